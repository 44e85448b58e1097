#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Writes the figures of recorded results into the tables of README and of the pages.

A comment ``<!-- figures: NAME -->`` stands above a table. Its rows are found by their first cell,
or by the first two if the first is not unique; rows that no file has, such as those of the paper,
stay as they are. New rows are appended. A cell that is None stays, too.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

from beluga_bench.harness.recorded import read_record
from beluga_bench.harness.row import FIELDS
from check_option import is_check

ROOT = Path(__file__).resolve().parents[2]
BASICS = "bench/results/basics-xeon.json"
BANDWIDTH = "bench/results/bandwidth-xeon.json"
PACED = "bench/results/bandwidth-paced.json"
COPY = "bench/results/copy-cpu.json"
COPY_EPYC = "bench/results/copy-cpu-epyc.json"
DISK = "bench/results/tiers-disk.json"
EVENTS = "bench/results/events.json"
GATEWAY = "bench/results/gateway.json"
GPU = "bench/results/gpu-h200.json"
GPUS = {"H200": GPU, "H100": "bench/results/gpu-h100.json"}
INDEX = "bench/results/index-xeon.json"
NULL_GPU = "bench/results/null-gpu.json"
PEERS = "bench/results/rpc-peers.json"
SCHEDULER = "bench/results/scheduler.json"
VLLM = "bench/results/vllm-bench.json"

Row = dict[str, Any]
_EMPTY: Row = dict.fromkeys(FIELDS)


RENAMED = {"gpu write, DDIO off": "gpu write, flush left out"}  # cases of older records


def rows_of(path: str) -> list[Row]:
    rows = [_EMPTY | row for row in read_record(ROOT / path)]
    rows = [row | {"case": RENAMED.get(row["case"], row["case"])} for row in rows]
    return [row for row in rows if row["p50_ns"] is not None or row["limit"] is not None]


def only(path: str, **fields: object) -> Row:
    """Return the only row of a file with these fields."""
    (row,) = [
        row for row in rows_of(path) if all(row[name] == value for name, value in fields.items())
    ]
    return row


def basic(bench: str, case: str, **fields: object) -> Row:
    """Return the only recorded row of a basic benchmark with these fields."""
    return only(BASICS, bench=bench, case=case, **fields)


def figures(value: float, digits: int) -> str:
    """Return a number with that many significant digits."""
    decimals = max(digits - len(str(int(abs(value)))), 0) if abs(value) >= 1 else digits
    return f"{value:,.{decimals}f}"


def duration(ns: float) -> str:
    return f"{figures(ns / 1e3, 2 if ns < 1e5 else 3)} us"


def ratio(row: Row) -> str:
    q1, q3 = row["ratio_q1"], row["ratio_q3"]
    return f"{row['ratio_to_limit']:.2f} ({q1:.2f}, {q3:.2f}){', noisy' if row['noisy'] else ''}"


Cells = tuple[str | None, ...]


def line(*cells: object) -> Cells:
    """Return a row; a cell of None keeps what the page has."""
    return tuple(None if cell is None else str(cell) for cell in cells)


MODES = {
    "software": "",
    "hardware": ", hardware coherence",
    "software, metadata hardware": ", coherent metadata device",
}


def of_rpc() -> Iterator[Cells]:
    for row in rows_of(BASICS):
        if row["bench"] == "rpc":
            case = row["case"] + MODES[row["coherence"]]
            speeds = (f"{figures(speed / 1e6, 3)} M" for speed in (row["ops_per_s"], row["limit"]))
            times = duration(row["p50_ns"]), duration(row["p99_ns"])
            yield line(case, row["depth"], *speeds, ratio(row), *times)


SIZES = {64: "64", 16 << 10: "16 KiB", 256 << 10: "256 KiB", 16 << 20: "16 MiB"}


def of_latency() -> Iterator[Cells]:
    for case in ("read", "write"):
        for size, name in SIZES.items():
            row = basic("latency", case, bytes=size, memory="tmpfs/DRAM")
            private = basic("latency", case, bytes=size, memory="DRAM (private)")
            speeds = (figures(speed, 3) for speed in (row["gb_per_s"], row["limit"]))
            times = duration(row["p50_ns"]), duration(private["p50_ns"])
            yield line(case, name, *speeds, ratio(row), *times)


def of_coherence() -> Iterator[Cells]:
    for row in rows_of(BASICS):
        if row["bench"] == "coherence":
            share = "" if row["ratio_to_limit"] is None else f"{row['ratio_to_limit']:.2f}"
            speed = figures(row["gb_per_s"], 3)
            yield line(row["case"], duration(row["p50_ns"]), speed, share, row["paper"] or "")


