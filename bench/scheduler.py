# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""How long onboards wait for a link that offloads fill, in our order and in those of others.

In virtual time first (``linkmodel.py``), so that the orders alone differ; then really, by the CPU
engine over a link that is said to be slower than memory; and what one decision costs.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from beluga._ffi import ffi, lib
from beluga.errors import BelugaError
from beluga.pool import Pool
from beluga.transfer import (
    CpuEngine,
    Direction,
    Link,
    LinkSettings,
    Plan,
    Scheduler,
    Speed,
    TransferClass,
    plan_blocks,
)
from beluga.transfer.fair import Queue, Way

from .ground import discipline_of, ground
from .linkmodel import BACKLOG, BLOCK, OFFLOAD, PIECE, Outcome, run
from .machine import memory_of
from .options import Options
from .orders import orders
from .row import Recorder, Row, percentiles

RATE = 26_000_000_000  # bytes per second: a GPU's way from the pool, in the paper
SHARE = 0.3  # of the link, asked for by onboards
REAL_RATE = 2_000_000_000  # slow enough for a busy machine's memory
FRAGMENT = 20 << 10


def bench_scheduler(options: Options) -> list[Row]:
    """Orders in virtual time, ours and a plain queue really, and the cost of a decision."""
    if options.pace is not None:
        raise BelugaError("scheduler says itself how fast its link is; leave --pace out")
    rows = _virtual(options)
    options.say("scheduler: decisions")
    rows.append(_decision(options))
    options.say("scheduler: really")
    return [*rows, *_real(options)]


# ---- In virtual time


def _virtual(options: Options) -> list[Row]:
    duration_ns = 20_000_000 if options.smoke else 1_000_000_000
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
    """Choosing a piece of two classes, admitting it, and taking note of its end; in C."""
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
            pass  # a nanosecond's tokens are missing
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


# ---- Really


def _real(options: Options) -> list[Row]:
    """Onboards at random, alone and beside offloads that never end: ours, and one plain queue."""
    rows = []
    with ground(options) as pool:
        fixed: Row = {
            "memory": memory_of(pool),
            "discipline": discipline_of(pool),
            "bytes": BLOCK,
            "threads": 1,
        }
        recorder = Recorder("scheduler", options, fixed)
        onboard, offload = (_plan(pool, place) for place in range(2))
        for name, driver in (("ours", _Ours), ("one queue", _OneQueue)):
            idle, _ = _measure(options, pool, driver, onboard, None)
            loaded, note = _measure(options, pool, driver, onboard, offload)
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
    return 0.3 if options.smoke else 5.0


def _plan(pool: Pool, place: int) -> Plan:
    """A block of fragments, like those of a 32B model; the limit of 128 apart."""
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


class _Ours:
    """Through the scheduler; the link is not duplex, so that offloads are in the way."""

    def __init__(self, pool: Pool, directory: Path) -> None:
        speed = Speed(REAL_RATE)
        settings = LinkSettings(read=speed, write=speed, duplex=False)
        self._scheduler = Scheduler(Link("bench", settings, directory=directory))
        self._engine = CpuEngine(pool, 1)
        self._busy = self._scheduler.link.utilisation

    def onboard(self, plan: Plan) -> Callable[[], None]:
        kind = TransferClass.ONBOARD
        return self._scheduler.submit(plan, self._engine, Direction.READ, kind).wait

    def offload(self, plan: Plan) -> Callable[[], bool]:
        kind = TransferClass.OFFLOAD
        return self._scheduler.submit(plan, self._engine, Direction.WRITE, kind).done

    def close(self) -> str:
        delay = self._scheduler.delays()[TransferClass.ONBOARD]
        share = self._busy()[0]
        self._scheduler.close()
        mean = delay.total_ns // max(delay.count, 1)
        return (
            f"; queue delay of onboards' pieces {mean} ns, {delay.longest_ns} ns at most; "
            f"the link was used for {share:.2f} of the time"
        )


class _OneQueue:
    """Whole blocks, one after the other, as they come: as fast as the engine goes."""

    def __init__(self, pool: Pool, directory: Path) -> None:
        self._engine = CpuEngine(pool, 1)
        self._line = ThreadPoolExecutor(1)

    def onboard(self, plan: Plan) -> Callable[[], None]:
        future = self._line.submit(lambda: self._engine.scatter_read(plan).wait())
        return future.result

    def offload(self, plan: Plan) -> Callable[[], bool]:
        return self._line.submit(lambda: self._engine.gather_write(plan).wait()).done

    def close(self) -> str:
        self._line.shutdown(cancel_futures=True)
        return ""


@contextmanager
def _driver(
    pool: Pool, kind: type[_Ours] | type[_OneQueue]
) -> Iterator[tuple[_Ours | _OneQueue, list[str]]]:
    """A driver, and what it has to say in the end."""
    notes: list[str] = []
    with TemporaryDirectory(prefix="beluga-bench-link-") as directory:
        driver = kind(pool, Path(directory))
        try:
            yield driver, notes
        finally:
            notes.append(driver.close())


def _measure(
    options: Options,
    pool: Pool,
    kind: type[_Ours] | type[_OneQueue],
    onboard: Plan,
    offload: Plan | None,
) -> tuple[list[int], str]:
    """How long each onboard took, from when it was due, in nanoseconds; and a note."""
    rng = random.Random(options.seed + 1)  # noqa: S311  arrivals, not secrets
    mean_s = BLOCK / REAL_RATE / SHARE
    took: list[int] = []
    CpuEngine(pool, 1).gather_write(onboard).wait()  # so that its checksums are right
    with _driver(pool, kind) as (driver, notes):
        waiting: list[Callable[[], bool]] = []
        due = time.monotonic() + mean_s
        end = time.monotonic() + _duration_s(options)
        while due < end:
            while offload is not None and len(waiting) < BACKLOG:
                waiting.append(driver.offload(offload))
            time.sleep(max(0.0, due - time.monotonic()))
            driver.onboard(onboard)()
            took.append(round((time.monotonic() - due) * 1e9))
            waiting = [done for done in waiting if not done()]
            due += rng.expovariate(1 / mean_s)
    return took, notes[0]
