# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The eviction policies agree with models over lists, and the evicted blocks free the requested
space.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models.evict import Lru, S3Fifo
from models.pages import PAGE, STRIPE, STRIPE_PAGES
from native._sim import ffi, lib
from support.emulation import fewer

IDS = 8
LRU, S3FIFO = lib.BL_EVICT_LRU, lib.BL_EVICT_S3FIFO
MODELS: dict[int, type[Lru | S3Fifo]] = {LRU: Lru, S3FIFO: S3Fifo}
NAMES = {LRU: "lru", S3FIFO: "s3fifo"}

every_policy = pytest.mark.parametrize("policy", MODELS, ids=NAMES.get)

VICTIM_DATA = 3 * STRIPE  # the offset of stripe 0


def create(count: int, policy: int = LRU) -> Any:
    out = ffi.new("bl_evict **")
    assert lib.bl_evict_create(out, count, policy) == 0
    return ffi.gc(out[0], lib.bl_evict_destroy)


def walk(order: Any) -> Iterator[int]:
    number = lib.bl_evict_coldest(order)
    while number >= 0:
        yield number
        number = lib.bl_evict_warmer(order, number)


def hash_of(key: int) -> int:
    """Spread a key over both halves of the hash, so that different keys have different ghosts."""
    return (key << 32 | key) & 2**64 - 1


def add(order: Any, number: int, *, key: int | None = None) -> None:
    """Add a new block to the order."""
    key = number if key is None else key
    lib.bl_evict_assign(order, number, hash_of(key))
    lib.bl_evict_touch(order, number)


def evict(order: Any) -> int:
    number = int(lib.bl_evict_coldest(order))
    if number >= 0:
        lib.bl_evict_forget(order, number)
    return number


STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.sampled_from(["touch", "touch", "cool", "remove", "forget"]),
            st.integers(0, IDS - 1),
        ),
        st.tuples(st.just("assign"), st.integers(0, IDS - 1), st.integers(0, IDS - 1)),
        st.tuples(st.just("evict")),
    ),
    max_size=100,
)


@every_policy
@given(steps=STEPS)
def test_a_policy_matches_its_model(policy: int, steps: list[tuple[Any, ...]]) -> None:
    order, model = create(IDS, policy), MODELS[policy]()
    for name, *arguments in steps:
        if name == "evict":
            evicted = evict(order)
            assert evicted == model.coldest()
            if evicted >= 0:
                model.forget(evicted)
        elif name == "assign":
            number, key = arguments
            model.assign(number, key)
            lib.bl_evict_assign(order, number, hash_of(key))
        else:
            getattr(model, name)(*arguments)
            getattr(lib, f"bl_evict_{name}")(order, *arguments)
        inside = [i for i in range(IDS) if model.has(i)]
        assert [i for i in range(IDS) if lib.bl_evict_has(order, i)] == inside
        assert lib.bl_evict_coldest(order) == model.coldest()
        assert sorted(walk(order)) == inside
        if isinstance(model, Lru):
            assert list(walk(order)) == model.order


@every_policy
def test_an_empty_order_has_no_coldest_block(policy: int) -> None:
    assert lib.bl_evict_coldest(create(0, policy)) == -1


def test_an_unknown_policy_is_refused() -> None:
    out = ffi.new("bl_evict **")
    assert lib.bl_evict_create(out, 8, 2) == -errno.EINVAL


@every_policy
@pytest.mark.parametrize("length", [2, 17])
def test_a_chain_touched_deepest_first_is_evicted_from_its_end(policy: int, length: int) -> None:
    order = create(length, policy)
    for hits in range(2):  # the first touch adds it, the second is a hit
        for block in reversed(range(length)):
            if not hits:
                lib.bl_evict_assign(order, block, hash_of(block))
            lib.bl_evict_touch(order, block)
    assert [evict(order) for _ in range(length)] == list(reversed(range(length)))


