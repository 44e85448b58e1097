# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Engines copy over a link: bytes arrive, and jobs end, fail and are dropped correctly."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from beluga.errors import (
    ChecksumError,
    TransferCancelledError,
    TransferError,
    TransferTimeoutError,
)
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

WAIT_S = 60
BLOCK = 1 << 20
CHUNK = 64 << 10
FRAGMENT = 32 << 10

FAST = LinkSettings(read=Speed(8 << 30), write=Speed(8 << 30), device=Speed(8 << 30))


class HeldTransfer:
    """A transfer that ends when the test says so."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def done(self) -> bool:
        return self.gate.is_set()

    def wait(self, timeout_s: float | None = None) -> None:
        assert self.gate.wait(WAIT_S)


class HeldEngine:
    """Copies nothing, and ends when the test says so."""

    name = "held"

    def __init__(self) -> None:
        self.started: list[tuple[Plan, HeldTransfer]] = []
        self.threads: set[int] = set()
        self.error: Exception | None = None

    def gather_write(self, plan: Plan) -> HeldTransfer:
        self.threads.add(threading.get_ident())
        if self.error is not None:
            raise self.error
        self.started.append((plan, HeldTransfer()))
        return self.started[-1][1]

    scatter_read = gather_write

    def close(self) -> None:
        pass

    def wait_for(self, count: int) -> None:
        end = time.monotonic() + WAIT_S
        while len(self.started) < count:
            assert time.monotonic() < end
            time.sleep(0.001)

    def let_all(self) -> None:
        for _, transfer in self.started:
            transfer.gate.set()


class Blocks:
    """Engine memory that knows its plan."""

    def __init__(self, offsets: list[int], *, chunk_size: int = CHUNK, seed: int = 1) -> None:
        rng = np.random.default_rng(seed)
        self.memory = rng.integers(256, size=(len(offsets), BLOCK), dtype=np.uint8)
        starts = self.memory.ctypes.data + np.arange(len(offsets)) * BLOCK
        fragments = starts[:, None] + np.arange(0, BLOCK, FRAGMENT)[None, :]
        self.plan = plan_blocks(
            fragments.astype(np.uint64),
            np.full(BLOCK // FRAGMENT, FRAGMENT),
            np.array(offsets, np.uint64),
            chunk_size=chunk_size,
            owners=(self.memory,),
        )


@pytest.fixture
def pool(shm: Path) -> Iterator[Pool]:
    with Pool.create([shm / "a", shm / "b"], device_size=32 << 20) as made:
        yield made


@pytest.fixture
def scheduler(shm: Path, pool: Pool) -> Iterator[Scheduler]:
    link = Link("test", FAST, pool=pool, directory=shm)
    with Scheduler(link) as made:
        yield made


def data_offsets(pool: Pool, count: int) -> list[int]:
    first = -(-pool.geometry.data_offset // BLOCK) * BLOCK
    return [first + place * BLOCK for place in range(count)]


def test_what_is_written_can_be_read_back(scheduler: Scheduler, pool: Pool) -> None:
    engine = CpuEngine(pool, 1)
    offsets = data_offsets(pool, 6)
    source, target = Blocks(offsets), Blocks(offsets, seed=2)
    assert not (source.memory == target.memory).all()
    scheduler.submit(source.plan, engine, Direction.WRITE, TransferClass.OFFLOAD).wait(WAIT_S)
    assert source.plan.checksums is not None
    assert target.plan.checksums is not None
    target.plan.checksums[:] = source.plan.checksums
    job = scheduler.submit(target.plan, engine, Direction.READ, TransferClass.ONBOARD)
    job.wait(WAIT_S)
    assert job.done()
    assert (source.memory == target.memory).all()
    assert scheduler.link.bytes_of(TransferClass.OFFLOAD) == (0, 6 * BLOCK)
    assert scheduler.link.bytes_of(TransferClass.ONBOARD) == (6 * BLOCK, 0)
    carried = scheduler.carried()[TransferClass.ONBOARD]
    assert carried.pieces == len(job.parts) == 6 * BLOCK // (256 << 10)
    assert carried.bytes == 6 * BLOCK
    assert 0 <= carried.longest_ns <= carried.waited_ns
    assert max(scheduler.link.utilisation()) > 0


def test_a_plan_is_let_onto_the_link_in_pieces(scheduler: Scheduler, pool: Pool) -> None:
    engine = HeldEngine()
    plan = Blocks(data_offsets(pool, 2)).plan
    job = scheduler.submit(plan, engine, Direction.READ, TransferClass.ONBOARD)
    engine.wait_for(2)
    time.sleep(0.05)
    assert len(engine.started) == 2  # not before one has ended
    while not job.done():
        engine.let_all()
        time.sleep(0.001)
    assert all(part.size <= 256 << 10 for part, _ in engine.started)
    pieces = np.concatenate([part.pieces for part, _ in engine.started])
    assert (pieces == plan.pieces).all()
    assert len(engine.threads) == 1
    assert threading.get_ident() not in engine.threads


def test_a_wrong_checksum_is_the_jobs_error(scheduler: Scheduler, pool: Pool) -> None:
    engine = CpuEngine(pool, 1)
    blocks = Blocks(data_offsets(pool, 2))
    scheduler.submit(blocks.plan, engine, Direction.WRITE, TransferClass.OFFLOAD).wait(WAIT_S)
    assert blocks.plan.checksums is not None
    blocks.plan.checksums[3] ^= 1
    job = scheduler.submit(blocks.plan, engine, Direction.READ, TransferClass.ONBOARD)
    with pytest.raises(ChecksumError):
        job.wait(WAIT_S)
    blocks.plan.checksums[3] ^= 1
    scheduler.submit(blocks.plan, engine, Direction.READ, TransferClass.ONBOARD).wait(WAIT_S)


@pytest.mark.parametrize("error", [TransferError("no"), ZeroDivisionError("no")])
def test_an_engine_that_fails_fails_the_job_and_nothing_else(
    scheduler: Scheduler, pool: Pool, error: Exception
) -> None:
    engine = HeldEngine()
    engine.error = error
    plan = Blocks(data_offsets(pool, 2)).plan
    job = scheduler.submit(plan, engine, Direction.WRITE, TransferClass.OFFLOAD)
    with pytest.raises(TransferError, match="no"):
        job.wait(WAIT_S)
    engine.error = None
    job = scheduler.submit(plan, engine, Direction.WRITE, TransferClass.OFFLOAD)
    while not job.done():
        engine.let_all()
        time.sleep(0.001)
    job.wait(WAIT_S)


def test_waiting_may_time_out(scheduler: Scheduler, pool: Pool) -> None:
    engine = HeldEngine()
    plan = Blocks(data_offsets(pool, 1)).plan
    job = scheduler.submit(plan, engine, Direction.READ, TransferClass.PREFETCH)
    with pytest.raises(TransferTimeoutError):
        job.wait(0.01)
    while not job.done():
        engine.let_all()
        time.sleep(0.001)
    job.wait(0)


def test_a_job_is_cancelled_between_pieces(scheduler: Scheduler, pool: Pool) -> None:
    engine = HeldEngine()
    plan = Blocks(data_offsets(pool, 4)).plan
    job = scheduler.submit(plan, engine, Direction.WRITE, TransferClass.OFFLOAD)
    engine.wait_for(2)
    job.cancel()
    job.cancel()
    assert not job.done()  # two pieces are under way
    engine.let_all()
    with pytest.raises(TransferCancelledError):
        job.wait(WAIT_S)
    assert len(engine.started) == 2
    after = scheduler.submit(plan, engine, Direction.WRITE, TransferClass.OFFLOAD)
    while not after.done():
        engine.let_all()
        time.sleep(0.001)
    after.wait(WAIT_S)
    after.cancel()
    after.wait(WAIT_S)  # it had ended


class Hold:
    """An engine's hold on blocks."""


