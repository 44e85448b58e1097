# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The structures of the index agree with models: hash table, pins and pages; the eviction policies
and the choice of victims, which frees the requested space.
"""

import errno
import random
import time
from collections.abc import Iterator
from errno import EAGAIN, EEXIST, EINVAL, ENOENT
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from models.structures import (
    PAGE,
    STRIPE,
    STRIPE_PAGES,
    STRIPES_MAX,
    Extents,
    Index,
    Key,
    Lru,
    Pages,
    Pins,
    S3Fifo,
    rounded,
)
from native._sim import ffi, lib
from support.emulation import fewer

DATA = 3 * STRIPE  # the offset of stripe 0
MIB = 1 << 20
KIB = 1 << 10

COUNT_MAX = 9

BLOCKS_MAX = 11


def create_pages(stripes: int) -> Any:
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
    positions = st.integers(0, 1 << 30)

    @initialize(stripes=st.sampled_from([1, 2, 7, 8, 9, 20, 70]))
    def start(self, stripes: int) -> None:
        self.stripes, self.pages, self.model = stripes, create_pages(stripes), Pages(stripes)
        self.blocks: list[tuple[int, int]] = []
        self.deferred = False

    def run_of(self, position: int, count: int) -> tuple[int, int]:
        """Return a block, or a run near one."""
        if self.blocks and position % 4:
            first, size = self.blocks[position % len(self.blocks)]
            return (
                (first, size) if position % 7 else (first + position % 3 - 1, size + position % 2)
            )
        return position % len(self.model.state), count

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

    @rule(positions=st.lists(positions, max_size=30), count=counts)
    def take_there(self, positions: list[int], count: int) -> None:
        for position in positions:
            first, size = self.run_of(position, count)
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
        positions=st.lists(positions, max_size=30),
        count=counts,
        turn=st.sampled_from(["give", "give", "hold", "unhold"]),
    )
    def turn(self, positions: list[int], count: int, turn: str) -> None:
        states = {"give": ("used", "free"), "hold": ("used", "held"), "unhold": ("held", "free")}
        for position in positions:
            first, size = self.run_of(position, count)
            expected = self.model.turn(first, size, *states[turn])
            call = getattr(lib, f"bl_pages_{turn}")
            if first >= 0:
                assert call(self.pages, at(first), size * PAGE) == expected

    @rule(position=positions)
    def lose(self, position: int) -> None:
        if position % 5 == 0:
            lib.bl_pages_lose(self.pages, position % self.stripes, 1)
            self.model.lose(position % self.stripes)

    @rule(position=positions, hold=st.booleans())
    def turn_all(self, position: int, hold: bool) -> None:
        if hold:
            lib.bl_pages_hold_free(self.pages, position % self.stripes, 1)
            self.model.hold_free(position % self.stripes)
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
        stripe, sizes = first % self.stripes, ffi.new("uint32_t [2]")
        states = self.model.state[stripe * STRIPE_PAGES : (stripe + 1) * STRIPE_PAGES]
        lib.bl_pages_of_stripe(self.pages, stripe, sizes, sizes + 1)
        assert list(sizes) == [states.count(state) * PAGE for state in ("used", "held")]
        assert lib.bl_pages_idle(self.pages, stripe, 1) == (set(states) == {"free"})

    @invariant()
    def the_held_pages_are_found_in_order(self) -> None:
        offset, size, pages = ffi.new("uint64_t *", DATA), ffi.new("uint32_t *"), []
        while lib.bl_pages_next_held(self.pages, offset, size) == 0:
            first = (offset[0] - DATA) // PAGE
            pages += range(first, first + size[0] // PAGE)
            offset[0] += size[0]
        assert pages == [page for page, state in enumerate(self.model.state) if state == "held"]


TestPages = PagesAgreeWithTheModel.TestCase
TestPages.settings = settings(max_examples=fewer(60), stateful_step_count=25, deadline=None)


@pytest.mark.parametrize("size", [PAGE, 68 * KIB, 1156 * KIB, 2 * MIB, 3 * MIB + PAGE, 33 * MIB])
@pytest.mark.parametrize("stripes", [256, 507])
def test_blocks_of_one_size_leave_less_space_than_one_of_them(size: int, stripes: int) -> None:
    pages, count = create_pages(stripes), 0
    while take(pages, rounded(size)) >= 0:
        count += 1
    assert count == stripes * STRIPE // rounded(size)


@pytest.mark.parametrize("stripe", [0, 1, 63, 64, 70, 4095, 4096, 99_999])
def test_the_one_free_stripe_of_a_large_pool_is_found(stripe: int) -> None:
    pages = create_pages(100_000)
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
    pages, largest = create_pages(2000), lib.BL_BLOCK_SIZE_MAX
    for page in (first, first + 1 + largest // PAGE):
        lib.bl_pages_take(pages, at(page), PAGE)
    position = 0 if first * PAGE >= largest else first + 1
    assert find(pages, largest) == at(position)
    assert lib.bl_pages_take(pages, at(position), largest) == 0
    assert stat(pages).used_bytes == largest + 2 * PAGE
    assert lib.bl_pages_give(pages, at(position), largest) == 0
    assert find(pages, largest) == at(position)


def test_offsets_outside_the_pools_pages_are_rejected() -> None:
    pages = create_pages(2)
    wrong = [(DATA - PAGE, PAGE), (DATA + 1, PAGE), (DATA, 100), (DATA, 0)]
    wrong += [(DATA + 2 * STRIPE, PAGE), (DATA + STRIPE, STRIPE + PAGE), (1 << 63, PAGE)]
    for offset, size in wrong:
        for call in ("take", "give", "hold", "unhold"):
            assert getattr(lib, f"bl_pages_{call}")(pages, offset, size) == -EINVAL
    assert stat(pages).used_bytes == 0
    assert lib.bl_pages_take(pages, DATA, PAGE) == 0
    assert lib.bl_pages_take(pages, DATA, PAGE) == -EEXIST


def test_a_pool_without_stripes_has_no_room() -> None:
    pages = create_pages(0)
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
    rng, pages, blocks = random.Random(3), create_pages(256), []
    fills = []
    for _ in range(20_000):
        size = rounded(rng.randrange(16 * KIB, MIB))
        while (offset := take(pages, size)) < 0:
            fills.append(stat(pages).used_bytes / (256 * STRIPE))
            victim = blocks.pop(rng.randrange(len(blocks)))
            assert lib.bl_pages_give(pages, *victim) == 0
        blocks.append((offset, size))
    assert sum(fills) / len(fills) > 0.85


def create_extents(stripes: int) -> Any:
    out = ffi.new("bl_extents **")
    assert lib.bl_extents_create(out, stripes) == 0
    return ffi.gc(out[0], lib.bl_extents_destroy)


def fields(view: Any) -> tuple[int, ...]:
    return tuple(getattr(view, name) for name, _ in ffi.typeof(view[0]).fields)


class ExtentsAgreeWithTheModel(RuleBasedStateMachine):
    stripe = st.integers(0, 205)

    @initialize(stripes=st.sampled_from([1, 31, 32, 100, 128, 200]))
    def start(self, stripes: int) -> None:
        self.extents, self.model = create_extents(stripes), Extents(stripes)
        self.generation = 0

    @rule(stripe=stripe)
    def open(self, stripe: int) -> None:
        self.generation += 1
        view = ffi.new("bl_extent_view *")
        expected = self.model.open(stripe, self.generation)
        result = lib.bl_extents_open(self.extents, stripe, self.generation, view)
        assert (result or (view.first_stripe, view.stripe_count)) == expected

    @rule(stripe=stripe, count=st.integers(0, 12) | st.just(STRIPES_MAX + 1), retired=st.booleans())
    def adopt(self, stripe: int, count: int, retired: bool) -> None:
        self.generation += 1
        retired = retired and self.generation % 4 == 0
        view = ffi.new("bl_extent_view *", (self.generation, stripe, count, retired))
        expected = self.model.adopt(stripe, count, self.generation, retired)
        assert lib.bl_extents_adopt(self.extents, view) == expected

    @rule(stripe=stripe, retire=st.booleans(), own=st.booleans())
    def end(self, stripe: int, retire: bool, own: bool) -> None:
        views = self.model.views()
        if views and own:
            stripe = views[stripe % len(views)][1]
        if retire and stripe % 5 == 0:
            assert lib.bl_extents_retire(self.extents, stripe) == self.model.retire(stripe)
        else:
            assert lib.bl_extents_close(self.extents, stripe) == self.model.close(stripe)

    @invariant()
    def a_walk_meets_all(self) -> None:
        view, stripe, views = ffi.new("bl_extent_view *"), 0, []
        while lib.bl_extents_next(self.extents, stripe, view) == 0:
            views.append(fields(view))
            stripe = view.first_stripe + view.stripe_count
        assert views == self.model.views()
        assert lib.bl_extents_count(self.extents) == len(views)

    @invariant()
    def every_stripe_has_its_extent(self) -> None:
        views = {view[1]: view for view in self.model.views()}
        view = ffi.new("bl_extent_view *")
        for stripe, first in enumerate(self.model.first):
            result = lib.bl_extents_at(self.extents, stripe, view)
            assert (result or fields(view)) == (-ENOENT if first is None else views[first])
        for first, count in ((0, len(self.model.first)), (0, 1), (len(views) % 3, 7)):
            owners = self.model.first[first : first + count]
            whole = first + count <= len(self.model.first)
            serving = [owner is not None and owner not in self.model.retired for owner in owners]
            covered = whole and all(serving)
            assert lib.bl_extents_cover(self.extents, first, count) == covered
            if whole:
                closed = first + owners.index(None) if None in owners else -ENOENT
                assert lib.bl_extents_closed(self.extents, first, count) == closed
        assert lib.bl_extents_at(self.extents, len(self.model.first), view) == -ENOENT


TestExtents = ExtentsAgreeWithTheModel.TestCase
TestExtents.settings = settings(max_examples=fewer(100), stateful_step_count=30, deadline=None)


def test_too_many_stripes_for_an_open_mark_are_rejected() -> None:
    assert lib.bl_extents_create(ffi.new("bl_extents **"), 1 << 32) < 0
    assert lib.bl_pages_create(ffi.new("bl_pages **"), 0, 1 << 32) < 0


def create_index(count: int) -> Any:
    out = ffi.new("bl_hash **")
    assert lib.bl_hash_create(out, count) == 0
    return ffi.gc(out[0], lib.bl_hash_destroy)


# There are few keys, so that they repeat, and their half words are equal, so that both halves
# matter.
key_strategy = st.tuples(st.integers(0, 3), st.integers(0, 3))
steps = st.lists(
    st.tuples(st.sampled_from(["add", "add", "remove", "find"]), key_strategy), max_size=80
)


@given(steps)
def test_index_agrees_with_a_dict(steps: list[tuple[str, Key]]) -> None:
    index, model = create_index(COUNT_MAX), Index(COUNT_MAX)
    for block, (name, key) in enumerate(steps):
        arguments = (key, block) if name == "add" else (key,)
        got = getattr(lib, f"bl_hash_{name}")(index, *arguments)
        assert got == getattr(model, name)(*arguments)
        assert lib.bl_hash_count(index) == len(model.block)
    for first in range(4):
        for second in range(4):
            lib.bl_hash_prefetch(index, (first, second))
            assert lib.bl_hash_find(index, (first, second)) == model.find((first, second))


@pytest.mark.parametrize("pattern", ["random", "counting", "one half"])
def test_full_index_survives_turnover(pattern: str) -> None:
    count, rng = 2048, random.Random(1)  # the largest number that its buckets are made for
    index, model = create_index(count), Index(count)
    for step in range(12 * count):
        number = rng.getrandbits(64)
        key = {"random": (number, rng.getrandbits(64)), "counting": (step, 0)}.get(
            pattern, (0, number)
        )
        if len(model.block) == count:
            victim = rng.choice(tuple(model.block)) if step % 97 == 0 else next(iter(model.block))
            assert lib.bl_hash_remove(index, victim) == model.remove(victim) == 0
            assert lib.bl_hash_find(index, victim) == -1
        assert lib.bl_hash_add(index, key, step) == model.add(key, step) == 0
    assert all(lib.bl_hash_find(index, key) == block for key, block in model.block.items())


def miss_s(index: Any) -> float:
    """Return the seconds for a thousand missing key_strategy, the minimum of a few runs."""
    tries = []
    for _ in range(5):
        begin = time.perf_counter()
        assert all(lib.bl_hash_find(index, (key, 0)) == -1 for key in range(1000))
        tries.append(time.perf_counter() - begin)
    return min(tries)


def test_misses_stay_as_fast_as_in_a_new_index() -> None:
    """Otherwise tombstones of removals would accumulate until a miss searches every bucket."""
    count, rng = 1 << 16, random.Random(1)
    key_strategy = [(rng.getrandbits(64), rng.getrandbits(64)) for _ in range(12 * count)]
    index = create_index(count)
    for step, key in enumerate(key_strategy):
        if step >= count:
            assert lib.bl_hash_remove(index, key_strategy[step - count]) == 0
        assert lib.bl_hash_add(index, key, step) == 0
    assert miss_s(index) < 5 * miss_s(create_index(count))


def test_the_only_bucket_is_searched() -> None:
    index = create_index(2)
    for block, key in enumerate([(1, 2), (3, 4)]):
        assert lib.bl_hash_add(index, key, block) == 0
        assert lib.bl_hash_find(index, key) == block
    assert lib.bl_hash_find(index, (5, 6)) == -1


def test_an_index_without_room_stores_nothing() -> None:
    index = create_index(0)
    assert lib.bl_hash_add(index, (1, 2), 3) < 0
    assert lib.bl_hash_find(index, (1, 2)) == -1


def create_pins(count: int) -> Any:
    out = ffi.new("bl_pins **")
    assert lib.bl_pins_create(out, count) == 0
    return ffi.gc(out[0], lib.bl_pins_destroy)


def pop(pins: Any) -> tuple[int, int] | None:
    count = ffi.new("uint32_t *")
    block = lib.bl_pins_pop(pins, count)
    return None if block < 0 else (block, count[0])


@given(st.lists(st.tuples(st.sampled_from(["add", "add", "remove", "pop"]), st.integers(0, 15))))
def test_pins_agree_with_a_dict(steps: list[tuple[str, int]]) -> None:
    pins, model = create_pins(BLOCKS_MAX), Pins(BLOCKS_MAX)
    for name, block in steps:
        if name == "pop":
            got = pop(pins)
            assert got in model.pins.items() if model.pins else got is None
            model.pins.pop(got[0] if got else -1, None)
        else:
            expected = getattr(model, name)(block)
            assert getattr(lib, f"bl_pins_{name}")(pins, block) == expected
        assert lib.bl_pins_count(pins) == len(model.pins)


def test_pins_survive_turnover() -> None:
    """Enough blocks for collisions, and to wrap around the end of the table."""
    rng, pins, model = random.Random(1), create_pins(512), Pins(512)
    for _ in range(20_000):
        block = rng.randrange(1 << 32) if len(model.pins) < 512 else rng.choice([*model.pins])
        name = "remove" if block in model.pins else "add"
        assert getattr(lib, f"bl_pins_{name}")(pins, block) == getattr(model, name)(block)
    for block in [*model.pins]:
        assert lib.bl_pins_remove(pins, block) == 0
    assert lib.bl_pins_count(pins) == 0


@pytest.mark.parametrize("count", [1, 3, 4096])
def test_popping_empties_a_full_set_of_pins(count: int) -> None:
    pins = create_pins(count)
    for block in range(count):
        assert lib.bl_pins_add(pins, block) == 1
        assert lib.bl_pins_add(pins, block) == 2
    assert lib.bl_pins_add(pins, count) < 0
    popped = dict(iter(lambda: pop(pins), None))
    assert popped == dict.fromkeys(range(count), 2)
    assert lib.bl_pins_count(pins) == 0


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
