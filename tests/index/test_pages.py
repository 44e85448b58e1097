# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The page allocator matches its model, and pools can be filled."""

from __future__ import annotations

import random
from errno import EAGAIN, EEXIST, EINVAL, ENOENT
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from models.pages import PAGE, STRIPE, STRIPE_PAGES, Pages, rounded
from native._sim import ffi, lib
from support.emulation import fewer

DATA = 3 * STRIPE  # the offset of stripe 0
MIB = 1 << 20
KIB = 1 << 10


def create(stripes: int) -> Any:
    out = ffi.new("bl_pages **")
    assert lib.bl_pages_create(out, DATA, stripes) == 0
    return ffi.gc(out[0], lib.bl_pages_destroy)


def at(page: int) -> int:
    return DATA + page * PAGE


def find(pages: Any, size: int) -> int:
    """Return the offset of the lowest free run of that many bytes, or a negative error."""
    offset = ffi.new("uint64_t *")
    return lib.bl_pages_find(pages, size, offset) or offset[0]


def take(pages: Any, size: int) -> int:
    """Take the lowest free run of that many bytes. Returns its offset, or a negative error."""
    offset = find(pages, size)
    return offset if offset < 0 else lib.bl_pages_take(pages, offset, size) or offset


def stat(pages: Any) -> Any:
    out = ffi.new("bl_pages_stat *")
    lib.bl_pages_count(pages, out)
    return out


