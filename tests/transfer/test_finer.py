# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Plans without checksums that are split into smaller pieces have the same bytes, in valid
chunks.
"""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from beluga.transfer import Plan, plan_blocks, plan_rows
from beluga.transfer.plan import finer

STRIPE = 2 << 20


def moved(plan: Plan) -> list[tuple[int, int]]:
    """Return address and offset of every byte, in order."""
    return [
        (address + i, offset + i)
        for address, offset, length, _ in plan.pieces.tolist()
        for i in range(length)
    ]


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 900), min_size=1, max_size=8),
    blocks=st.integers(1, 3),
    size=st.integers(1, 1500),
    aligned=st.booleans(),
)
def test_a_finer_plan_has_the_same_bytes(
    sizes: list[int], blocks: int, size: int, aligned: bool
) -> None:
    if aligned:
        sizes = [64 * -(-part // 20) for part in sizes]
        size = 64 * -(-size // 20)
    room = -(-sum(sizes) // 64) * 64
    addresses = np.arange(blocks * len(sizes), dtype=np.uint64).reshape(blocks, -1) << 20
    offsets = STRIPE - 640 + np.arange(blocks) * room
    plan = plan_blocks(addresses, np.array(sizes), offsets)
    cut = finer(plan, size)
    assert moved(cut) == moved(plan)
    firsts = [*cut.chunks["first"].tolist(), len(cut.pieces)]
    for index, (offset, length, first) in enumerate(cut.chunks.tolist()):
        pieces = cut.pieces[first : firsts[index + 1]]
        assert offset % 64 == 0
        assert (pieces["chunk"] == index).all()
        at = offset
        for _, place, piece, _ in pieces.tolist():
            assert place == at
            assert place // STRIPE == (place + piece - 1) // STRIPE
            at += piece
        assert at == offset + length
        last = offset + length
        # otherwise zeros would be written there
        assert last % 64 == 0 or (offsets + sum(sizes) == last).any()
    if aligned:
        assert cut.chunks["length"].max() <= max(size, 64)
    parts = list(cut.cut(size))
    assert [byte for part in parts for byte in moved(part)] == moved(plan)


def test_rows_are_cut_and_stay_in_their_chunks() -> None:
    starts = np.arange(20) * 1000
    plan = plan_rows(
        (np.arange(20) * 200 + (1 << 30)).astype(np.uint64),
        np.zeros(20, np.int64),
        starts,
        np.full(20, 200),
        offsets=np.array([STRIPE], np.uint64),
        length=32_000,
    )
    cut = finer(plan, 700)
    assert moved(cut) == moved(plan)
    assert cut.sparse
    parts = list(cut.cut(700))
    assert len(parts) > 4
    assert all(part.size <= 700 for part in parts)
    assert (cut.chunks["offset"] == STRIPE).all()
    assert (cut.chunks["length"] == plan.chunks["length"][0]).all()


def test_chunks_with_checksums_stay_whole() -> None:
    plan = plan_blocks(np.array([[0]], np.uint64), np.array([4096]), np.array([0]), chunk_size=2048)
    assert finer(plan, 64) is plan


def test_parts_of_plans_can_be_cut() -> None:
    addresses = np.arange(4, dtype=np.uint64).reshape(4, 1) << 20
    plan = plan_blocks(addresses, np.array([4096]), np.arange(4) * 4096)
    parts = list(plan.cut(8192))
    assert len(parts) == 2
    for part in parts:
        assert moved(finer(part, 512)) == moved(part)
        assert len(finer(part, 512).chunks) >= 16
