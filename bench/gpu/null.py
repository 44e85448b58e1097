# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A GPU that copies nothing, to measure the overhead of link and cache.

Each of its copies ends bytes / 52 GB/s after the previous one, in real time. So the difference to
52 GB/s is time in which planning, the link scheduler and the cache leave it idle. A
:class:`~beluga.kvcache.KVCache` of default settings drives it: alone, and from two processes that
share the link. The other process runs ``null_worker.py``.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from beluga.child import start
from beluga.errors import BelugaError
from beluga.index import MetaServer
from beluga.kvcache import KVCache, Run
from beluga.pool import Pool
from beluga.transfer import Link, LinkSettings, Plan, Speed, TransferClass

from ..harness.ground import coherence_of, ground
from ..harness.machine import memory_of
from ..harness.options import Options
from ..harness.row import Recorder, Row, percentiles, speed

BYTES_PER_S = 52_000_000_000
FRAGMENT, FRAGMENTS = 32 << 10, 128  # of Qwen3-32B's block
BLOCK = FRAGMENT * FRAGMENTS
BLOCKS, SMOKE_BLOCKS = 512, 4  # of a put or get: 8192 tokens
NAMESPACE = "beluga-null-gpu"
_BESIDE = 32 << 20  # of a pool: the part without blocks
_ROOM = BLOCK + BLOCK // 16  # of a block, with its checksums and the waste of its extent
_PROCESSES = 2
_RUNS = 5
_END_TIMEOUT_S = 30.0


class NullTransfer:
    """A transfer that ends at a time of the clock."""

    def __init__(self, end_ns: int) -> None:
        self._end_ns = end_ns

    def done(self) -> bool:
        """Return whether its time has come."""
        return time.perf_counter_ns() >= self._end_ns

    def wait(self, timeout_s: float | None = None) -> None:
        """Sleep until its time has come."""
        while (left_ns := self._end_ns - time.perf_counter_ns()) > 0:
            time.sleep(left_ns / 1e9)


class NullGpu:
    """An engine whose copies take time and move nothing."""

    name = "null_gpu"
    piece_size = 4 << 20  # as the CUDA engine's

    def __init__(self) -> None:
        self._free_ns = 0

    def gather_write(self, plan: Plan) -> NullTransfer:
        """Return a transfer that ends after the simulated copy time."""
        return self._start(plan.size)

    scatter_read = gather_write

    def close(self) -> None:
        """Close nothing, because nothing is held."""

    def _start(self, size: int) -> NullTransfer:
        begin = max(self._free_ns, time.perf_counter_ns())
        self._free_ns = begin + size * 10**9 // BYTES_PER_S
        return NullTransfer(self._free_ns)


def link_at(pool: Pool, directory: Path) -> Link:
    """Return the settings of a link of the engine's speed; the rest is default."""
    speed = Speed(BYTES_PER_S)
    settings = LinkSettings(read=speed, write=speed, device=None)
    return Link("null-gpu", settings, pool=pool, directory=directory)


def digests(count: int) -> list[bytes]:
    """Return names of blocks."""
    return [b"%032d" % number for number in range(count)]


def blocks_of(count: int) -> Run:
    """Return blocks at addresses of a GPU: each layer's fragments are adjacent."""
    layers = (1 << 40) + np.arange(FRAGMENTS) * (1 << 30)
    fragments = np.empty((count, FRAGMENTS, 2), np.uint64)
    fragments[:, :, 0] = layers + np.arange(count)[:, None] * FRAGMENT
    fragments[:, :, 1] = FRAGMENT
    return Run(count, BLOCK, FRAGMENTS, fragments.reshape(-1, 2))


def null_gpu_rows(options: Options) -> list[Row]:
    """Return the rows of one engine alone, writing and reading, and of processes that read."""
    wanted = SMOKE_BLOCKS if options.smoke else BLOCKS
    with ground(options, devices=1, size=_BESIDE + wanted * _ROOM) as pool:
        room = (pool.geometry.size - pool.geometry.data_offset) // _ROOM - 1
        count = min(wanted, room)
        if count < 1:
            raise BelugaError(f"the pool has no room for a block of {BLOCK} bytes")
        fixed: Row = {"memory": memory_of(pool), "coherence": coherence_of(pool), "depth": count}
        return _rows(Recorder("copy", options, fixed), pool, count)


