# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Engines of a process for one pool and GPU share one registration of the pool."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cuda_gpu import PATIENCE_S, STRIPE, Blocks, Gpu, engine_on

from beluga.errors import TransferError
from beluga.pool import Pool
from beluga.transfer.cuda import CudaEngine

pytestmark = pytest.mark.usefixtures("compiled")

WINDOWS = 2 * 16


class Counting(Gpu):
    """Drivers of one GPU."""

    def __init__(self) -> None:
        super().__init__(identity="the one")
        self.count = 0
        self._counting = threading.Lock()

    def register(self, address: int, size: int) -> int:
        with self._counting:
            self.count += 1
        return super().register(address, size)

    def unregister(self, address: int) -> None:
        with self._counting:
            self.count -= 1
        super().unregister(address)


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


def test_loads_and_saves_register_a_pool_once(pool: Pool, again: Pool, claims: Path) -> None:
    drivers = [Counting(), Counting()]
    engines = [engine_on(pool, drivers[0]), engine_on(again, drivers[1])]
    for engine, side in zip(engines, (pool, again), strict=True):
        assert engine.settle(PATIENCE_S)
        moves(engine, Blocks.make(side), side)
        assert engine.stat.bounced_bytes == 0
        assert engine.stat.registered_bytes == WINDOWS * STRIPE
    assert [driver.count for driver in drivers] == [WINDOWS, 0]
    assert claimed(claims) == WINDOWS * STRIPE


def test_the_engine_that_registered_may_be_closed_first(
    pool: Pool, again: Pool, claims: Path
) -> None:
    """Its engine, driver and mapping of the pool were closed, and the other engine continues."""
    drivers = [Counting(), Counting()]
    first, second = engine_on(again, drivers[0]), engine_on(pool, drivers[1])
    assert first.settle(PATIENCE_S)
    again.close()
    with pytest.raises(ValueError, match="closed"):
        _ = again.handle
    drivers[0].close()
    moves(second, Blocks.make(pool), pool)
    assert second.stat.bounced_bytes == 0
    assert claimed(claims) == WINDOWS * STRIPE
    second.close()
    second.close()
    assert [driver.count for driver in drivers] == [0, 0]
    assert list(claims.glob("claim-*")) == []
    third = engine_on(pool, Counting())  # and it can be registered again
    assert third.settle(PATIENCE_S)
    moves(third, Blocks.make(pool), pool)
    assert third.stat.direct_bytes > 0


def test_two_engines_on_one_mapping_are_not_refused(pool: Pool) -> None:
    gpu = Counting()  # rejects memory that is already registered
    engines = [engine_on(pool, gpu), engine_on(pool, gpu)]
    for engine in engines:
        assert engine.settle(PATIENCE_S)
        assert engine.stat.fault is None
        moves(engine, Blocks.make(pool), pool)
        assert engine.stat.bounced_bytes == 0


def test_a_window_in_use_by_another_engine_is_not_unregistered(pool: Pool) -> None:
    drivers = [Counting(), Counting()]
    cap = 6 * STRIPE
    first, second = (engine_on(pool, driver, cap=cap) for driver in drivers)
    assert first.settle(PATIENCE_S)
    near = Blocks.make(pool)
    used = first._windows.touched(pool, near.plan)
    drivers[0].gate.clear()
    transfer = first.gather_write(near.plan)  # in progress, with the first engine's driver
    for _ in range(12):
        for stripe in range(14, 20):
            second.gather_write(Blocks.make(pool, stripe=stripe).plan).wait(PATIENCE_S)
            assert second.settle(PATIENCE_S)
    assert second.stat.unregistered_count > 0
    assert used <= set(second._registrar.ready)
    drivers[0].gate.set()
    transfer.wait(PATIENCE_S)
    assert near.stored(pool)


def test_windows_of_a_graph_are_released_when_its_engine_is_closed(pool: Pool) -> None:
    gpu = Counting()
    first, second = engine_on(pool, gpu), engine_on(pool, gpu)
    assert first.settle(PATIENCE_S)
    first.runs(Blocks.make(pool).plan)
    registrar = second._registrar
    assert set().union(*registrar._kept.values())
    first.close()
    assert registrar._kept == {}


def test_engines_opened_and_closed_concurrently_leave_no_registration(
    pool: Pool, claims: Path
) -> None:
    gpu, failed = Counting(), list[BaseException]()

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
    assert gpu.count == 0
    assert claimed(claims) == 0


def test_engines_on_two_gpus_have_separate_registrations(pool: Pool) -> None:
    drivers = [Gpu(), Gpu()]
    first, second = (engine_on(pool, driver) for driver in drivers)
    assert first._registrar is not second._registrar
    for engine in (first, second):
        assert engine.settle(PATIENCE_S)
        moves(engine, Blocks.make(pool), pool)
    with pytest.raises(TransferError):
        first._registrar.keep({(0, 99)}, first)
