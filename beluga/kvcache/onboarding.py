# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Blocks below the pool: where each block is, and waiting for those that are on their way up."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from beluga.index import BlockState

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from beluga.index import MetaClient

_NAP_S = 0.0001
_NAP_MAX_S = 0.005
_NAP_SHARE = 0.125  # of the time waited so far: a wait is at most so much too long
_COMING = BlockState.BELOW, BlockState.PENDING


class Found(int):
    """The number of leading blocks that some tier has.

    ``tiers`` has the fastest tier of each block that was asked for, shape (count,): 0 is none, 1 is
    the pool, and n + 1 is lower tier n, in the order in which the server was given them. A remote
    store is asked only when a block is fetched, so its blocks may be 0 here.
    """

    tiers: NDArray[np.uint8]

    def __new__(cls, tiers: NDArray[np.uint8]) -> Found:
        """Count the leading blocks."""
        absent = tiers.tobytes().find(0)
        found = super().__new__(cls, len(tiers) if absent < 0 else absent)
        found.tiers = tiers
        return found


def fastest(bits: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Convert sets of tiers, as bits, to the numbers of :class:`Found`: the lowest bit plus 1."""
    lowest = bits & -bits
    return np.where(bits == 0, 0, np.log2(np.maximum(lowest, 1)) + 1).astype(np.uint8)


class Onboarding:
    """Decides for one get whether it asks lower tiers for more, waits, or gives up."""

    def __init__(self, meta: MetaClient, timeout_s: float) -> None:
        self._meta, self._timeout_s = meta, timeout_s
        self._since_s = 0.0  # when the wait began; 0: it did not
        self._asked = False

    def more(self, keys: NDArray[np.uint64], state: BlockState, *, progress: bool) -> bool:
        """Return whether the get shall try again, after a nap if the next block is on its way.

        ``keys`` are those of the blocks that are missing, and ``state`` is that of the first.
        ``progress`` says that the last try has fetched blocks.
        """
        now_s = time.monotonic()
        if progress or not self._since_s:
            self._since_s, self._asked = now_s, False
        waited_s = now_s - self._since_s
        if state not in _COMING or waited_s > self._timeout_s:
            return False
        if state == BlockState.BELOW or not self._asked:  # it may have been evicted again
            self._asked = True
            return self._meta.onboard(keys) > 0
        time.sleep(min(max(waited_s * _NAP_SHARE, _NAP_S), _NAP_MAX_S))
        return True