def _rows(recorder: Recorder, pool: Pool, count: int) -> list[Row]:
    options = recorder.options
    folder = pool.devices[0].path.parent
    with MetaServer(pool), TemporaryDirectory(prefix="beluga-bench-null-", dir=folder) as name:
        link = link_at(pool, Path(name))
        with KVCache(pool, namespace=NAMESPACE, engine=NullGpu(), link=link) as cache:
            found = {"write, alone": _alone(options, partial(_put, cache), count)}
            found["read, alone"] = _alone(options, partial(_get, cache), count)
        with _workers(pool, Path(name), count):
            several = f"read, {_PROCESSES} processes"
            found[several] = [_together(options, link) for _ in range(_RUNS)]
        link.close()
    return [_row(recorder, case, rates) for case, rates in found.items()]


def _put(cache: KVCache, count: int) -> float:
    """Return the seconds of a put; the blocks of the last one were removed."""
    names, blocks = digests(count), blocks_of(count)
    cache.remove(names)
    start = time.perf_counter()
    stored = cache.put(names, blocks).stored
    took = time.perf_counter() - start
    if stored != count:
        raise BelugaError(f"{stored} of {count} blocks were stored; the pool is too small")
    return took


def _get(cache: KVCache, count: int) -> float:
    """Return the seconds of a get."""
    names, blocks = digests(count), blocks_of(count)
    start = time.perf_counter()
    hits = cache.get(names, blocks).hits
    took = time.perf_counter() - start
    if hits != count:
        raise BelugaError(f"{hits} of {count} blocks were found that were just put")
    return took


def _alone(options: Options, once: Callable[[int], float], count: int) -> list[float]:
    """Return the bytes per second of several runs."""
    found = []
    once(count)
    for _ in range(_RUNS):
        end, moved, took = time.perf_counter() + _duration_s(options), 0, 0.0
        while took == 0.0 or time.perf_counter() < end:
            took += once(count)
            moved += count * BLOCK
        found.append(moved / took)
    return found


def _together(options: Options, link: Link) -> float:
    """Return the bytes per second of all processes that the link admitted."""
    start, before = time.perf_counter(), link.bytes_of(TransferClass.ONBOARD)[0]
    time.sleep(_duration_s(options))
    moved = link.bytes_of(TransferClass.ONBOARD)[0] - before
    return moved / (time.perf_counter() - start)


def _duration_s(options: Options) -> float:
    return 0.05 if options.smoke else 1.0


def _row(recorder: Recorder, case: str, found: list[float]) -> Row:
    recorder.options.say(f"copy null_gpu {case}")
    first, median, third = np.percentile(found, [25, 50, 75])
    return recorder.row(
        f"null_gpu {case}",
        engine="null_gpu",
        crc=True,
        fragment_bytes=FRAGMENT,
        fragments=FRAGMENTS,
        bytes=BLOCK,
        threads=1,
        **percentiles((BLOCK * 1e9 / np.array(found)).astype(np.uint64)),
        **speed(median / BLOCK, BLOCK),
        limit=BYTES_PER_S / 1e9,
        limit_unit="GB/s",
        ratio_to_limit=round(median / BYTES_PER_S, 3),
        ratio_q1=round(first / BYTES_PER_S, 3),
        ratio_q3=round(third / BYTES_PER_S, 3),
        note="an engine that moves nothing and takes the time of 52 GB/s, behind a KVCache",
    )


@contextmanager
def _workers(pool: Pool, directory: Path, count: int) -> Iterator[None]:
    with ExitStack() as stack:
        children = [stack.enter_context(_worker(pool, directory, count)) for _ in range(_PROCESSES)]
        for child in children:
            assert child.stdout is not None  # noqa: S101  a pipe
            if child.stdout.readline() != "ready\n":
                raise BelugaError("the benchmark's other process has ended; see above")
        yield


@contextmanager
def _worker(pool: Pool, directory: Path, count: int) -> Iterator[subprocess.Popen[str]]:
    paths = [f"{device.path}@{device.offset}+{device.size}" for device in pool.devices]
    child = start(
        f"{__package__}.null_worker",
        json.dumps([str(directory), count, paths]),
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
