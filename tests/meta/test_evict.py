# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The eviction order agrees with a list."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from beluga._sim import ffi, lib
from hypothesis import given
from hypothesis import strategies as st
from models.evict import Evict

IDS = 8


def create(count: int) -> Any:
    out = ffi.new("bl_evict **")
    assert lib.bl_evict_create(out, count, lib.BL_EVICT_LRU) == 0
    return ffi.gc(out[0], lib.bl_evict_destroy)


def walk(order: Any) -> Iterator[int]:
    number = lib.bl_evict_coldest(order)
    while number >= 0:
        yield number
        number = lib.bl_evict_warmer(order, number)


@given(st.lists(st.tuples(st.sampled_from(["touch", "cool", "remove"]), st.integers(0, IDS - 1))))
def test_order_is_that_of_the_last_changes(steps: list[tuple[str, int]]) -> None:
    order, model = create(IDS), Evict()
    for name, number in steps:
        getattr(lib, f"bl_evict_{name}")(order, number)
        getattr(model, name)(number)
        assert list(walk(order)) == model.order
        assert [i for i in range(IDS) if lib.bl_evict_has(order, i)] == sorted(model.order)


def test_empty_order_has_no_coldest() -> None:
    assert lib.bl_evict_coldest(create(0)) == -1


@pytest.mark.parametrize("length", [2, 17])
def test_chain_touched_deepest_first_is_eaten_from_its_tail(length: int) -> None:
    order = create(length)
    for block in reversed(range(length)):
        lib.bl_evict_touch(order, block)
    assert list(walk(order)) == list(reversed(range(length)))