def of_readme() -> Iterator[Cells]:
    one, many = (basic("rpc", "c", depth=depth, coherence="software") for depth in (1, 128))
    yield line(
        "`rpc`, round trip, C to C",
        duration(1e9 / one["ops_per_s"]),
        f"{duration(1e9 / one['limit'])}, a bare exchange of lines",
        "2.11 us",
    )
    speeds = (f"{speed / 1e6:.0f} M/s" for speed in (many["ops_per_s"], many["limit"]))
    yield line("`rpc`, 128 calls in flight", *speeds, "12.1 M/s")
    for case, word, bare, paper in (
        ("write", "written", "bare streamed stores", "2.41 us"),
        ("read", "read", "bare flushes and loads", "5.98 us"),
    ):
        row = basic("latency", case, bytes=16 << 10, memory="tmpfs/DRAM")
        own, limit = (duration((16 << 10) / speed) for speed in (row["gb_per_s"], row["limit"]))
        yield line(f"`latency`, 16 KiB {word}", own, f"{limit}, {bare}", paper)


def of_index() -> Iterator[Cells]:
    for row in rows_of(INDEX):
        call = duration(row["p50_ns"])
        speeds = (f"{figures(speed / 1e6, 3)} M" for speed in (row["keys_per_s"], row["limit"]))
        yield line(row["case"], f"{row['blocks']:,}", call, *speeds, ratio(row))


def of_gateway() -> Iterator[Cells]:
    for row in rows_of(GATEWAY):
        yield line(row["case"], row["note"].partition(";")[0].replace("<=", "at most"))


ROWS = {"128 x 20 KB": 20480, "2,048 x 1,280 B": 1280}  # names of plans, and their fragments
SPARSE = {"Qwen-32B (1,280 B)": 1280, "Llama-3-8B (2 KiB)": 2048}
COPY_PEERS = ("numpy indexed copy + contiguous copy", "torch indexed copy + contiguous copy",
              "Python loop of memcpys", "two-step bounce")  # fmt: skip


def copied(path: str, case: str, size: int, *, crc: bool = False) -> Row:
    """Return the row of a copy by one thread."""
    return only(path, case=case, engine="cpu", fragment_bytes=size, crc=crc, threads=1, note=None)


def sparse(path: str, model: str) -> Row:
    size = SPARSE[model]
    rows = [
        row
        for row in rows_of(path)
        if (row["case"], row["engine"], row["threads"]) == ("sparse_read", "cpu", 1)
    ]
    (row,) = [row for row in rows if row["fragment_bytes"] == size]
    return row


def of_copies(path: str, *, peers: bool) -> Iterator[Cells]:
    for name, size in ROWS.items():
        for case in ("gather_write", "scatter_read"):
            plain, summed = (copied(path, case, size, crc=crc) for crc in (False, True))
            theirs = [
                only(path, case=case, peer=peer, fragment_bytes=size)["ratio_to_peer"]
                for peer in (COPY_PEERS if peers else ())
            ]
            yield line(
                f"{case}, {name}",
                f"{plain['gb_per_s']:.1f}",
                f"{plain['ratio_to_limit']:.2f}",
                f"{summed['ratio_to_limit']:.2f}",
                *(f"{times:.1f}x" for times in theirs),
            )
    for model in SPARSE:
        row = sparse(path, model)
        empty = [""] * (1 + len(COPY_PEERS) * peers)
        text = (f"{row['gb_per_s']:.1f}", f"{row['ratio_to_limit']:.2f}")
        yield line(f"sparse_read, {model}", *text, *empty)


def of_null_gpu() -> Iterator[Cells]:
    for row in rows_of(NULL_GPU):
        case = row["case"].removeprefix("null_gpu ").replace("2 processes", "two processes")
        share = f"{row['ratio_to_limit']:.3f} ({row['ratio_q1']:.3f}, {row['ratio_q3']:.3f})"
        yield line(case, f"{row['gb_per_s']:.1f}", share)


def of_gpu() -> Iterator[Cells]:
    def row(case: str, size: int, *, crc: bool) -> Row:
        return only(GPU, bench="copy", case=case, engine="cuda", bytes=size, crc=crc, note=None)

    for size, blocks in ((40 << 20, "16 blocks"), (2560 << 10, "1 block")):
        for case in ("gather_write", "scatter_read"):
            plain, summed = (row(case, size, crc=crc) for crc in (False, True))
            speed = f"{plain['gb_per_s']:.1f}"
            yield line(f"{case}, {blocks}", speed, ratio(plain), ratio(summed))
    for model in SPARSE:
        (one,) = [
            row
            for row in rows_of(GPU)
            if row["case"] == "sparse_read" and str(row["note"]).startswith(model.split()[0])
        ]
        yield line(f"sparse_read, {model}", f"{one['gb_per_s']:.1f}", ratio(one), "")


