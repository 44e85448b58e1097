# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Plans, compared with a model of bytes: every byte occurs once, cuts are right, and each rule of
pieces and chunks is checked.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from beluga._ffi import lib
from beluga.errors import LayoutError
from beluga.pool import Pool
from beluga.transfer import CHUNK, PIECE, Plan, plan_blocks, plan_rows

# ---- Plans are compared with a model of bytes: every byte occurs once, and cuts are right.


STRIPE = 2 << 20


def bytes_of(plan: Plan) -> dict[int, tuple[int, int]]:
    """Return the engine address and the chunk of each byte, by pool offset."""
    found: dict[int, tuple[int, int]] = {}
    for address, offset, length, chunk in plan.pieces.tolist():
        for i in range(length):
            assert offset + i not in found
            found[offset + i] = (address + i, chunk)
    return found


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=6),
    places=st.lists(st.integers(0, 40), min_size=1, max_size=3, unique=True),
    chunk_lines=st.integers(0, 4),
)
def test_every_byte_of_every_block_is_in_one_piece(
    sizes: list[int], places: list[int], chunk_lines: int
) -> None:
    length, chunk_size = sum(sizes), chunk_lines * 64
    room = -(-length // 64) * 64
    # some across the end of a stripe
    offsets = [STRIPE - 20 * 64 + place * room for place in places]
    addresses = np.arange(len(places) * len(sizes), dtype=np.uint64).reshape(-1, len(sizes)) << 20
    plan = plan_blocks(addresses, np.array(sizes), np.array(offsets), chunk_size=chunk_size)
    found = bytes_of(plan)
    per_block = -(-length // (chunk_size or length))
    for block, offset in enumerate(offsets):
        at = 0
        for fragment, size in enumerate(sizes):
            for i in range(size):
                address, chunk = found.pop(offset + at)
                assert address == int(addresses[block, fragment]) + i
                assert chunk == block * per_block + at // (chunk_size or length)
                at += 1
    assert not found
    first, last = plan.pieces["offset"], plan.pieces["offset"] + plan.pieces["length"] - 1
    assert (first // STRIPE == last // STRIPE).all()
    chunks = plan.chunks[plan.pieces["chunk"]]
    assert (plan.pieces["offset"] >= chunks["offset"]).all()
    assert (last < chunks["offset"] + chunks["length"]).all()
    assert (plan.checksums is None) == (chunk_size == 0)


@pytest.mark.parametrize(
    ("addresses", "sizes", "offsets", "chunk_size"),
    [
        ([[1, 2]], [64], [0], 0),
        ([[1]], [64], [0, 64], 0),
        ([[1]], [0], [0], 0),
        ([[1]], [64], [32], 0),
        ([[1]], [64], [0], 100),
        (np.empty((0, 1)), [64], [], 0),
    ],
)
def test_an_invalid_plan_is_rejected(
    addresses: list[list[int]], sizes: list[int], offsets: list[int], chunk_size: int
) -> None:
    with pytest.raises(LayoutError):
        plan_blocks(np.array(addresses), np.array(sizes), np.array(offsets), chunk_size=chunk_size)


@settings(deadline=None)
@given(
    length=st.integers(1, 900),
    chunk_lines=st.integers(1, 4),
    data=st.data(),
    verify=st.booleans(),
)
def test_every_byte_of_every_row_is_in_one_piece(
    length: int, chunk_lines: int, data: st.DataObject, *, verify: bool
) -> None:
    chunk_size = chunk_lines * 64
    room = -(-length // 64) * 64
    offsets = np.array([STRIPE - 5 * 64, STRIPE - 5 * 64 + room, 3 * STRIPE], np.uint64)
    row = st.tuples(st.integers(0, 2), st.integers(0, length - 1), st.integers(1, 300))
    rows = [
        (block, place, min(size, length - place))
        for block, place, size in data.draw(st.lists(row, min_size=1, max_size=8))
    ]
    blocks, places, sizes = (np.array(column) for column in zip(*rows, strict=True))
    addresses = np.arange(1, len(rows) + 1, dtype=np.uint64) << 20
    per_block = -(-length // chunk_size)
    sums = np.arange(3 * per_block, dtype=np.uint32).reshape(3, per_block) if verify else None
    plan = plan_rows(
        addresses,
        blocks,
        places,
        sizes,
        offsets=offsets,
        length=length,
        chunk_size=chunk_size,
        checksums=sums,
    )
    assert plan.sparse
    found: dict[int, int] = {}
    for address, offset, size, chunk in plan.pieces.tolist():
        start, chunk_length, _ = plan.chunks[chunk].tolist()
        assert start <= offset
        assert offset + size <= start + chunk_length
        assert offset // STRIPE == (offset + size - 1) // STRIPE
        for i in range(size):
            assert address + i not in found
            found[address + i] = offset + i
    wanted = {
        int(address) + i: int(offsets[block]) + place + i
        for address, (block, place, size) in zip(addresses, rows, strict=True)
        for i in range(size)
    }
    assert found == wanted
    assert (plan.pieces["chunk"][plan.chunks["first"]] == np.arange(len(plan.chunks))).all()
    assert (np.diff(plan.pieces["chunk"].astype(int)) >= 0).all()
    if sums is None:
        assert plan.checksums is None
        return
    touched = {
        (block, at // chunk_size)
        for block, place, size in rows
        for at in range(place, place + size)
    }
    assert plan.checksums is not None
    assert plan.checksums.tolist() == [int(sums[block, c]) for block, c in sorted(touched)]
    starts = [int(offsets[block]) + c * chunk_size for block, c in sorted(touched)]
    assert plan.chunks["offset"].tolist() == starts


@pytest.mark.parametrize(
    "change",
    [
        {"blocks": [1]},
        {"blocks": [-1]},
        {"places": [-1]},
        {"places": [1000]},
        {"sizes": [0]},
        {"sizes": [64, 64]},
        {"offsets": [32]},
        {"chunk_size": 100},
        {"chunk_size": 256},
    ],
    ids=str,
)
def test_rows_that_are_not_in_their_blocks_are_refused(change: dict[str, Any]) -> None:
    good: dict[str, Any] = {
        "blocks": [0],
        "places": [0],
        "sizes": [64],
        "offsets": [64],
        "length": 1000,
    }
    good |= {"chunk_size": 512, "checksums": np.zeros((1, 2), np.uint32)}
    plan_rows(np.array([4096]), **good)
    wrong = good | change
    with pytest.raises(LayoutError):
        plan_rows(np.array([4096]), **wrong)


def test_a_plan_that_leaves_the_pool_is_refused() -> None:
    plan = plan_blocks(np.array([[4096]]), np.array([1000]), np.array([1 << 20]))
    plan.refuse_beyond((1 << 20) + 1000)
    with pytest.raises(LayoutError, match="1049576 bytes; the pool has 1049575"):
        plan.refuse_beyond((1 << 20) + 999)


@pytest.mark.parametrize("size", [1, STRIPE - 1, STRIPE, STRIPE + 1, 3 * STRIPE + 5, 70 << 20])
@pytest.mark.parametrize("chunk_size", [0, 16384, STRIPE + 64])
def test_long_fragments_are_cut_at_each_stripe(size: int, chunk_size: int) -> None:
    sizes = np.array([7, size, 64])
    offsets = np.array([STRIPE - 64, 60 * STRIPE, 101 * STRIPE + 640])
    addresses = (np.arange(9, dtype=np.uint64).reshape(3, 3) << 30) + np.uint64(1)
    plan = plan_blocks(addresses, sizes, offsets, chunk_size=chunk_size)
    length, chunk = int(sizes.sum()), chunk_size or int(sizes.sum())
    starts = np.cumsum(sizes) - sizes
    wanted = [
        (int(addresses[block, part]) + at - int(starts[part]), int(offset) + at, end - at)
        for block, offset in enumerate(offsets)
        for edges in [
            sorted(
                {*starts.tolist(), *range(0, length, chunk), length}
                | {*range(-int(offset) % STRIPE, length, STRIPE)}
            )
        ]
        for at, end in itertools.pairwise(edges)
        for part in [int(np.searchsorted(starts, at, side="right")) - 1]
    ]
    found = [tuple(piece)[:3] for piece in plan.pieces.tolist()]
    assert found == wanted
    assert plan.pieces["chunk"][plan.chunks["first"]].tolist() == [*range(len(plan.chunks))]


# ---- Plans without checksums that are split into smaller pieces have the same bytes, in valid
# chunks.


def moved(plan: Plan) -> list[tuple[int, int]]:
    """Return address and offset of every byte, in order."""
    return [
        (address + i, offset + i)
        for address, offset, length, _ in plan.pieces.tolist()
        for i in range(length)
    ]


# ---- Each rule of a plan's pieces and chunks (``bl_plan_piece_valid``) is violated alone.


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
