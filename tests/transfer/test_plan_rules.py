# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Each rule of a plan's pieces and chunks (``bl_plan_piece_valid``) is violated alone."""

from __future__ import annotations

import numpy as np
import pytest

from beluga._ffi import lib
from beluga.pool import Pool
from beluga.transfer import CHUNK, PIECE, Plan

Rows = list[list[int]]
AT = 1 << 20  # of the first chunk, from the pool's data

# Two chunks, of two pieces each: (offset, length, chunk) and (offset, length, first).
PIECES: Rows = [[0, 128, 0], [128, 128, 0], [256, 128, 1], [384, 128, 1]]
CHUNKS: Rows = [[0, 256, 0], [256, 256, 2]]


def verdict(
    pool: Pool,
    pieces: Rows,
    chunks: Rows,
    *,
    sparse: bool = False,
    bases: tuple[int, int] = (0, 0),
) -> bool:
    start = pool.geometry.data_offset + AT
    made = Plan(
        np.array([(4096, start + o, n, c + bases[1]) for o, n, c in pieces], PIECE),
        np.array([(start + o, n, f + bases[0]) for o, n, f in chunks], CHUNK),
        sparse=sparse,
        piece_base=bases[0],
        chunk_base=bases[1],
    )
    return int(lib.bl_plan_check(pool.handle, made.struct())) == 0


def changed(rows: Rows, row: int, column: int, value: int) -> Rows:
    copy = [list(one) for one in rows]
    copy[row][column] = value
    return copy


@pytest.mark.parametrize("bases", [(0, 0), (7, 5)])
def test_arrays_that_satisfy_all_rules_are_a_plan(pool: Pool, bases: tuple[int, int]) -> None:
    assert verdict(pool, PIECES, CHUNKS, bases=bases)
    assert verdict(pool, PIECES, CHUNKS, bases=bases, sparse=True)
    assert verdict(pool, [], [])


# A chunk may start within a line only at the end of the previous chunk.
RAGGED_PIECES: Rows = [[0, 100, 0], [100, 28, 1]]
RAGGED_CHUNKS: Rows = [[0, 100, 0], [100, 28, 1]]
END = 1 << 40

BROKEN: dict[str, tuple[Rows, Rows]] = {
    "a piece of a chunk that is not there": (changed(PIECES, 3, 2, 2), CHUNKS),
    "a first piece of a later chunk": ([*PIECES[2:]], CHUNKS),
    "pieces that go back to a chunk": (
        [[0, 128, 0], [256, 256, 1], [128, 128, 0]],
        [[0, 256, 0], [256, 256, 1]],
    ),
    "a chunk that is skipped": (
        [[0, 256, 0], [512, 256, 2]],
        [[0, 256, 0], [256, 256, 1], [512, 256, 1]],
    ),
    "a chunk without a piece at the end": (PIECES[:2], CHUNKS),
    "chunks without pieces": ([], CHUNKS),
    "a chunk whose first piece is another": (PIECES, changed(CHUNKS, 1, 2, 3)),
    "a first chunk whose first piece is another": (PIECES, changed(CHUNKS, 0, 2, 1)),
    "a chunk that begins beyond the pool": (
        [[END, 128, 0]],
        [[END, 128, 0]],
    ),
    "a piece that begins before its chunk": (changed(PIECES, 2, 0, 192), CHUNKS),
    "a piece that begins after its chunk": (changed(PIECES, 3, 0, 576), CHUNKS),
    "a piece that ends after its chunk": (changed(PIECES, 3, 1, 192), CHUNKS),
}
LOOSE: dict[str, tuple[Rows, Rows]] = {
    "a gap before a piece": (changed(changed(PIECES, 1, 0, 192), 1, 1, 64), CHUNKS),
    "a gap before the first piece": (changed(changed(PIECES, 2, 0, 320), 2, 1, 64), CHUNKS),
    "a gap after the last piece": (changed(PIECES, 3, 1, 64), CHUNKS),
    "a gap at a chunk's end in the midst": (changed(PIECES, 1, 1, 64), CHUNKS),
    "pieces that overlap": (changed(changed(PIECES, 1, 0, 64), 1, 1, 192), CHUNKS),
}


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("name", BROKEN)
def test_arrays_that_violate_one_rule_are_rejected(pool: Pool, name: str, *, sparse: bool) -> None:
    assert not verdict(pool, *BROKEN[name], sparse=sparse)
    assert not verdict(pool, *BROKEN[name], sparse=sparse, bases=(7, 5))


@pytest.mark.parametrize("name", LOOSE)
def test_only_a_sparse_plan_leaves_gaps(pool: Pool, name: str) -> None:
    assert not verdict(pool, *LOOSE[name])
    assert verdict(pool, *LOOSE[name], sparse=True)


def test_every_byte_of_a_chunk_is_inside_the_pool(pool: Pool) -> None:
    """The pieces of a sparse plan may lie in the pool, but its chunk is fetched whole."""
    end = pool.geometry.size - pool.geometry.data_offset - AT
    for sparse in (False, True):
        assert verdict(pool, [[end - 64, 64, 0]], [[end - 64, 64, 0]], sparse=sparse)
    assert not verdict(pool, [[end - 64, 64, 0]], [[end - 64, 65, 0]], sparse=True)
    assert not verdict(pool, [[end, 64, 0]], [[end, 64, 0]], sparse=True)
    assert not verdict(pool, [[end + 64, 64, 0]], [[end + 64, 64, 0]], sparse=True)


@pytest.mark.parametrize("sparse", [False, True])
def test_a_chunk_begins_or_continues_a_line(pool: Pool, *, sparse: bool) -> None:
    assert verdict(pool, RAGGED_PIECES, RAGGED_CHUNKS, sparse=sparse)
    apart = changed(RAGGED_PIECES, 1, 0, 108), changed(RAGGED_CHUNKS, 1, 0, 108)
    assert not verdict(pool, *apart, sparse=sparse)
    assert not verdict(pool, [[36, 28, 0]], [[36, 28, 0]], sparse=sparse)
    assert verdict(pool, [[64, 28, 0]], [[64, 28, 0]], sparse=sparse)