ORDERS = {
    "**ours, one process**": "ours",
    "**ours, a process each**": "ours, 2 processes",
    "strict priority": "strict priority",
    "a bare shared counter": "shared counter",
    "the copy first, then the account (Dynamo)": "copy first",
    "FIFO": "FIFO",
}


def slowdown(case: str) -> float:
    """Return how many times as long the p99 of onboards is beside offloads."""
    text = re.search(r"p99 ([\d.]+) times as long", only(SCHEDULER, case=case)["note"])
    return float(text[1]) if text else float("nan")


def of_scheduler() -> Iterator[Cells]:
    for name, case in ORDERS.items():
        times = [figures(slowdown(f"{case}, {when}"), 3) for when in ("evenly", "at random")]
        if name.startswith("**"):
            times = [f"**{time}**" for time in times]
        used = only(SCHEDULER, case=f"{case}, evenly")["ratio_to_limit"]
        yield line(name, *times, f"{used:.2f}")


def of_events() -> Iterator[Cells]:
    row = only(EVENTS, case="in the server's loop")
    times = [f"{1e6 / row[name]:.1f} us" for name in ("ops_per_s", "limit")]
    yield line("in the server's loop, the two calls of a put", *times, thirds(row))
    for when in ("with pauses", "without pauses"):
        row = only(EVENTS, case=f"put, {when}")
        yield line(f"puts per second, {when}", f"{row['ops_per_s']:,}", f"{row['limit']:,}",
                   ratio(row))  # fmt: skip
    row = only(EVENTS, case="the publisher's CPU time")
    yield line("CPU time of the publisher, per change", f"{row['p50_ns'] / 1e3:.2f} us", "", "")


def thirds(row: Row) -> str:
    return f"{row['ratio_to_limit']:.3f} ({row['ratio_q1']:.3f}, {row['ratio_q3']:.3f})"


def of_disk() -> Iterator[Cells]:
    for case, depths in (("random read", (32, 8, 1)), ("save", (32,))):
        for engine in ("uring", "threads"):
            for depth in depths:
                row = only(DISK, case=case, engine=engine, bytes=2560 << 10, depth=depth)
                name = {"uring": "io_uring"}.get(engine, engine)
                speeds = (f"{speed:.1f}" for speed in (row["gb_per_s"], row["limit"]))
                yield line(f"{case} of 2.5 MiB, {name}, depth {depth}", *speeds, ratio(row))


FROM_TO = {
    ("C to C", None): "Beluga, C to C",
    ("Python to Python, by number", None): "Beluga, Python, by number (`Server.handle`)",
    ("Python to Python, by name", None): "Beluga, Python, by name (`Handlers`)",
    ("Python to Python", "gRPC"): "gRPC, Python, unix socket",
    ("Python to Python", "ZeroMQ"): "ZeroMQ, Python, REQ and REP over ipc",
    ("Python to Python", "iceoryx2"): "iceoryx2, Python, shared memory, both sides poll",
    ("Python to Python", "pipe"): "two named pipes, Python",
    ("Python to C", "Redis"): "Redis, Python, ECHO over a unix socket",
    ("Python to a master in C++", "Mooncake"): "Mooncake's master, Python, is_exist over TCP",
}


def of_peers() -> Iterator[Cells]:
    for key in dict.fromkeys((row["case"], row["peer"]) for row in rows_of(PEERS)):
        cells = []
        for size in (64, 16 << 10):
            if size > 64 and key[1] == "Mooncake":  # its call carries a key only
                cells.append("")
                continue
            row = only(PEERS, case=key[0], peer=key[1], bytes=size)
            p50, q1, q3 = (short(row[f"p50{part}_ns"]) for part in ("", "_q1", "_q3"))
            cells.append(f"{p50} us [{q1}, {q3}]")
        yield line(FROM_TO[key], *cells)


def short(ns: float) -> str:
    """Return microseconds with a decimal below 100."""
    return f"{ns / 1e3:.0f}" if ns >= 1e5 else f"{ns / 1e3:.1f}"


def of_methods() -> Iterator[Cells]:
    for name, case, paper in (
        ("CPU: streaming store", "streamed store", "2.41 us"),
        ("CPU: flush, then load", "read after flush", "5.98 us"),
    ):
        row = basic("coherence", case)
        yield line(name, paper, duration(row["p50_ns"]), f"{row['ratio_to_limit']:.2f}")
    for name, case, paper in (
        ("GPU writes, the flush left out (the paper: DDIO off)", "gpu write, flush left out",
         "9.14 us"),
        ("GPU writes, then the CPU flushes", "gpu write, then flush", "11.06 us"),
        ("GPU reads, by our kernel", "gpu read by our kernel", "not known"),
        ("GPU reads, by cudaMemcpy", "gpu read by memcpy", "10.55 us"),
    ):  # fmt: skip
        yield line(name, paper, on_gpus("coherence", case, 16 << 10), "")


