# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Layouts and views of an engine's blocks: numpy's addresses, every order of axes, and what is
refused.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.plans import cut
from support.soft_dsa import soft_engine

from beluga.errors import LayoutError
from beluga.pool import Pool
from beluga.transfer import BlockLayout, CpuEngine, Order, Plan, View, arrangements, plan_blocks
from beluga.transfer.plan import plan_rows
from beluga.transfer.view import DTYPE_SIZES

# ---- Layouts of all engines are compared with numpy's transposition of the same arrays.


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


# ---- Views compute numpy's addresses and reject indices outside of their memory.


@settings(deadline=None)
@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    order=st.randoms(use_true_random=False),
    item=st.sampled_from([np.uint8, np.uint16, np.float32]),
)
def test_addresses_match_the_elements(shape: list[int], order: Any, item: type) -> None:
    axes = list(range(len(shape)))
    order.shuffle(axes)
    array = np.arange(np.prod(shape), dtype=item).reshape(shape).transpose(axes)[::-1]
    view = View.of(array)
    for index in np.ndindex(array.shape):
        raw = ctypes.string_at(view.address(*index), array.itemsize)
        assert np.frombuffer(raw, item)[0] == array[index]


@settings(deadline=None)
@given(data=st.data())
def test_slices_and_splits_match_numpy(data: st.DataObject) -> None:
    array = np.arange(4 * 6 * 5, dtype=np.uint16).reshape(4, 6, 5)
    axis = data.draw(st.integers(0, 2))
    start = data.draw(st.integers(0, array.shape[axis] - 1))
    stop = data.draw(st.integers(start + 1, array.shape[axis]))
    part = array[(slice(None),) * axis + (slice(start, stop),)]
    view = View.of(array).slice(axis, start, stop)
    assert (view.start, view.shape, view.strides) == (part.ctypes.data, part.shape, part.strides)
    halves = View.of(array).split(1, 2)
    wanted = array.reshape(4, 3, 2, 5)
    assert (halves.shape, halves.strides) == (wanted.shape, wanted.strides)


@pytest.mark.parametrize("index", [(4,), (-1,), (0, 6), (0, 0, 0, 0)])
def test_the_error_of_an_index_out_of_range_has_the_shape(index: tuple[int, ...]) -> None:
    view = View.of(np.zeros((4, 6, 5), np.uint8))
    with pytest.raises(LayoutError, match=r"shape \(4, 6, 5\)"):
        view.address(*index)


def test_slices_and_splits_out_of_range_are_rejected() -> None:
    view = View.of(np.zeros((4, 6, 5), np.uint8))
    for axis, start, stop in ((0, 0, 5), (0, 2, 2), (3, 0, 1), (1, -1, 2)):
        with pytest.raises(LayoutError):
            view.slice(axis, start, stop)
    for size in (4, 0, 7):
        with pytest.raises(LayoutError):
            view.split(1, size)


def test_sizes_of_elements_are_those_of_their_types() -> None:
    assert DTYPE_SIZES == {"F32": 4, "F16": 2, "BF16": 2, "FP8": 1, "U8": 1}
    for dtype, size in DTYPE_SIZES.items():
        view = View.foreign(4096, 6 * size, shape=(2, 3), dtype=dtype)
        assert view.strides == (3 * size, size)
        assert view.address(1, 2) == 4096 + 5 * size
    with pytest.raises(LayoutError, match="I64"):
        View.foreign(4096, 48, shape=(2, 3), dtype="I64")


@settings(deadline=None)
@given(
    shape=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    strides=st.lists(st.integers(0, 50), min_size=3, max_size=3),
    offset=st.integers(0, 20),
    size=st.integers(1, 600),
)
def test_a_view_that_leaves_its_memory_is_refused(
    shape: list[int], strides: list[int], offset: int, size: int
) -> None:
    steps = strides[: len(shape)]
    need = offset + sum((n - 1) * step for n, step in zip(shape, steps, strict=True)) * 2 + 2
    given_ = {"shape": shape, "dtype": "BF16", "element_strides": steps, "offset": offset}
    if need <= size:
        View.foreign(1 << 30, size, **given_)  # type: ignore[arg-type]
        return
    with pytest.raises(LayoutError, match=f"to {need}, but the memory has {size}"):
        View.foreign(1 << 30, size, **given_)  # type: ignore[arg-type]


def test_foreign_memory_keeps_its_owner() -> None:
    owner = object()
    assert View.foreign(4096, 64, shape=(64,), dtype="U8", owner=owner).owner is owner


class Torch:
    """The part of a torch tensor that a view uses."""

    def __init__(self, address: int, shape: tuple[int, ...], steps: tuple[int, ...]) -> None:
        self.data_ptr, self.shape, self.stride = lambda: address, shape, lambda: steps
        self.element_size = lambda: 2


class Cupy:
    """The part of a cupy array that a view uses."""

    shape, strides, dtype = (3, 4), (16, 4), np.dtype(np.float32)
    __cuda_array_interface__ = {"data": (1 << 40, False)}  # noqa: RUF012  as the protocol has it


def test_arrays_of_devices_are_taken_by_their_pointers() -> None:
    tensor = Torch(1 << 41, (2, 5), (1, 2))
    view = View.of(tensor)
    assert (view.start, view.strides, view.item_size) == (1 << 41, (2, 4), 2)
    assert view.memory == (1 << 41, 20)
    assert view.owner is tensor
    assert View.of(Cupy()).address(2, 3) == (1 << 40) + 2 * 16 + 3 * 4
    with pytest.raises(LayoutError, match="list"):
        View.of([1, 2])


# ---- Wrong numbers, read-only memory, and plans that C would misread are rejected. Each of them
# raises one clear error, and no byte is copied.


