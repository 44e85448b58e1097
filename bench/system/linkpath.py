# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The benchmark of onboards during offloads with the real product: one pool and several processes,
each with a KVCache.

This process gets blocks at random times while others put continuously: over a link that is declared
slow, with classes and with one class for all, and over this machine's memory, with the host's
default link and without a link. The other processes run ``linkflood.py``.
"""

from __future__ import annotations

import dataclasses
import json
import random
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from beluga._ffi import core, ffi, lib
from beluga.child import start
from beluga.errors import BelugaError
from beluga.index import IndexServer
from beluga.kvcache import KVCache
from beluga.pool import Pool
from beluga.transfer import (
    CpuEngine,
    Direction,
    IoHandle,
    Link,
    LinkSettings,
    Speed,
    TransferClass,
    plan_blocks,
    settings_for,
)

from ..harness.machine import memory_of
from ..harness.options import Options
from ..harness.row import Recorder, Row, percentiles
from .linkmodel import BLOCK
from .throttlers import Queue

FLOODS = 2  # processes that put
SHARE = 0.3  # the share of the slow link that gets use
SLOW = Speed(500_000_000)  # The bottleneck must be the link, not the machine.
NAMESPACE = "beluga-bench"
_PIECE = 4096  # the plan for measuring the cost of pieces
_STAY = 1 << 62
_WAIT_NS = 50_000_000
_END_TIMEOUT_S = 30.0


@dataclasses.dataclass(frozen=True)
class _Case:
    """One case. ``settings`` None means no link. ``read`` is the class of gets; ``mean_s`` is the
    mean time between two.
    """

    name: str
    settings: LinkSettings | None
    read: TransferClass
    mean_s: float


def path_rows(options: Options, pool: Pool) -> list[Row]:
    """Return a row for each case. Its note has the times of gets without offloads."""
    slow = LinkSettings(read=SLOW, write=SLOW, device=None, duplex=False)
    slow_mean_s = BLOCK / SLOW.bytes_per_s / SHARE
    onboard, offload = TransferClass.ONBOARD, TransferClass.OFFLOAD
    cases = (
        _Case("caches, slow link, ours", slow, onboard, slow_mean_s),
        _Case("caches, slow link, one class", slow, offload, slow_mean_s),
        _Case("caches, memory, host's link", settings_for(pool), onboard, 0.003),
        _Case("caches, memory, no link", None, onboard, 0.003),
    )
    fixed: Row = {"memory": memory_of(pool), "bytes": BLOCK, "threads": 1}
    recorder = Recorder("scheduler", options, fixed)
    with IndexServer(pool):
        return [_row(options, recorder, pool, case) for case in cases]


def _row(options: Options, recorder: Recorder, pool: Pool, case: _Case) -> Row:
    options.report(f"scheduler: {case.name}")
    duration_s = 0.3 if options.smoke else 8.0
    with TemporaryDirectory(prefix="beluga-bench-link-", dir=pool.devices[0].path.parent) as name:
        directory = Path(name)
        link = case.settings and Link("bench", case.settings, pool=pool, directory=directory)
        with KVCache(pool, namespace=NAMESPACE, link=link, read_class=case.read) as cache:
            alone = _gets(options, cache, case.mean_s, duration_s)
            with _floods(pool, directory if link else None):
                start, before = time.monotonic(), cache.stat().commit_count
                loaded_ns = _gets(options, cache, case.mean_s, duration_s)
                put = (cache.stat().commit_count - before) * BLOCK / (time.monotonic() - start)
            carried = cache.transfer_stats()[case.read]
    wait = f"; a piece waited {carried.waited_ns // carried.pieces} ns" if carried.pieces else ""
    idle = percentiles(np.array(alone, np.uint64))
    return recorder.row(
        case.name,
        **percentiles(np.array(loaded_ns, np.uint64)),
        ops_per_s=round(len(loaded_ns) / duration_s),
        note=f"gets beside {FLOODS} processes that put {put / 1e9:.2f} GB/s; without them "
        f"p50 {idle['p50_ns']} ns, p99 {idle['p99_ns']} ns{wait}",
    )


def digest(number: int) -> list[bytes]:
    """Return the digest of one block."""
    return [b"%032d" % number]


def _gets(options: Options, cache: KVCache, mean_s: float, duration_s: float) -> list[int]:
    """Return how long each get took from its due time, in nanoseconds."""
    block = np.ones((1, BLOCK), np.uint8)
    cache.put(digest(0), block)
    rng = random.Random(options.seed + 1)  # noqa: S311  arrivals, not secrets
    took: list[int] = []
    due = time.monotonic()
    end = due + duration_s
    while due < end or not took:
        time.sleep(max(0.0, due - time.monotonic()))
        if cache.get(digest(0), block).hits != 1:
            raise BelugaError("a block was not found that was just put")
        took.append(round((time.monotonic() - due) * 1e9))
        due += rng.expovariate(1 / mean_s)
        due = max(due, time.monotonic() - 0.1)  # one very slow get does not delay all others
    return took


@contextmanager
def _floods(pool: Pool, directory: Path | None) -> Iterator[None]:
    with ExitStack() as stack:
        children = [
            stack.enter_context(_flood(pool, directory, number)) for number in range(FLOODS)
        ]
        for child in children:
            assert child.stdout is not None  # noqa: S101  a pipe
            if child.stdout.readline() != "ready\n":
                raise BelugaError("the benchmark's other process has ended; see above")
        yield


@contextmanager
def _flood(pool: Pool, directory: Path | None, number: int) -> Iterator[subprocess.Popen[str]]:
    paths = [f"{device.path}@{device.offset}+{device.size}" for device in pool.devices]
    wanted = json.dumps([str(directory) if directory else None, number, paths])
    child = start(
        f"{__package__}.linkflood",
        wanted,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield child
    finally:
        assert child.stdin is not None  # noqa: S101  a pipe
        child.stdin.close()
        try:
            child.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


# ---- The cost of a decision when threads acquire tokens themselves


def decision_rows(options: Options, pool: Pool) -> list[Row]:
    """Measure the cost of a piece that is acquired in C, as the difference to the same copy without
    a link: when a process is alone, and with another engine. Also measure the cost of waiting.
    """
    recorder = Recorder("scheduler", options, {"memory": memory_of(pool), "threads": 1})
    size = (1 if options.smoke else 8) << 20
    memory = np.ones(size, np.uint8)
    first = -(-pool.geometry.data_offset // size) * size
    plan = plan_blocks(
        np.array([[memory.ctypes.data]], np.uint64),
        np.array([size]),
        np.array([first], np.uint64),
        owners=(memory,),
    )
    fast = Speed(10**12)
    settings = LinkSettings(read=fast, write=fast, device=None, piece_size=_PIECE)
    rows = []
    with TemporaryDirectory(prefix="beluga-bench-link-", dir=pool.devices[0].path.parent) as name:
        link = Link("bench", settings, pool=pool, directory=Path(name))
        handle = IoHandle(link)
        bare, admitted = CpuEngine(pool, 1), CpuEngine(pool, 1, handle=handle)
        direction = link.directions[Direction.READ]
        for case in ("in C, alone", "in C, beside another"):
            other = Queue(direction, now_ns=lib.bl_io_queue_now_ns())
            if case != "in C, alone":  # The other one requests the same but does not use it.
                member = next(s for s in direction.handle.members if s.owner and not s.demand)
                member.demand, member.until_ns = 1 << TransferClass.ONBOARD, _STAY
            costs, seconds = [], []
            for _ in range(9):
                times = []
                for engine in (bare, admitted):
                    start = time.perf_counter_ns()
                    engine.scatter_read(plan).wait()
                    times.append(time.perf_counter_ns() - start)
                costs.append(max(0, times[1] - times[0]) * _PIECE // size)
                seconds.append(times[1] / 1e9)
            other.close()
            rows.append(
                recorder.row(
                    f"decision, {case}",
                    ops_per_s=size / _PIECE / float(np.median(seconds)),
                    p50_ns=int(np.median(costs)),
                    p99_ns=max(costs),
                    note="per piece; what a copy in pieces of 4 KiB takes longer than without",
                )
            )
        handle.close()
        rows.append(_waiting_row(recorder, link))
        link.close()
    return rows


def _waiting_row(recorder: Recorder, link: Link) -> Row:
    """Measure the CPU time of a thread that waits while another engine holds the link."""
    holder, waiter = IoHandle(link), IoHandle(link)
    held = [_request() for _ in range(link.settings.pieces)]
    if not all(_acquire(holder, request) for request in held):
        raise BelugaError("the link of the benchmark is not free")
    spent, waits = [], []
    for _ in range(9):
        request, start, used = _request(), time.perf_counter_ns(), time.thread_time_ns()
        _acquire(waiter, request)
        used, wall_ns = time.thread_time_ns() - used, time.perf_counter_ns() - start
        lib.bl_io_queue_release(waiter.handle, request)
        spent.append(used * 10**6 // wall_ns)
        waits.append(wall_ns / 1e9)
    for request in held:
        lib.bl_io_queue_release(holder.handle, request)
    holder.close()
    waiter.close()
    return recorder.row(
        "waiting, in C",
        ops_per_s=1 / float(np.median(waits)),
        p50_ns=int(np.median(spent)),
        p99_ns=max(spent),
        note="CPU time of a thread per millisecond that it waits for a link that another holds",
    )


def _acquire(handle: IoHandle, request: core.bl_io_request) -> bool:
    return lib.bl_io_queue_acquire(handle.handle, request, ffi.NULL, _WAIT_NS) == 0


def _request() -> core.bl_io_request:
    return ffi.new(
        "bl_io_request *",
        {"bytes": _PIECE, "node": TransferClass.ONBOARD, "direction": Direction.READ},
    )