def on_gpus(bench: str, case: str, size: int) -> str:
    """Return the median of a copy by each recorded GPU."""
    rows = {name: only(path, bench=bench, case=case, bytes=size) for name, path in GPUS.items()}
    return ", ".join(f"{name}: {duration(row['p50_ns'])}" for name, row in rows.items())


def of_sizes() -> Iterator[Cells]:
    for name, case, size, paper in (
        ("64 B read by the CPU", "read", 64, "about 750 ns"),
        ("16 KiB read by the CPU", "read", 16 << 10, "5.98 us"),
        ("16 KiB written by the CPU", "write", 16 << 10, "2.41 us"),
    ):
        row = basic("latency", case, bytes=size, memory="tmpfs/DRAM")
        yield line(name, paper, duration(row["p50_ns"]), f"{row['ratio_to_limit']:.2f}")
    for what, size, paper in (
        ("16 KiB", 16 << 10, "10.55 us, of which 2.68 us move data"),
        ("64 KiB", 64 << 10, "11.73 us; 10.32 us from DRAM"),
        ("16 MiB", 16 << 20, "not known"),
    ):
        for how, case in (("cudaMemcpy", "gpu read by memcpy"), ("our kernel", "gpu read")):
            name = f"{what} to a GPU by {how}"
            theirs = paper if how == "cudaMemcpy" else "not known"
            yield line(name, theirs, on_gpus("latency", case, size), "")
    name = "16 KiB from a GPU, then the CPU flushes"
    yield line(name, "11.06 us", on_gpus("latency", "gpu write", 16 << 10), "")


def of_skewed() -> Iterator[Cells]:
    for case in ("read", "write"):
        for size, name in ((64, "64 B"), (16 << 10, "16 KiB")):
            cells = [
                moved(path, f"{case}, skewed, {layout}", size)
                for path, layout in (
                    (PACED, "interleaved"),
                    (PACED, "not interleaved"),
                    (BANDWIDTH, "local DRAM"),
                )
            ]
            yield line(f"{case}, {name}", *cells)


def of_calls() -> Iterator[Cells]:
    one, many = (basic("rpc", "c", depth=depth, coherence="software") for depth in (1, 128))
    rdma = "8.39, 8.83 us"
    yield line("one call at a time", "2.11 us", rdma, duration(one["p50_ns"]),
               f"{one['ratio_to_limit']:.2f}")  # fmt: skip
    yield line("128 calls at a time, one server thread", "12.13 M calls/s", "4.5, 6.65 M calls/s",
               f"{many['ops_per_s'] / 1e6:.1f} M calls/s",
               f"{many['ratio_to_limit']:.2f}")  # fmt: skip


def of_dense() -> Iterator[Cells]:
    """Ours by a bounce buffer in two steps, and without one, on two kinds of CPU."""
    for name, case, paper in (
        ("gather and write 128 x 20 KB", "gather_write", "36.2 % less time than Mooncake"),
        ("read and scatter 128 x 20 KB", "scatter_read", "-38.7 %"),
    ):
        cells = []
        for path in (COPY, COPY_EPYC):
            of = f"{copied(path, case, 20480)['ratio_to_limit']:.2f}"
            times = only(path, case=case, peer="two-step bounce", fragment_bytes=20480)
            times = times["ratio_to_peer"]
            cells.append(f"{of} of the limit; {times:.2f} times (-{1 - 1 / times:.0%}".replace(
                "%", " %)"))  # fmt: skip
        yield line(name, paper, *cells)
    for name, model, paper in (
        ("16 single tokens of Qwen-32B (2,048 x 1,280 B)", "Qwen-32B (1,280 B)", "-95.9 %"),
        ("16 single tokens of Llama-3-8B (1,024 x 2 KiB)", "Llama-3-8B (2 KiB)", "not known"),
    ):
        rows = [sparse(path, model) for path in (COPY, COPY_EPYC)]
        yield line(name, paper, *(
            f"{row['p50_ns'] / 1e3:.0f} us, {row['ratio_to_limit']:.2f}" for row in rows
        ))  # fmt: skip


FUSED = ("cudaMemcpyAsync per fragment", "cudaMemcpyBatchAsync")


def on_gpu(path: str, case: str, size: int, note: str | None = None) -> Row:
    (row,) = [
        row
        for row in rows_of(path)
        if (row["case"], row["engine"], row["bytes"], row["crc"]) == (case, "cuda", size, False)
        and (str(row["note"]).startswith(note) if note else row["note"] is None)
    ]
    return row