def test_a_pin_does_not_reset_the_policys_state() -> None:
    """A block with three hits stays longer than those without, even if it was pinned meanwhile."""
    order = create(40, S3FIFO)
    add(order, 0)
    for _ in range(3):
        lib.bl_evict_remove(order, 0)
        lib.bl_evict_touch(order, 0)
    lib.bl_evict_remove(order, 0)
    for number in range(1, 20):
        add(order, number)
    lib.bl_evict_touch(order, 0)
    assert [evict(order) for _ in range(20)][-1] == 0


@every_policy
def test_a_pinned_block_is_never_the_coldest(policy: int) -> None:
    order = create(20, policy)
    for number in range(20):
        add(order, number)
    for number in range(0, 20, 2):
        lib.bl_evict_remove(order, number)
    victims = []
    while (number := evict(order)) >= 0:
        victims.append(number)
    assert sorted(victims) == list(range(1, 20, 2))
    for number in range(0, 20, 2):
        lib.bl_evict_touch(order, number)
    assert sorted(walk(order)) == list(range(0, 20, 2))


def test_an_unpinned_block_is_evicted_if_the_other_queue_is_all_pinned() -> None:
    order = create(60, S3FIFO)
    for number in range(50):
        lib.bl_evict_cool(order, number)  # into the main queue
    add(order, 50)
    for number in range(50):
        lib.bl_evict_remove(order, number)
    assert [evict(order), evict(order)] == [50, -1]


def test_a_scan_does_not_evict_hot_blocks_from_s3fifo() -> None:
    hot, order = range(20), create(200, S3FIFO)
    for number in hot:
        add(order, number)
        lib.bl_evict_touch(order, number)
    for number in range(20, 200):
        add(order, number)
        if number >= 40:
            assert evict(order) not in hot


def test_a_ghost_is_inserted_into_the_main_queue() -> None:
    """A block that is put again soon after its eviction stays; a new one is evicted again."""
    order = create(64, S3FIFO)
    for number in range(20):
        add(order, number)
    assert evict(order) == 0
    add(order, 40, key=0)
    add(order, 41)
    victims = [evict(order) for _ in range(21)]
    assert victims.index(40) > victims.index(41)
    assert 19 in victims[: victims.index(40)]


def test_ghosts_are_bounded_by_the_blocks_in_the_queues() -> None:
    order = create(64, S3FIFO)
    for number in range(10):
        add(order, number)
    assert evict(order) == 0
    for number in range(10, 30):  # 20 more ghosts, with at most 10 blocks
        add(order, number)
        evict(order)
    add(order, 40, key=0)
    for number in range(41, 60):
        add(order, number)
    victims = [evict(order) for _ in range(20)]
    assert 40 in victims  # the ghost was dropped, so 40 was a new block in the small queue


