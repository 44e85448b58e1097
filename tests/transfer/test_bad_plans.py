# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Wrong numbers, read-only memory, and plans that C would misread are rejected. Each of them raises
one clear error, and no byte is copied.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.soft_dsa import soft_engine

from beluga.errors import LayoutError
from beluga.pool import Pool
from beluga.transfer import BlockLayout, CpuEngine, Plan, View, arrangements, plan_blocks
from beluga.transfer.plan import plan_rows

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
    for wrong in (plan, *plan.cut(100), tokens):
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