def fused(path: str, case: str, size: int) -> str:
    """Return how many times as fast one launch is as each peer, from the call to the end."""
    times = (only(path, case=case, peer=peer, bytes=size)["ratio_to_peer"] for peer in FUSED)
    return ", ".join(f"{each:.1f} times" for each in times)


def of_gpu_copies() -> Iterator[Cells]:
    """The GPU rows of Exp 9 and 10: the GPU's time, and whole calls beside those of the driver."""
    for name, case, size, note in (
        ("gather and write 16 blocks (40 MiB)", "gather_write", 40 << 20, None),
        ("read and scatter 16 blocks (40 MiB)", "scatter_read", 40 << 20, None),
        ("gather and write 1 block (2.5 MiB)", "gather_write", 2560 << 10, None),
        ("read and scatter 1 block (2.5 MiB)", "scatter_read", 2560 << 10, None),
        ("16 single tokens of Qwen-32B (2,048 x 1,280 B)", "sparse_read", 2560 << 10, "Qwen-32B"),
    ):
        for gpu, path in GPUS.items():
            row = on_gpu(path, case, size, note)
            time = f"{duration(row['p50_ns'])}, {row['gb_per_s']:.1f} GB/s"
            yield line(name, gpu, time, f"{row['ratio_to_limit']:.2f}", fused(path, case, size))


def of_engines() -> Iterator[Cells]:
    """Exp 5 and Table 5: both passes of a real engine."""
    passes = read_record(ROOT / VLLM)["passes"]
    for row in passes:
        times = [
            f"{row[f'{time}_mean_s'] * 1e3:,.0f}, {row[f'{time}_p99_s'] * 1e3:,.0f} ms"
            for time in ("ttft", "tpot")
        ]
        name = "fill" if row["pass"] == 1 else "full hit"
        yield line(f"{name}, {row['length']:,} tokens", ARMS[row["arm"]], *times,
                   f"{row['qps']:.2f}")  # fmt: skip


ARMS = {"plain": "vLLM alone", "beluga": "with the pool"}


def of_hints() -> Iterator[Cells]:
    """The hints whose figures are recorded."""
    yield from of_hint()
    flushed, bare = (
        on_gpus("coherence", f"gpu write, {case}", 16 << 10)
        for case in ("then flush", "flush left out")
    )
    yield line("O3", None, None, f"16 KiB written and flushed {flushed}; without the flush {bare}. "
               "Uncacheable mappings and DDIO off: never run")  # fmt: skip
    times = "; ".join(
        f"{gpu}: {fused(path, 'gather_write', 40 << 20)} (writes), "
        f"{fused(path, 'scatter_read', 40 << 20)} (reads)" for gpu, path in GPUS.items()
    )  # fmt: skip
    yield line("O5", None, None, "speed of one launch for 2,048 fragments, relative to "
               f"{FUSED[0]} and to {FUSED[1]}: {times}")  # fmt: skip
    kernel, driver = (
        on_gpus("latency", case, 16 << 10) for case in ("gpu read", "gpu read by memcpy")
    )
    yield line("O6", None, None, f"16 KiB from write-back memory: our kernel {kernel}; cudaMemcpy "
               f"{driver}; not faster on both. Uncacheable memory: never run")  # fmt: skip
    speeds = (
        only(PACED, case=f"read, skewed, {layout}", bytes=16 << 10, threads=2)["gb_per_s"]
        for layout in ("interleaved", "not interleaved")
    )
    yield line("O9", None, None, "paced: skewed reads {:.1f} GB/s interleaved, {:.1f} GB/s not "
               "(Exp 3)".format(*speeds))  # fmt: skip


def of_hint() -> Iterator[Cells]:
    """The part of hint O1 with figures."""
    times = ", ".join(
        f"{name} {duration(basic('coherence', case)['p50_ns'])}"
        for name, case in (
            ("streaming store", "streamed store"),
            ("store + clwb", "store + clwb"),
            ("store + clflush", "store + clflush"),
        )
    )
    commit = basic("coherence", "streamed store")["commit"]
    origin = f"`beluga bench coherence`; emulated, Intel Xeon, commit {commit}"
    yield line("O1", None, None, f"{times} for 16 KiB ({origin})")


def moved(path: str, case: str, size: int = 16 << 10) -> str:
    """Return speed and median of pieces of that size by two threads."""
    row = only(path, case=case, bytes=size, threads=2)
    digits = 1 if size > 64 else 2
    return f"{row['gb_per_s']:.{digits}f} GB/s, p50 {duration(row['p50_ns'])}"


def of_paced() -> Iterator[Cells]:
    for layout in ("interleaved", "not interleaved"):
        cases = (f"read, {pattern}, {layout}" for pattern in ("uniform", "skewed"))
        yield line(layout, *(moved(PACED, case) for case in cases))


