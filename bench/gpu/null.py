# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The CUDA engine on a GPU that copies nothing, to measure the overhead of engine, link and cache.

A kernel of the null GPU ends bytes / 52 GB/s after the previous one, in real time, and computes no
checksum. So the difference to 52 GB/s is time in which planning, the engine, the link scheduler and
the cache leave the GPU idle. A :class:`~beluga.kvcache.KVCache` of default settings drives it:
alone, and from two processes that share the link. The other process runs ``null_worker.py``. The
CPU maintains no cache lines; ``coherence`` has that cost.
"""

from __future__ import annotations

import ctypes
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
from beluga.index import IndexServer
from beluga.kvcache import KVCache, Run
from beluga.pool import Pool
from beluga.transfer import CudaEngine, Link, LinkSettings, Speed, TransferClass
from beluga.transfer.policy import CacheMaintenance, Step
from beluga.transfer.policy import PolicyRow as Steps

from ..harness.ground import coherence_of, ground
from ..harness.machine import memory_of
from ..harness.options import Options
from ..harness.row import Recorder, Row, percentiles, speed
from .stub import StandIn

BYTES_PER_S = 52_000_000_000
FRAGMENT, FRAGMENTS = 32 << 10, 128  # of Qwen3-32B's block
BLOCK = FRAGMENT * FRAGMENTS
_SPAN_SIZE = 16 << 10  # a fragment is two chunks
BLOCKS, SMOKE_BLOCKS = 512, 4  # per put or get: 8192 tokens
NAMESPACE = "beluga-null-gpu"
_METADATA_SIZE = 32 << 20  # of a pool: the part without blocks
_ROOM = BLOCK + BLOCK // 16  # a block, its checksums and the waste of its extent
_PROCESSES = 2
_RUNS = 5
_END_TIMEOUT_S = 30.0


def null_gpu(pool: Pool) -> CudaEngine:
    """Return an engine on a null GPU; the pool closes it."""
    bare = CacheMaintenance(pool, Steps(Step.FENCE, Step.FENCE))
    gpu = StandIn(name="cuda-null")
    gpu.library.stub_null(gpu.index, ctypes.c_uint64(BYTES_PER_S), ctypes.c_uint64(_SPAN_SIZE))
    engine = CudaEngine(pool, gpu, maintenance=bare)
    engine.settle()
    return engine


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
    block_count = SMOKE_BLOCKS if options.smoke else BLOCKS
    with ground(options, devices=1, size=_METADATA_SIZE + block_count * _ROOM) as pool:
        room = (pool.geometry.size - pool.geometry.data_offset) // _ROOM - 1
        count = min(block_count, room)
        if count < 1:
            raise BelugaError(f"the pool has no room for a block of {BLOCK} bytes")
        fixed: Row = {"memory": memory_of(pool), "coherence": coherence_of(pool), "depth": count}
        return _rows(Recorder("copy", options, fixed), pool, count)


def _rows(recorder: Recorder, pool: Pool, count: int) -> list[Row]:
    options = recorder.options
    folder = pool.devices[0].path.parent
    with IndexServer(pool), TemporaryDirectory(prefix="beluga-bench-null-", dir=folder) as name:
        link = link_at(pool, Path(name))
        with KVCache(pool, namespace=NAMESPACE, engine=null_gpu(pool), link=link) as cache:
            rates_by_case = {"write, alone": _alone(options, partial(_put, cache), count)}
            rates_by_case["read, alone"] = _alone(options, partial(_get, cache), count)
        cpu_ms: list[float] = []
        with _workers(pool, Path(name), count, cpu_ms):
            several = f"read, {_PROCESSES} processes"
            rates_by_case[several] = [_together(options, link) for _ in range(_RUNS)]
        link.close()
    rows = [_row(recorder, case, rates) for case, rates in rates_by_case.items()]
    took_ms = sum(cpu_ms) / len(cpu_ms)  # processes without a server, which polls
    rows[-1]["note"] = f"{rows[-1]['note']}; {took_ms:.1f} ms of CPU per GiB"
    return rows


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
    rates = []
    once(count)
    for _ in range(_RUNS):
        end, moved, took = time.perf_counter() + _duration_s(options), 0, 0.0
        while took == 0.0 or time.perf_counter() < end:
            took += once(count)
            moved += count * BLOCK
        rates.append(moved / took)
    return rates


def _together(options: Options, link: Link) -> float:
    """Return the bytes per second of all processes that the link admitted."""
    start, before = time.perf_counter(), link.bytes_of(TransferClass.ONBOARD)[0]
    time.sleep(_duration_s(options))
    moved = link.bytes_of(TransferClass.ONBOARD)[0] - before
    return moved / (time.perf_counter() - start)


def _duration_s(options: Options) -> float:
    return 0.05 if options.smoke else 1.0


def _row(recorder: Recorder, case: str, rates: list[float]) -> Row:
    recorder.options.report(f"copy null_gpu {case}")
    first, median, third = np.percentile(rates, [25, 50, 75])
    return recorder.row(
        f"null_gpu {case}",
        engine="null_gpu",
        crc=True,
        fragment_bytes=FRAGMENT,
        fragments=FRAGMENTS,
        bytes=BLOCK,
        threads=1,
        **percentiles((BLOCK * 1e9 / np.array(rates)).astype(np.uint64)),
        **speed(median / BLOCK, BLOCK),
        limit=BYTES_PER_S / 1e9,
        limit_unit="GB/s",
        ratio_to_limit=round(median / BYTES_PER_S, 3),
        ratio_q1=round(first / BYTES_PER_S, 3),
        ratio_q3=round(third / BYTES_PER_S, 3),
        note="a GPU that moves nothing and takes the time of 52 GB/s, behind a KVCache",
    )


@contextmanager
def _workers(pool: Pool, directory: Path, count: int, cpu_ms: list[float]) -> Iterator[None]:
    """Run the other processes. Adds each one's CPU time per GiB to ``cpu_ms`` at the end."""
    with ExitStack() as stack:
        children = [stack.enter_context(_worker(pool, directory, count)) for _ in range(_PROCESSES)]
        for child in children:
            assert child.stdout is not None  # noqa: S101  a pipe
            if child.stdout.readline() != "ready\n":
                raise BelugaError("the benchmark's other process has ended; see above")
        yield
        for child in children:
            assert child.stdin is not None  # noqa: S101  a pipe
            child.stdin.close()
            assert child.stdout is not None  # noqa: S101  a pipe
            cpu_ms.append(float(child.stdout.readline()))


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
