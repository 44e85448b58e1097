# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Engines whose pieces wait for a link: bytes arrive, transfers end and fail as they should."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from beluga._ffi import ffi
from beluga.errors import (
    ChecksumError,
    TransferCancelledError,
    TransferError,
    TransferTimeoutError,
)
from beluga.kvcache import CHUNK_SIZE
from beluga.pool import Pool
from beluga.transfer import (
    CpuEngine,
    Direction,
    IoHandle,
    Link,
    LinkSettings,
    Plan,
    ScheduledEngine,
    Speed,
    Transfer,
    TransferClass,
    plan_blocks,
    plan_rows,
)
from beluga.transfer.scheduled import DEPTH, piece_size

# ---- Engines whose pieces wait for a link: bytes arrive, transfers end and fail as they should.


WAIT_S = 60
BLOCK = 1 << 20
CHUNK = 64 << 10
FRAGMENT = 32 << 10
PIECE = 256 << 10

FAST = LinkSettings(read=Speed(8 << 30), write=Speed(8 << 30), device=Speed(8 << 30))


class HeldTransfer:
    """Ends when the test permits it."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def done(self) -> bool:
        return self.gate.is_set()

    def wait(self, timeout_s: float | None = None) -> None:
        assert self.gate.wait(WAIT_S)


class HeldEngine:
    """Copies nothing, and ends only when the test ends it."""

    name = "held"
    piece_size = PIECE

    def __init__(self) -> None:
        self.started: list[tuple[Plan, HeldTransfer]] = []
        self.error: Exception | None = None
        self.transfer = HeldTransfer

    def gather_write(self, plan: Plan) -> HeldTransfer:
        if self.error is not None:
            raise self.error
        self.started.append((plan, self.transfer()))
        return self.started[-1][1]

    scatter_read = gather_write

    def close(self) -> None:
        pass

    def let_all(self) -> None:
        for _, transfer in self.started:
            transfer.gate.set()


class Blocks:
    """Engine memory with its plan."""

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


class PreparingEngine(HeldEngine):
    """An engine with tables, of which ranges can be started."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[object] = []

    def prepare(self, plan: Plan, direction: Direction) -> PreparingEngine:
        self.calls.append(("prepare", len(plan.chunks), direction))
        return self

    def start(self, first: int, end: int) -> HeldTransfer:
        self.calls.append((first, end))
        transfer = HeldTransfer()
        transfer.gate.set()
        return transfer

    def close(self) -> None:
        self.calls.append("close")


@pytest.fixture
def pool(shm: Path) -> Iterator[Pool]:
    with Pool.create([shm / "a", shm / "b"], device_size=32 << 20) as made:
        yield made


@pytest.fixture
def handle(shm: Path, pool: Pool) -> Iterator[IoHandle]:
    link = Link("test", FAST, pool=pool, directory=shm)
    made = IoHandle(link)
    yield made
    made.close()
    link.close()