def of_pressed() -> Iterator[Cells]:
    for share in (25, 50, 75, 90):
        cells = []
        for verb, other in (("read", "write"), ("write", "read")):
            for beside, direction in ((verb, "same"), (other, "opposite")):
                row = only(
                    PACED, case=f"{verb}, beside {beside}s at {share}% ({direction} direction)"
                )
                p99 = duration(row["p99_ns"])
                cells.append(f"{duration(row['p50_ns']).removesuffix(' us')}, {p99}")
        yield line(f"{share} %", *cells)


def of_adapters() -> Iterator[Cells]:
    for verb, paper in (("read", "46.2 GB/s"), ("write", "33 GB/s")):
        row = only(BANDWIDTH, case=f"{verb}, uniform, interleaved", bytes=16 << 10, threads=2)
        speed = f"{row['gb_per_s']:.1f} GB/s, two cores"
        yield line(f"CPU {verb}s through one adapter", paper, speed, f"{row['ratio_to_limit']:.2f}")
    for name, bench, reads, size, paper in (
        ("GPU and pool, a copy engine alone", "bandwidth", "gpu read, the pool's device", 2 << 20,
         "26 GB/s"),
        ("GPU and pool, our kernel with cache maintenance, 16 MiB", "latency", "gpu read", 16 << 20,
         "26 GB/s"),
        ("GPU and local DRAM, a copy engine alone (Fig. 6)", "bandwidth",
         "gpu read, DRAM of NUMA node 0", 2 << 20,
         "read 23 GB/s, written 33 GB/s; the GPU's own link 55.4 GB/s"),
    ):  # fmt: skip
        speeds = []
        for gpu, path in GPUS.items():
            pair = (
                only(path, bench=bench, case=reads.replace("read", verb), bytes=size)["gb_per_s"]
                for verb in ("read", "write")
            )
            speeds.append(gpu + ": read {:.1f}, written {:.1f} GB/s".format(*pair))
        yield line(name, paper, "; ".join(speeds), "")


RIVALS = "docs/understand/comparison.md"
TOKENS = "time to the first token of a prompt that"


def of_rivals() -> Iterator[Cells]:
    demo, tiers = (
        read_record(ROOT / f"bench/results/vllm-{name}.json") for name in ("demo", "tiers")
    )
    ours = f"{demo['ttft_hit_s'] * 1e3:.0f} ms"
    peers = {name: f"{seconds * 1e3:.0f} ms" for name, seconds in demo["peers"].items()}
    yield line(
        f"{TOKENS} another vLLM computed (3,841 tokens)",
        ours,
        f"{peers['mooncake']}, Mooncake Store over TCP",
    )
    yield line("the same", ours, f"{peers['lmcache']}, LMCache in shared memory")
    own = f"{demo['ttft_local_hit_s'] * 1e3:.0f} ms"
    yield line("the same, vLLM's own prefix cache", ours, f"{own}: the lower bound, in one process")
    for medium, name, what in (
        ("disk", "disk", f"{TOKENS} is only on disk (2,049 tokens)"),
        ("redis", "Redis", "the same, only in Redis"),
    ):
        ratios = tiers["ratios"][medium]
        beluga, lmcache = (
            next(row["ttft_s"] for row in tiers["summary"] if row["arm"] == f"{arm}-{medium}")
            for arm in ("beluga", "lmcache")
        )
        pairs = (
            f"{ratios['median']:.2f} times in the median of {ratios['pairs']} pairs, "
            f"{ratios['min']:.2f} in the worst"
        )
        theirs = f"{lmcache * 1e3:.0f} ms, LMCache's {name} backend; {pairs}"
        yield line(what, f"{beluga * 1e3:.0f} ms", theirs)
    case = {"case": "gather_write", "fragment_bytes": 20480, "threads": 1, "crc": False}
    rows = [only(COPY, engine="cpu", peer=None, **case)]
    rows += [only(COPY, peer=peer, **case) for peer in (*COPY_PEERS[:2], COPY_PEERS[3])]
    own, numpy, torch, bounce = (f"{row['p50_ns'] / 1e6:.2f} ms" for row in rows)
    theirs = f"{numpy} numpy, {torch} torch, {bounce} two steps through a bounce buffer"
    yield line("gather and write, 128 x 20 KB", own, theirs)
    own, dynamo, first = (
        "; ".join(figures(slowdown(f"{case}, {when}"), 3) for when in ("evenly", "at random"))
        for case in ("ours", "copy first", "FIFO")
    )
    yield line(
        "p99 of loads during continuous saves, relative to loads alone; loads at regular and at "
        "random times",
        own,
        f"Dynamo's order (copy first, account afterward): {dynamo}. First come, first served: "
        f"{first}",
    )
    row = only("bench/results/indexer.json", case="find_matches, c")
    yield line(
        "prefix index: 1,000 of 1 M blocks, 16 workers",
        f"{row['p50_ns'] / 1e3:.1f} us",
        f"{row['ratio_to_limit']:.2f} of the speed of a bare hash table in C",
    )
    added = only(GATEWAY, case="time to first byte")["note"].split()[1]
    yield line("router: latency added to the first byte at 100 requests/s", f"{added} ms", None)