def test_offloads_are_dropped_when_their_blocks_go(scheduler: Scheduler, pool: Pool) -> None:
    engine = HeldEngine()
    plan, hold = Blocks(data_offsets(pool, 4)).plan, Hold()
    job = scheduler.submit(plan, engine, Direction.WRITE, TransferClass.OFFLOAD, blocks=hold)
    engine.wait_for(2)
    engine.started[0][1].gate.set()
    engine.wait_for(3)  # they are there, so it goes on
    del hold
    gc.collect()
    while not job.done():
        engine.let_all()
        time.sleep(0.001)
    with pytest.raises(TransferCancelledError):
        job.wait(WAIT_S)
    assert len(engine.started) < len(job.parts)


def test_offloads_whose_blocks_went_while_they_waited_copy_nothing(
    scheduler: Scheduler, pool: Pool
) -> None:
    engine = HeldEngine()
    plan, hold = Blocks(data_offsets(pool, 1)).plan, Hold()
    running = scheduler.submit(plan, engine, Direction.WRITE, TransferClass.OFFLOAD)
    engine.wait_for(2)
    job = scheduler.submit(plan, engine, Direction.WRITE, TransferClass.OFFLOAD, blocks=hold)
    del hold
    gc.collect()
    with pytest.raises(TransferCancelledError):
        while not job.done():
            engine.let_all()
            time.sleep(0.001)
        job.wait(WAIT_S)
    while not running.done():
        engine.let_all()
        time.sleep(0.001)
    running.wait(WAIT_S)
    assert len(engine.started) == len(running.parts)


