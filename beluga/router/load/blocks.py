# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The distinct blocks that the active requests of one worker hold. A shared block counts once.

Blocks are named by sequence hashes, each of which stands for its whole prefix. So the set of held
blocks is closed under prefixes, and reference counts never grow along a request; a binary search
suffices for both.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Container, Sequence

_MOST = 4  # holders of a block; with more of them a request holds it alone for 0.3 % of its time


def alone(holders: int) -> float:
    """Return the share of its time in which one more request holds a block alone.

    Let all requests run for a time T, which is distributed exponentially. After t seconds each of
    the k holders has ended with probability u = 1 - exp(-t / T). If requests for the block come as
    often as they end, k * u of those that came since are active, and none of them is with
    probability exp(-k * u). So the share is the integral of u**k * exp(-k * u) over u from 0 to 1,
    for which there is a closed form: 1, 0.26, 0.08 and 0.03 for 0 to 3 holders.
    """
    if not holders:
        return 1.0
    none = math.exp(-holders) * sum(
        float(holders) ** j / math.factorial(j) for j in range(holders + 1)
    )
    return (1 - none) * math.factorial(holders) / float(holders) ** (holders + 1)


_ALONE = [alone(holders) for holders in range(_MOST + 1)]


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

    def held_alone(self, sequence: Sequence[int], held: int) -> float:
        """Return how many of the first ``held`` blocks of a request, which others hold, it would
        hold alone, in the mean over its time.
        """
        counts, blocks, end = self._counts, 0.0, held
        while end and (holders := counts[sequence[end - 1]]) <= _MOST:
            start = bisect_left(range(end), -holders, key=lambda at: -counts[sequence[at]])
            blocks += (end - start) * _ALONE[holders]
            end = start
        return blocks

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
