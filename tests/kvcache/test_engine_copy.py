# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Puts and gets with an engine have the same results as those in C, leave no partial work, and
survive faults of the DSA and of a process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from numpy.typing import NDArray
from support import role
from support.soft_dsa import soft_portal

from beluga import IndexServer, KVCache, Pool
from beluga.errors import LayoutError, UnsettledError
from beluga.index import BlockState, check_pool
from beluga.kvcache import CHUNK_SIZE, Run
from beluga.transfer import (
    BlockLayout,
    CopyEngine,
    CpuEngine,
    DsaEngine,
    Order,
    Plan,
    Slots,
    Transfer,
    View,
    arrangements,
)
from tests.kvcache.conftest import digests, flip, payload, place


class Hooked:
    """The CPU engine with a hook before each plan; ``late`` copies later, on another thread."""

    name = "cpu-hooked"

    def __init__(self, pool: Pool, before: Callable[[Plan], None], *, late: bool = False) -> None:
        self._cpu, self._before, self._late = CpuEngine(pool, threads=1), before, late
        self.transfers: list[Later] = []

    def gather_write(self, plan: Plan) -> Transfer:
        return self._start(self._cpu.gather_write, plan)

    def scatter_read(self, plan: Plan) -> Transfer:
        return self._start(self._cpu.scatter_read, plan)

    def close(self) -> None:
        pass

    def _start(self, move: Callable[[Plan], Transfer], plan: Plan) -> Transfer:
        self._before(plan)
        if not self._late:
            return move(plan)
        self.transfers.append(Later(lambda: move(plan)))
        return self.transfers[-1]


class Later:
    """A transfer that starts some time after it was returned."""

    def __init__(self, move: Callable[[], Transfer]) -> None:
        self._move, self._ended = move, threading.Event()
        self._made: list[Transfer] = []
        threading.Timer(0.05, self._run).start()

    def _run(self) -> None:
        self._made.append(self._move())
        self._ended.set()

    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self, timeout_s: float | None = None) -> None:
        assert self._ended.wait(timeout_s or 60)
        self._made[0].wait()


@pytest.fixture
def caches(pool: Pool, server: IndexServer) -> Iterator[Callable[[CopyEngine | None], KVCache]]:
    made: list[KVCache] = []

    def make(engine: CopyEngine | None = None, *, check_checksums: bool = True) -> KVCache:
        made.append(KVCache(pool, namespace="test", engine=engine, check_checksums=check_checksums))
        return made[-1]

    yield make
    for cache in made:
        cache.close()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("length", [1, 63, 4096, CHUNK_SIZE + 1, 3 * CHUNK_SIZE - 7, 5 << 19])
def test_an_engine_and_c_read_each_others_blocks(
    pool: Pool, caches: Callable[..., KVCache], length: int, *, late: bool
) -> None:
    engine = Hooked(pool, lambda _: None, late=late)
    by_engine, by_call = caches(engine), caches()
    blocks = payload(6, length)
    assert by_engine.put(digests(3), blocks[:3]).stored == 3
    assert by_call.put(digests(3, start=3), blocks[3:]).stored == 3
    again = by_engine.put(digests(6), blocks)
    assert (again.stored, again.present) == (0, 6)
    for cache in (by_engine, by_call, caches(engine, check_checksums=False)):
        targets = np.zeros_like(blocks)
        result = cache.get(digests(6), targets)
        assert (result.hits, result.mismatches) == (6, 0)
        assert np.array_equal(blocks, targets)
    short = by_engine.get(digests(7), np.zeros((7, length), np.uint8))
    assert (short.hits, short.states[6]) == (6, BlockState.MISS)
    assert check_pool(pool, payload=True).finding_count == 0


def test_blocks_of_different_fragments_are_copied_in_one_batch(
    pool: Pool, caches: Callable[..., KVCache]
) -> None:
    cache = caches(CpuEngine(pool))
    blocks = payload(4, 50_000)
    cuts = (0, 20_000, 50_000), (0, 7, 50_000), (0, 20_000, 50_000), (0, 49_999, 50_000)
    pieces = [[block[a:b], block[b:c]] for block, (a, b, c) in zip(blocks, cuts, strict=True)]
    assert cache.put(digests(4), pieces).stored == 4
    targets = np.zeros_like(blocks)
    assert caches().get(digests(4), targets).hits == 4
    assert np.array_equal(blocks, targets)
    targets[:] = 0
    scattered = [
        [target[a:b], target[b:c]] for target, (a, b, c) in zip(targets, cuts[::-1], strict=True)
    ]
    assert cache.get(digests(4), scattered).hits == 4
    assert np.array_equal(blocks, targets)


