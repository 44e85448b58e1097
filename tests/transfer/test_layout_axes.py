# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Layouts of all engines are compared with numpy's transposition of the same arrays."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from beluga.errors import LayoutError
from beluga.transfer import BlockLayout, Order, Plan, View, arrangements

NB, BS, H, D, L = 6, 4, 3, 10, 5
Array = NDArray[np.uint16]


def noise(*shape: int) -> Array:
    return np.random.default_rng(7).permutation(65536)[: np.prod(shape)].reshape(shape).astype("u2")


@dataclasses.dataclass(frozen=True)
class Case:
    """An arrangement, and the same elements in numpy: ``whole`` gives them with the axes
    layer, kv, block, token, head, dim."""

    arrays: tuple[Array, ...]
    layout: Callable[[list[View], Order | None], BlockLayout]
    whole: Callable[[tuple[Array, ...]], Array]


def layers(*shape: int) -> tuple[Array, ...]:
    return tuple(noise(L, *shape))


def heads_outside() -> tuple[Array, ...]:
    """Return vLLM's HND: tokens come before heads logically, but after them in memory."""
    return tuple(array.transpose(0, 1, 3, 2, 4) for array in layers(NB, 2, H, BS, D))


def vllm(views: list[View], order: Order | None) -> BlockLayout:
    return arrangements.vllm(views, order=order)


def sglang(name: str) -> Callable[[list[View], Order | None], BlockLayout]:
    return lambda views, order: arrangements.sglang(views[0], name, page_size=BS, order=order)


def stacked(*axes: int) -> Callable[[tuple[Array, ...]], Array]:
    return lambda arrays: np.stack(arrays).transpose(axes)


CASES = {
    "vllm-kv-first": Case(layers(2, NB, BS, H, D), vllm, stacked(0, 1, 2, 3, 4, 5)),
    "vllm-block-first": Case(layers(NB, 2, BS, H, D), vllm, stacked(0, 2, 1, 3, 4, 5)),
    "vllm-heads-outside": Case(heads_outside(), vllm, stacked(0, 2, 1, 3, 4, 5)),
    "vllm-packed": Case(layers(NB, BS, H, 2 * D), vllm, lambda a: np.stack(a)[:, None]),
    "vllm-mla": Case(layers(NB, BS, D), vllm, lambda a: np.stack(a)[:, None, :, :, None]),
    "sglang-layer-first": Case(
        (noise(2, L, NB * BS, H, D),),
        sglang("layer_first"),
        lambda a: a[0].reshape(2, L, NB, BS, H, D).transpose(1, 0, 2, 3, 4, 5),
    ),
    "sglang-page-first": Case(
        (noise(2, NB * BS, L, H, D),),
        sglang("page_first"),
        lambda a: a[0].reshape(2, NB, BS, L, H, D).transpose(3, 0, 1, 2, 4, 5),
    ),
    "sglang-page-first-direct": Case(
        (noise(2, NB, L, BS, H, D),),
        sglang("page_first_direct"),
        lambda a: a[0].transpose(2, 0, 1, 3, 4, 5),
    ),
    "sglang-mla-layer-first": Case(
        (noise(L, NB * BS, 1, D),),
        sglang("layer_first"),
        lambda a: a[0].reshape(L, 1, NB, BS, 1, D),
    ),
    "sglang-mla-page-first": Case(
        (noise(NB * BS, L, 1, D),),
        sglang("page_first"),
        lambda a: a[0].reshape(NB, BS, L, 1, 1, D).transpose(2, 3, 0, 1, 4, 5),
    ),
}

# The target order of a block's axes: layer, kv, token, head, dim are 0 to 4.
PLACES = {
    Order.DENSE: (0, 1, 2, 3, 4),
    Order.HEADS: (0, 1, 3, 2, 4),
    Order.TOKENS: (2, 0, 1, 3, 4),
}


def gathered(plan: Plan, start: int, size: int) -> bytes:
    """Return the bytes that a plan would write at [start, start + size) of the pool."""
    found = bytearray(size)
    for address, offset, length, _ in plan.pieces.tolist():
        at = offset - start
        if 0 <= at < size:
            found[at : at + length] = ctypes.string_at(address, length)
    return bytes(found)


