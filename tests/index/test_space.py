# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Nothing is evicted before a pool is full, and then the oldest blocks are; and how much of a
pool's devices blocks of real models fill.
"""

import random
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.blocks import eventually, held, keys, put, states
from support.emulation import fewer, long
from support.forge import line_hash

from beluga._ffi import ffi, lib
from beluga.index import IndexClient, IndexServer
from beluga.kvcache import KVCache, hash_keys
from beluga.pool import Pool
from beluga.rpc import Client

KIB, MIB = 1 << 10, 1 << 20
PAGE, STRIPE = 4096, 2 << 20

Interval = tuple[int, int]  # the offsets of a block's start and end

SIZES = {"1.1 MiB": 11 * MIB // 10, "2.5 MiB": 5 * MIB // 2, "3 MiB": 3 * MIB}
CHUNK_SIZE = 16384  # the checksums take another page
FILL_MIN = 0.95

each_size = pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
each_pool = pytest.mark.parametrize(
    ("device_count", "pool_size"), [(1, 512 * MIB), (2, 1024 * MIB)], ids=["512 MiB", "1 GiB"]
)


@pytest.fixture
def quick(shm: Path) -> Iterator[Pool]:
    """The pool of the quick start."""
    paths = [shm / "a", shm / "b"]
    with Pool.create(paths, device_size=256 * MIB, sparse=True) as pool:
        yield pool


@contextmanager
def serving(paths: list[Path], **shape: int) -> Iterator[tuple[Pool, IndexClient]]:
    with (
        Pool.create(paths, sparse=True, **shape) as pool,  # type: ignore[arg-type]
        IndexServer(pool),
        Client(pool) as client,
    ):
        yield pool, IndexClient(client)


@pytest.fixture
def index(quick: Pool) -> Iterator[IndexClient]:
    with IndexServer(quick), Client(quick) as client:
        yield IndexClient(client)


def rounded(length: int) -> int:
    return -(-length // PAGE) * PAGE


def put_one(index: IndexClient, number: int, length: int) -> Interval | None:
    """Put a block without checksums. Returns its place, or None if it was refused."""
    (grant,) = index.reserve(keys([number]), length=length)
    if states([grant]) != ["GRANTED"]:
        return None
    assert index.commit([grant]) == [0]
    return grant.offset, grant.offset + rounded(length)


def fill(index: IndexClient, lengths: Iterable[int], first: int = 0) -> dict[int, Interval]:
    """Put blocks until one is evicted. Returns the places of the stored ones."""
    there: dict[int, Interval] = {}
    for number, length in enumerate(lengths, first):
        interval = put_one(index, number, length)
        assert interval is not None
        there[number] = interval
        if index.stat().evict_count:
            break
    return {number: there[number] for number in held(index, there)}


def test_twelve_files_of_any_size_are_kept_in_the_pool_of_the_quick_start(
    index: IndexClient,
) -> None:
    for number in range(12):
        put(index, [number], length=(number + 1) * 512 * KIB, chunk_size=16 * KIB)
    assert held(index, range(12)) == set(range(12))


SMALLEST = 32 * KIB  # smallest size of many blocks, because puts take most of the time
PRIMES = (32_771, 65_537, 99_991, 131_101, 299_993, 524_309, 999_983, 2_097_169, 3_999_971)
HALF = 120 * MIB  # about half of the pool's space


def lengths_of(kind: str, rng: random.Random) -> Iterator[int]:
    count, top = rng.randrange(1, 1000), rng.choice([64 * KIB, MIB, 4 * MIB])
    sizes = [rng.randrange(1, top) for _ in range(count)]
    turn = 0
    while True:
        turn += 1
        yield {
            "some sizes": sizes[rng.randrange(count)],
            "growing": min(1 + turn * 1999, top),
            "shrinking": max(top - turn * 1999, SMALLEST),
            "mostly small": rng.choice(sizes) if rng.random() < 0.05 else SMALLEST + sizes[0] // 50,
            "tenants": sizes[turn // 50 % min(count, 3)],
            "primes": PRIMES[rng.randrange(len(PRIMES))],
            "two sizes": top if rng.random() < 0.3 else SMALLEST + 1,
            "half the pool": HALF if turn % 9 == 5 else max(sizes[turn % count], SMALLEST),
        }[kind]


@pytest.mark.parametrize(
    "kind",
    [
        *("some sizes", "tenants", "primes", "half the pool"),
        *map(long, ("growing", "mostly small", "shrinking", "two sizes")),
    ],
)
@settings(max_examples=fewer(3), deadline=None)
@given(seed=st.integers(0, 1 << 30), removes=st.booleans())
def test_any_mix_of_sizes_fills_the_pool_before_anything_is_evicted(
    kind: str, memory_root: Path, seed: int, *, removes: bool
) -> None:
    """Blocks are up to 1/64 of the pool, if some are removed. If sizes only grow, space of removed
    blocks is too short. The pool has one device or four.
    """
    rng = random.Random(seed)
    removes = removes and kind != "half the pool"
    device_count = rng.choice([1, 4])
    fill_min = 0.75 if removes and kind == "growing" else 0.85
    with (
        tempfile.TemporaryDirectory(prefix="beluga-test-", dir=memory_root) as folder,
        serving(
            [Path(folder) / str(number) for number in range(device_count)],
            device_size=256 * MIB // device_count,
            max_blocks=100_000,
        ) as (_, index),
    ):
        for number, length in enumerate(lengths_of(kind, rng)):
            used = index.stat().used_bytes
            assert put_one(index, number, length) is not None
            stat = index.stat()
            if stat.evict_count:
                break
            if removes and rng.random() < 0.4:
                index.remove(keys([rng.randrange(number + 1)]))
        fuller = used + rounded(length)
        assert used / stat.data_bytes >= fill_min or fuller > stat.data_bytes
        assert stat.table_evict_count == 0


@pytest.mark.parametrize("length", [4 * KIB, 68 * KIB, 300 * KIB, MIB + PAGE, 5 * MIB // 2])
def test_blocks_of_one_size_fill_the_pool(index: IndexClient, length: int) -> None:
    count = index.stat().data_bytes // length
    count = min(count, index.stat().block_count_max)
    put(index, range(count), length=length)
    stat = index.stat()
    assert stat.evict_count == 0
    assert stat.data_bytes - count * length < length or count == stat.block_count_max


def test_a_large_block_takes_the_place_of_the_oldest_small_ones(index: IndexClient) -> None:
    numbers = fill(index, iter(lambda: 68 * KIB, 0))
    numbers = [number for number in sorted(numbers) if number]  # all but the evicted one
    before = index.stat().evict_count
    assert put_one(index, 1 << 20, MIB) is not None
    evicted = set(numbers) - held(index, numbers)
    assert evicted == set(numbers[: len(evicted)])
    assert len(evicted) <= -(-MIB // (68 * KIB))
    assert index.stat().evict_count == before + len(evicted)


def gaps(taken: list[Interval], space: Interval) -> Iterator[Interval]:
    end = space[0]
    for first, last in [*taken, (space[1], space[1])]:
        yield end, first
        end = last


def youngest_needed(ages: list[Interval], fixed: list[Interval], size: int, space: Interval) -> int:
    """Return how many of the oldest blocks must be removed until size contiguous bytes are free; 0:
    never.
    """
    for count in range(1, len(ages) + 1):
        remaining = sorted(ages[count:] + fixed)
        if any(end - first >= size for first, end in gaps(remaining, space)):
            return count
    return 0


@settings(max_examples=fewer(30), deadline=None)
@given(seed=st.integers(0, 1 << 30))
def test_no_other_choice_of_victims_would_have_an_older_youngest(
    memory_root: Path, seed: int
) -> None:
    """A full pool of many sizes whose blocks were used in an order that is unrelated to place."""
    rng = random.Random(seed)
    with (
        tempfile.TemporaryDirectory(prefix="beluga-test-", dir=memory_root) as folder,
        serving([Path(folder) / "a"], device_size=32 * MIB) as (pool, index),
    ):
        g = pool.geometry
        space = (g.data_offset, g.data_offset + g.stripe_count * STRIPE)
        sizes = [rng.randrange(1, MIB) for _ in range(rng.choice([2, 5, 100]))]
        there = fill(index, iter(lambda: rng.choice(sizes), 0))
        order = rng.sample(sorted(there), len(there))
        for number in order:
            index.lookup(keys([number]))
        pinned = order[:: rng.choice([3, 7, 1000])]
        pins = [index.lookup(keys([number]), pin=True).hits for number in pinned]
        movable = [number for number in order if number not in set(pinned)]
        ages = [there[number] for number in movable]
        fixed = [there[number] for number in pinned]
        widest = max(end - first for first, end in gaps(sorted(ages + fixed), space))
        size = widest + PAGE * rng.choice([1, 5, 50, 300, 5000])
        needed = youngest_needed(ages, fixed, size, space)
        placed = put_one(index, 1 << 20, size)
        evicted = [number for number in movable if not index.lookup(keys([number])).hits]
        assert (placed is None) == (needed == 0) == (evicted == [])
        assert not evicted or movable.index(evicted[-1]) == needed - 1
        for hits in pins:
            index.release(hits)


def test_nothing_is_evicted_for_a_block_that_pins_leave_no_room_for(index: IndexClient) -> None:
    there = sorted(fill(index, iter(lambda: MIB, 0)))
    offsets = {number: index.lookup(keys([number])).hits[0].offset for number in there}
    by_offset = sorted(there, key=offsets.__getitem__)
    pins = [index.lookup(keys([number]), pin=True).hits for number in by_offset[::4]]
    (refused,) = index.reserve(keys([1 << 20]), length=4 * MIB)
    assert refused.status == -lib.BL_ERROR_NO_SPACE
    assert held(index, there) == set(there)
    (granted,) = index.reserve(keys([1 << 20]), length=3 * MIB)
    assert states([granted]) == ["GRANTED"]
    for hits in pins:
        index.release(hits)


def test_more_blocks_than_one_walk_visits_are_evicted_at_once(shm: Path) -> None:
    """The coldest thousands lie between blocks that are pinned; space is freed elsewhere."""
    with serving([shm / "a"], device_size=260 * MIB, max_blocks=70_000) as (_, index):
        count = 60_000
        for first in range(0, count, 1000):
            index.commit(index.reserve(keys(range(first, first + 1000)), length=PAGE))
        pinned = [n for first in range(0, 9000, 1000) for n in range(first, first + 1000, 2)]
        pins = [index.lookup(keys([number]), pin=True).hits for number in pinned]
        stat = index.stat()
        free = (stat.data_bytes - stat.used_bytes) // PAGE - 1
        put(index, range(count, count + free), length=PAGE)
        (granted,) = index.reserve(keys([1 << 20]), length=MIB)
        assert states([granted]) == ["GRANTED"]
        assert index.stat().evict_count <= 2 * MIB // PAGE
        for hits in pins:
            index.release(hits)


def test_a_task_that_is_refused_evicts_nothing(index: IndexClient, quick: Pool) -> None:
    there = fill(index, iter(lambda: MIB, 0))
    task = np.zeros((1, index.stat().data_bytes // 8 + PAGE), np.uint8)
    with KVCache(quick, namespace="tasks", kept=True) as tasks:
        assert tasks.put(tasks.keys(hash_keys(["task"])), task).stored == 0
    assert held(index, there) == set(there)


def old_mark(stripe: int, count: int, block_size: int, epoch: int, state: int = 1) -> bytes:
    """A mark in the format of earlier releases: an extent of blocks of one size."""
    blocks = min(count * STRIPE // block_size, 512)
    fields = [epoch, epoch << 40 | 1 << 30 | stripe]
    line = b"".join(value.to_bytes(8, "little") for value in fields)
    for value in (stripe, count, block_size, blocks, state):
        line += value.to_bytes(4, "little")
    line += bytes(60 - len(line))
    return line + line_hash(line + bytes(4), stripe).to_bytes(4, "little")


def write_line(pool: Pool, offset: int, line: bytes) -> None:
    lib.bl_ntstore_copy(lib.bl_pool_address(pool.handle, offset), line, 64)


def former(pool: Pool) -> dict[int, int]:
    """Arrange a pool's tables, of epoch 1, as a server of an earlier release would have: extents of
    4, 1 and 2 stripes for blocks of 2.5 MiB, 64 KiB and 3 MiB. Returns the blocks and their places.
    """
    g, half = pool.geometry, 1
    shapes = [(0, 5, 5 * MIB // 2), (5, 1, 64 * KIB), (6, 3, 3 * MIB)]
    with IndexServer(pool), Client(pool) as client:
        for number in range(8):
            put(IndexClient(client), [number], length=shapes[number % 3][2])
    for stripe in range(g.stripe_count):
        free = bytes(16) + stripe.to_bytes(4, "little") + bytes(40)
        line = free + line_hash(free + bytes(4), stripe).to_bytes(4, "little")
        write_line(pool, g.extent_offset + (half * g.stripe_count + stripe) * 64, line)
    for shape in shapes:
        mark = old_mark(*shape, epoch=1)
        write_line(pool, g.extent_offset + (half * g.stripe_count + shape[0]) * 64, mark)
    offsets = {}
    for number in range(8):
        first, count, size = shapes[number % 3]
        offset = g.data_offset + first * STRIPE + number // 3 % (count * STRIPE // size) * size
        if offset in offsets.values():
            continue
        offsets[number] = offset
        at = g.table_offset + (half * g.block_count_max + number) * 64
        address = lib.bl_pool_address(pool.handle, at)
        entry = ffi.new("bl_entry *")
        ffi.memmove(entry, ffi.cast("char *", address), 64)
        entry.offset, entry.check = offset, 0
        line = bytes(ffi.buffer(entry))
        write_line(pool, at, line[:60] + line_hash(line, number).to_bytes(4, "little"))
    return offsets


def test_a_pool_of_an_earlier_release_is_taken_over(quick: Pool) -> None:
    offsets = former(quick)
    with IndexServer(quick), Client(quick) as client:
        index = IndexClient(client)
        hits_of = {number: index.lookup(keys([number])).hits for number in offsets}
        assert {number: hits[0].offset for number, hits in hits_of.items() if hits} == offsets
        assert eventually(lambda: index.stat().held_bytes == 0)
        there = fill(index, iter(lambda: MIB, 0), first=100)
        stat = index.stat()
        assert stat.used_bytes / stat.data_bytes > 0.97
        assert len(there) > 400
    with IndexServer(quick), Client(quick) as client:
        assert held(IndexClient(client), there) == set(there)


def test_a_mark_is_valid_for_earlier_releases(index: IndexClient, quick: Pool) -> None:
    """They have the extents that it opens, and treat them as extents of one-page blocks."""
    put(index, range(40), length=MIB)
    g = quick.geometry
    opened = 0
    for stripe in range(g.stripe_count):
        address = lib.bl_pool_address(
            quick.handle, g.extent_offset + (g.stripe_count + stripe) * 64
        )
        mark = ffi.cast("bl_extent_line *", address)
        if mark.state == lib.BL_EXTENT_OPEN:
            opened += mark.stripe_count
            assert (mark.block_size, mark.block_count) == (PAGE, min(512 * mark.stripe_count, 512))
            assert 1 <= mark.stripe_count <= 64
    assert opened >= 20


def fill_pool(index: IndexClient, size: int, pool_size: int, first: int = 0) -> range:
    """Put a third more blocks than fit."""
    numbers = range(first, first + pool_size * 4 // (3 * size))
    put(index, numbers, length=size, chunk_size=CHUNK_SIZE)
    return numbers


def shuffled(numbers: Iterable[int]) -> list[int]:
    order = list(numbers)
    random.Random(7).shuffle(order)
    return order


@pytest.mark.long
@each_pool
@pytest.mark.parametrize("order", ["as written", "at random"])
@pytest.mark.parametrize("second", SIZES.values(), ids=SIZES)
@each_size
def test_blocks_of_one_size_and_then_of_another_fill_the_pool(
    shm: Path, *, device_count: int, pool_size: int, size: int, second: int, order: str
) -> None:
    paths = [shm / str(number) for number in range(device_count)]
    with serving(paths, device_size=pool_size // device_count) as (_, index):
        numbers = fill_pool(index, size, pool_size)
        assert len(held(index, numbers)) * size >= FILL_MIN * pool_size
        if order == "at random":
            for number in shuffled(numbers):
                index.lookup(keys([number]))
        others = fill_pool(index, second, pool_size, first=1 << 20)
        assert len(held(index, others)) * second >= FILL_MIN * pool_size


@each_size
def test_a_pool_is_filled_before_anything_is_evicted(shm: Path, size: int) -> None:
    pool_size = 512 * MIB
    with serving([shm / "a"], device_size=pool_size) as (_, index):
        put(index, range(int(FILL_MIN * pool_size / size) + 1), length=size, chunk_size=CHUNK_SIZE)
        stat = index.stat()
        assert stat.evict_count == 0
        assert stat.block_bytes >= FILL_MIN * pool_size


def test_a_change_of_models_keeps_the_pool_in_use(shm: Path) -> None:
    """While blocks of one size replace those of another, no more old bytes are evicted than new
    ones are put.
    """
    pool_size = 1024 * MIB
    old, new = SIZES["2.5 MiB"], SIZES["3 MiB"]
    with serving([shm / "a"], device_size=pool_size) as (_, index):
        for number in shuffled(fill_pool(index, old, pool_size)):
            index.lookup(keys([number]))
        used = []
        for number in range(1 << 20, (1 << 20) + 320):
            put(index, [number], length=new, chunk_size=CHUNK_SIZE)
            used.append(index.stat().block_bytes / pool_size)
        assert min(used) > 0.7