def data_offsets(pool: Pool, count: int) -> list[int]:
    first = -(-pool.geometry.data_offset // BLOCK) * BLOCK
    return [first + place * BLOCK for place in range(count)]


def pieced(engine: CpuEngine) -> CpuEngine:
    """An engine with pieces of the link's size."""
    engine.piece_size = PIECE  # type: ignore[attr-defined]
    return engine


def run_to_the_end(engine: HeldEngine, transfer: Transfer) -> None:
    end = time.monotonic() + WAIT_S
    while not transfer.done():
        assert time.monotonic() < end
        engine.let_all()


def idle(handle: IoHandle) -> bool:
    """Whether all tokens of the link are free."""
    directions = [direction.handle for direction in handle.link.directions]
    held = sum(int(member.held) for each in directions for member in each.members)
    return held == 0 and all(
        each.bucket.ceil - each.bucket.tail == each.bucket.limit for each in directions
    )


def test_written_blocks_can_be_read_back(handle: IoHandle, pool: Pool) -> None:
    engine = ScheduledEngine(pieced(CpuEngine(pool, 1)), handle)
    offsets = data_offsets(pool, 6)
    source, target = Blocks(offsets), Blocks(offsets, seed=2)
    assert not (source.memory == target.memory).all()
    engine.gather_write(source.plan).wait(WAIT_S)
    assert source.plan.checksums is not None
    assert target.plan.checksums is not None
    target.plan.checksums[:] = source.plan.checksums
    transfer = engine.scatter_read(target.plan)
    transfer.wait(WAIT_S)
    assert transfer.done()
    assert (source.memory == target.memory).all()
    assert handle.link.bytes_of(TransferClass.OFFLOAD) == (0, 6 * BLOCK)
    assert handle.link.bytes_of(TransferClass.ONBOARD) == (6 * BLOCK, 0)
    carried = handle.transfer_stats(TransferClass.ONBOARD)
    assert carried.pieces == 6 * BLOCK // PIECE
    assert carried.bytes == 6 * BLOCK
    assert 0 <= carried.longest_ns <= carried.waited_ns
    assert max(handle.link.utilisation()) > 0
    assert idle(handle)


def test_a_plan_is_admitted_in_pieces(handle: IoHandle, pool: Pool) -> None:
    engine = HeldEngine()
    plan = Blocks(data_offsets(pool, 2)).plan
    transfer = ScheduledEngine(engine, handle).scatter_read(plan)
    for _ in range(10):
        assert not transfer.done()
    assert 1 <= len(engine.started) <= DEPTH  # no other piece starts before one has ended
    run_to_the_end(engine, transfer)
    assert all(part.size <= PIECE for part, _ in engine.started)
    pieces = np.concatenate([part.pieces for part, _ in engine.started])
    assert (pieces == plan.pieces).all()
    assert idle(handle)


def test_several_pieces_of_an_engine_are_in_flight(shm: Path, pool: Pool) -> None:
    """Of any size: the bucket has tokens for them and for one more."""
    engine = HeldEngine()
    engine.piece_size = BLOCK  # four times the size that the link's bucket is made for
    slow = LinkSettings(read=Speed(1 << 30), write=Speed(1 << 30), device=None)
    handle = IoHandle(Link("wide", slow, directory=shm))
    tokens = slow.read.tokens(BLOCK)
    assert handle.link.directions[Direction.READ].handle.bucket.limit < tokens
    scheduled = ScheduledEngine(engine, handle)
    assert handle.link.directions[Direction.READ].handle.bucket.limit == (DEPTH + 1) * tokens
    transfer = scheduled.scatter_read(Blocks(data_offsets(pool, DEPTH + 2)).plan)
    end = time.monotonic() + WAIT_S
    while len(engine.started) < DEPTH:
        assert time.monotonic() < end
        assert not transfer.done()
    run_to_the_end(engine, transfer)
    assert len(engine.started) == DEPTH + 2
    assert idle(handle)
    handle.close()


def test_a_piece_that_ends_makes_room_beside_an_older_transfer(
    handle: IoHandle, pool: Pool
) -> None:
    """The first transfer's last piece takes long, and the second transfer continues meanwhile."""
    engine = HeldEngine()
    scheduled = ScheduledEngine(engine, handle)
    transfers = [scheduled.scatter_read(Blocks([at]).plan) for at in data_offsets(pool, 2)]

    def expect(count: int) -> None:
        end = time.monotonic() + WAIT_S
        while len(engine.started) < count:
            assert time.monotonic() < end
            assert not transfers[0].done()

    expect(DEPTH)
    for number in range(DEPTH - 1):  # all but the last of the first transfer
        engine.started[number][1].gate.set()
    expect(2 * DEPTH - 1)
    engine.started[DEPTH][1].gate.set()
    expect(2 * DEPTH)
    run_to_the_end(engine, transfers[1])
    assert idle(handle)


@pytest.mark.parametrize("bytes_per_s", [50 << 30, 46_200_000_000, 1 << 30, 999_999_937])
def test_a_link_admits_as_many_pieces_at_once_as_configured(shm: Path, bytes_per_s: int) -> None:
    """For any rounding of a piece's price."""
    speed = Speed(bytes_per_s)
    link = Link(
        "exact", LinkSettings(read=speed, write=speed, device=None, pieces=3), directory=shm
    )
    handle = IoHandle(link)
    requests = [
        ffi.new("bl_io_request *", {"bytes": link.settings.piece_size, "node": 1}) for _ in range(4)
    ]
    admitted = [handle.acquire(request, ffi.NULL, 0) for request in requests]
    assert admitted == [True, True, True, False]
    for request in requests:
        handle.release(request)
    assert idle(handle)
    handle.close()


def test_an_engine_prepares_a_plan_once_and_starts_ranges_of_it(
    handle: IoHandle, pool: Pool
) -> None:
    engine = PreparingEngine()
    plan = Blocks(data_offsets(pool, 2)).plan
    ScheduledEngine(engine, handle).scatter_read(plan).wait(WAIT_S)
    prepared, *ranges, closed = engine.calls
    assert (prepared, closed) == (("prepare", len(plan.chunks), Direction.READ), "close")
    assert ranges == [(first, first + 4) for first in range(0, len(plan.chunks), 4)]


def test_a_wrong_checksum_is_the_transfers_error(handle: IoHandle, pool: Pool) -> None:
    engine = ScheduledEngine(pieced(CpuEngine(pool, 1)), handle)
    blocks = Blocks(data_offsets(pool, 2))
    engine.gather_write(blocks.plan).wait(WAIT_S)
    assert blocks.plan.checksums is not None
    blocks.plan.checksums[3] ^= 1
    transfer = engine.scatter_read(blocks.plan)
    with pytest.raises(ChecksumError):
        transfer.wait(WAIT_S)
    blocks.plan.checksums[3] ^= 1
    engine.scatter_read(blocks.plan).wait(WAIT_S)
    assert idle(handle)


@pytest.mark.parametrize("error", [TransferError("no"), ZeroDivisionError("no")])
def test_a_failure_of_an_engine_fails_only_its_transfer(
    handle: IoHandle, pool: Pool, error: Exception
) -> None:
    engine = HeldEngine()
    engine.error = error
    scheduled = ScheduledEngine(engine, handle)
    plan = Blocks(data_offsets(pool, 2)).plan
    transfer = scheduled.gather_write(plan)
    with pytest.raises(TransferError, match="no"):
        transfer.wait(WAIT_S)
    assert idle(handle)
    engine.error = None
    transfer = scheduled.gather_write(plan)
    run_to_the_end(engine, transfer)
    transfer.wait(WAIT_S)


def test_waiting_may_time_out(handle: IoHandle, pool: Pool) -> None:
    class Late(HeldTransfer):
        def wait(self, timeout_s: float | None = None) -> None:
            if not self.gate.wait(timeout_s):
                raise TransferTimeoutError("late")

    engine = HeldEngine()
    engine.transfer = Late
    plan = Blocks(data_offsets(pool, 1)).plan
    transfer = ScheduledEngine(engine, handle).scatter_read(plan)
    with pytest.raises(TransferTimeoutError):
        transfer.wait(0.01)
    assert not transfer.done()
    run_to_the_end(engine, transfer)
    transfer.wait(0)


def test_waiting_for_the_link_may_time_out(handle: IoHandle, pool: Pool) -> None:
    for direction in handle.link.directions:
        direction.handle.bucket.tail += 10**15  # held by another process, for a long time
    transfer = ScheduledEngine(HeldEngine(), handle).scatter_read(
        Blocks(data_offsets(pool, 1)).plan
    )
    with pytest.raises(TransferTimeoutError):
        transfer.wait(0.01)
    handle.stop()
    with pytest.raises(TransferCancelledError):
        transfer.wait(WAIT_S)


def test_transfers_end_in_the_order_in_which_they_were_started(
    handle: IoHandle, pool: Pool
) -> None:
    """So none of them holds tokens that an earlier waited one needs."""
    engine = ScheduledEngine(pieced(CpuEngine(pool, 1)), handle)
    transfers = [engine.gather_write(Blocks([offset]).plan) for offset in data_offsets(pool, 8)]
    transfers[-1].wait(WAIT_S)
    assert all(transfer.done() for transfer in transfers)
    assert idle(handle)
    assert handle.transfer_stats(TransferClass.OFFLOAD).unthrottled == 0


def test_a_stopped_handle_ends_a_transfer_between_pieces(handle: IoHandle, pool: Pool) -> None:
    engine = HeldEngine()
    scheduled = ScheduledEngine(engine, handle)
    plan = Blocks(data_offsets(pool, 4)).plan
    transfer = scheduled.gather_write(plan)
    assert engine.started
    handle.stop()
    run_to_the_end(engine, transfer)
    with pytest.raises(TransferCancelledError):
        transfer.wait(WAIT_S)
    assert len(engine.started) <= DEPTH
    assert idle(handle)
    handle.resume()
    after = scheduled.gather_write(plan)
    run_to_the_end(engine, after)
    after.wait(WAIT_S)


def test_closing_ends_pieces_in_flight(handle: IoHandle, pool: Pool) -> None:
    engine = HeldEngine()
    scheduled = ScheduledEngine(engine, handle)
    transfers = [scheduled.scatter_read(Blocks([at]).plan) for at in data_offsets(pool, 3)]
    engine.let_all()
    scheduled.close()
    assert all(transfer.done() for transfer in transfers)
    with pytest.raises(TransferError, match="closed"):
        transfers[2].wait(WAIT_S)
    assert idle(handle)
    handle.close()
    transfer = scheduled.scatter_read(Blocks(data_offsets(pool, 1)).plan)
    with pytest.raises(TransferError, match="closed"):
        transfer.wait(WAIT_S)


def test_several_threads_and_engines_share_a_link(handle: IoHandle, pool: Pool) -> None:
    offsets = data_offsets(pool, 8)
    sources = [Blocks([offset], seed=seed) for seed, offset in enumerate(offsets)]
    errors: list[BaseException] = []

    def move(number: int) -> None:
        try:
            engine = ScheduledEngine(pieced(CpuEngine(pool, 1)), handle)
            source = sources[number]
            for _ in range(3):
                engine.gather_write(source.plan).wait(WAIT_S)
                engine.scatter_read(source.plan).wait(WAIT_S)
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=move, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert not errors
    assert idle(handle)


def test_a_half_duplex_link_has_one_direction(shm: Path, pool: Pool) -> None:
    settings = LinkSettings(read=Speed(8 << 30), write=Speed(8 << 30), duplex=False)
    link = Link("half", settings, directory=shm)
    handle = IoHandle(link)
    kind = TransferClass.PREFETCH
    engine = ScheduledEngine(CpuEngine(pool, 1), handle, read=kind, write=kind)
    plan = Blocks(data_offsets(pool, 2)).plan
    for transfer in (engine.gather_write(plan), engine.scatter_read(plan)):
        transfer.wait(WAIT_S)
    assert link.bytes_of(kind) == (4 * BLOCK, 0)
    handle.close()


def test_bytes_are_counted_for_their_devices(shm: Path, pool: Pool) -> None:
    link = Link("devices", FAST, pool=pool, directory=shm)
    offsets = [(8 << 20) + place * (2 << 20) for place in range(3)]  # stripes 4, 5, 6
    plan = Blocks(offsets).plan
    count = len(plan.chunks)
    assert link.device_bytes(plan, [count]).tolist() == [[2 * BLOCK, BLOCK]]
    third = count // 3
    ranges = link.device_bytes(plan, [third, 2 * third, count])
    assert ranges.tolist() == [[BLOCK, 0], [0, BLOCK], [BLOCK, 0]]
    other = Link("elsewhere", FAST, pool=pool, directory=shm)
    link.devices[0].tail += 7
    assert other.devices[0].tail == link.devices[0].tail


def test_an_empty_plan_completes_immediately(handle: IoHandle, pool: Pool) -> None:
    plan = Blocks(data_offsets(pool, 1)).plan
    transfer = ScheduledEngine(HeldEngine(), handle).scatter_read(
        Plan(plan.pieces[:0], plan.chunks[:0])
    )
    assert transfer.done()
    transfer.wait(0)


@pytest.mark.parametrize(
    ("own", "bytes_per_s", "expected"),
    [
        (None, 52 * 10**9, 4 << 20),  # that link's bytes in 100 microseconds
        (None, 10**9, PIECE),
        (1 << 20, 52 * 10**9, 1 << 20),
        (4096, 10**9, PIECE),
    ],
)
def test_the_piece_size_matches_the_engines_speed(
    own: int | None, bytes_per_s: int, expected: int
) -> None:
    class Some(HeldEngine):
        piece_size = own  # type: ignore[assignment]

    speed = Speed(bytes_per_s)
    settings = LinkSettings(read=speed, write=speed)
    assert piece_size(Some(), settings, Direction.READ) == expected


# ---- Rows with checksums count as the chunks that are read for them, piece by piece.


COUNT, ROW = 64, 64
SIZE = COUNT * CHUNK_SIZE


def test_rows_that_are_verified_count_as_their_chunks(pool: Pool, shm: Path) -> None:
    engine = CpuEngine(pool, 1)
    whole = np.random.default_rng(1).integers(0, 256, SIZE, np.uint8)
    offsets = np.array([pool.geometry.data_offset + (2 << 20) - 4096], np.uint64)  # two stripes
    handle = np.array([[whole.ctypes.data]], np.uint64)
    writing = plan_blocks(handle, np.array([SIZE]), offsets, chunk_size=CHUNK_SIZE)
    engine.gather_write(writing).wait(WAIT_S)
    assert writing.checksums is not None
    rows = np.zeros((COUNT, ROW), np.uint8)
    plan = plan_rows(
        (rows.ctypes.data + np.arange(COUNT) * ROW).astype(np.uint64),
        *(np.zeros(COUNT, np.int64), np.arange(COUNT) * CHUNK_SIZE, np.full(COUNT, ROW)),
        offsets=offsets,
        length=SIZE,
        chunk_size=CHUNK_SIZE,
        checksums=writing.checksums.reshape(1, -1),
    )
    link = Link(f"rows-{os.getpid()}", FAST, pool=pool, directory=shm)
    engine.piece_size = FAST.piece_size  # type: ignore[attr-defined]
    handle = IoHandle(link)
    ScheduledEngine(engine, handle).scatter_read(plan).wait(WAIT_S)
    carried = handle.transfer_stats(TransferClass.ONBOARD)
    handle.close()
    assert (rows == whole.reshape(COUNT, CHUNK_SIZE)[:, :ROW]).all()
    assert (carried.pieces, carried.bytes) == (SIZE // FAST.piece_size, SIZE)
    found = link.device_bytes(plan, [len(plan.chunks)]).tolist()[0]
    assert found in ([4096, SIZE - 4096], [SIZE - 4096, 4096])
    bare = dataclasses.replace(plan, checksums=None)
    assert link.device_bytes(bare, [len(bare.chunks)]).sum() == COUNT * ROW


def test_a_chunk_is_no_longer_than_a_piece() -> None:
    """So a link admits no more than a piece of verified bytes, whatever engine copies: chunks are
    longer only where a cache requests it, and then the CPU stops within them."""
    assert CHUNK_SIZE <= LinkSettings().piece_size <= 256 << 10


# ---- An I/O handle that is closed while threads use it.


def test_an_acquire_during_a_close_gets_a_whole_member_or_none(tmp_path: Path) -> None:
    link = Link("closing", directory=tmp_path)
    for _ in range(40):
        handle = IoHandle(link)
        assert handle.handle
        over = threading.Event()

        def use(handle: IoHandle = handle, over: threading.Event = over) -> None:
            while not over.is_set():
                with contextlib.suppress(OSError):
                    handle.watch()
                    handle.stat(Direction.READ)

        threads = [threading.Thread(target=use) for _ in range(2)]
        for thread in threads:
            thread.start()
        handle.close()
        over.set()
        for thread in threads:
            thread.join()
        assert handle.stat(Direction.READ).queued == 0
    link.close()