def test_a_block_evicted_during_a_read_is_a_miss(
    pool: Pool, caches: Callable[..., KVCache]
) -> None:
    other = caches()
    first = digests(3)[0]
    cache = caches(Hooked(pool, lambda _: other.remove([first]) and None))
    blocks = payload(3, 5000)
    other.put(digests(3), blocks)
    result = cache.get(digests(3), np.zeros_like(blocks))
    assert (result.hits, result.mismatches) == (0, 1)
    assert result.states[1] == BlockState.HIT


class BrokenError(Exception):
    """An error that an engine may raise."""


def breaks_at(number: int) -> Callable[[Plan], None]:
    left = [number]

    def before(plan: Plan) -> None:
        del plan
        left[0] -= 1
        if left[0] == 0:
            raise BrokenError

    return before


def test_grants_of_a_failed_write_are_released(pool: Pool, caches: Callable[..., KVCache]) -> None:
    cache = caches(Hooked(pool, breaks_at(1)))
    blocks = payload(3, 5000)
    with pytest.raises(BrokenError):
        cache.put(digests(3), blocks)
    stat = cache.stat()
    assert (stat.grant_count, stat.abort_count, stat.block_count) == (0, 3, 0)
    assert cache.put(digests(3), blocks).stored == 3
    assert check_pool(pool, payload=True).finding_count == 0


def test_no_grant_is_released_while_a_copy_may_write_to_it(
    pool: Pool, caches: Callable[..., KVCache]
) -> None:
    engine = Hooked(pool, breaks_at(2), late=True)
    cache = caches(engine)
    with pytest.raises(BrokenError):  # at the second of two parts of the batch
        cache.put(digests(3), payload(3, 5 << 20))
    assert [transfer.done() for transfer in engine.transfers] == [True]
    assert cache.stat().abort_count == 3


class Unknown:
    """A transfer whose end cannot be determined."""

    def done(self) -> bool:
        raise OSError("made up")

    def wait(self, timeout_s: float | None = None) -> None:
        self.done()


class Lost(Hooked):
    """An engine whose transfers have no known end."""

    def _start(self, move: Callable[[Plan], Transfer], plan: Plan) -> Transfer:
        self._before(plan)
        return Unknown()


def test_grants_stay_if_it_is_unknown_whether_a_part_still_writes(
    pool: Pool, caches: Callable[..., KVCache]
) -> None:
    """Also if the part after it failed, and has ended."""
    cache, other = caches(Lost(pool, breaks_at(2))), caches()
    with pytest.raises(UnsettledError):
        cache.put(digests(3), payload(3, 5 << 20))
    stat = other.stat()
    assert (stat.grant_count, stat.abort_count) == (3, 0)


def test_pins_are_released_after_a_failed_read_of_an_engine(
    pool: Pool, caches: Callable[..., KVCache]
) -> None:
    cache = caches(Hooked(pool, breaks_at(2)))
    blocks = payload(3, 5000)
    cache.put(digests(3), blocks)
    with pytest.raises(BrokenError):
        cache.get(digests(3), np.zeros_like(blocks))
    assert cache.stat().pinned_count == 0
    assert cache.get(digests(3), np.zeros_like(blocks)).hits == 3


LAYERS, BLOCKS, BLOCK_SIZE, HEADS, HEAD_SIZE = 3, 7, 16, 4, 80


def tensors(seed: int) -> list[NDArray[np.uint16]]:
    rng = np.random.default_rng(seed)
    shape = (2, BLOCKS, BLOCK_SIZE, HEADS, HEAD_SIZE)
    return [rng.integers(0, 65536, shape).astype(np.uint16) for _ in range(LAYERS)]


def layout_of(arrays: list[NDArray[np.uint16]], order: Order | None) -> BlockLayout:
    return arrangements.vllm([View.of(array) for array in arrays], order=order)


