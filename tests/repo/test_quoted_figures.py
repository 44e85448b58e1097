# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The tables of README and of pages have the figures of recorded files, and a commit that a page
names as the origin of figures is that of a recorded file.

``python tests/repo/test_quoted_figures.py`` prints the tables of the files, to be pasted after a
new run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench/results"
BASICS = "bench/results/basics-xeon.json"
BANDWIDTH = "bench/results/bandwidth-xeon.json"
PACED = "bench/results/bandwidth-paced.json"
COPY = "bench/results/copy-cpu.json"
COPY_EPYC = "bench/results/copy-cpu-epyc.json"
DISK = "bench/results/tiers-disk.json"
EVENTS = "bench/results/events.json"
GATEWAY = "bench/results/gateway.json"
GPU = "bench/results/gpu-h200.json"
INDEX = "bench/results/index-xeon.json"
NULL_GPU = "bench/results/null-gpu.json"
PEERS = "bench/results/rpc-peers.json"
SCHEDULER = "bench/results/scheduler.json"

Row = dict[str, Any]


def rows_of(path: str) -> list[Row]:
    rows: list[Row] = json.loads((ROOT / path).read_text(encoding="utf-8"))
    return [row for row in rows if row["p50_ns"] is not None or row["limit"] is not None]


def only(path: str, **fields: object) -> Row:
    """Return the only row of a file with these fields."""
    (row,) = [
        row for row in rows_of(path) if all(row[name] == value for name, value in fields.items())
    ]
    return row


def found(bench: str, case: str, **fields: object) -> Row:
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


def line(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


MODES = {
    "software": "",
    "hardware": ", hardware coherence",
    "software, metadata hardware": ", coherent metadata device",
}


def of_rpc() -> Iterator[str]:
    for row in rows_of(BASICS):
        if row["bench"] == "rpc":
            case = row["case"] + MODES[row["coherence"]]
            speeds = (f"{figures(one / 1e6, 3)} M" for one in (row["ops_per_s"], row["limit"]))
            times = duration(row["p50_ns"]), duration(row["p99_ns"])
            yield line(case, row["depth"], *speeds, ratio(row), *times)


SIZES = {64: "64", 16 << 10: "16 KiB", 256 << 10: "256 KiB", 16 << 20: "16 MiB"}


def of_latency() -> Iterator[str]:
    for case in ("read", "write"):
        for size, name in SIZES.items():
            row = found("latency", case, bytes=size, memory="tmpfs/DRAM")
            private = found("latency", case, bytes=size, memory="DRAM (private)")
            speeds = (figures(one, 3) for one in (row["gb_per_s"], row["limit"]))
            times = duration(row["p50_ns"]), duration(private["p50_ns"])
            yield line(case, name, *speeds, ratio(row), *times)


def of_coherence() -> Iterator[str]:
    for row in rows_of(BASICS):
        if row["bench"] == "coherence":
            share = "" if row["ratio_to_limit"] is None else f"{row['ratio_to_limit']:.2f}"
            speed = figures(row["gb_per_s"], 3)
            yield line(row["case"], duration(row["p50_ns"]), speed, share, row["paper"] or "")


def of_readme() -> Iterator[str]:
    one, many = (found("rpc", "c", depth=depth, coherence="software") for depth in (1, 128))
    yield line(
        "`rpc`, round trip, C to C",
        duration(1e9 / one["ops_per_s"]),
        f"{duration(1e9 / one['limit'])}, a bare exchange of lines",
        "2.11 us",
    )
    speeds = (f"{one / 1e6:.0f} M/s" for one in (many["ops_per_s"], many["limit"]))
    yield line("`rpc`, 128 calls in flight", *speeds, "12.1 M/s")
    for case, word, bare, paper in (
        ("write", "written", "bare streamed stores", "2.41 us"),
        ("read", "read", "bare flushes and loads", "5.98 us"),
    ):
        row = found("latency", case, bytes=16 << 10, memory="tmpfs/DRAM")
        own, limit = (duration((16 << 10) / speed) for speed in (row["gb_per_s"], row["limit"]))
        yield line(f"`latency`, 16 KiB {word}", own, f"{limit}, {bare}", paper)


def of_index() -> Iterator[str]:
    for row in rows_of(INDEX):
        call = duration(row["p50_ns"])
        speeds = (f"{figures(one / 1e6, 3)} M" for one in (row["keys_per_s"], row["limit"]))
        yield line(row["case"], f"{row['blocks']:,}", call, *speeds, ratio(row))


def of_gateway() -> Iterator[str]:
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


def of_copies(path: str, *, peers: bool) -> Iterator[str]:
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
                *(f"{one:.1f}x" for one in theirs),
            )
    for model in SPARSE:
        row = sparse(path, model)
        empty = [""] * (1 + len(COPY_PEERS) * peers)
        text = (f"{row['gb_per_s']:.1f}", f"{row['ratio_to_limit']:.2f}")
        yield line(f"sparse_read, {model}", *text, *empty).replace("|  ", "| ")


