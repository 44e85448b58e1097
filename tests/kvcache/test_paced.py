# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A cache's engine copies piece by piece as a link admits the pieces (csrc/kvcache/engine.c): bytes
arrive, batches end and fail as they should, and the link's tokens are free afterwards.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.blocks import eventually

from beluga import IndexServer, KVCache, Pool
from beluga._ffi import ffi, lib
from beluga.errors import TransferCancelledError, TransferError
from beluga.kvcache import CHUNK_SIZE, Run
from beluga.kvcache.engine import piece_size
from beluga.transfer import (
    CopyEngine,
    CpuEngine,
    Direction,
    IoHandle,
    Link,
    LinkSettings,
    Plan,
    Slots,
    Speed,
    Transfer,
    TransferClass,
    View,
    arrangements,
)
from tests.kvcache.conftest import digests, payload

WAIT_S = 60
BLOCK = 1 << 20
PIECE = 256 << 10
DEPTH = lib.BL_KV_IN_FLIGHT
FAST = LinkSettings(read=Speed(8 << 30), write=Speed(8 << 30), device=Speed(8 << 30))


class HeldTransfer:
    """Ends when the test permits it."""

    def __init__(self, transfer: Transfer, gate: threading.Event) -> None:
        self._transfer, self._gate = transfer, gate

    def done(self) -> bool:
        return self._gate.is_set()

    def wait(self, timeout_s: float | None = None) -> None:
        assert self._gate.wait(WAIT_S)
        self._transfer.wait()


class HeldEngine:
    """Copies by the CPU. Its transfers end when ``gate`` is set; the start number ``breaks_at``
    raises ``error``.
    """

    name = "held"
    piece_size = PIECE

    def __init__(self, pool: Pool) -> None:
        self._cpu = CpuEngine(pool, 1)
        self.gate = threading.Event()
        self.gate.set()
        self.sizes: list[int] = []
        self.breaks_at, self.error = 0, Exception()

    def gather_write(self, plan: Plan) -> Transfer:
        return self._start(self._cpu.gather_write, plan)

    def scatter_read(self, plan: Plan) -> Transfer:
        return self._start(self._cpu.scatter_read, plan)

    def close(self) -> None:
        pass

    def _start(self, move: Callable[[Plan], Transfer], plan: Plan) -> Transfer:
        self.sizes.append(plan.size)
        if len(self.sizes) == self.breaks_at:
            raise self.error
        return HeldTransfer(move(plan), self.gate)


@pytest.fixture
def handle(pool: Pool, shm: Path) -> Iterator[IoHandle]:
    link = Link("test", FAST, pool=pool, directory=shm)
    made = IoHandle(link)
    yield made
    made.close()
    link.close()


Make = Callable[..., KVCache]


@pytest.fixture
def caches(pool: Pool, server: IndexServer, handle: IoHandle) -> Iterator[Make]:
    with contextlib.ExitStack() as stack:

        def make(engine: CopyEngine, **options: Any) -> KVCache:
            options = {"namespace": "test", "link": handle} | options
            return stack.enter_context(KVCache(pool, engine=engine, **options))

        yield make


def idle(handle: IoHandle) -> bool:
    """Whether all tokens of the link are free."""
    directions = [direction.handle for direction in handle.link.directions]
    held = sum(int(member.held) for each in directions for member in each.members)
    return held == 0 and all(
        each.bucket.ceil - each.bucket.tail == each.bucket.limit for each in directions
    )


