# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""At the limit the least recently used window is unregistered, but never one in use."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from support.cuda_capture import begin_capture, end_capture, replay
from support.cuda_gpu import PATIENCE_S, STRIPE, Blocks, Gpu, engine_on

from beluga.errors import TransferError
from beluga.pool import Pool
from beluga.transfer.cuda import CudaEngine, DriverError

pytestmark = pytest.mark.usefixtures("compiled")

CAP = 6  # windows of the pool's 32: three without blocks, and those of the first stripes of blocks
NEAR = 3  # stripes of blocks that are registered at first
FAR = 20  # a stripe that is not


@pytest.fixture(autouse=True)
def own_claims(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ignore other processes."""
    monkeypatch.setattr("beluga.config.runtime_root", lambda: tmp_path)


@pytest.fixture
def engine(pool: Pool, gpu: Gpu) -> CudaEngine:
    return capped(pool, gpu)


def capped(pool: Pool, gpu: Gpu) -> CudaEngine:
    engine = engine_on(pool, gpu, cap=CAP * STRIPE)
    assert engine.settle(PATIENCE_S)
    assert engine.stat.registered_bytes == CAP * STRIPE
    return engine


def move(engine: CudaEngine, blocks: Blocks, stream: int | None = None) -> None:
    engine.gather_write(blocks.plan, stream=stream).wait(PATIENCE_S)
    assert engine.settle(PATIENCE_S)


def windows_of(engine: CudaEngine, blocks: Blocks) -> set[tuple[int, int]]:
    return engine._windows.touched(engine._pool, blocks.plan)


def ready(engine: CudaEngine) -> set[tuple[int, int]]:
    return set(engine._registrar.ready)


def until(engine: CudaEngine, blocks: Blocks, condition: Callable[[], bool]) -> None:
    """Copy the blocks until the condition is true."""
    for _ in range(100):
        if condition():
            return
        move(engine, blocks)
    raise AssertionError("not after a hundred copies")


def test_a_window_with_many_misses_replaces_an_idle_one(pool: Pool, engine: CudaEngine) -> None:
    blocks = Blocks.make(pool, stripe=FAR)
    (wanted,) = windows_of(engine, blocks)
    before = ready(engine)
    move(engine, blocks)
    assert ready(engine) == before  # registering costs more than one copy gains
    until(engine, blocks, lambda: wanted in ready(engine))
    stat = engine.stat
    assert stat.bounced_bytes >= STRIPE  # as many bytes as the window has
    assert stat.bounced_bytes < STRIPE + 2 * blocks.plan.size
    assert (stat.unregistered_count, stat.registered_bytes) == (1, CAP * STRIPE)
    move(engine, blocks)
    assert engine.stat.bounce_count == stat.bounce_count
    assert blocks.stored(pool)


def registered(engine: CudaEngine, pool: Pool, stripe: int) -> None:
    """Copy blocks of that stripe until its window is registered."""
    blocks = Blocks.make(pool, stripe=stripe)
    until(engine, blocks, lambda: windows_of(engine, blocks) <= ready(engine))


def test_the_least_recently_used_window_is_unregistered(pool: Pool, engine: CudaEngine) -> None:
    near = [Blocks.make(pool, stripe=stripe) for stripe in range(NEAR)]
    of_blocks = [windows_of(engine, blocks) for blocks in near]
    for stripe in (1, 0, 2):
        move(engine, near[stripe])
    assert engine.stat.bounced_bytes == 0
    gone = []
    for far in range(FAR - CAP, FAR):
        before = ready(engine)
        registered(engine, pool, far)
        gone.append(before - ready(engine))
    # never used: these are unregistered first
    assert not set.union(*gone[:NEAR]) & set.union(*of_blocks)
    assert gone[NEAR:] == [of_blocks[1], of_blocks[0], of_blocks[2]]


def test_a_window_in_use_stays_until_its_event_has_ended(
    pool: Pool, gpu: Gpu, engine: CudaEngine
) -> None:
    near = Blocks.make(pool, 13)  # two stripes of blocks, and a few bytes
    used = windows_of(engine, near)
    assert len(used) == NEAR
    stream, gate = gpu.make_stream(urgent=False), threading.Event()
    gpu._streams[stream].put(lambda: gate.wait(PATIENCE_S) and None)
    started = engine.gather_write(near.plan, stream=stream)
    for stripe in range(FAR, FAR + 4):  # one more than there are idle ones
        registered(engine, pool, stripe)
        assert used <= ready(engine)
    with engine._registrar.hold(ready(engine), gpu):  # as if copies of them all were being started
        blocks = Blocks.make(pool, stripe=FAR - 1)
        until(engine, blocks, lambda: engine.stat.refused_count > 1)
    assert used <= ready(engine)
    assert "cap" in str(engine.stat.fault)
    gate.set()
    event = gpu.make_event()
    gpu.record(event, stream)
    gpu.wait(event)  # the copy has ended, and no caller has waited for it
    for stripe in range(FAR - CAP, FAR):
        registered(engine, pool, stripe)
    assert not used & ready(engine)
    started.wait(PATIENCE_S)
    assert near.stored(pool)


def test_a_window_that_the_driver_keeps_is_not_used_again(pool: Pool) -> None:
    class Stuck(Gpu):
        failures = 1

        def unregister(self, address: int) -> None:
            if self.failures:
                self.failures -= 1
                raise DriverError("cudaErrorHostMemoryNotRegistered: made up")
            super().unregister(address)

    engine = capped(pool, Stuck())
    before, blocks = ready(engine), Blocks.make(pool, stripe=FAR)
    registered(engine, pool, FAR)
    move(engine, blocks)
    assert "cudaErrorHostMemoryNotRegistered" in str(engine.stat.fault)
    assert len(before - ready(engine)) == 2  # one is lost, and one was unregistered
    assert engine.stat.unregistered_count == 1
    assert engine.stat.registered_bytes == (CAP - 1) * STRIPE
    assert blocks.stored(pool)


def test_a_failed_registration_is_not_retried(pool: Pool) -> None:
    tried: list[int] = []

    def refuse(size: int) -> None:
        tried.append(size)
        raise DriverError("cudaErrorMemoryAllocation: made up")

    engine, blocks = engine_on(pool, Gpu(before_register=refuse)), Blocks.make(pool)
    assert engine.settle(PATIENCE_S)
    count = len(tried)
    for _ in range(10):
        move(engine, blocks)
    assert len(tried) == count == 32
    assert blocks.stored(pool)


def test_a_graph_keeps_its_windows(pool: Pool, gpu: Gpu, engine: CudaEngine) -> None:
    near, stream = Blocks.make(pool), gpu.make_stream(urgent=True)
    move(engine, near, stream)
    begin_capture(gpu, stream)
    transfer = engine.capture(near.plan, stream, write=True)
    graph = end_capture(gpu, stream)
    for stripe in range(FAR - CAP, FAR):
        registered(engine, pool, stripe)
    assert windows_of(engine, near) <= ready(engine)
    near.memory[:] = 7
    event = gpu.make_event()
    replay(gpu, graph, stream)
    gpu.record(event, stream)
    gpu.wait(event)
    transfer.wait()
    assert near.stored(pool)
    with pytest.raises(TransferError, match="not registered"):
        engine.runs(Blocks.make(pool, stripe=28).plan)


def test_a_window_requested_during_its_registration_is_registered_once(pool: Pool) -> None:
    begun, gate = threading.Event(), threading.Event()

    def held(_: int) -> None:
        begun.set()
        assert gate.wait(PATIENCE_S)

    engine = engine_on(pool, Gpu(before_register=held))
    assert begun.wait(PATIENCE_S)
    first = next(iter(engine._registrar._all(interleaved=True)))
    engine._registrar.bounced([first], STRIPE)
    gate.set()
    assert engine.settle(PATIENCE_S)
    assert engine.stat.fault is None
    assert first in ready(engine)


def test_a_metadata_device_is_not_registered(shm: Path, gpu: Gpu) -> None:
    with Pool.create(
        [shm / "x", shm / "y"], device_size=32 * STRIPE, metadata=shm / "metadata", sparse=True
    ) as pool:
        engine = engine_on(pool, gpu)
        assert engine.settle(PATIENCE_S)
        assert {device for device, _ in ready(engine)} == {1, 2}
        assert engine.stat.registered_bytes == 2 * 32 * STRIPE
        blocks = Blocks.make(pool)
        move(engine, blocks)
        assert (engine.stat.bounce_count, blocks.stored(pool)) == (0, True)