def of_null_gpu() -> Iterator[str]:
    for row in rows_of(NULL_GPU):
        case = row["case"].removeprefix("null_gpu ").replace("2 processes", "two processes")
        share = f"{row['ratio_to_limit']:.3f} ({row['ratio_q1']:.3f}, {row['ratio_q3']:.3f})"
        yield line(case, f"{row['gb_per_s']:.1f}", share)


def of_gpu() -> Iterator[str]:
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
        yield line(f"sparse_read, {model}", f"{one['gb_per_s']:.1f}", ratio(one), "").replace(
            "|  ", "| "
        )


ORDERS = {
    "**ours, one process**": "ours",
    "**ours, a process each**": "ours, 2 processes",
    "strict priority": "strict priority",
    "a bare shared counter": "shared counter",
    "the copy first, then the account (Dynamo)": "copy first",
    "FIFO": "FIFO",
}


def beside(case: str) -> float:
    """Return how many times as long the p99 of onboards is beside offloads."""
    text = re.search(r"p99 ([\d.]+) times as long", only(SCHEDULER, case=case)["note"])
    assert text is not None
    return float(text[1])


def of_scheduler() -> Iterator[str]:
    for name, case in ORDERS.items():
        times = [figures(beside(f"{case}, {when}"), 3) for when in ("evenly", "at random")]
        if name.startswith("**"):
            times = [f"**{one}**" for one in times]
        used = only(SCHEDULER, case=f"{case}, evenly")["ratio_to_limit"]
        yield line(name, *times, f"{used:.2f}")


def of_events() -> Iterator[str]:
    row = only(EVENTS, case="in the server's loop")
    times = [f"{1e6 / row[name]:.1f} us" for name in ("ops_per_s", "limit")]
    yield line("in the server's loop, the two calls of a put", *times, thirds(row))
    for when in ("with pauses", "without pauses"):
        row = only(EVENTS, case=f"put, {when}")
        yield line(f"puts per second, {when}", f"{row['ops_per_s']:,}", f"{row['limit']:,}",
                   ratio(row))  # fmt: skip
    row = only(EVENTS, case="the publisher's CPU time")
    yield f"| CPU time of the publisher, per change | {row['p50_ns'] / 1e3:.2f} us | | |"


def thirds(row: Row) -> str:
    return f"{row['ratio_to_limit']:.3f} ({row['ratio_q1']:.3f}, {row['ratio_q3']:.3f})"


def of_disk() -> Iterator[str]:
    for case, depths in (("random read", (32, 8, 1)), ("save", (32,))):
        for engine in ("uring", "threads"):
            for depth in depths:
                row = only(DISK, case=case, engine=engine, bytes=2560 << 10, depth=depth)
                name = {"uring": "io_uring"}.get(engine, engine)
                speeds = (f"{one:.1f}" for one in (row["gb_per_s"], row["limit"]))
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


def of_peers() -> Iterator[str]:
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


def of_methods() -> Iterator[str]:
    for name, case, paper in (
        ("CPU: streaming store", "streamed store", "2.41 us"),
        ("CPU: flush, then load", "read after flush", "5.98 us"),
    ):
        row = found("coherence", case)
        yield line(name, paper, duration(row["p50_ns"]), f"{row['ratio_to_limit']:.2f}")


def of_sizes() -> Iterator[str]:
    for name, case, size, paper in (
        ("64 B read by the CPU", "read", 64, "about 750 ns"),
        ("16 KiB read by the CPU", "read", 16 << 10, "5.98 us"),
        ("16 KiB written by the CPU", "write", 16 << 10, "2.41 us"),
    ):
        row = found("latency", case, bytes=size, memory="tmpfs/DRAM")
        yield line(name, paper, duration(row["p50_ns"]), f"{row['ratio_to_limit']:.2f}")