@pytest.mark.parametrize("check_checksums", [True, False])
@pytest.mark.parametrize("chunk_size", [CHUNK_SIZE, 0])
def test_blocks_are_copied_in_pieces_that_the_link_admits(
    caches: Make, handle: IoHandle, pool: Pool, *, check_checksums: bool, chunk_size: int
) -> None:
    engine = HeldEngine(pool)
    cache = caches(engine, check_checksums=check_checksums, chunk_size=chunk_size)
    blocks, targets = payload(6, BLOCK + 64), np.zeros((6, BLOCK + 64), np.uint8)
    before = [int(device.tail) for device in handle.link.devices]
    assert cache.put(digests(6), blocks).stored == 6
    assert cache.get(digests(6), targets).hits == 6
    assert np.array_equal(blocks, targets)
    assert max(engine.sizes) <= PIECE
    assert sum(engine.sizes) == 2 * blocks.nbytes
    pieces = 0
    for kind in (TransferClass.OFFLOAD, TransferClass.ONBOARD):
        stats = handle.transfer_stats(kind)
        assert (stats.bytes, stats.unthrottled) == (blocks.nbytes, 0)
        assert 0 <= stats.longest_ns <= stats.waited_ns
        pieces += stats.pieces
    assert pieces == len(engine.sizes)
    after = [int(device.tail) for device in handle.link.devices]
    assert [now > was for now, was in zip(after, before, strict=True)] == [True, True]
    assert idle(handle)


def test_small_blocks_share_a_piece(caches: Make, handle: IoHandle, pool: Pool) -> None:
    engine = HeldEngine(pool)
    cache = caches(engine)
    assert cache.put(digests(100), payload(100, 4096)).stored == 100
    assert engine.sizes == [64 * 4096, 36 * 4096]
    assert idle(handle)


def test_a_bounded_number_of_pieces_is_in_flight(
    caches: Make, handle: IoHandle, pool: Pool
) -> None:
    engine = HeldEngine(pool)
    cache = caches(engine)
    engine.gate.clear()
    with ThreadPoolExecutor(1) as thread:
        putting = thread.submit(cache.put, digests(3), payload(3, BLOCK))
        assert eventually(lambda: len(engine.sizes) == DEPTH)
        assert not putting.done()
        assert len(engine.sizes) == DEPTH
        engine.gate.set()
        assert putting.result(WAIT_S).stored == 3
    assert idle(handle)


def test_the_bucket_has_tokens_for_the_pieces_in_flight(
    caches: Make, pool: Pool, shm: Path
) -> None:
    """Of any size: for them and for one more."""
    engine = HeldEngine(pool)
    engine.piece_size = BLOCK  # four times the size that the link's bucket is made for
    slow = LinkSettings(read=Speed(1 << 30), write=Speed(1 << 30), device=None)
    with contextlib.closing(Link("wide", slow, directory=shm)) as link:
        limit = link.directions[Direction.READ].handle.bucket
        assert limit.limit < slow.read.tokens(BLOCK)
        with contextlib.closing(IoHandle(link)) as handle:
            caches(engine, link=handle)
            assert limit.limit == (DEPTH + 1) * slow.read.tokens(BLOCK)


@pytest.mark.parametrize("breaks_at", [1, 3, 7])
@pytest.mark.parametrize("error", [TransferError("no"), ZeroDivisionError("no")])
def test_a_failed_start_ends_the_batch_and_frees_its_tokens(
    caches: Make, handle: IoHandle, pool: Pool, error: Exception, breaks_at: int
) -> None:
    engine = HeldEngine(pool)
    cache = caches(engine)
    engine.breaks_at, engine.error = breaks_at, error
    with pytest.raises(type(error), match="no"):
        cache.put(digests(3), payload(3, BLOCK))
    assert len(engine.sizes) == breaks_at
    assert idle(handle)
    assert (cache.stat().grant_count, cache.stat().abort_count) == (0, 3)
    assert cache.put(digests(3), payload(3, BLOCK)).stored == 3


def test_a_stopped_handle_ends_a_batch_between_pieces(
    caches: Make, handle: IoHandle, pool: Pool
) -> None:
    engine = HeldEngine(pool)
    cache = caches(engine)
    engine.gate.clear()
    with ThreadPoolExecutor(1) as thread:
        putting = thread.submit(cache.put, digests(4), payload(4, BLOCK))
        assert eventually(lambda: len(engine.sizes) == DEPTH)
        handle.stop()
        engine.gate.set()
        with pytest.raises(TransferCancelledError):
            putting.result(WAIT_S)
    assert len(engine.sizes) == DEPTH
    assert idle(handle)
    handle.resume()
    assert cache.put(digests(4), payload(4, BLOCK)).stored == 4


