# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Plans against a byte-by-byte model: every byte of every block once, cut where it must be."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from beluga.errors import LayoutError
from beluga.transfer import Plan, plan_blocks

STRIPE = 2 << 20


def bytes_of(plan: Plan) -> dict[int, tuple[int, int]]:
    """Pool offset of each byte: its engine address and its chunk."""
    found: dict[int, tuple[int, int]] = {}
    for address, offset, length, chunk in plan.pieces.tolist():
        for i in range(length):
            assert offset + i not in found
            found[offset + i] = (address + i, chunk)
    return found


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
    offsets = [STRIPE - 20 * 64 + place * room for place in places]  # some over a stripe's end
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


@given(blocks=st.integers(1, 5), size=st.integers(1, 5000))
def test_parts_are_the_whole_and_share_its_checksums(blocks: int, size: int) -> None:
    addresses = np.arange(blocks * 3, dtype=np.uint64).reshape(blocks, 3) << 20
    plan = plan_blocks(
        addresses, np.array([640, 1000, 200]), np.arange(blocks) * 4096, chunk_size=512
    )
    parts = list(plan.cut(size))
    assert (np.concatenate([part.pieces for part in parts]) == plan.pieces).all()
    assert (np.concatenate([part.chunks for part in parts]) == plan.chunks).all()
    assert plan.checksums is not None
    for part in parts:
        assert part.size <= size or len(part.chunks) == 1
        assert part.checksums is not None
        assert (part.pieces["chunk"] - part.chunk_base < len(part.chunks)).all()
        part.checksums[:] = 7
    assert (plan.checksums == 7).all()


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
def test_what_is_no_plan_is_refused(
    addresses: list[list[int]], sizes: list[int], offsets: list[int], chunk_size: int
) -> None:
    with pytest.raises(LayoutError):
        plan_blocks(np.array(addresses), np.array(sizes), np.array(offsets), chunk_size=chunk_size)
