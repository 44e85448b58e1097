# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The benchmark of the link scheduler: how long onboards wait for a link that offloads saturate, in
our order and in others.

First in virtual time (``linkmodel.py``), so that only the orders differ; then in real time, with
several processes' caches (``linkpath.py``); and the cost of one decision.
"""

from __future__ import annotations

import time

import numpy as np

from beluga._ffi import ffi, lib
from beluga.transfer.link import LinkDirection

from ..harness.ground import ground
from ..harness.options import Options
from ..harness.row import Recorder, Row, percentiles
from .linkmodel import BLOCK, OFFLOAD, PIECE, Outcome, run
from .linkpath import decision_rows, path_rows
from .orders import orders
from .throttlers import Queue

RATE = 26_000_000_000  # bytes per second: between a GPU and the pool, in the paper
SHARE = 0.3  # of the link, used by onboards


def bench_scheduler(options: Options) -> list[Row]:
    """Return the rows: orders in virtual time, caches in real time, and the cost of a decision."""
    rows = _virtual(options)
    options.report("scheduler: decisions")
    rows.append(_decision(options))
    with ground(options) as pool:
        rows += decision_rows(options, pool)
    with ground(options) as pool:
        return [*rows, *path_rows(options, pool)]


# ---- In virtual time


def _virtual(options: Options) -> list[Row]:
    duration_ns = 20_000_000 if options.smoke else 500_000_000
    fixed: Row = {"memory": "virtual time", "bytes": BLOCK, "threads": 1}
    recorder = Recorder("scheduler", options, fixed)
    rows = []
    for regular in (False, True):
        for name in orders(RATE):
            options.report(f"scheduler: {name}")
            idle, loaded = (
                run(
                    orders(RATE)[name],
                    bytes_per_s=RATE,
                    onboard_share=SHARE,
                    offload=offload,
                    duration_ns=duration_ns,
                    seed=options.seed + 1,
                    regular=regular,
                )
                for offload in (False, True)
            )
            case = f"{name}, {'evenly' if regular else 'at random'}"
            rows.append(_virtual_row(recorder, case, idle, loaded, duration_ns))
    return rows


def _virtual_row(
    recorder: Recorder, case: str, idle: Outcome, loaded: Outcome, duration_ns: int
) -> Row:
    alone, with_decodes = _times(idle.latencies_ns), _times(loaded.latencies_ns)
    slower = float(str(with_decodes["p99_ns"])) / float(str(alone["p99_ns"]))
    carried = sum(loaded.bytes.values())
    return recorder.row(
        case,
        **with_decodes,
        ops_per_s=round(len(loaded.latencies_ns) * 1e9 / duration_ns),
        gb_per_s=round(carried / duration_ns, 3),
        limit=RATE / 1e9,
        limit_unit="GB/s",
        ratio_to_limit=round(carried / duration_ns / (RATE / 1e9), 3),
        note=f"onboards without offloads: p50 {alone['p50_ns']} ns, p99 {alone['p99_ns']} ns; "
        f"p99 {slower:.2f} times as long beside them; "
        f"offloads had {loaded.bytes[OFFLOAD] / carried:.2f} of what was carried",
    )


def _times(samples_ns: list[int]) -> Row:
    return percentiles(np.array(samples_ns, np.uint64))


# ---- One decision


def _decision(options: Options) -> Row:
    """Measure in C: choose a piece of two classes, admit it, and complete it."""
    direction = LinkDirection(limit=2000, capped=True, now_ns=lib.bl_io_queue_now_ns())
    nodes = [direction.add(shares) for shares in (8, 1)]
    queue = Queue(direction, now_ns=lib.bl_io_queue_now_ns())
    count = 2_000 if options.smoke else 200_000
    for number in range(count):
        queue.push(nodes[number % 2], 1000, number, size=PIECE)
    samples = np.empty(count, np.uint64)
    admission, wait = ffi.new("bl_admission *"), ffi.new("uint64_t *")
    clock = time.perf_counter_ns
    bare = _bare_call_ns(count)
    start = clock()
    for index in range(count):
        before = clock()
        while lib.bl_queue_poll(queue.handle, clock(), admission, wait) != 0:
            pass  # the tokens of a nanosecond are missing
        lib.bl_queue_complete(queue.handle, admission.waiter, before)
        samples[index] = clock() - before
    elapsed_ns = clock() - start
    queue.close()
    return Recorder("scheduler", options, {"threads": 1, "depth": 1}).row(
        "decision",
        memory="DRAM (private)",
        **percentiles(samples),
        ops_per_s=round(count * 1e9 / elapsed_ns),
        note=f"two calls from Python; a call that only reads the clock takes {bare:.0f} ns",
    )


def _bare_call_ns(count: int) -> float:
    start = time.perf_counter_ns()
    for _ in range(count):
        lib.bl_io_queue_now_ns()
    return (time.perf_counter_ns() - start) / count
