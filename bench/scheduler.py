# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The benchmark of the link scheduler: how long onboards wait for a link that offloads fill, in our
order and in others.

It runs in virtual time first (``linkmodel.py``), so that only the orders differ. Then the CPU
engine copies in real time over a link that is declared slower than memory, with onboards in their
own class and in that of the offloads. Then caches of several processes copy (``linkpath.py``). At
last it measures the cost of a decision.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from beluga._ffi import ffi, lib
from beluga.errors import BelugaError
from beluga.pool import Pool
from beluga.transfer import (
    CpuEngine,
    Direction,
    Job,
    Link,
    LinkSettings,
    Plan,
    Scheduler,
    Speed,
    TransferClass,
    plan_blocks,
)
from beluga.transfer.iosched.fair import Queue, Way

from .ground import coherence_of, ground
from .linkmodel import BACKLOG, BLOCK, OFFLOAD, PIECE, Outcome, run
from .linkpath import decision_rows, path_rows
from .machine import memory_of
from .options import Options
from .orders import orders
from .row import Recorder, Row, percentiles

RATE = 26_000_000_000  # bytes per second: a GPU's path from the pool, in the paper
SHARE = 0.3  # the share of the link that onboards use
REAL_RATE = 500_000_000  # The link, not a busy machine, must be the bottleneck.
FRAGMENT = 20 << 10
_LOOK_S = 0.0005  # a tenth of a block's time


def bench_scheduler(options: Options) -> list[Row]:
    """Return rows for orders in virtual time, for real copies with classes and with one class, and
    for decisions.
    """
    if options.pace is not None:
        raise BelugaError("scheduler says itself how fast its link is; leave --pace out")
    rows = _virtual(options)
    options.say("scheduler: decisions")
    rows.append(_decision(options))
    with ground(options) as pool:
        rows += decision_rows(options, pool)
    options.say("scheduler: really")
    rows += _real(options)
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
            options.say(f"scheduler: {name}")
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
    alone, beside = _times(idle.latencies_ns), _times(loaded.latencies_ns)
    carried = sum(loaded.bytes.values())
    return recorder.row(
        case,
        **beside,
        ops_per_s=round(len(loaded.latencies_ns) * 1e9 / duration_ns),
        gb_per_s=round(carried / duration_ns, 3),
        limit=RATE / 1e9,
        limit_unit="GB/s",
        ratio_to_limit=round(carried / duration_ns / (RATE / 1e9), 3),
        note=f"onboards without offloads: p50 {alone['p50_ns']} ns, p99 {alone['p99_ns']} ns; "
        f"p99 {_over(beside, alone):.2f} times as long beside them; "
        f"offloads had {loaded.bytes[OFFLOAD] / carried:.2f} of what was carried",
    )


def _times(samples_ns: list[int]) -> Row:
    return percentiles(np.array(samples_ns, np.uint64))


def _over(loaded: Row, idle: Row) -> float:
    return float(str(loaded["p99_ns"])) / float(str(idle["p99_ns"]))


# ---- One decision


def _decision(options: Options) -> Row:
    """Measure in C: choose a piece of two classes, admit it, and note its end."""
    way = Way(limit=2000, capped=True, now_ns=lib.bl_port_now_ns())
    nodes = [way.add(shares) for shares in (8, 1)]
    queue = Queue(way, now_ns=lib.bl_port_now_ns())
    count = 2_000 if options.smoke else 200_000
    for number in range(count):
        queue.push(nodes[number % 2], 1000, number, size=PIECE)
    samples = np.empty(count, np.uint64)
    admission, wait = ffi.new("bl_admission *"), ffi.new("uint64_t *")
    clock = time.perf_counter_ns
    bare = _bare_call_ns(count)
    start = clock()
    for place in range(count):
        before = clock()
        while lib.bl_queue_poll(queue.handle, clock(), admission, wait) != 0:
            pass  # the tokens of a nanosecond are missing
        lib.bl_queue_complete(queue.handle, admission.waiter, before)
        samples[place] = clock() - before
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
        lib.bl_port_now_ns()
    return (time.perf_counter_ns() - start) / count


# ---- In real time