def of_calls() -> Iterator[str]:
    one, many = (found("rpc", "c", depth=depth, coherence="software") for depth in (1, 128))
    rdma = "8.39, 8.83 us"
    yield line("one call at a time", "2.11 us", rdma, duration(one["p50_ns"]),
               f"{one['ratio_to_limit']:.2f}")  # fmt: skip
    yield line("128 calls at a time, one server thread", "12.13 M calls/s", "4.5, 6.65 M calls/s",
               f"{many['ops_per_s'] / 1e6:.1f} M calls/s",
               f"{many['ratio_to_limit']:.2f}")  # fmt: skip


def of_dense() -> Iterator[str]:
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


def of_hint() -> Iterator[str]:
    """The part of hint O1 with figures."""
    cases = {
        "streaming store": "streamed store",
        "store + clwb": "store + clwb",
        "store + clflush": "store + clflush",
    }
    times = (
        f"{name} {duration(found('coherence', case)['p50_ns'])}" for name, case in cases.items()
    )
    yield f"{', '.join(times)} for 16 KiB"


def moved(path: str, case: str) -> str:
    """Return speed and median of 16 KiB by two threads."""
    row = only(path, case=case, bytes=16 << 10, threads=2)
    return f"{row['gb_per_s']:.1f} GB/s, p50 {duration(row['p50_ns'])}"


def of_paced() -> Iterator[str]:
    for layout in ("interleaved", "not interleaved"):
        cases = (f"read, {pattern}, {layout}" for pattern in ("uniform", "skewed"))
        yield line(layout, *(moved(PACED, case) for case in cases))


def of_pressed() -> Iterator[str]:
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


def of_adapters() -> Iterator[str]:
    for verb, paper in (("read", "46.2 GB/s"), ("write", "33 GB/s")):
        row = only(BANDWIDTH, case=f"{verb}, uniform, interleaved", bytes=16 << 10, threads=2)
        speed = f"{row['gb_per_s']:.1f} GB/s, two cores"
        yield line(f"CPU {verb}s through one adapter", paper, speed, f"{row['ratio_to_limit']:.2f}")


PAGE = "docs/understand/benchmarks.md"
PAPER = "docs/understand/paper.md"
TABLES: dict[str, tuple[str, Callable[[], Iterator[str]]]] = {
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
    "paper, O1": (PAPER, of_hint),
    "paced": (PAGE, of_paced),
    "paper, Exp 4": (PAPER, of_pressed),
    "paper, adapters": (PAPER, of_adapters),
}


@pytest.mark.parametrize("table", TABLES)
def test_a_table_has_the_recorded_figures(table: str) -> None:
    path, rows = TABLES[table]
    text = (ROOT / path).read_text(encoding="utf-8")
    wanted = "\n".join(rows())
    assert wanted
    assert wanted in text, f"{path} lacks these lines:\n{wanted}"


@pytest.mark.parametrize("path", [BASICS, GATEWAY, INDEX])
def test_a_page_names_the_commit_of_its_figures(path: str) -> None:
    commits = {row["commit"] for row in rows_of(path)}
    assert len(commits) == 1
    assert commits.pop() in (ROOT / PAGE).read_text(encoding="utf-8")


