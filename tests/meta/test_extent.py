# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The allocator agrees with its model; then exact arithmetic says how full it gets."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from errno import E2BIG, EAGAIN, EBUSY, EEXIST, EINVAL, ENOENT
from typing import Any

import pytest
from beluga._sim import ffi, lib
from emulation import fewer
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from models.extents import Extent, Extents
from models.fit import PAGE, STRIPE, STRIPES_MAX, blocks_in, cell_size, cells

DATA = 3 * STRIPE  # where stripe 0 lies
MIB = 1 << 20
# These are stored sizes of blocks: a payload and its checksums; one page; a size with no good
# extent.
SIZES = [2560 * 1024 + PAGE, 3 * MIB + PAGE, 1156 * 1024, PAGE, 16 * MIB, 32 * MIB + PAGE]


def create(stripes: int) -> Any:
    out = ffi.new("bl_extents **")
    assert lib.bl_extents_create(out, DATA, stripes) == 0
    return ffi.gc(out[0], lib.bl_extents_destroy)


def fields(view: Any) -> tuple[int, ...]:
    return tuple(getattr(view, name) for name, _ in ffi.typeof(view[0]).fields)


def walk(extents: Any) -> Iterator[Any]:
    stripe, view = 0, ffi.new("bl_extent_view *")
    while lib.bl_extents_next(extents, stripe, view) == 0:
        stripe = view.first_stripe + 1
        yield ffi.new("bl_extent_view *", view[0])


def open_extent(extents: Any, block_size: int, any_fit: bool = False, generation: int = 1) -> int:
    """Return the first stripe of the new extent, or a negative error."""
    view = ffi.new("bl_extent_view *")
    fit = lib.BL_FIT_ANY if any_fit else lib.BL_FIT_GOOD
    return lib.bl_extents_open(extents, block_size, fit, generation, view) or view.first_stripe


def take(extents: Any, block_size: int) -> int:
    offset = ffi.new("uint64_t *")
    return lib.bl_extents_take(extents, block_size, offset) or offset[0]


def stat(extents: Any) -> Any:
    out = ffi.new("bl_extents_stat *")
    lib.bl_extents_count(extents, out)
    return out