def test_blocks_that_the_plan_keeps_are_refused(scheduler: Scheduler, pool: Pool) -> None:
    blocks = Blocks(data_offsets(pool, 1))
    with pytest.raises(TransferError, match="owns"):
        scheduler.submit(
            blocks.plan,
            HeldEngine(),
            Direction.WRITE,
            TransferClass.OFFLOAD,
            blocks=blocks.memory,
        )


def test_closing_drops_what_waits(shm: Path, pool: Pool) -> None:
    engine = HeldEngine()
    plan = Blocks(data_offsets(pool, 2)).plan
    with Scheduler(Link("other", FAST, pool=pool, directory=shm)) as scheduler:
        jobs = [
            scheduler.submit(plan, engine, Direction.READ, TransferClass.SCRUB) for _ in range(3)
        ]
        engine.wait_for(2)
        engine.let_all()
    for job in jobs:
        assert job.done()
    with pytest.raises(TransferCancelledError):
        jobs[2].wait(WAIT_S)
    with pytest.raises(TransferError, match="closed"):
        scheduler.submit(plan, engine, Direction.READ, TransferClass.SCRUB)


def test_several_threads_and_engines_share_a_link(scheduler: Scheduler, pool: Pool) -> None:
    offsets = data_offsets(pool, 8)
    engines = [CpuEngine(pool, 1) for _ in range(2)]
    sources = [Blocks([offset], seed=seed) for seed, offset in enumerate(offsets)]
    errors: list[BaseException] = []

    def move(place: int) -> None:
        try:
            engine = engines[place % 2]
            source, target = sources[place], Blocks([offsets[place]], seed=99)
            for _ in range(3):
                kind = TransferClass.OFFLOAD
                scheduler.submit(source.plan, engine, Direction.WRITE, kind).wait(WAIT_S)
                kind = TransferClass.ONBOARD
                scheduler.submit(target.plan, engine, Direction.READ, kind).cancel()
                scheduler.submit(source.plan, engine, Direction.READ, kind).wait(WAIT_S)
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=move, args=(place,)) for place in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert not errors
    way = scheduler.link.way(Direction.WRITE).handle
    assert all(seat.held == 0 for seat in way.seats)
    assert way.bucket.ceil - way.bucket.tail == way.bucket.limit


def test_a_link_that_is_not_duplex_has_one_way(shm: Path, pool: Pool) -> None:
    settings = LinkSettings(read=Speed(8 << 30), write=Speed(8 << 30), duplex=False)
    link = Link("half", settings, directory=shm)
    engine = CpuEngine(pool, 1)
    plan = Blocks(data_offsets(pool, 2)).plan
    with Scheduler(link) as scheduler:
        jobs = [
            scheduler.submit(plan, engine, direction, TransferClass.PREFETCH)
            for direction in (Direction.WRITE, Direction.READ)
        ]
        for job in jobs:
            job.wait(WAIT_S)
    assert link.bytes_of(TransferClass.PREFETCH) == (4 * BLOCK, 0)


def test_bytes_count_for_the_devices_they_lie_on(shm: Path, pool: Pool) -> None:
    link = Link("devices", FAST, pool=pool, directory=shm)
    offsets = [(8 << 20) + place * (2 << 20) for place in range(3)]  # stripes 4, 5, 6
    plan = Blocks(offsets).plan
    assert link.device_bytes(plan).tolist() == [2 * BLOCK, BLOCK]
    other = Link("elsewhere", FAST, pool=pool, directory=shm)
    link.devices[0].tail += 7
    assert other.devices[0].tail == link.devices[0].tail


def test_a_forked_child_makes_its_own(scheduler: Scheduler, pool: Pool) -> None:
    plan = Blocks(data_offsets(pool, 1)).plan
    scheduler._pid = os.getpid() + 1
    with pytest.raises(TransferError, match="parent"):
        scheduler.submit(plan, HeldEngine(), Direction.READ, TransferClass.SCRUB)
    scheduler._pid = os.getpid()


def test_a_plan_of_nothing_has_ended(scheduler: Scheduler, pool: Pool) -> None:
    plan = Blocks(data_offsets(pool, 1)).plan
    empty = Plan(plan.pieces[:0], plan.chunks[:0])
    job = scheduler.submit(empty, HeldEngine(), Direction.READ, TransferClass.SCRUB)
    job.wait(0)
    job.cancel()
    job.wait(0)


def test_depth_is_at_least_one(shm: Path) -> None:
    with pytest.raises(TransferError):
        Scheduler(Link("depth", FAST, directory=shm), depth=0)
