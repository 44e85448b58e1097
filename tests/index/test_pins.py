# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A session's pins agree with a dict."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from models.pins import Pins
from native._sim import ffi, lib

BLOCKS_MAX = 11


def create(count: int) -> Any:
    out = ffi.new("bl_pins **")
    assert lib.bl_pins_create(out, count) == 0
    return ffi.gc(out[0], lib.bl_pins_destroy)


def pop(pins: Any) -> tuple[int, int] | None:
    count = ffi.new("uint32_t *")
    block = lib.bl_pins_pop(pins, count)
    return None if block < 0 else (block, count[0])


@given(st.lists(st.tuples(st.sampled_from(["add", "add", "remove", "pop"]), st.integers(0, 15))))
def test_pins_agree_with_a_dict(steps: list[tuple[str, int]]) -> None:
    pins, model = create(BLOCKS_MAX), Pins(BLOCKS_MAX)
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
    rng, pins, model = random.Random(1), create(512), Pins(512)
    for _ in range(20_000):
        block = rng.randrange(1 << 32) if len(model.pins) < 512 else rng.choice([*model.pins])
        name = "remove" if block in model.pins else "add"
        assert getattr(lib, f"bl_pins_{name}")(pins, block) == getattr(model, name)(block)
    for block in [*model.pins]:
        assert lib.bl_pins_remove(pins, block) == 0
    assert lib.bl_pins_count(pins) == 0


@pytest.mark.parametrize("count", [1, 3, 4096])
def test_popping_empties_a_full_set_of_pins(count: int) -> None:
    pins = create(count)
    for block in range(count):
        assert lib.bl_pins_add(pins, block) == 1
        assert lib.bl_pins_add(pins, block) == 2
    assert lib.bl_pins_add(pins, count) < 0
    popped = dict(iter(lambda: pop(pins), None))
    assert popped == dict.fromkeys(range(count), 2)
    assert lib.bl_pins_count(pins) == 0