class ExtentsAgreeWithTheModel(RuleBasedStateMachine):
    sizes = st.sampled_from(SIZES)
    places = st.integers(0, 1 << 30)  # which of the blocks there are; some beside one

    @initialize(stripes=st.integers(1, 12) | st.integers(1, 200))
    def start(self, stripes: int) -> None:
        self.extents, self.model = create(stripes), Extents(stripes, DATA)
        self.generation = 0

    def offset(self, place: int) -> int:
        """Return the offset of a block, now and then one page beside it, or just behind the last of
        its extent.
        """
        blocks = [
            (first, block)
            for first, extent in self.model.extents.items()
            for block in range(len(extent.blocks) + 1)
        ]
        offset = self.model.offset(*blocks[place % len(blocks)]) if blocks else DATA
        return offset + (place % 5 == 0) * PAGE - (place % 7 == 0) * STRIPE

    @rule(size=sizes, any_fit=st.booleans())
    def open(self, size: int, any_fit: bool) -> None:
        self.generation += 1
        expected = self.model.open(size, any_fit, self.generation)
        assert open_extent(self.extents, size, any_fit, self.generation) == expected

    @rule(size=sizes, count=st.integers(1, 40))
    def take(self, size: int, count: int) -> None:
        for _ in range(count):
            assert take(self.extents, size) == self.model.take(size)

    @rule(places=st.lists(places, max_size=20), turn=st.sampled_from(["give", "hold", "unhold"]))
    def turn(self, places: list[int], turn: str) -> None:
        states = {"give": ("used", "free"), "hold": ("used", "held"), "unhold": ("held", "free")}
        for offset in map(self.offset, places):
            expected = self.model.turn(offset, *states[turn])
            assert getattr(lib, f"bl_extents_{turn}")(self.extents, offset) == expected

    @rule(hold=st.booleans())
    def turn_all(self, hold: bool) -> None:
        self.model.turn_all(*(("free", "held") if hold else ("held", "free")))
        (lib.bl_extents_hold_free if hold else lib.bl_extents_unhold_all)(self.extents)

    @rule(place=places, size=sizes, own=st.booleans())
    def claim(self, place: int, size: int, own: bool) -> None:
        offset = self.offset(place)
        found = self.model.find(offset)
        size = found[0].block_size if found and own else size
        assert lib.bl_extents_claim(self.extents, offset, size) == self.model.claim(offset, size)

    @rule(place=places, give=st.booleans())
    def close(self, place: int, give: bool) -> None:
        firsts = sorted(self.model.extents) or [0]
        first = firsts[place % len(firsts)] + (place % 11 == 0)
        extent = self.model.extents.get(first)
        for block in range(len(extent.blocks) if extent and give else 0):
            offset = self.model.offset(first, block)
            expected = self.model.turn(offset, "used", "free")
            assert lib.bl_extents_give(self.extents, offset) == expected
        assert lib.bl_extents_close(self.extents, first) == self.model.close(first)

    @rule(first=st.integers(0, 210), stripes=st.integers(0, STRIPES_MAX + 1), size=sizes)
    def adopt(self, first: int, stripes: int, size: int) -> None:
        view = ffi.new("bl_extent_view *", {"first_stripe": first, "stripe_count": stripes})
        view.block_size, view.block_count, view.generation = size, blocks_in(size, stripes), 7
        expected = self.model.adopt(first, Extent(size, stripes, 7))
        assert lib.bl_extents_adopt(self.extents, view) == expected

    @invariant()
    def same(self) -> None:
        expected, used, held = [], 0, 0
        for first, extent in sorted(self.model.extents.items()):
            count = Counter(extent.blocks)
            used += count["used"] * extent.block_size
            held += count["held"] * extent.block_size
            shape = (first, extent.stripes, extent.block_size, len(extent.blocks))
            expected.append((extent.generation, *shape, count["free"], count["held"]))
        assert [fields(view)[:-1] for view in walk(self.extents)] == expected
        classes = {extent.block_size for extent in self.model.extents.values()}
        sizes = (self.model.stripe_count, len(self.model.free()), len(expected), len(classes))
        assert fields(stat(self.extents)) == (*sizes, used, held, 0)

    @rule(stripe=st.integers(-1, 210), size=sizes)
    def look(self, stripe: int, size: int) -> None:
        offset, view = DATA + stripe * STRIPE + PAGE, ffi.new("bl_extent_view *")
        at = [f for f, e in self.model.extents.items() if f <= stripe < f + e.stripes]
        assert (lib.bl_extents_at(self.extents, offset, view) == 0) == bool(at)
        assert not at or view.first_stripe == at[0]
        first, count = ffi.new("uint32_t *"), ffi.new("uint32_t *")
        inside = 0 <= stripe < self.model.stripe_count
        rc = lib.bl_extents_cell(self.extents, size, offset, first, count)
        assert rc == (0 if inside else -EINVAL)
        n = cell_size(size)
        expected = (stripe // n * n, min(n, self.model.stripe_count - stripe // n * n))
        assert not inside or (first[0], count[0]) == expected


TestExtents = ExtentsAgreeWithTheModel.TestCase
TestExtents.settings = settings(max_examples=fewer(100), stateful_step_count=40, deadline=None)


def fill(extents: Any, block_size: int) -> float:
    """Open and take all there is: return the share of the stripes that blocks use."""
    for any_fit in (False, True):
        while open_extent(extents, block_size, any_fit) >= 0:
            pass
    while take(extents, block_size) >= 0:
        pass
    return stat(extents).used_bytes / (stat(extents).stripe_count * STRIPE)


def empty(extents: Any, view: Any) -> None:
    for block in range(view.block_count):
        offset = DATA + view.first_stripe * STRIPE + block * view.block_size
        assert lib.bl_extents_give(extents, offset) == 0
    assert lib.bl_extents_close(extents, view.first_stripe) == 0


@pytest.mark.parametrize("size", SIZES)
def test_class_alone_fills_every_cell_of_its_grid(size: int) -> None:
    for stripes in [*range(1, 140, 3), 507, 5000]:
        blocks = sum(blocks_in(size, count) for _, count in cells(size, stripes))
        extents = create(stripes)
        assert fill(extents, size) == blocks * size / (stripes * STRIPE)


@pytest.mark.parametrize("size", SIZES[:3])
def test_blocks_of_models_fill_the_pool(size: int) -> None:
    shares = {stripes: fill(create(stripes), size) for stripes in (*range(100, 400, 7), 124, 507)}
    assert min(shares.values()) >= 0.965
    assert min(share for stripes, share in shares.items() if stripes >= 200) >= 0.97


@pytest.mark.parametrize("order", ["up", "down", "random"])
@pytest.mark.parametrize("stripes", [124, 507])
@pytest.mark.parametrize("first", SIZES[:4])
@pytest.mark.parametrize("second", SIZES[:3])
def test_second_class_fills_what_the_first_gives_back(
    first: int, second: int, stripes: int, order: str
) -> None:
    extents = create(stripes)
    fill(extents, first)
    views = list(walk(extents))
    if order == "down":
        views.reverse()
    if order == "random":
        random.Random(stripes).shuffle(views)
    for view in views:
        empty(extents, view)
        while open_extent(extents, second) >= 0:
            while take(extents, second) >= 0:
                pass
    assert fill(extents, second) == fill(create(stripes), second) >= 0.965


@pytest.mark.parametrize("second", SIZES)
@pytest.mark.parametrize("first", SIZES)
def test_emptying_a_cell_makes_room_for_its_class(first: int, second: int) -> None:
    extents, begin, count = create(507), ffi.new("uint32_t *"), ffi.new("uint32_t *")
    fill(extents, first)
    offset = DATA + 300 * STRIPE
    assert lib.bl_extents_cell(extents, second, offset, begin, count) == 0
    end = begin[0] + count[0]
    for view in walk(extents):
        if view.first_stripe < end and view.first_stripe + view.stripe_count > begin[0]:
            empty(extents, view)
    assert begin[0] <= 300 < end
    assert 0 <= open_extent(extents, second) <= begin[0]


def test_class_without_extents_makes_room_for_another() -> None:
    extents = create(20_000)
    sizes = [PAGE * (n + 1) for n in range(lib.BL_CLASS_COUNT_MAX)]
    firsts = [open_extent(extents, size) for size in sizes]
    assert min(firsts) >= 0
    assert open_extent(extents, 2 * MIB) == -E2BIG
    assert lib.bl_extents_close(extents, firsts[5]) == 0
    assert open_extent(extents, 2 * MIB) >= 0
    assert open_extent(extents, sizes[5]) == -E2BIG
    assert take(extents, sizes[5]) < 0


def test_class_that_found_no_room_leaves_none_of_its_past_to_the_next() -> None:
    extents = create(1)
    assert open_extent(extents, 16 * MIB) == -EAGAIN
    assert open_extent(extents, PAGE) == 0


def test_recovered_extents_are_granted_from_only_where_nobody_may_write() -> None:
    extents, size = create(64), 4 * MIB
    view = ffi.new("bl_extent_view *", {"generation": 9, "first_stripe": 8, "stripe_count": 6})
    view.block_size, view.block_count = size, 3
    assert lib.bl_extents_adopt(extents, view) == 0
    assert lib.bl_extents_adopt(extents, view) == -EEXIST
    committed = DATA + 8 * STRIPE + size
    assert lib.bl_extents_claim(extents, committed, size) == 0
    assert lib.bl_extents_claim(extents, committed, size) == -EEXIST
    lib.bl_extents_hold_free(extents)
    assert take(extents, size) < 0
    assert (stat(extents).used_bytes, stat(extents).held_bytes) == (size, 2 * size)
    lib.bl_extents_unhold_all(extents)
    assert [take(extents, size) for _ in range(2)] == [committed - size, committed + size]


def test_a_retired_extent_gives_nothing_and_keeps_its_stripes() -> None:
    extents, size = create(2), MIB
    first = open_extent(extents, size)
    offsets = [take(extents, size) for _ in range(2)]
    assert lib.bl_extents_give(extents, offsets[0]) == 0
    assert lib.bl_extents_retire(extents, first) == lib.bl_extents_retire(extents, first) == 0
    assert take(extents, size) < 0
    assert lib.bl_extents_give(extents, offsets[1]) == 0
    lib.bl_extents_hold_free(extents)
    lib.bl_extents_unhold_all(extents)
    assert take(extents, size) < 0
    assert lib.bl_extents_claim(extents, offsets[0], size) == -EINVAL
    assert lib.bl_extents_close(extents, first) == -EBUSY
    assert (stat(extents).retired_stripe_count, stat(extents).free_stripe_count) == (1, 1)
    view = ffi.new("bl_extent_view *")
    assert lib.bl_extents_at(extents, offsets[0], view) == 0
    assert view.retired
    successor = create(2)
    assert lib.bl_extents_adopt(successor, view) == 0
    assert take(successor, size) < 0
    assert lib.bl_extents_retire(successor, 1 - first) == -EINVAL


@pytest.mark.parametrize("field", ["block_size", "block_count", "stripe_count", "first_stripe"])
@pytest.mark.parametrize("wrong", [0, 1, 63, (1 << 32) - 1])
def test_adopt_refuses_nonsense(field: str, wrong: int) -> None:
    view = ffi.new("bl_extent_view *", {"block_size": MIB, "block_count": 2, "stripe_count": 1})
    setattr(view, field, wrong)
    extents = create(64)
    right = (field, wrong) in [("first_stripe", 0), ("first_stripe", 1), ("first_stripe", 63)]
    right |= (field, wrong) == ("stripe_count", 1)
    assert lib.bl_extents_adopt(extents, view) == (0 if right else -EINVAL)


def test_block_sizes_are_whole_pages_up_to_the_largest_extent() -> None:
    largest = STRIPES_MAX * STRIPE
    sizes = {0: 0, 1: PAGE, PAGE: PAGE, PAGE + 1: 2 * PAGE, largest: largest, largest + 1: 0}
    assert {bytes_: lib.bl_block_size(bytes_) for bytes_ in sizes} == sizes
    assert lib.bl_block_size((1 << 64) - 1) == 0
    assert open_extent(create(64), PAGE + 1) == -EINVAL


def test_pool_of_8_tib_is_searched_without_looking_at_each_stripe() -> None:
    extents, size = create(8 << 19), 64 * MIB
    while open_extent(extents, size) >= 0:
        pass
    last = (8 << 19) - 32
    assert lib.bl_extents_close(extents, last) == 0
    for _ in range(100_000):  # hours, were it a walk
        assert open_extent(extents, size) == last
        assert lib.bl_extents_close(extents, last) == 0


def test_the_next_empty_extent_is_the_first_of_all_classes() -> None:
    rng, sizes = random.Random(5), [3 * MIB + PAGE, MIB, PAGE, 16 * MIB]
    for _ in range(40):
        extents, view = create(96), ffi.new("bl_extent_view *")
        for _ in range(10):
            open_extent(extents, rng.choice(sizes), any_fit=True)
        for _ in range(rng.randrange(12)):
            take(extents, rng.choice(sizes))
        empty = [
            extent.first_stripe
            for extent in walk(extents)
            if extent.free_count == extent.block_count
        ]
        for stripe in range(96):
            found = lib.bl_extents_next_empty(extents, stripe, view) or view.first_stripe
            assert found == next((first for first in empty if first >= stripe), -ENOENT)