def compared() -> Iterator[str]:
    """The figures of docs/understand/comparison.md, each as a part of a row."""
    demo, tiers = (
        json.loads((RESULTS / f"vllm-{name}.json").read_text(encoding="utf-8"))
        for name in ("demo", "tiers")
    )
    ours = f"{demo['ttft_hit_s'] * 1e3:.0f} ms"
    for peer, what in (("mooncake", "Mooncake Store over TCP"), ("lmcache", "LMCache in shared")):
        yield f"| {ours} | {demo['peers'][peer] * 1e3:.0f} ms, {what}"
    yield f"| {ours} | {demo['ttft_local_hit_s'] * 1e3:.0f} ms: the lower bound"
    for place, what in (("disk", "disk"), ("redis", "Redis")):
        ratios = tiers["ratios"][place]
        times = {
            arm: next(row["ttft_s"] for row in tiers["summary"] if row["arm"] == f"{arm}-{place}")
            for arm in ("beluga", "lmcache")
        }
        yield (
            f"| {times['beluga'] * 1e3:.0f} ms | {times['lmcache'] * 1e3:.0f} ms, LMCache's {what} "
            f"backend; {ratios['median']:.2f} times in the median of {ratios['pairs']} pairs, "
            f"{ratios['min']:.2f} in the worst |"
        )
    case = {"case": "gather_write", "fragment_bytes": 20480, "threads": 1, "crc": False}
    rows = [only(COPY, engine="cpu", peer=None, **case)]
    rows += [only(COPY, peer=peer, **case) for peer in (*COPY_PEERS[:2], COPY_PEERS[3])]
    own, *theirs = (f"{row['p50_ns'] / 1e6:.2f} ms" for row in rows)
    names = ("numpy", "torch", "two steps through a bounce buffer")
    yield f"| {own} | {', '.join(map(' '.join, zip(theirs, names, strict=True)))} |"
    ours, dynamo, first = (
        [figures(beside(f"{case}, {when}"), 3) for when in ("evenly", "at random")]
        for case in ("ours", "copy first", "FIFO")
    )
    yield (
        f"| {'; '.join(ours)} | Dynamo's order (copy first, account afterward): "
        f"{'; '.join(dynamo)}. First come, first served: {'; '.join(first)} |"
    )
    row = only("bench/results/indexer.json", case="find_matches, c")
    yield f"| {row['p50_ns'] / 1e3:.1f} us | {row['ratio_to_limit']:.2f} of the speed of a bare"
    row = only(GATEWAY, case="time to first byte")
    yield f"| {row['note'].split()[1]} ms | measured against a plain proxy"


def test_the_comparison_has_the_recorded_figures() -> None:
    text = (ROOT / "docs/understand/comparison.md").read_text(encoding="utf-8")
    assert [part for part in compared() if part not in text] == []


PAGES = (
    *("README.md", PAGE, PAPER, "docs/use/rpc.md", "docs/understand/comparison.md"),
    *("docs/understand/routing-results.md", "docs/understand/copy-engines.md"),
)
UNRECORDED = {
    "4e7d8c1": "one sentence about calls on an EPYC: to be recorded",
    "5adaf90": "four policies at 2.5x, which simulate-conversation.json leaves out",
    "a349972": "the code of the simulator that policies.json ran on, before its own commit",
    "e199e28": "the same",
    "249a911f": "probes of a GPU, which are marked as such",
    "3b5a594": "of Mooncake",
    "8770b65": "of NIXL",
    "4fd29ce": "of maru",
}


def test_figures_are_of_commits_with_recorded_files() -> None:
    """A commit without a file is listed with the reason, as long as a page names it."""
    recorded = set()
    for path in RESULTS.glob("*.json"):
        content = json.loads(path.read_text(encoding="utf-8"))
        rows = content if isinstance(content, list) else [content]
        recorded |= {str(row.get("commit")).partition("-")[0][:7] for row in rows}
    named = set()
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        named |= set(re.findall(r"\b(?=\w*[a-f])(?=\w*\d)[0-9a-f]{7,8}\b", text))
    assert {commit for commit in named if commit[:7] not in recorded} == set(UNRECORDED)


ORIGIN = {"machine", "commit", "date", "command"}
WITHOUT = {
    "before-after.json": {"commit", "command", "date"},  # commits and commands of both builds
    "vllm-disagg.json": ORIGIN,
} | {
    f"{name}.json": {"date"}
    for name in ("copy-cpu-epyc", "indexer", "scheduler", "vllm-bench", "vllm-demo")
}


def test_a_recorded_file_names_machine_commit_day_and_command() -> None:
    """Those in WITHOUT were recorded before results had these fields."""
    lacking = {}
    for path in RESULTS.glob("*.json"):
        content = json.loads(path.read_text(encoding="utf-8"))
        rows = content if isinstance(content, list) else [content]
        if missing := {name for name in ORIGIN for row in rows if not row.get(name)}:
            lacking[path.name] = missing
    assert lacking == WITHOUT


if __name__ == "__main__":
    for name, (_, make) in TABLES.items():
        print(f"\n{name}\n")
        print("\n".join(make()))