def _real(options: Options) -> list[Row]:
    """Measure random onboards, alone and beside endless offloads, with classes and with one
    class.
    """
    rows = []
    with ground(options) as pool:
        fixed: Row = {
            "memory": memory_of(pool),
            "coherence": coherence_of(pool),
            "bytes": BLOCK,
            "threads": 1,
        }
        recorder = Recorder("scheduler", options, fixed)
        onboard, offload = (_plan(pool, place) for place in range(2))
        for name, kind in (("ours", TransferClass.ONBOARD), ("one class", TransferClass.OFFLOAD)):
            idle, _ = _measure(options, pool, kind, onboard, None)
            loaded, note = _measure(options, pool, kind, onboard, offload)
            alone, beside = _times(idle), _times(loaded)
            rows.append(
                recorder.row(
                    f"real, {name}",
                    **beside,
                    ops_per_s=round(len(loaded) / _duration_s(options)),
                    note=f"link of {REAL_RATE / 1e9} GB/s; onboards without offloads: "
                    f"p50 {alone['p50_ns']} ns, p99 {alone['p99_ns']} ns{note}",
                )
            )
    return rows


def _duration_s(options: Options) -> float:
    return 0.3 if options.smoke else 10.0


def _plan(pool: Pool, place: int) -> Plan:
    """Return a plan for a block with fragments like those of a 32B model."""
    memory = np.ones(BLOCK, np.uint8)
    starts = memory.ctypes.data + np.arange(0, BLOCK, FRAGMENT)
    first = -(-pool.geometry.data_offset // BLOCK) * BLOCK
    return plan_blocks(
        starts.astype(np.uint64)[None, :],
        np.full(BLOCK // FRAGMENT, FRAGMENT),
        np.array([first + place * BLOCK], np.uint64),
        chunk_size=FRAGMENT,
        owners=(memory,),
    )


def _measure(
    options: Options, pool: Pool, kind: TransferClass, onboard: Plan, offload: Plan | None
) -> tuple[list[int], str]:
    """Return how long each onboard took from its due time, in nanoseconds, and a note.

    The link is not duplex, so that offloads compete with onboards.
    """
    engine, speed = CpuEngine(pool, 1), Speed(REAL_RATE)
    engine.gather_write(onboard).wait()  # this makes its checksums right
    settings = LinkSettings(read=speed, write=speed, duplex=False)
    with TemporaryDirectory(prefix="beluga-bench-link-") as directory:
        link = Link("bench", settings, directory=Path(directory))
        with Scheduler(link) as scheduler:
            took = _arrive(options, scheduler, engine, kind, (onboard, offload))
            carried, used = scheduler.carried()[kind], link.utilisation()[0]
    mean = carried.waited_ns // max(carried.pieces, 1)
    return took, (
        f"; queue delay of a piece {mean} ns, {carried.longest_ns} ns at most; "
        f"the link was used for {used:.2f} of the time"
    )


def _arrive(
    options: Options,
    scheduler: Scheduler,
    engine: CpuEngine,
    kind: TransferClass,
    plans: tuple[Plan, Plan | None],
) -> list[int]:
    """Submit onboards at random times, and an offload for every one that has ended."""
    rng = random.Random(options.seed + 1)  # noqa: S311  arrivals, not secrets
    onboard, offload = plans
    mean_s = BLOCK / REAL_RATE / SHARE
    took: list[int] = []
    waiting: list[Job] = []
    onboards: list[tuple[float, Job]] = []
    due = time.monotonic() + mean_s
    end = time.monotonic() + _duration_s(options)
    while due < end or onboards:
        while offload is not None and len(waiting) < BACKLOG:
            best_effort = TransferClass.OFFLOAD
            waiting.append(scheduler.submit(offload, engine, Direction.WRITE, best_effort))
        now = time.monotonic()
        while due < min(now, end):
            onboards.append((due, scheduler.submit(onboard, engine, Direction.READ, kind)))
            due += rng.expovariate(1 / mean_s)
        ended = [(since, job) for since, job in onboards if job.done()]
        for since, job in ended:
            job.wait()  # raises the job's error
            took.append(round((now - since) * 1e9))
        onboards = [pair for pair in onboards if pair not in ended]
        waiting = [job for job in waiting if not job.done()]
        time.sleep(_LOOK_S)
    return took
