# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The CUDA engine's own logic, with host-compiled kernels on worker threads in place of a GPU, and
together with graphs, streams and failures.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support.cuda_gpu import (
    PATIENCE_S,
    STRIPE,
    Blocks,
    Gpu,
    engine_on,
    nothing_under_way,
    refuse,
    windows_of,
)
from support.engines import peek, poke

from beluga import coherence
from beluga.errors import (
    ChecksumError,
    DeviceFaultError,
    EngineUnavailableError,
    LayoutError,
    TransferError,
    TransferTimeoutError,
    UnsettledError,
)
from beluga.index import BlockState, IndexClient, IndexServer
from beluga.kvcache import KVCache
from beluga.pool import Pool
from beluga.transfer import Link, LinkSettings, Plan, Speed, TransferClass
from beluga.transfer.cuda import CudaDevice, CudaEngine, DriverError
from beluga.transfer.policy import CacheMaintenance, probe

# ---- The CUDA engine's own logic, with the host-compiled kernels on worker threads in place of
# a GPU.


@pytest.mark.usefixtures("compiled")
def test_a_batch_is_one_launch_without_a_wait(pool: Pool, gpu: Gpu) -> None:
    engine, blocks = engine_on(pool, gpu), Blocks.make(pool, 5)
    assert engine.settle(PATIENCE_S)
    for start in (engine.gather_write, engine.scatter_read):
        before = len(gpu.launches)
        gpu.gate.clear()
        transfer = start(blocks.plan)
        assert len(gpu.launches) == before + 1
        assert not transfer.done()
        with pytest.raises(TransferTimeoutError):
            transfer.wait(0.01)
        gpu.gate.set()
        transfer.wait(PATIENCE_S)
        assert transfer.done()
    assert blocks.stored(pool)
    assert engine.stat.bounced_bytes == 0
    assert engine.stat.direct_bytes == 2 * blocks.plan.size


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("bounced", [False, True])
def test_copies_release_all_resources(pool: Pool, bounced: bool) -> None:
    """Events, GPU memory and pinned memory do not grow with the number of copies."""
    gpu = Gpu(bounced=bounced)
    engine, blocks = engine_on(pool, gpu), Blocks.make(pool)
    engine.settle(PATIENCE_S)
    taken = []
    for _ in range(6):
        for start in (engine.gather_write, engine.scatter_read):
            start(blocks.plan).wait(PATIENCE_S)
        taken.append(gpu.counts)
    assert taken[-1] == taken[1]  # later copies reuse the resources of the first ones


@dataclasses.dataclass(frozen=True)
class Ranges(CacheMaintenance):
    """Cache maintenance in ranges of ``size`` bytes."""

    size: int = dataclasses.field(kw_only=True)

    def range_size(self, *, write: bool) -> int:
        del write
        return self.size


