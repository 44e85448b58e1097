# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The index agrees with a dict: first its contract, then the state after removals."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from models.index import Index, Key
from native._sim import ffi, lib

COUNT_MAX = 9


def create(count: int) -> Any:
    out = ffi.new("bl_hash **")
    assert lib.bl_hash_create(out, count) == 0
    return ffi.gc(out[0], lib.bl_hash_destroy)


# There are few keys, so that they repeat, and their half words are equal, so that both halves
# matter.
keys = st.tuples(st.integers(0, 3), st.integers(0, 3))
steps = st.lists(st.tuples(st.sampled_from(["add", "add", "remove", "find"]), keys), max_size=80)


@given(steps)
def test_index_agrees_with_a_dict(steps: list[tuple[str, Key]]) -> None:
    index, model = create(COUNT_MAX), Index(COUNT_MAX)
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
    index, model = create(count), Index(count)
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
    """Return the seconds for a thousand missing keys, the minimum of a few runs."""
    tries = []
    for _ in range(5):
        begin = time.perf_counter()
        assert all(lib.bl_hash_find(index, (key, 0)) == -1 for key in range(1000))
        tries.append(time.perf_counter() - begin)
    return min(tries)


def test_misses_stay_as_fast_as_in_a_new_index() -> None:
    """Otherwise tombstones of removals would accumulate until a miss searches every bucket."""
    count, rng = 1 << 16, random.Random(1)
    keys = [(rng.getrandbits(64), rng.getrandbits(64)) for _ in range(12 * count)]
    index = create(count)
    for step, key in enumerate(keys):
        if step >= count:
            assert lib.bl_hash_remove(index, keys[step - count]) == 0
        assert lib.bl_hash_add(index, key, step) == 0
    assert miss_s(index) < 5 * miss_s(create(count))


def test_the_only_bucket_is_searched() -> None:
    index = create(2)
    for block, key in enumerate([(1, 2), (3, 4)]):
        assert lib.bl_hash_add(index, key, block) == 0
        assert lib.bl_hash_find(index, key) == block
    assert lib.bl_hash_find(index, (5, 6)) == -1


def test_an_index_without_room_stores_nothing() -> None:
    index = create(0)
    assert lib.bl_hash_add(index, (1, 2), 3) < 0
    assert lib.bl_hash_find(index, (1, 2)) == -1
