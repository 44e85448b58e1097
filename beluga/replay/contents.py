# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The contents of blocks in a replay: every word is computed from the block's id and the word's
index.

So a reader can check each byte without a copy, and detects another block's bytes, bytes in the
wrong place, and bytes that were never written. It costs one multiplication per word, which is cheap
beside the copy.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Ids: TypeAlias = npt.NDArray[np.uint64]
Words: TypeAlias = npt.NDArray[np.uint64]
Digests: TypeAlias = npt.NDArray[np.uint8]


class Contents:
    """Keys and bytes of blocks of one size. ``block_size`` is in bytes, a multiple of 8."""

    def __init__(self, block_size: int) -> None:
        word_count = block_size // 8
        self._odds: Words = np.arange(1, 2 * word_count, 2, dtype=np.uint64)
        self._scratch = np.empty((0, word_count), np.uint64)

    def fill(self, ids: Ids, blocks: Words) -> None:
        """Write the blocks of ``ids`` into ``blocks``, one row for each."""
        np.multiply.outer(_mixed(ids), self._odds, out=blocks)

    def wrong_count(self, ids: Ids, blocks: Words) -> int:
        """Return how many rows of ``blocks`` differ from what :meth:`fill` would write for
        ``ids``.
        """
        if len(self._scratch) < len(ids):
            self._scratch = np.empty(blocks.shape, np.uint64)
        expected = self._scratch[: len(ids)]
        self.fill(ids, expected)
        return int((blocks != expected).any(axis=1).sum())


def digests(ids: Ids) -> Digests:
    """Return 16 bytes per id that look random, like an engine's digest of a block."""
    words = np.stack([_mixed(ids), _mixed(ids ^ np.uint64(1 << 63))], axis=1)
    return words.view(np.uint8)


def _mixed(ids: Ids) -> Words:
    """Apply a bijection of 64 bits that leaves no pattern (the finalizer of splitmix64)."""
    z = ids + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Words = z ^ (z >> np.uint64(31))
    return mixed
