# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The choice of victims: the evicted blocks free the requested space, and no others are evicted."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models.pages import PAGE, STRIPE, STRIPE_PAGES
from native._sim import ffi, lib
from support.emulation import fewer

DATA = 3 * STRIPE  # the offset of stripe 0


class Scene:
    """Blocks in pages, the coldest first, and a search over them. Places and sizes are in pages."""

    def __init__(self, stripes: int) -> None:
        self.pages = self._made("bl_pages", DATA, stripes)
        self.stripes = stripes
        self.place: list[tuple[int, int]] = []  # of each block: its first page and its length
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
                ("warmer", "int64_t(void *, uint32_t)", lambda _, one: self.at(self.rank[one] + 1)),
                ("first", "int64_t(void *, uint64_t)", lambda _, at: [*self.begins[at], -1][0]),
                ("next", "int64_t(void *, uint32_t)", lambda _, one: self.after.get(one, -1)),
                ("look", "bl_resident(void *, uint32_t)", self.look),
            ]
        }
        self.residents = ffi.new("bl_residents *", {"data_offset": DATA, **self.calls})

    @staticmethod
    def _made(kind: str, *arguments: int) -> Any:
        out = ffi.new(f"{kind} **")
        assert getattr(lib, f"{kind}_create")(out, *arguments) == 0
        return ffi.gc(out[0], getattr(lib, f"{kind}_destroy"))

    def at(self, rank: int) -> int:
        return self.order[rank] if rank < len(self.order) else -1

    def look(self, _: Any, block: int) -> Any:
        first, count = self.place[block]
        return ffi.new(
            "bl_resident *", (DATA + first * PAGE, count * PAGE, block not in self.fixed)
        )[0]

    def add(self, first: int, count: int, *, fixed: bool = False) -> int:
        assert lib.bl_pages_take(self.pages, DATA + first * PAGE, count * PAGE) == 0
        block = len(self.place)
        self.place.append((first, count))
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
        self.victims = self._made("bl_victims", len(self.place))

    def choose(self, count: int) -> tuple[list[int], int]:
        """Return the blocks to evict so that count pages are free, and the first of these pages."""
        blocks, place = ffi.new("uint32_t **"), ffi.new("uint64_t *")
        many = lib.bl_victims_choose(
            self.victims, self.pages, self.residents, count * PAGE, blocks, place
        )
        chosen = list(ffi.unpack(blocks[0], many)) if many else []
        return chosen, (place[0] - DATA) // PAGE if many else -1

    def covered(self, first: int, count: int) -> set[int]:
        """Return the blocks that overlap a window."""
        return {
            block
            for block, (start, length) in enumerate(self.place)
            if start < first + count and start + length > first
        }

    def check(self, chosen: list[int], place: int, count: int) -> None:
        """Check that these are exactly the blocks in a window of the pages, each once."""
        assert 0 <= place <= self.stripes * STRIPE_PAGES - count
        assert len(set(chosen)) == len(chosen)
        assert set(chosen) == self.covered(place, count)
        assert not set(chosen) & self.fixed

    def needed(self, count: int) -> int:
        """Return how many of the coldest blocks must be removed until there is room; or 0."""
        free = [True] * (self.stripes * STRIPE_PAGES)
        for first, length in self.place:
            free[first : first + length] = [False] * length
        for seen, block in enumerate(self.order, 1):
            first, length = self.place[block]
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
    scene.age(rng.sample(range(len(scene.place)), len(scene.place)))
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
        chosen, place = scene.choose(count)
        needed = scene.needed(count)
        assert bool(chosen) == bool(needed)
        if chosen:
            scene.check(chosen, place, count)
            assert max(scene.rank[block] for block in chosen) == needed - 1


@settings(max_examples=fewer(100), deadline=None)
@given(seed=st.integers(0, 1 << 40))
def test_consecutive_requests_of_one_size_are_placed_on_its_grid(seed: int) -> None:
    rng = random.Random(seed)
    scene = mixed(rng)
    count = widest(scene) + rng.choice([1, 7, 100])
    answers = [scene.choose(count) for _ in range(6)]
    for chosen, place in answers:
        assert bool(chosen) == bool(scene.needed(count))
        if chosen:
            scene.check(chosen, place, count)
    assert answers[0] == answers[3]
    cells = range(0, scene.stripes * STRIPE_PAGES - count + 1, count)
    if any(not scene.covered(cell, count) & scene.fixed for cell in cells):
        chosen, place = answers[5]
        youngest = max(chosen, key=scene.rank.__getitem__)
        assert place % count == 0 or scene.place[youngest][1] == count


COLD = 5000  # more than the first walk covers (BL_WALK)


def striped(fixed: Iterator[bool]) -> Scene:
    """Cold blocks of a page, each between two of the warmest, some of which are pinned."""
    scene = Scene(2 * COLD // STRIPE_PAGES + 1)
    cold = [scene.add(2 * i, 1) for i in range(COLD)]
    warm = [scene.add(2 * i + 1, 1, fixed=next(fixed)) for i in range(COLD)]
    left = scene.stripes * STRIPE_PAGES - 2 * COLD
    scene.add(2 * COLD, left, fixed=True)
    random.Random(1).shuffle(cold)
    scene.age([*cold, *warm])
    return scene


def test_a_walk_without_enough_victims_selects_a_window_with_neighbors() -> None:
    scene = striped(iter(lambda: False, True))
    chosen, place = scene.choose(20)
    scene.check(chosen, place, 20)
    assert len(chosen) == 20
    assert sum(scene.rank[block] < COLD for block in chosen) == 10


def test_a_window_with_a_pinned_block_is_not_selected() -> None:
    rng = random.Random(7)
    scene = striped(iter(lambda: rng.random() < 0.02, None))
    chosen, place = scene.choose(40)
    scene.check(chosen, place, 40)
    assert sum(scene.rank[block] < COLD for block in chosen) == 20


def test_a_longer_walk_finds_victims_that_guesses_miss() -> None:
    """All but a few windows have a pinned block."""
    scene = striped(i not in range(2000, 2010) for i in range(COLD))
    chosen, place = scene.choose(20)
    scene.check(chosen, place, 20)
    assert place in (4000, 4001)
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
    assert len(scene.choose(2 * STRIPE_PAGES)[0]) == len(scene.place)