@pytest.mark.parametrize("order", [None, *Order])
@pytest.mark.parametrize("name", CASES)
def test_blocks_hold_the_elements_in_the_order_of_the_pool(name: str, order: Order | None) -> None:
    case = CASES[name]
    layout = case.layout([View.of(array) for array in case.arrays], order)
    whole = case.whole(case.arrays)
    ids = [4, 0, 5]
    room = -(-layout.length // 64) * 64
    offsets = [64 + room * i for i in range(3)]
    plan = layout.plan(ids, offsets, chunk_size=192)
    assert layout.length == whole[:, :, 0].nbytes
    assert (layout.block_count, layout.block_size) == (NB, BS)
    for block, offset in zip(ids, offsets, strict=True):
        wanted = whole[:, :, block].transpose(PLACES[layout.order]).tobytes()
        assert gathered(plan, offset, layout.length) == wanted
    assert layout.owners == case.arrays


@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize("name", CASES)
def test_tokens_go_to_their_slots(name: str, order: Order) -> None:
    case = CASES[name]
    whole = case.whole(case.arrays)
    targets = tuple(~array for array in case.arrays)  # of the same strides
    layout = case.layout([View.of(array) for array in targets], order)
    blocks, tokens, slots = [1, 0, 1], [3, 0, 2], [2 * BS + 1, 5 * BS, 3]
    expected = case.whole(targets).copy()
    for block, token, slot in zip(blocks, tokens, slots, strict=True):
        expected[:, :, slot // BS, slot % BS] = whole[:, :, (2, 4)[block], token]
    payloads = [whole[:, :, block].transpose(PLACES[order]).tobytes() for block in (2, 4)]
    rows = layout.rows(blocks, tokens, slots)
    for address, block, place, size in zip(*rows, strict=True):
        ctypes.memmove(int(address), payloads[block][place : place + size], int(size))
    assert np.array_equal(case.whole(targets), expected)
    assert rows.sizes.reshape(3, -1).sum(axis=1).tolist() == [layout.length // BS] * 3
    if order == Order.TOKENS:  # a single run in the pool
        firsts = rows.places.reshape(3, -1).min(axis=1)
        assert (firsts // (layout.length // BS)).tolist() == tokens


def test_runs_that_lie_together_are_one() -> None:
    counts = {
        "vllm-kv-first": 2 * L,
        "vllm-block-first": L,  # K and V of a block are adjacent
        "vllm-heads-outside": L,
        "vllm-packed": L,
        "vllm-mla": L,
        "sglang-page-first-direct": 2 * L,
        "sglang-layer-first": 2 * L,
    }
    for name, count in counts.items():
        case = CASES[name]
        layout = case.layout([View.of(array) for array in case.arrays], None)
        assert len(layout.sizes) == count, name


def test_layouts_with_distinct_shapes_are_recognized() -> None:
    def view(*shape: int) -> View:
        return View.of(np.zeros(shape, np.uint16))

    with pytest.raises(LayoutError, match="specify which"):
        arrangements.vllm([view(2, 2, BS, H, D)])
    arrangements.vllm([view(2, 2, BS, H, D)], kv_first=True)
    wrong: list[Callable[[], BlockLayout]] = [
        lambda: arrangements.vllm([view(NB, 2, BS, H, D)], kv_first=True),
        lambda: arrangements.vllm([view(2, NB, BS, H, D)], kv_first=False),
        lambda: arrangements.vllm([view(3, NB, BS, H, D)]),
        lambda: arrangements.vllm([view(NB, BS, H, D)], kv_first=True),
        lambda: arrangements.vllm([view(NB, D)]),
        lambda: arrangements.vllm([view(2, NB, BS, H, D), view(2, NB, BS, H, 2 * D)]),
        lambda: arrangements.vllm([]),
        lambda: arrangements.sglang(view(2, L, NB * BS, H, D), "page_head", page_size=BS),
        lambda: arrangements.sglang(view(2, L, NB * BS + 1, H, D), "layer_first", page_size=BS),
        lambda: arrangements.sglang(view(3, L, NB * BS, H, D), "layer_first", page_size=BS),
        lambda: arrangements.sglang(view(2, NB, L, BS, H, D), "page_first_direct", page_size=8),
        lambda: BlockLayout([view(2, 3)], ("block", "block")),
        lambda: BlockLayout([view(2, 3)], ("dim", "block")),
        lambda: BlockLayout([view(2, 3)], ("token", "dim")),
        lambda: BlockLayout([View.of(np.zeros((4, 6), np.uint8)[:, ::2])], ("block", "dim")),
        lambda: BlockLayout([View.of(np.zeros((4, 6), np.uint8)[::-1])], ("block", "dim")),
    ]
    for make in wrong:
        with pytest.raises(LayoutError):
            make()


def test_blocks_tokens_and_slots_out_of_range_are_refused() -> None:
    case = CASES["vllm-kv-first"]
    layout = case.layout([View.of(array) for array in case.arrays], None)
    for ids in ([NB], [-1]):
        with pytest.raises(LayoutError, match=f"has {NB}"):
            layout.addresses(ids)
    for blocks, tokens, slots in (([0], [BS], [0]), ([0], [0], [NB * BS]), ([0, 0], [0], [0])):
        with pytest.raises(LayoutError):
            layout.rows(blocks, tokens, slots)


def test_the_declared_text_covers_what_engines_must_share() -> None:
    found = {
        name: case.layout([View.of(array) for array in case.arrays], Order.DENSE).declared
        for name, case in CASES.items()
    }
    assert found["vllm-kv-first"] == found["vllm-block-first"] == found["sglang-layer-first"]
    assert len(set(found.values())) == 3  # heads apart, packed, and MLA