@pytest.mark.parametrize("check_checksums", [False, True])
@pytest.mark.parametrize("order", [Order.DENSE, Order.TOKENS])
@pytest.mark.parametrize("engine", [False, True])
def test_single_tokens_are_read(
    pool: Pool, caches: Callable[..., KVCache], order: Order, *, engine: bool, check_checksums: bool
) -> None:
    cache = caches(CpuEngine(pool) if engine else None, check_checksums=check_checksums)
    source, target = tensors(1), tensors(2)
    stored = [5, 0, 3]
    assert cache.put(digests(3), Run.of(layout_of(source, order), stored)).stored == 3
    wanted = [(0, 3), (2, 15), (1, 0), (0, 4), (2, 3)]
    slots = [6 * BLOCK_SIZE + 1, 0, 2 * BLOCK_SIZE + 15, 40, 41]
    expected = [array.copy() for array in target]
    for (block, token), slot in zip(wanted, slots, strict=True):
        for into, out_of in zip(expected, source, strict=True):
            into[:, slot // BLOCK_SIZE, slot % BLOCK_SIZE] = out_of[:, stored[block], token]
    targets = Slots(layout_of(target, order), slots)
    assert cache.get_tokens(digests(3), wanted, targets).hits == 3
    assert all(np.array_equal(a, b) for a, b in zip(target, expected, strict=True))
    one = cache.get_tokens(digests(1), [7], Slots(layout_of(target, order), [17]))
    assert one.hits == 1
    assert np.array_equal(target[0][:, 1, 1], source[0][:, 5, 7])
    assert cache.get_tokens(digests(4), wanted, targets).hits == 3
    for tokens in ([(3, 0)], [(0, 16)], [(-1, 0)], [(0, 0), (0, 1)], [0]):
        with pytest.raises(LayoutError):
            cache.get_tokens(digests(3), tokens, Slots(layout_of(target, order), [0]))
    assert cache.stat().pinned_count == 0


def test_only_chunks_that_tokens_touch_are_verified(
    pool: Pool, caches: Callable[..., KVCache]
) -> None:
    cache, bare = caches(), caches(check_checksums=False)
    layout = layout_of(tensors(1), Order.TOKENS)
    cache.put(digests(2), Run.of(layout, [0, 1]))
    per_token = layout.length // BLOCK_SIZE
    touched = 8 * per_token // CHUNK_SIZE
    start = place(cache, digests(2)[1])
    target = Slots(layout_of(tensors(2), Order.TOKENS), [5, 6])
    tokens = [(0, 2), (1, 8)]
    for at in range(0, layout.length, CHUNK_SIZE // 2):
        flip(pool, start + at)
        chunk = at // CHUNK_SIZE
        hit = not touched <= chunk <= (9 * per_token - 1) // CHUNK_SIZE
        result = cache.get_tokens(digests(2), tokens, target)
        assert (result.hits, result.mismatches) == ((2, 0) if hit else (1, 1))
        assert bare.get_tokens(digests(2), tokens, target).hits == 2
        flip(pool, start + at)


TIMEOUT_S = 60.0
STORM = {"fault": 9000, "list_fault": 9000, "full": 9000, "full_run": 4, "error": 2000}


@pytest.mark.parametrize("length", [63, 3 * CHUNK_SIZE - 7, 5 << 19])
def test_cpu_and_faulty_dsa_read_each_others_blocks(
    pool: Pool, server: IndexServer, cache: KVCache, length: int
) -> None:
    faults = {"seed": length, "reorder": 30_000, "late": 9000, **STORM}
    engine = DsaEngine(pool, soft_portal(faults=faults))
    blocks = payload(6, length)
    with KVCache(pool, namespace="test", engine=engine) as by_dsa:
        assert by_dsa.put(digests(3), blocks[:3]).stored == 3
        assert cache.put(digests(3, start=3), blocks[3:]).stored == 3
        for reader in (by_dsa, cache):
            targets = np.zeros_like(blocks)
            result = reader.get(digests(6), targets)
            assert (result.hits, result.mismatches) == (6, 0)
            assert np.array_equal(blocks, targets)
    engine.close()
    assert check_pool(pool, payload=True).finding_count == 0


def slow_writer(paths: list[str]) -> None:
    """Put with a slow device; "ready" is printed once the copy was started."""
    pool = Pool.open(paths)
    engine = DsaEngine(pool, soft_portal(faults={"delay_us": 500_000}))
    gather_write = engine.gather_write

    def announce(plan: Plan) -> Transfer:
        transfer = gather_write(plan)
        role.reply("ready")
        return transfer

    engine.gather_write = announce  # type: ignore[method-assign]
    with KVCache(pool, namespace="test", engine=engine) as cache:
        cache.put(digests(2), np.ones((2, 4 << 20), np.uint8))
    role.reply("stored")


def test_copies_in_flight_of_a_killed_process_are_never_visible(
    pool: Pool, server: IndexServer, cache: KVCache
) -> None:
    with role.Process(slow_writer, [device.path for device in pool.devices]) as writer:
        states = cache.get(digests(2), np.zeros((2, 4 << 20), np.uint8)).states
        assert BlockState.HIT not in set(states.tolist())
        assert writer.receive(0) == "", "it was killed before its end"
        writer.kill()
    blocks = payload(2, 4 << 20)
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        result = cache.put(digests(2), blocks)
        if result.stored + result.present == 2:
            break
        assert time.monotonic() < deadline
        time.sleep(0.01)
    targets = np.zeros_like(blocks)
    assert cache.get(digests(2), targets).hits == 2
    assert np.array_equal(targets, blocks)
    assert check_pool(pool, payload=True).finding_count == 0