def in_three_ranges(pool: Pool, gpu: Gpu, plan: Plan) -> CudaEngine:
    kept = Ranges(pool, probe().row("gpu"), size=plan.size // 3)
    engine = engine_on(pool, gpu, maintenance=kept)
    assert engine.settle(PATIENCE_S)
    return engine


def without_memory(pool: Pool, size: int) -> None:
    """Truncate the files of the pool. A GPU that has written would not notice, but a flush does."""
    for device in pool.devices:
        os.truncate(device.path, size)


@pytest.mark.usefixtures("compiled")
def test_a_write_is_flushed_before_its_checksums_are_known(pool: Pool, gpu: Gpu) -> None:
    blocks = Blocks.make(pool)
    engine = in_three_ranges(pool, gpu, blocks.plan)
    stream = gpu.make_stream(urgent=False)
    transfer = engine.gather_write(blocks.plan, stream=stream)
    assert len(gpu.launches) == 3  # all were launched before the first one was flushed
    gpu.drain(stream)
    without_memory(pool, 0)
    for _ in range(2):  # unflushed blocks are never published
        with pytest.raises(DeviceFaultError):
            transfer.wait(PATIENCE_S)
    assert blocks.plan.checksums is not None
    assert not blocks.plan.checksums.any()
    assert nothing_under_way(engine)


@pytest.mark.usefixtures("compiled")
def test_lines_of_a_range_are_dropped_before_its_read_is_launched(pool: Pool, gpu: Gpu) -> None:
    blocks = Blocks.make(pool, 12)  # over several stripes
    engine = in_three_ranges(pool, gpu, blocks.plan)
    engine.gather_write(blocks.plan).wait(PATIENCE_S)
    assert blocks.stored(pool)
    before = len(gpu.launches)
    gpu.gate.clear()
    without_memory(pool, 0)
    with pytest.raises(DeviceFaultError):
        engine.scatter_read(blocks.plan)
    assert len(gpu.launches) == before
    assert nothing_under_way(engine)
    gpu.gate.set()


@pytest.mark.usefixtures("compiled")
def test_wrong_chunks_of_several_ranges_are_counted(pool: Pool, gpu: Gpu) -> None:
    blocks = Blocks.make(pool)
    engine = in_three_ranges(pool, gpu, blocks.plan)
    engine.gather_write(blocks.plan).wait(PATIENCE_S)
    engine.scatter_read(blocks.plan).wait(PATIENCE_S)
    assert len(gpu.launches) == 6
    for place in (0, -1):  # in different ranges
        offset = int(blocks.plan.chunks["offset"][place])
        poke(pool, offset, peek(pool, offset, 1) ^ 1)
    with pytest.raises(ChecksumError, match="2 chunks"):
        engine.scatter_read(blocks.plan).wait(PATIENCE_S)
    assert nothing_under_way(engine)


@pytest.mark.usefixtures("compiled")
def test_lines_of_coherent_memory_are_not_maintained(pool: Pool, shm: Path) -> None:
    row = probe().row("gpu")
    assert CacheMaintenance(pool, row).range_size(write=False) < 1 << 30
    paths = [shm / "coherent"]
    with Pool.create(paths, device_size=16 * STRIPE, coherence="hardware", sparse=True) as other:
        assert CacheMaintenance(other, row).range_size(write=False) > 1 << 40


@pytest.mark.usefixtures("compiled")
def test_no_copy_waits_for_a_registration(pool: Pool) -> None:
    let = threading.Event()
    gpu = Gpu(lambda _: let.wait(PATIENCE_S) and None)
    engine, blocks = engine_on(pool, gpu), Blocks.make(pool)
    engine.gather_write(blocks.plan).wait(PATIENCE_S)
    assert blocks.stored(pool)
    blocks.memory[:] = 0
    engine.scatter_read(blocks.plan).wait(PATIENCE_S)
    assert blocks.stored(pool)
    stat = engine.stat
    assert (stat.bounce_count, stat.bounced_bytes) == (2, 2 * blocks.plan.size)
    assert (stat.direct_bytes, stat.registered_bytes) == (0, 0)
    let.set()
    assert engine.settle(PATIENCE_S)
    engine.gather_write(blocks.plan).wait(PATIENCE_S)
    assert engine.stat.bounce_count == 2
    assert engine.stat.registered_bytes == 2 * 16 * STRIPE


@pytest.mark.usefixtures("compiled")
def test_requested_windows_are_registered_first(pool: Pool) -> None:
    gate = threading.Event()
    order: list[int] = []

    def note(function: str, first: int) -> None:
        if function == "cuMemHostRegister":
            order.append(first)

    gpu = Gpu(lambda _: gate.wait(PATIENCE_S) and None)
    gpu.seen = note
    engine, blocks = engine_on(pool, gpu), Blocks.make(pool, 1, stripe=24)
    engine.gather_write(blocks.plan).wait(PATIENCE_S)
    gate.set()
    assert engine.settle(PATIENCE_S)
    (wanted,) = windows_of(engine, pool, blocks.plan)
    windows = engine.registrar.windows
    place = order.index(windows[wanted].address)
    assert place <= 1  # one may have started before the failure was known
    rest = order[:place] + order[place + 1 :]
    lowest = {windows[index].address for index in (0, len(windows) // 2)}
    assert set(rest[:2]) == lowest  # low offsets first


@pytest.mark.usefixtures("compiled")
def test_a_refused_registration_is_logged_and_its_copies_are_bounced(pool: Pool) -> None:
    engine, blocks = engine_on(pool, Gpu(refuse)), Blocks.make(pool)
    assert engine.settle(PATIENCE_S)
    engine.gather_write(blocks.plan).wait(PATIENCE_S)
    assert blocks.stored(pool)
    assert engine.stat.fault is not None
    assert "out of memory" in engine.stat.fault
    assert engine.stat.registered_bytes == 0


@pytest.mark.usefixtures("compiled")
def test_processes_share_the_registration_limit_of_the_host(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("beluga.config.runtime_root", lambda: tmp_path)
    first = engine_on(pool, Gpu(), cap=20 * STRIPE)
    assert first.settle(PATIENCE_S)
    assert first.stat.registered_bytes == 20 * STRIPE
    assert "cap" in str(first.stat.fault)
    second = engine_on(pool, Gpu(), cap=24 * STRIPE)
    assert second.settle(PATIENCE_S)
    assert second.stat.registered_bytes == 4 * STRIPE
    first.close()
    third = engine_on(pool, Gpu(), cap=24 * STRIPE)
    assert third.settle(PATIENCE_S)
    assert third.stat.registered_bytes == 20 * STRIPE
    (tmp_path / "cuda-registered" / "claim-1-dead").write_text(f"{1 << 40}")  # no lock is held
    third.close()
    fourth = engine_on(pool, Gpu(), cap=24 * STRIPE)
    assert fourth.settle(PATIENCE_S)
    assert fourth.stat.registered_bytes == 20 * STRIPE


@pytest.mark.usefixtures("compiled")
def test_bounces_beyond_the_buffers_wait_for_the_oldest(pool: Pool) -> None:
    engine = engine_on(pool, Gpu(refuse), bounce_size=256 << 10)
    blocks = Blocks.make(pool, 8)
    engine.gather_write(blocks.plan).wait(PATIENCE_S)
    assert blocks.stored(pool)
    blocks.memory[:] = 0
    engine.scatter_read(blocks.plan).wait(PATIENCE_S)
    assert blocks.stored(pool)
    assert blocks.memory.any()


@pytest.mark.usefixtures("compiled")
def test_a_wrong_chunk_is_found(pool: Pool, gpu: Gpu) -> None:
    engine, blocks = engine_on(pool, gpu), Blocks.make(pool)
    assert engine.settle(PATIENCE_S)
    engine.gather_write(blocks.plan).wait(PATIENCE_S)
    assert blocks.plan.checksums is not None
    assert blocks.plan.checksums[0] == coherence.crc32c(blocks.memory[:16384].tobytes())
    offset = int(blocks.plan.chunks["offset"][2])
    poke(pool, offset, peek(pool, offset, 1) ^ 1)
    with pytest.raises(ChecksumError, match="1 chunks"):
        engine.scatter_read(blocks.plan).wait(PATIENCE_S)


@pytest.mark.usefixtures("compiled")
def test_plans_that_leave_the_pool_are_refused(pool: Pool, gpu: Gpu) -> None:
    engine, blocks = engine_on(pool, gpu), Blocks.make(pool)
    blocks.plan.pieces["offset"] += np.uint64(pool.geometry.size)
    with pytest.raises(LayoutError):
        engine.gather_write(blocks.plan)
    assert gpu.launches == []


@pytest.mark.usefixtures("compiled")
def test_without_a_gpu_the_error_names_the_missing_part() -> None:
    try:
        CudaDevice()
    except EngineUnavailableError as error:
        assert "\n" not in str(error)
        assert "NVRTC" in str(error) or "GPU" in str(error) or "NVIDIA" in str(error)


# ---- The CUDA engine together with other work: graphs, streams, failures.


class TestGraphs:
    def test_a_captured_copy_runs_at_each_replay(self, pool: Pool, gpu: Gpu) -> None:
        engine, blocks = engine_on(pool, gpu), Blocks.make(pool)
        assert engine.settle(PATIENCE_S)
        stream = gpu.make_stream(urgent=True)
        engine.gather_write(blocks.plan, stream=stream).wait(PATIENCE_S)
        gpu.begin_capture(stream)
        transfer = engine.capture(blocks.plan, stream, write=True)
        graph = gpu.end_capture(stream)
        for value in (1, 2):
            blocks.memory[:] = value
            transfer.prepare()
            gpu.replay(graph, stream)
            transfer.wait()
            assert blocks.stored(pool)
            assert blocks.plan.checksums is not None
            assert blocks.plan.checksums[0] == coherence.crc32c(bytes([value]) * 16384)
        engine.scatter_read(blocks.plan, stream=stream).wait(PATIENCE_S)
        gpu.begin_capture(stream)
        reading = engine.capture(blocks.plan, stream, write=False)
        graph = gpu.end_capture(stream)
        for spoilt in (False, True):
            if spoilt:
                poke(pool, int(blocks.plan.chunks["offset"][1]), np.zeros(1, np.uint8))
            reading.prepare()
            gpu.replay(graph, stream)
            if spoilt:
                with pytest.raises(ChecksumError):
                    reading.wait()
            else:
                reading.wait()

    def test_no_other_work_is_enqueued_on_a_captured_stream(self, pool: Pool, gpu: Gpu) -> None:
        engine, blocks = engine_on(pool, gpu), Blocks.make(pool)
        assert engine.settle(PATIENCE_S)
        stream = gpu.make_stream(urgent=True)
        with pytest.raises(TransferError, match="not being captured"):
            engine.capture(blocks.plan, stream, write=True)
        gpu.begin_capture(stream)
        for start in (engine.gather_write, engine.scatter_read):
            with pytest.raises(TransferError, match="captured"):
                start(blocks.plan, stream=stream)
        other = gpu.make_stream(urgent=False)
        assert gpu.replay(gpu.end_capture(stream), other) == 0

    def test_unregistered_memory_is_not_captured(self, pool: Pool) -> None:
        let = threading.Event()
        gpu = Gpu(lambda _: let.wait(PATIENCE_S) and None)
        engine, blocks = engine_on(pool, gpu), Blocks.make(pool)
        stream = gpu.make_stream(urgent=True)
        gpu.begin_capture(stream)
        with pytest.raises(TransferError, match="not registered yet"):
            engine.capture(blocks.plan, stream, write=True)
        let.set()


@pytest.mark.usefixtures("compiled")
def test_streams_of_torch_and_cupy_are_accepted(pool: Pool, gpu: Gpu) -> None:
    engine, blocks = engine_on(pool, gpu), Blocks.make(pool)
    assert engine.settle(PATIENCE_S)
    handle = gpu.make_stream(urgent=False)
    foreign = type("Foreign", (), {"__cuda_stream__": lambda self: (0, handle)})()
    for stream in (SimpleNamespace(cuda_stream=handle), SimpleNamespace(ptr=handle), foreign):
        engine.gather_write(blocks.plan, stream=stream).wait(PATIENCE_S)
    with pytest.raises(TransferError, match="not a CUDA stream"):
        engine.gather_write(blocks.plan, stream="0")  # type: ignore[arg-type]


@pytest.mark.usefixtures("compiled")
def test_a_failed_kernel_is_the_transfers_error(pool: Pool, gpu: Gpu) -> None:
    engine, blocks = engine_on(pool, gpu), Blocks.make(pool)
    assert engine.settle(PATIENCE_S)
    stream = gpu.make_stream(urgent=True)
    gpu.break_stream(stream)
    transfer = engine.gather_write(blocks.plan, stream=stream)
    with pytest.raises(TransferError, match="failed"):
        transfer.wait(PATIENCE_S)
    engine.gather_write(blocks.plan).wait(PATIENCE_S)  # other streams continue
    assert blocks.stored(pool)


# ---- A cache whose engine is in C.


@pytest.fixture
def cache(pool: Pool, gpu: Gpu, shm: Path) -> Iterator[KVCache]:
    speed = Speed(8 << 30)
    link = Link("gpu", LinkSettings(read=speed, write=speed), pool=pool, directory=shm)
    engine = engine_on(pool, gpu)
    engine.piece_size = 1 << 20
    assert engine.settle(PATIENCE_S)
    with IndexServer(pool), KVCache(pool, namespace="gpu", engine=engine, link=link) as cache:
        yield cache
    link.close()


KEYS = [hashlib.sha256(b"block %d" % number).digest() for number in range(4)]


@pytest.mark.usefixtures("compiled")
def test_a_cache_copies_without_python(
    pool: Pool, gpu: Gpu, cache: KVCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("gather_write", "scatter_read"):
        monkeypatch.delattr(CudaEngine, name)
    blocks = np.random.default_rng(1).integers(256, size=(4, 1_000_000), dtype=np.uint8)
    targets = np.zeros_like(blocks)
    assert cache.put(KEYS, blocks).stored == 4
    assert cache.get(KEYS, targets).hits == 4
    assert np.array_equal(blocks, targets)
    assert len(gpu.launches) == 8  # a launch for each piece
    carried = cache.transfer_stats()
    for kind in (TransferClass.OFFLOAD, TransferClass.ONBOARD):
        assert (carried[kind].pieces, carried[kind].bytes) == (4, blocks.nbytes)
    offset = int(IndexClient(cache.client).lookup(cache.keys(KEYS)).hits[2].offset)
    poke(pool, offset + 500_000, peek(pool, offset + 500_000, 1) ^ 1)
    result = cache.get(KEYS, targets)
    assert (result.hits, result.mismatches, result.states[2]) == (2, 1, BlockState.MISS)
    assert nothing_under_way(cache.engine)  # type: ignore[arg-type]


@pytest.mark.usefixtures("compiled")
def test_a_caches_errors_are_those_of_its_engine(pool: Pool, gpu: Gpu, cache: KVCache) -> None:
    blocks = np.zeros((4, 100_000), np.uint8)
    gpu.fail_at = 1
    with pytest.raises(DriverError, match="unknown error"):
        cache.put(KEYS, blocks)
    stat = cache.stat()
    assert (stat.grant_count, stat.abort_count) == (0, 4)
    assert cache.put(KEYS[:2], blocks[:2]).stored == 2
    gpu.fail_at = 1
    with pytest.raises(DriverError, match="unknown error"):
        cache.get(KEYS[:2], blocks[:2])
    assert cache.stat().pinned_count == 0
    gpu.gate.clear()
    gpu.silent = True
    with pytest.raises(UnsettledError, match="restart"):
        cache.put(KEYS[2:], blocks[2:])
    gpu.silent = False
    gpu.gate.set()
    assert cache.stat().grant_count == 2  # until this process ends
    assert cache.engine is not None
    cache.engine.close()
    with pytest.raises(TransferError, match="the CUDA engine is closed"):
        cache.get(KEYS[:2], blocks[:2])