SHAPE = (2, 5, 4, 3, 8)
LINE = 64


def layout_of(array: Any) -> BlockLayout:
    return arrangements.vllm([View.of(array)])


@pytest.fixture
def layout() -> BlockLayout:
    return layout_of(np.zeros(SHAPE, np.float16))


@pytest.mark.parametrize(
    "blocks", [1, [[1]], [1.0], [True], ["1"], [None], [[1], [1, 2]], np.array([True, False])]
)
def test_blocks_must_be_integers(layout: BlockLayout, blocks: Any) -> None:
    with pytest.raises(LayoutError):
        layout.plan(blocks, [LINE])


@pytest.mark.parametrize(
    "offsets",
    [[-64], np.array([-64]), [64.0], np.array([2**64 - 64], np.uint64), 64, [2**70], [2**62]],
)
def test_offsets_must_be_inside_the_pool(layout: BlockLayout, offsets: Any) -> None:
    with pytest.raises(LayoutError, match="offsets"):
        layout.plan([1], offsets)
    rows = layout.rows([0], [1], [2])
    with pytest.raises(LayoutError):
        layout.plan_rows(rows, offsets=offsets)


@pytest.mark.parametrize(
    ("tokens", "slots"),
    [([1.5], [0]), (np.array([True]), [0]), ([1], [0.5]), ([1], [True]), ([[1]], [[0]])],
)
def test_tokens_and_slots_must_be_integers(layout: BlockLayout, tokens: Any, slots: Any) -> None:
    with pytest.raises(LayoutError):
        layout.rows([0], tokens, slots)


def test_a_chunk_longer_than_c_counts_is_refused() -> None:
    size, offset = 5 << 30, np.array([LINE])
    with pytest.raises(LayoutError, match="chunk has 5368709120 bytes"):
        plan_blocks(np.array([[4096]]), np.array([size]), offset)
    row = {"blocks": np.array([0]), "places": np.array([0]), "sizes": np.array([9])}
    with pytest.raises(LayoutError, match="chunk has 5368709120 bytes"):
        plan_rows(np.array([4096]), **row, offsets=offset, length=size)
    whole = plan_blocks(np.array([[4096]]), np.array([size]), offset, chunk_size=1 << 30)
    assert int(whole.chunks["length"].sum(dtype=np.int64)) == whole.size == size
    rows = plan_rows(
        np.array([4096]),
        **row | {"places": np.array([size - 9])},
        offsets=offset,
        length=size,
        chunk_size=1 << 30,
        checksums=np.zeros((1, 5), np.uint32),
    )
    assert rows.pieces["offset"].tolist() == [LINE + size - 9]


def test_one_element_is_dense_with_any_stride() -> None:
    layout = layout_of(np.zeros(SHAPE, np.float16)[..., ::8])
    assert (layout.length, layout.block_count) == (2 * 4 * 3 * 2, 5)


@pytest.mark.parametrize("make", [lambda pool: CpuEngine(pool, 1), soft_engine])
def test_read_only_memory_is_rejected_as_a_target(pool: Pool, make: Any) -> None:
    content = bytes(2 * 5 * 4 * 3 * 8 * 2)
    frozen = layout_of(np.frombuffer(content, np.float16).reshape(SHAPE))
    ones = layout_of(np.ones(SHAPE, np.float16))
    offset = [pool.geometry.data_offset]
    engine = make(pool)
    engine.gather_write(frozen.plan([0], offset)).wait()  # still valid as a source
    engine.gather_write(ones.plan([0], offset)).wait()
    plan = frozen.plan([0], offset, chunk_size=LINE)
    tokens = frozen.plan_rows(frozen.rows([0], [1], [2]), offsets=offset)
    for wrong in (plan, *cut(plan, 100), tokens):
        with pytest.raises(LayoutError, match="read-only"):
            engine.scatter_read(wrong)
    assert content == bytes(len(content))
    engine.close()


def test_a_view_of_read_only_or_missing_memory_is_detected() -> None:
    array = np.zeros(8, np.uint8)
    assert not View.of(array).read_only
    array.flags.writeable = False
    assert View.of(array).slice(0, 1, 5).read_only

    class Frozen:
        shape, strides, dtype = (3,), (4,), np.dtype(np.float32)
        __cuda_array_interface__ = {"data": (1 << 40, True)}  # noqa: RUF012  as the protocol has it

    assert View.of(Frozen()).read_only
    Frozen.__cuda_array_interface__ = {"data": (0, False)}
    with pytest.raises(LayoutError, match=r"shape \(3,\) has no memory"):
        View.of(Frozen())
    with pytest.raises(LayoutError):
        View.of(np.array([None]))


def test_arrays_of_a_plan_cannot_be_resized(layout: BlockLayout) -> None:
    plan = layout.plan([0, 1], [LINE, LINE + 4096], chunk_size=LINE)
    assert plan.checksums is not None
    before = plan.struct()
    pieces, chunks, sums = before.pieces, before.chunks, before.checksums
    for array in (plan.pieces, plan.chunks, plan.checksums):
        with pytest.raises(ValueError, match="resize"):
            array.resize(len(array) * 50_000)
    again = plan.struct()
    assert (again.pieces, again.chunks, again.checksums) == (pieces, chunks, sums)


def test_a_piece_without_bytes_is_refused(layout: BlockLayout, pool: Pool) -> None:
    good = layout.plan([0], [pool.geometry.data_offset])
    pieces = good.pieces.copy()
    pieces["length"][0] = 0
    with pytest.raises(LayoutError, match="without bytes"):
        CpuEngine(pool, 1).scatter_read(Plan(pieces, good.chunks, sparse=True))
