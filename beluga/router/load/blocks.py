# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The distinct blocks that the active requests of one worker hold. A shared block counts once.

Blocks are named by sequence hashes, each of which stands for its whole prefix. So the set of held
blocks is closed under prefixes, and reference counts never grow along a request; a binary search
suffices for both.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Sequence


def leading(chain: Sequence[int], held: Container[int]) -> int:
    """Return how many leading elements of a chain are in a set that is closed under prefixes."""
    if not chain or chain[0] not in held:
        return 0
    if chain[-1] in held:
        return len(chain)
    return bisect_left(range(len(chain)), True, key=lambda at: chain[at] not in held)


class ActiveBlocks:
    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._faded: dict[
            int, float
        ] = {}  # for blocks of only one request: how much less than 1 they weigh

    def __len__(self) -> int:
        """Return the number of distinct blocks, with the faded ones at their weight, rounded."""
        if self._faded:
            return round(len(self._counts) - sum(self._faded.values()))
        return len(self._counts)

    def held(self, sequence: Sequence[int]) -> int:
        """Return how many leading blocks of a request are held already."""
        return leading(sequence, self._counts)

    def add(self, sequence: Sequence[int]) -> None:
        counts = self._counts
        for block in sequence:
            counts[block] = counts.get(block, 0) + 1
        if self._faded:
            for block in sequence:
                self._faded.pop(block, None)

    def remove(self, sequence: Sequence[int]) -> None:
        counts = self._counts
        for block in sequence:
            left = counts[block] - 1
            if left:
                counts[block] = left
            else:
                del counts[block]
        if self._faded:
            for block in sequence:
                self._faded.pop(block, None)

    def fade(self, sequence: Sequence[int], weight: float) -> None:
        """Give the blocks that only this request holds, its exclusive suffix, a weight of 0..1
        each.
        """
        for block in reversed(sequence):
            if self._counts[block] > 1:
                break
            self._faded[block] = 1 - weight
