# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Contents of replayed blocks: every kind of wrong byte is detected."""

from __future__ import annotations

import numpy as np
import pytest

from beluga.replay.blocks import Contents, digests

IDS = np.array([0, 1, 2, 1 << 40], np.uint64)


@pytest.fixture
def blocks() -> np.ndarray:
    filled = np.empty((len(IDS), 512), np.uint64)
    Contents(4096).fill(IDS, filled)
    return filled


def test_filled_blocks_have_no_errors(blocks: np.ndarray) -> None:
    assert Contents(4096).wrong_count(IDS, blocks) == 0


@pytest.mark.parametrize("place", [0, 1, 2047, 4095])
def test_one_wrong_bit_is_detected(blocks: np.ndarray, place: int) -> None:
    blocks.view(np.uint8)[2, place] ^= 1
    assert Contents(4096).wrong_count(IDS, blocks) == 1


def test_another_blocks_bytes_are_detected(blocks: np.ndarray) -> None:
    assert Contents(4096).wrong_count(IDS[::-1].copy(), blocks) == len(IDS)


def test_lines_in_the_wrong_place_are_detected(blocks: np.ndarray) -> None:
    blocks[1] = np.roll(blocks[1], 8)
    assert Contents(4096).wrong_count(IDS, blocks) == 1


def test_bytes_that_were_never_written_are_detected() -> None:
    assert Contents(4096).wrong_count(IDS, np.zeros((len(IDS), 512), np.uint64)) == len(IDS)


def test_digests_are_distinct_and_reproducible() -> None:
    ids = np.arange(10_000, dtype=np.uint64)
    found = digests(ids)
    assert found.shape == (10_000, 16)
    assert len({bytes(row) for row in found}) == 10_000
    assert bytes(digests(ids[5:6])[0]) == bytes(found[5])


def test_ids_are_mixed_like_splitmix64() -> None:
    """The first outputs of seed 0 are published, and other words follow from them."""
    assert digests(np.array([0], np.uint64)).view(np.uint64)[0, 0] == 0xE220A8397B1DCDAF
    filled = np.empty((1, 8), np.uint64)
    Contents(64).fill(np.array([0], np.uint64), filled)
    assert [int(word) for word in filled[0, :3]] == [
        0xE220A8397B1DCDAF * odd % (1 << 64) for odd in (1, 3, 5)
    ]