# What a record's figures depend on. Later changes of it make the record older than the code.
COPIES = ("csrc/coherence", "csrc/transfer", "beluga/transfer")
BLOCKS = ("csrc/index", "csrc/kvcache", "beluga/index", "beluga/kvcache", *COPIES)
CALLS = ("csrc/rpc", "beluga/rpc")
TIERS = ("csrc/disk", "beluga/tiers", *BLOCKS)
ENGINES = ("beluga/connectors/vllm", *BLOCKS, *CALLS)
ROUTING = ("csrc/routing", "csrc/prefix", "beluga/router", "beluga/simulate")
MEASURES: dict[str, tuple[str, ...]] = {
    "bandwidth-paced": ("csrc/coherence", "csrc/format"),
    "bandwidth-xeon": ("csrc/coherence", "csrc/format"),
    "basics-xeon": ("csrc/coherence", *CALLS),
    "before-after": (*COPIES, *CALLS),
    "copy-cpu": COPIES,
    "copy-cpu-epyc": COPIES,
    "events": ("beluga/events", "csrc/index", *CALLS),
    "families": ROUTING,
    "gateway": ("beluga/gateway", "beluga/router"),
    "gpu-h100": ("csrc/cuda", *COPIES),
    "gpu-h200": ("csrc/cuda", *COPIES),
    "hints": ("beluga/simulate", "csrc/index"),
    "index-xeon": ("csrc/index", *CALLS),
    "indexer": ("csrc/prefix", "csrc/routing", "beluga/router"),
    "null-gpu": (*BLOCKS, "csrc/iosched"),
    "policies": ROUTING,
    "rpc-peers": CALLS,
    "scheduler": ("csrc/iosched", "beluga/transfer/link.py", "csrc/kvcache/engine.c"),
    "simulate-conversation": ROUTING,
    "tiers-disk": TIERS,
    "tiers-policy": ("csrc/index", "beluga/tiers"),
    "tiers-pool": TIERS,
    "tiers-remote": TIERS,
    "vllm-bench": ENGINES,
    "vllm-demo": ENGINES,
    "vllm-disagg": ("beluga/disagg", *ENGINES),
    "vllm-tiers": ("beluga/connectors/vllm", *TIERS),
}
UNKNOWN = "**not known**"


def git(*words: str) -> str | None:
    """Return what git prints, or None if it fails."""
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *words],  # noqa: S607  the user's git
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


@cache
def has_history() -> bool:
    """Return whether this is a clone with all commits: not an archive, and not a shallow clone."""
    inside = git("rev-parse", "--show-toplevel") == str(ROOT)
    return inside and git("rev-parse", "--is-shallow-repository") == "false"


def origins(path: Path, name: str) -> list[str]:
    """Return the different values of a field of a record's rows."""
    content = read_record(path)
    rows = content if isinstance(content, list) else [content]
    if name == "commit" and not isinstance(content, list) and "commits" in content:
        return sorted(content["commits"].values())  # a comparison of several builds
    return sorted({str(row[name]) for row in rows if row.get(name)})


def state(path: Path) -> str:
    """Return whether a record is of the code as it is now, or why its figures are in doubt."""
    commits = origins(path, "commit")
    if not commits:
        return f"commit {UNKNOWN}: it cannot be repeated"
    known = [each for each in commits if is_ancestor(each.removesuffix("-dirty"))]
    if known != commits:
        return "**its commit is not in the history**: it cannot be repeated"
    if any(each.endswith("-dirty") for each in commits):
        return "**of changes that were not committed**; older than the code"
    changed = [each for each in commits if git("log", "-1", "--format=%h", f"{each}..HEAD", "--",
                                               *MEASURES[path.stem])]  # fmt: skip
    return "**older than the code**" if changed else "of the code as it is"


def is_ancestor(commit: str) -> bool:
    return git("merge-base", "--is-ancestor", commit, "HEAD") is not None


def day(path: Path) -> str:
    """Return the day of a record, or that of its commit."""
    if days := origins(path, "date"):
        return ", ".join(sorted({each[:10] for each in days}))
    commits = origins(path, "commit")
    made = [git("log", "-1", "--format=%cs", each) for each in commits if is_ancestor(each)]
    return f"{UNKNOWN}; commit of {', '.join(map(str, made))}" if made else UNKNOWN


