# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Registrations: engines of a process share one, and at the limit the least recently used window is
unregistered, but never one in use.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.cuda_gpu import PATIENCE_S, STRIPE, Blocks, Gpu, engine_on, enqueue, held, refuse
from support.cuda_gpu import windows_of as windows_in

from beluga.pool import Pool
from beluga.transfer.cuda import CudaEngine

# ---- Engines of a process for one pool and GPU share one registration of the pool.


WINDOWS = 2 * 16


def registered_by(gpu: Gpu) -> int:
    """Return the number of registered windows of a GPU."""
    return gpu.counts[3]


@pytest.fixture(autouse=True)
def claims(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Ignore other processes."""
    monkeypatch.setattr("beluga.config.runtime_root", lambda: tmp_path)
    return tmp_path / "cuda-registered"


@pytest.fixture
def again(pool: Pool) -> Iterator[Pool]:
    """The same pool, mapped once more, as by another attachment of a connector."""
    with Pool.open([device.path for device in pool.devices]) as opened:
        yield opened


def claimed(claims: Path) -> int:
    """Return the bytes that count toward the host's limit."""
    return sum(int(path.read_text() or 0) for path in claims.glob("claim-*"))


def moves(engine: CudaEngine, blocks: Blocks, pool: Pool) -> None:
    before = blocks.memory.copy()
    engine.gather_write(blocks.plan).wait(PATIENCE_S)
    assert blocks.stored(pool)
    blocks.memory[:] = 0
    engine.scatter_read(blocks.plan).wait(PATIENCE_S)
    assert (blocks.memory == before).all()


@pytest.mark.usefixtures("compiled")
def test_loads_and_saves_register_a_pool_once(
    pool: Pool, again: Pool, gpu: Gpu, claims: Path
) -> None:
    gpus = [gpu, Gpu(index=gpu.index)]
    engines = [engine_on(pool, gpus[0]), engine_on(again, gpus[1])]
    for engine, side in zip(engines, (pool, again), strict=True):
        assert engine.settle(PATIENCE_S)
        moves(engine, Blocks.make(side), side)
        assert engine.stat.bounced_bytes == 0
        assert engine.stat.registered_bytes == WINDOWS * STRIPE
    assert registered_by(gpu) == WINDOWS
    assert claimed(claims) == WINDOWS * STRIPE


@pytest.mark.usefixtures("compiled")
def test_the_engine_that_registered_may_be_closed_first(
    pool: Pool, again: Pool, gpu: Gpu, claims: Path
) -> None:
    """Its engine and mapping of the pool were closed, and the other engine continues."""
    first, second = engine_on(again, gpu), engine_on(pool, Gpu(index=gpu.index))
    assert first.settle(PATIENCE_S)
    again.close()
    with pytest.raises(ValueError, match="closed"):
        _ = again.handle
    moves(second, Blocks.make(pool), pool)
    assert second.stat.bounced_bytes == 0
    assert claimed(claims) == WINDOWS * STRIPE
    second.close()
    second.close()
    assert registered_by(gpu) == 0
    assert list(claims.glob("claim-*")) == []
    third = engine_on(pool, gpu)  # and it can be registered again
    assert third.settle(PATIENCE_S)
    moves(third, Blocks.make(pool), pool)
    assert third.stat.direct_bytes > 0


@pytest.mark.usefixtures("compiled")
def test_two_engines_on_one_mapping_are_not_refused(pool: Pool, gpu: Gpu) -> None:
    """CUDA rejects memory that is already registered."""
    engines = [engine_on(pool, gpu), engine_on(pool, gpu)]
    for engine in engines:
        assert engine.settle(PATIENCE_S)
        assert engine.stat.fault is None
        moves(engine, Blocks.make(pool), pool)
        assert engine.stat.bounced_bytes == 0


@pytest.mark.usefixtures("compiled")
def test_a_window_in_use_by_another_engine_is_not_unregistered(pool: Pool, gpu: Gpu) -> None:
    cap, ended, stream = 6 * STRIPE, threading.Event(), gpu.make_stream(urgent=False)
    first, second = (engine_on(pool, each, cap=cap) for each in (gpu, Gpu(index=gpu.index)))
    assert first.settle(PATIENCE_S)
    near = Blocks.make(pool)
    used = windows_of(first, near)
    enqueue(gpu, stream, lambda: ended.wait(PATIENCE_S))
    transfer = first.gather_write(near.plan, stream=stream)  # in progress
    for _ in range(12):
        for stripe in range(14, 20):
            second.gather_write(Blocks.make(pool, stripe=stripe).plan).wait(PATIENCE_S)
            assert second.settle(PATIENCE_S)
    assert second.stat.unregistered_count > 0
    assert used <= ready(second)
    ended.set()
    transfer.wait(PATIENCE_S)
    assert near.stored(pool)


@pytest.mark.usefixtures("compiled")
def test_windows_of_a_graph_are_released_when_its_engine_is_closed(pool: Pool, gpu: Gpu) -> None:
    first, second = engine_on(pool, gpu), engine_on(pool, gpu)
    assert first.settle(PATIENCE_S)
    blocks, stream = Blocks.make(pool), gpu.make_stream(urgent=False)
    gpu.begin_capture(stream)
    first.capture(blocks.plan, stream, write=True)
    gpu.end_capture(stream)
    assert held(second) == windows_of(second, blocks)
    first.close()
    assert held(second) == set()


@pytest.mark.usefixtures("compiled")
def test_engines_opened_and_closed_concurrently_leave_no_registration(
    pool: Pool, gpu: Gpu, claims: Path
) -> None:
    failed = list[BaseException]()

    def use() -> None:
        try:
            for _ in range(3):
                engine = engine_on(pool, gpu)
                moves(engine, blocks.pop(), pool)
                engine.close()
        except BaseException as error:
            failed.append(error)

    blocks = [Blocks.make(pool, 1, stripe=stripe) for stripe in range(12)]
    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert failed == []
    assert registered_by(gpu) == 0
    assert claimed(claims) == 0


@pytest.mark.usefixtures("compiled")
def test_engines_on_two_gpus_have_separate_registrations(pool: Pool) -> None:
    first, second = (engine_on(pool, Gpu()) for _ in range(2))
    assert first.registrar is not second.registrar
    for engine in (first, second):
        assert engine.settle(PATIENCE_S)
        moves(engine, Blocks.make(pool), pool)


# ---- At the limit the least recently used window is unregistered, but never one in use.


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


def windows_of(engine: CudaEngine, blocks: Blocks) -> set[int]:
    return windows_in(engine, engine._pool, blocks.plan)


def ready(engine: CudaEngine) -> set[int]:
    return set(engine.registrar.ready)


def until(engine: CudaEngine, blocks: Blocks, condition: Callable[[], bool]) -> None:
    """Copy the blocks until the condition is true."""
    for _ in range(100):
        if condition():
            return
        move(engine, blocks)
    raise AssertionError("not after a hundred copies")


@pytest.mark.usefixtures("compiled")
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


@pytest.mark.usefixtures("compiled")
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


@pytest.mark.usefixtures("compiled")
def test_a_window_in_use_stays_until_its_event_has_ended(
    pool: Pool, gpu: Gpu, engine: CudaEngine
) -> None:
    near = Blocks.make(pool, 13)  # two stripes of blocks, and a few bytes
    used = windows_of(engine, near)
    assert len(used) == NEAR
    stream, gate = gpu.make_stream(urgent=False), threading.Event()
    enqueue(gpu, stream, lambda: gate.wait(PATIENCE_S))
    started = engine.gather_write(near.plan, stream=stream)
    for stripe in range(FAR, FAR + 4):  # one more than there are idle ones
        registered(engine, pool, stripe)
        assert used <= ready(engine)
    others = [Blocks.make(pool, 1, stripe=stripe) for stripe in range(FAR - 4, FAR + 4)]
    begun = [engine.gather_write(each.plan, stream=stream) for each in others]
    assert ready(engine) == held(engine)  # all are in use
    blocks = Blocks.make(pool, stripe=FAR - 5)
    until(engine, blocks, lambda: engine.stat.refused_count > 1)
    assert used <= ready(engine)
    assert "cap" in str(engine.stat.fault)
    gate.set()
    gpu.drain(stream)  # the copy has ended, and no caller has waited for it
    for stripe in range(FAR - CAP, FAR):
        registered(engine, pool, stripe)
    assert not used & ready(engine)
    for transfer in (started, *begun):
        transfer.wait(PATIENCE_S)
    assert near.stored(pool)


@pytest.mark.usefixtures("compiled")
def test_a_window_that_the_driver_keeps_is_not_used_again(pool: Pool, gpu: Gpu) -> None:
    failures = [713]  # CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED
    gpu.seen = lambda function, _: (
        failures.pop() if failures and function == "cuMemHostUnregister" else None
    )
    engine = capped(pool, gpu)
    before, blocks = ready(engine), Blocks.make(pool, stripe=FAR)
    registered(engine, pool, FAR)
    move(engine, blocks)
    assert "unregistering: CUDA: pointer does not" in str(engine.stat.fault)
    assert len(before - ready(engine)) == 2  # one is lost, and one was unregistered
    assert engine.stat.unregistered_count == 1
    assert engine.stat.registered_bytes == (CAP - 1) * STRIPE
    assert blocks.stored(pool)


@pytest.mark.usefixtures("compiled")
def test_a_failed_registration_is_not_retried(pool: Pool) -> None:
    tried: list[int] = []

    def fail(size: int) -> None:
        tried.append(size)
        refuse(size)

    engine, blocks = engine_on(pool, Gpu(fail)), Blocks.make(pool)
    assert engine.settle(PATIENCE_S)
    count = len(tried)
    for _ in range(10):
        move(engine, blocks)
    assert len(tried) == count == 32
    assert blocks.stored(pool)


@pytest.mark.usefixtures("compiled")
def test_a_graph_keeps_its_windows(pool: Pool, gpu: Gpu, engine: CudaEngine) -> None:
    near, stream = Blocks.make(pool), gpu.make_stream(urgent=True)
    move(engine, near, stream)
    gpu.begin_capture(stream)
    transfer = engine.capture(near.plan, stream, write=True)
    graph = gpu.end_capture(stream)
    for stripe in range(FAR - CAP, FAR):
        registered(engine, pool, stripe)
    assert windows_of(engine, near) <= ready(engine)
    near.memory[:] = 7
    gpu.replay(graph, stream)
    transfer.wait()
    assert near.stored(pool)


@pytest.mark.usefixtures("compiled")
def test_a_window_requested_during_its_registration_is_registered_once(pool: Pool) -> None:
    begun, gate = threading.Event(), threading.Event()

    def hold(_: int) -> None:
        begun.set()
        assert gate.wait(PATIENCE_S)

    engine = engine_on(pool, Gpu(hold))
    assert begun.wait(PATIENCE_S)
    blocks = [Blocks.make(pool, 1, stripe=stripe) for stripe in range(29)]
    for each in blocks:
        engine.gather_write(each.plan).wait(PATIENCE_S)
    gate.set()
    assert engine.settle(PATIENCE_S)
    assert engine.stat.fault is None
    assert len(ready(engine)) == WINDOWS


@pytest.mark.usefixtures("compiled")
def test_a_metadata_device_is_not_registered(shm: Path, gpu: Gpu) -> None:
    with Pool.create(
        [shm / "x", shm / "y"], device_size=32 * STRIPE, metadata=shm / "metadata", sparse=True
    ) as pool:
        engine = engine_on(pool, gpu)
        assert engine.settle(PATIENCE_S)
        assert {engine.registrar.windows[index].device for index in ready(engine)} == {1, 2}
        assert engine.stat.registered_bytes == 2 * 32 * STRIPE
        blocks = Blocks.make(pool)
        move(engine, blocks)
        assert (engine.stat.bounce_count, blocks.stored(pool)) == (0, True)
