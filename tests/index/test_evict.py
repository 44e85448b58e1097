# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The eviction policies agree with models over lists."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from models.evict import Lru, S3Fifo
from native._sim import ffi, lib

IDS = 8
LRU, S3FIFO = lib.BL_EVICT_LRU, lib.BL_EVICT_S3FIFO
MODELS: dict[int, type[Lru | S3Fifo]] = {LRU: Lru, S3FIFO: S3Fifo}
NAMES = {LRU: "lru", S3FIFO: "s3fifo"}

every_policy = pytest.mark.parametrize("policy", MODELS, ids=NAMES.get)


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
    gone = []
    while (number := evict(order)) >= 0:
        gone.append(number)
    assert sorted(gone) == list(range(1, 20, 2))
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
    gone = [evict(order) for _ in range(21)]
    assert gone.index(40) > gone.index(41)
    assert 19 in gone[: gone.index(40)]


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
    gone = [evict(order) for _ in range(20)]
    assert 40 in gone  # the ghost was dropped, so 40 was a new block in the small queue