def of_records(page: str) -> Iterator[Cells]:
    """The records that a page cites; all of them on the page of the benchmarks.

    Without git's history the page stays as it is.
    """
    text = (ROOT / page).read_text(encoding="utf-8")
    for path in sorted((ROOT / "bench/results").glob("*.json")):
        link = f"../../bench/results/{path.name}"
        name = f"[`{path.stem}`]({link})"
        if page == PAGE or text.replace(name, "").count(link):
            commits = ", ".join(origins(path, "commit")) or UNKNOWN
            machine = ", ".join(origins(path, "machine")) or UNKNOWN
            machine = machine.replace("(R)", "").replace("(TM)", "")
            if has_history():
                yield line(name, day(path), commits, machine, state(path))
            else:
                yield line(name, None, commits, machine, None)


PAGE = "docs/understand/benchmarks.md"
PAPER = "docs/understand/paper.md"
TABLES: dict[str, tuple[str, Callable[[], Iterator[Cells]]]] = {
    "readme": ("README.md", of_readme),
    "rpc": (PAGE, of_rpc),
    "latency": (PAGE, of_latency),
    "coherence": (PAGE, of_coherence),
    "index": (PAGE, of_index),
    "gateway": (PAGE, of_gateway),
    "copies": (PAGE, lambda: of_copies(COPY, peers=True)),
    "copies of an EPYC": (PAGE, lambda: of_copies(COPY_EPYC, peers=False)),
    "null GPU": (PAGE, of_null_gpu),
    "GPU": (PAGE, of_gpu),
    "scheduler": (PAGE, of_scheduler),
    "events": (PAGE, of_events),
    "disk": (PAGE, of_disk),
    "peers": ("docs/use/rpc.md", of_peers),
    "paper, Exp 1": (PAPER, of_methods),
    "paper, Exp 2": (PAPER, of_sizes),
    "paper, Exp 9 and 10": (PAPER, of_dense),
    "paper, Exp 11": (PAPER, of_calls),
    "paper, Exp 3": (PAPER, of_skewed),
    "paper, Exp 5": (PAPER, of_engines),
    "paper, Exp 9 and 10, GPUs": (PAPER, of_gpu_copies),
    "paper, hints": (PAPER, of_hints),
    "paced": (PAGE, of_paced),
    "paper, Exp 4": (PAPER, of_pressed),
    "paper, adapters": (PAPER, of_adapters),
    "rivals": (RIVALS, of_rivals),
} | {
    f"records of {name}": (page, partial(of_records, page))
    for name, page in (("the benchmarks", PAGE), ("the paper", PAPER), ("rivals", RIVALS))
}


def cells_of(text: str) -> list[str]:
    return [cell.strip() for cell in text.strip().strip("|").split("|")]


def merged(table: list[str], rows: list[Cells], *, whole: bool = False) -> list[str]:
    """Return the lines of a table, without its head, with the given rows, and without others if
    ``whole``.
    """
    width = 1 if len({row[0] for row in rows}) == len(rows) else 2
    by_key = {row[:width]: row for row in rows}
    lines = []
    for text in table:
        old = cells_of(text)
        new = by_key.pop(tuple(old[:width]), None)
        if new is None:
            lines += [] if whole else [text]
            continue
        kept = [*old[: len(new)], *[""] * (len(new) - len(old))]
        cells = [mine if cell is None else cell for mine, cell in zip(kept, new, strict=True)]
        lines.append(shown([*cells, *old[len(new) :]]))
    return lines + [
        shown(["" if cell is None else cell for cell in row]) for row in by_key.values()
    ]


def shown(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |".replace("|  ", "| ")


def written(text: str, name: str, rows: list[Cells]) -> str:
    """Return a page with the rows of one table. Raises ValueError if it has no such table."""
    before, mark, after = text.partition(f"<!-- figures: {name} -->\n\n")
    if not mark:
        raise ValueError(f"<!-- figures: {name} --> is missing")
    lines = after.split("\n")
    end = next(number for number, each in enumerate(lines) if not each.startswith("|"))
    table = [*lines[:2], *merged(lines[2:end], rows, whole=name.startswith("records of"))]
    return "\n".join([before + mark + table[0], *table[1:], *lines[end:]])


def main() -> None:
    check = is_check(__doc__)
    pages: dict[str, str] = {}
    for name, (path, make) in TABLES.items():
        text = pages.get(path) or (ROOT / path).read_text(encoding="utf-8")
        pages[path] = written(text, name, list(make()))
    for path, text in pages.items():
        if (ROOT / path).read_text(encoding="utf-8") == text:
            continue
        if check:
            sys.exit(f"{path} is stale; run scripts/dev/gen_tables.py")
        (ROOT / path).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