class PagesAgreeWithTheModel(RuleBasedStateMachine):
    counts = st.integers(1, 40) | st.sampled_from([500, 512, 513, 1024, 5000])
    places = st.integers(0, 1 << 30)

    @initialize(stripes=st.sampled_from([1, 2, 7, 8, 9, 20, 70]))
    def start(self, stripes: int) -> None:
        self.stripes, self.pages, self.model = stripes, create(stripes), Pages(stripes)
        self.blocks: list[tuple[int, int]] = []
        self.deferred = False

    def run_of(self, place: int, count: int) -> tuple[int, int]:
        """Return a block, or a run near one."""
        if self.blocks and place % 4:
            first, size = self.blocks[place % len(self.blocks)]
            return (first, size) if place % 7 else (first + place % 3 - 1, size + place % 2)
        return place % len(self.model.state), count

    @rule(count=counts, times=st.integers(1, 60))
    def take(self, count: int, times: int) -> None:
        for _ in range(times):
            first = self.model.find(count)
            expected = first if first < 0 else at(first)
            assert take(self.pages, count * PAGE) == expected
            if first < 0:
                break
            self.model.take(first, count)
            self.blocks.append((first, count))

    @rule(places=st.lists(places, max_size=30), count=counts)
    def take_there(self, places: list[int], count: int) -> None:
        for place in places:
            first, size = self.run_of(place, count)
            expected = self.model.take(first, size)
            if first >= 0:
                assert lib.bl_pages_take(self.pages, at(first), size * PAGE) == expected
            if expected == 0:
                self.blocks.append((first, size))

    @rule(defer=st.booleans())
    def defer(self, defer: bool) -> None:
        (lib.bl_pages_defer if defer else lib.bl_pages_settle)(self.pages)
        self.deferred = defer

    @rule(
        places=st.lists(places, max_size=30),
        count=counts,
        turn=st.sampled_from(["give", "give", "hold", "unhold"]),
    )
    def turn(self, places: list[int], count: int, turn: str) -> None:
        states = {"give": ("used", "free"), "hold": ("used", "held"), "unhold": ("held", "free")}
        for place in places:
            first, size = self.run_of(place, count)
            expected = self.model.turn(first, size, *states[turn])
            call = getattr(lib, f"bl_pages_{turn}")
            if first >= 0:
                assert call(self.pages, at(first), size * PAGE) == expected

    @rule(place=places)
    def lose(self, place: int) -> None:
        if place % 5 == 0:
            lib.bl_pages_lose(self.pages, place % self.stripes, 1)
            self.model.lose(place % self.stripes)

    @rule(place=places, hold=st.booleans())
    def turn_all(self, place: int, hold: bool) -> None:
        if hold:
            lib.bl_pages_hold_free(self.pages, place % self.stripes, 1)
            self.model.hold_free(place % self.stripes)
        else:
            lib.bl_pages_unhold_all(self.pages)
            self.model.unhold_all()

    @invariant()
    def the_counts_agree(self) -> None:
        state, counted = self.model.state, stat(self.pages)
        idle = [
            all(map(self.model.free, range(stripe * STRIPE_PAGES, (stripe + 1) * STRIPE_PAGES)))
            for stripe in range(self.stripes)
        ]
        longest = max((end - first for first, end in self.model.runs()), default=0)
        assert (counted.stripe_count, counted.lost_stripe_count) == (
            self.stripes,
            len(self.model.lost),
        )
        assert counted.used_bytes == state.count("used") * PAGE
        assert counted.held_bytes == state.count("held") * PAGE
        if self.deferred:
            return
        assert counted.free_stripe_count == sum(idle)
        assert counted.free_run_bytes == min(longest * PAGE, lib.BL_BLOCK_SIZE_MAX)

    @invariant()
    def every_question_about_a_place_has_its_answer(self) -> None:
        for first, end in self.model.runs()[:5]:
            assert lib.bl_pages_free_after(self.pages, at(first)) == (end - first) * PAGE
            assert lib.bl_pages_free_before(self.pages, at(end)) == (end - first) * PAGE
        first, size = self.run_of(len(self.blocks) * 31, 700)
        if self.model.inside(first, size):
            free = sum(map(self.model.free, range(first, first + size)))
            assert lib.bl_pages_free_within(self.pages, at(first), size * PAGE) == free * PAGE
        stripe, parts = first % self.stripes, ffi.new("uint32_t [2]")
        states = self.model.state[stripe * STRIPE_PAGES : (stripe + 1) * STRIPE_PAGES]
        lib.bl_pages_of_stripe(self.pages, stripe, parts, parts + 1)
        assert list(parts) == [states.count(state) * PAGE for state in ("used", "held")]
        assert lib.bl_pages_idle(self.pages, stripe, 1) == (set(states) == {"free"})

    @invariant()
    def the_held_pages_are_found_in_order(self) -> None:
        offset, size, found = ffi.new("uint64_t *", DATA), ffi.new("uint32_t *"), []
        while lib.bl_pages_next_held(self.pages, offset, size) == 0:
            first = (offset[0] - DATA) // PAGE
            found += range(first, first + size[0] // PAGE)
            offset[0] += size[0]
        assert found == [page for page, state in enumerate(self.model.state) if state == "held"]


TestPages = PagesAgreeWithTheModel.TestCase
TestPages.settings = settings(max_examples=fewer(60), stateful_step_count=25, deadline=None)


@pytest.mark.parametrize("size", [PAGE, 68 * KIB, 1156 * KIB, 2 * MIB, 3 * MIB + PAGE, 33 * MIB])
@pytest.mark.parametrize("stripes", [256, 507])
def test_blocks_of_one_size_leave_less_space_than_one_of_them(size: int, stripes: int) -> None:
    pages, count = create(stripes), 0
    while take(pages, rounded(size)) >= 0:
        count += 1
    assert count == stripes * STRIPE // rounded(size)


@pytest.mark.parametrize("stripe", [0, 1, 63, 64, 70, 4095, 4096, 99_999])
def test_the_one_free_stripe_of_a_large_pool_is_found(stripe: int) -> None:
    pages = create(100_000)
    lib.bl_pages_defer(pages)
    for number in range(100_000):
        lib.bl_pages_take(pages, DATA + number * STRIPE, STRIPE)
    lib.bl_pages_settle(pages)
    assert find(pages, PAGE) == -EAGAIN
    lib.bl_pages_give(pages, DATA + stripe * STRIPE, STRIPE)
    assert find(pages, STRIPE) == DATA + stripe * STRIPE
    assert find(pages, STRIPE + PAGE) == -EAGAIN


@pytest.mark.parametrize("first", [0, 1, 500, 511, 4095, 32_000])
def test_the_largest_block_may_cross_any_number_of_stripes(first: int) -> None:
    pages, largest = create(2000), lib.BL_BLOCK_SIZE_MAX
    for page in (first, first + 1 + largest // PAGE):
        lib.bl_pages_take(pages, at(page), PAGE)
    place = 0 if first * PAGE >= largest else first + 1
    assert find(pages, largest) == at(place)
    assert lib.bl_pages_take(pages, at(place), largest) == 0
    assert stat(pages).used_bytes == largest + 2 * PAGE
    assert lib.bl_pages_give(pages, at(place), largest) == 0
    assert find(pages, largest) == at(place)


def test_offsets_outside_the_pools_pages_are_rejected() -> None:
    pages = create(2)
    wrong = [(DATA - PAGE, PAGE), (DATA + 1, PAGE), (DATA, 100), (DATA, 0)]
    wrong += [(DATA + 2 * STRIPE, PAGE), (DATA + STRIPE, STRIPE + PAGE), (1 << 63, PAGE)]
    for offset, size in wrong:
        for call in ("take", "give", "hold", "unhold"):
            assert getattr(lib, f"bl_pages_{call}")(pages, offset, size) == -EINVAL
    assert stat(pages).used_bytes == 0
    assert lib.bl_pages_take(pages, DATA, PAGE) == 0
    assert lib.bl_pages_take(pages, DATA, PAGE) == -EEXIST


def test_a_pool_without_stripes_has_no_room() -> None:
    pages = create(0)
    assert find(pages, PAGE) == -EAGAIN
    assert lib.bl_pages_next_held(pages, ffi.new("uint64_t *", DATA), ffi.new("uint32_t *")) == (
        -ENOENT
    )
    assert stat(pages).free_run_bytes == 0


def test_block_sizes_are_whole_pages() -> None:
    largest = lib.BL_BLOCK_SIZE_MAX
    sizes = {0: 0, 1: PAGE, PAGE: PAGE, PAGE + 1: 2 * PAGE, largest: largest, largest + 1: 0}
    assert {bytes_: lib.bl_block_size(bytes_) for bytes_ in sizes} == sizes
    assert lib.bl_block_size((1 << 64) - 1) == 0


def test_random_sizes_fill_a_pool_to_nine_tenths_in_a_steady_state() -> None:
    """Blocks are added and removed at random, as when evictions are unrelated to places."""
    rng, pages, blocks = random.Random(3), create(256), []
    fills = []
    for _ in range(20_000):
        size = rounded(rng.randrange(16 * KIB, MIB))
        while (offset := take(pages, size)) < 0:
            fills.append(stat(pages).used_bytes / (256 * STRIPE))
            victim = blocks.pop(rng.randrange(len(blocks)))
            assert lib.bl_pages_give(pages, *victim) == 0
        blocks.append((offset, size))
    assert sum(fills) / len(fills) > 0.85