def test_a_full_link_holds_a_batch_up_for_a_second_at_most(
    caches: Make, handle: IoHandle, pool: Pool
) -> None:
    cache = caches(HeldEngine(pool))
    for direction in handle.link.directions:
        direction.handle.bucket.tail += 10**15  # held by another process, for a long time
    assert cache.put(digests(1), payload(1, PIECE)).stored == 1
    assert handle.transfer_stats(TransferClass.OFFLOAD).unthrottled == 1


def test_several_threads_and_engines_share_a_link(
    caches: Make, handle: IoHandle, pool: Pool
) -> None:
    made = [caches(HeldEngine(pool)) for _ in range(4)]

    def move(number: int) -> None:
        names, blocks = digests(2, start=2 * number), payload(2, BLOCK, seed=number)
        targets = np.zeros_like(blocks)
        for _ in range(3):
            assert made[number].put(names, blocks).stored == 2
            assert made[number].get(names, targets).hits == 2
            assert np.array_equal(blocks, targets)
            assert made[number].remove(names) == 2

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(move, range(4)))
    assert idle(handle)


def test_rows_that_are_verified_count_as_their_chunks(
    caches: Make, handle: IoHandle, pool: Pool
) -> None:
    engine = HeldEngine(pool)
    cache = caches(engine)
    shape = 2, 3, 512, 1, 2048  # keys and values of 3 blocks of 512 tokens; 8 tokens are a chunk
    source = np.random.default_rng(1).integers(256, size=shape, dtype=np.uint8)
    target = np.zeros_like(source)
    of_source, of_target = (arrangements.vllm([View.of(each)]) for each in (source, target))
    cache.put(digests(3), Run.of(of_source, [0, 1, 2]))
    engine.sizes.clear()
    tokens = [(block, token) for block in range(3) for token in range(0, 512, 8)]
    slots = [block * 512 + token for block, token in tokens]
    assert cache.get_tokens(digests(3), tokens, Slots(of_target, slots)).hits == 3
    assert sum(engine.sizes) == len(tokens) * 2 * 2048
    stats = handle.transfer_stats(TransferClass.ONBOARD)
    assert stats.bytes == len(tokens) * 2 * CHUNK_SIZE
    assert stats.pieces == stats.bytes // PIECE
    assert np.array_equal(target[:, :, ::8], source[:, :, ::8])
    assert idle(handle)


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
    pool: Pool, own: int | None, bytes_per_s: int, expected: int
) -> None:
    engine, speed = HeldEngine(pool), Speed(bytes_per_s)
    engine.piece_size = own  # type: ignore[assignment]
    settings = LinkSettings(read=speed, write=speed)
    assert piece_size(engine, settings, Direction.READ) == expected


def test_a_chunk_is_no_longer_than_a_piece() -> None:
    """So a link admits no more than a piece of verified bytes, whatever engine copies."""
    assert CHUNK_SIZE <= LinkSettings().piece_size <= 256 << 10


@pytest.mark.parametrize("bytes_per_s", [50 << 30, 46_200_000_000, 1 << 30, 999_999_937])
def test_a_link_admits_as_many_pieces_at_once_as_configured(shm: Path, bytes_per_s: int) -> None:
    """For any rounding of a piece's price."""
    speed = Speed(bytes_per_s)
    settings = LinkSettings(read=speed, write=speed, device=None, pieces=3)
    link = Link(f"exact-{os.getpid()}", settings, directory=shm)
    handle = IoHandle(link)
    requests = [
        ffi.new("bl_io_request *", {"bytes": settings.piece_size, "node": 1}) for _ in range(4)
    ]
    admitted = [lib.bl_io_queue_acquire(handle.handle, each, ffi.NULL, 0) for each in requests]
    assert [status == 0 for status in admitted] == [True, True, True, False]
    for request in requests:
        lib.bl_io_queue_release(handle.handle, request)
    assert idle(handle)
    handle.close()


def test_a_handle_that_closes_gives_a_whole_member_or_none(tmp_path: Path) -> None:
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