class Scene:
    """Blocks in pages, the coldest first, and a search over them. Places and sizes are in pages."""

    def __init__(self, stripes: int) -> None:
        self.pages = self._made("bl_pages", VICTIM_DATA, stripes)
        self.stripes = stripes
        self.intervals: list[tuple[int, int]] = []  # of each block: its first page and its length
        self.fixed: set[int] = set()
        self.order: list[int] = []
        self.rank: dict[int, int] = {}
        self.begins: list[list[int]] = [[] for _ in range(stripes)]
        self.after: dict[int, int] = {}
        self.victims: Any = None
        self.calls = {
            name: ffi.callback(kind, call)
            for name, kind, call in [
                ("coldest", "int64_t(void *)", lambda _: self.at(0)),
                (
                    "warmer",
                    "int64_t(void *, uint32_t)",
                    lambda _, block: self.at(self.rank[block] + 1),
                ),
                ("first", "int64_t(void *, uint64_t)", lambda _, at: [*self.begins[at], -1][0]),
                ("next", "int64_t(void *, uint32_t)", lambda _, block: self.after.get(block, -1)),
                ("look", "bl_resident(void *, uint32_t)", self.look),
            ]
        }
        self.residents = ffi.new("bl_residents *", {"data_offset": VICTIM_DATA, **self.calls})

    @staticmethod
    def _made(kind: str, *arguments: int) -> Any:
        out = ffi.new(f"{kind} **")
        assert getattr(lib, f"{kind}_create")(out, *arguments) == 0
        return ffi.gc(out[0], getattr(lib, f"{kind}_destroy"))

    def at(self, rank: int) -> int:
        return self.order[rank] if rank < len(self.order) else -1

    def look(self, _: Any, block: int) -> Any:
        first, count = self.intervals[block]
        return ffi.new(
            "bl_resident *", (VICTIM_DATA + first * PAGE, count * PAGE, block not in self.fixed)
        )[0]

    def add(self, first: int, count: int, *, fixed: bool = False) -> int:
        assert lib.bl_pages_take(self.pages, VICTIM_DATA + first * PAGE, count * PAGE) == 0
        block = len(self.intervals)
        self.intervals.append((first, count))
        if fixed:
            self.fixed.add(block)
        begins = self.begins[first // STRIPE_PAGES]
        if begins:
            self.after[begins[-1]] = block
        begins.append(block)
        return block

    def age(self, coldest_first: list[int]) -> None:
        self.order = coldest_first
        self.rank = {block: rank for rank, block in enumerate(coldest_first)}
        self.victims = self._made("bl_victims", len(self.intervals))

    def choose(self, count: int) -> tuple[list[int], int]:
        """Return the blocks to evict so that count pages are free, and the first of these pages."""
        blocks, offset = ffi.new("uint32_t **"), ffi.new("uint64_t *")
        many = lib.bl_victims_choose(
            self.victims, self.pages, self.residents, count * PAGE, blocks, offset
        )
        chosen = list(ffi.unpack(blocks[0], many)) if many else []
        return chosen, (offset[0] - VICTIM_DATA) // PAGE if many else -1

    def covered(self, first: int, count: int) -> set[int]:
        """Return the blocks that overlap a window."""
        return {
            block
            for block, (start, length) in enumerate(self.intervals)
            if start < first + count and start + length > first
        }

    def check(self, chosen: list[int], first: int, count: int) -> None:
        """Check that these are exactly the blocks in a window of the pages, each once."""
        assert 0 <= first <= self.stripes * STRIPE_PAGES - count
        assert len(set(chosen)) == len(chosen)
        assert set(chosen) == self.covered(first, count)
        assert not set(chosen) & self.fixed

    def needed(self, count: int) -> int:
        """Return how many of the coldest blocks must be removed until there is room; or 0."""
        free = [True] * (self.stripes * STRIPE_PAGES)
        for first, length in self.intervals:
            free[first : first + length] = [False] * length
        for seen, block in enumerate(self.order, 1):
            first, length = self.intervals[block]
            if block in self.fixed:
                continue
            free[first : first + length] = [True] * length
            start, end = first, first + length
            while start > 0 and free[start - 1]:
                start -= 1
            while end < len(free) and free[end]:
                end += 1
            if end - start >= count:
                return seen
        return 0


def mixed(rng: random.Random) -> Scene:
    """A full space with a few gaps and blocks of many sizes, some of them pinned."""
    scene = Scene(rng.choice([1, 2, 3]))
    page, top = 0, rng.choice([3, 40, 700])
    while page < scene.stripes * STRIPE_PAGES:
        count = min(rng.randint(1, top), scene.stripes * STRIPE_PAGES - page)
        if rng.random() < 0.9:
            scene.add(page, count, fixed=rng.random() < 0.1)
        page += count
    scene.age(rng.sample(range(len(scene.intervals)), len(scene.intervals)))
    return scene


def widest(scene: Scene) -> int:
    stat = ffi.new("bl_pages_stat *")
    lib.bl_pages_count(scene.pages, stat)
    return int(stat.free_run_bytes) // PAGE


@settings(max_examples=fewer(100), deadline=None)
@given(seed=st.integers(0, 1 << 40))
def test_the_youngest_victim_is_as_old_as_possible(seed: int) -> None:
    rng = random.Random(seed)
    scene = mixed(rng)
    for _ in range(3):  # fewer than a streak, which uses a grid
        count = widest(scene) + rng.choice([1, 2, 30, 400])
        chosen, first_page = scene.choose(count)
        needed = scene.needed(count)
        assert bool(chosen) == bool(needed)
        if chosen:
            scene.check(chosen, first_page, count)
            assert max(scene.rank[block] for block in chosen) == needed - 1


@settings(max_examples=fewer(100), deadline=None)
@given(seed=st.integers(0, 1 << 40))
def test_consecutive_requests_of_one_size_are_placed_on_its_grid(seed: int) -> None:
    rng = random.Random(seed)
    scene = mixed(rng)
    count = widest(scene) + rng.choice([1, 7, 100])
    answers = [scene.choose(count) for _ in range(6)]
    for chosen, first_page in answers:
        assert bool(chosen) == bool(scene.needed(count))
        if chosen:
            scene.check(chosen, first_page, count)
    assert answers[0] == answers[3]
    cells = range(0, scene.stripes * STRIPE_PAGES - count + 1, count)
    if any(not scene.covered(cell, count) & scene.fixed for cell in cells):
        chosen, first_page = answers[5]
        youngest = max(chosen, key=scene.rank.__getitem__)
        assert first_page % count == 0 or scene.intervals[youngest][1] == count


COLD = 5000  # more than the first walk covers (BL_WALK)


def striped(fixed: Iterator[bool]) -> Scene:
    """Cold blocks of a page, each between two of the warmest, some of which are pinned."""
    scene = Scene(2 * COLD // STRIPE_PAGES + 1)
    cold = [scene.add(2 * i, 1) for i in range(COLD)]
    warm = [scene.add(2 * i + 1, 1, fixed=next(fixed)) for i in range(COLD)]
    remaining = scene.stripes * STRIPE_PAGES - 2 * COLD
    scene.add(2 * COLD, remaining, fixed=True)
    random.Random(1).shuffle(cold)
    scene.age([*cold, *warm])
    return scene


def test_a_walk_without_enough_victims_selects_a_window_with_neighbors() -> None:
    scene = striped(iter(lambda: False, True))
    chosen, first_page = scene.choose(20)
    scene.check(chosen, first_page, 20)
    assert len(chosen) == 20
    assert sum(scene.rank[block] < COLD for block in chosen) == 10


def test_a_window_with_a_pinned_block_is_not_selected() -> None:
    rng = random.Random(7)
    scene = striped(iter(lambda: rng.random() < 0.02, None))
    chosen, first_page = scene.choose(40)
    scene.check(chosen, first_page, 40)
    assert sum(scene.rank[block] < COLD for block in chosen) == 20


def test_a_longer_walk_finds_victims_that_guesses_miss() -> None:
    """All but a few windows have a pinned block."""
    scene = striped(i not in range(2000, 2010) for i in range(COLD))
    chosen, first_page = scene.choose(20)
    scene.check(chosen, first_page, 20)
    assert first_page in (4000, 4001)
    assert scene.choose(22) == ([], -1)


@pytest.mark.parametrize("count", [1, 2, 512, 1 << 15])
def test_nothing_is_evicted_if_all_blocks_are_pinned(count: int) -> None:
    scene = Scene(2)
    blocks = [scene.add(page, 64, fixed=True) for page in range(0, 2 * STRIPE_PAGES, 64)]
    scene.age(blocks)
    assert scene.choose(count) == ([], -1)


def test_a_reservation_above_the_capacity_evicts_no_block() -> None:
    scene = Scene(2)
    scene.age([scene.add(page, 64) for page in range(0, 2 * STRIPE_PAGES, 64)])
    assert scene.choose(2 * STRIPE_PAGES + 1) == ([], -1)
    assert len(scene.choose(2 * STRIPE_PAGES)[0]) == len(scene.intervals)
