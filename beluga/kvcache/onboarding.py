# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Blocks in lower tiers: where each block is, and the wait for those being fetched."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from beluga.index import BlockState

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from beluga.index import IndexClient

_NAP_S = 0.0001
_NAP_MAX_S = 0.005
# The next pause, as a fraction of the time waited so far: the bound of the excess wait
_NAP_SHARE = 0.125


class LookupResult(int):
    """The number of leading blocks that some tier has.

    ``tiers`` is the fastest tier of each block, shape (count,): 0 is none, 1 is the pool, and n + 1
    is lower tier n, in the order in which the server was given them. A remote store is only queried
    when a block is fetched, so its blocks may be 0 here.
    """

    tiers: NDArray[np.uint8]

    def __new__(cls, tiers: NDArray[np.uint8]) -> LookupResult:
        """Count the leading blocks."""
        absent = tiers.tobytes().find(0)
        found = super().__new__(cls, len(tiers) if absent < 0 else absent)
        found.tiers = tiers
        return found


def fastest(bits: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Convert bit sets of tiers to the numbers of :class:`LookupResult`: the lowest bit plus 1."""
    lowest = bits & -bits
    return np.where(bits == 0, 0, np.log2(np.maximum(lowest, 1)) + 1).astype(np.uint8)


def follow(
    index: IndexClient,
    keys: NDArray[np.uint64],
    begun: tuple[int, BlockState],
    advance: Callable[[int], tuple[int, BlockState]],
    timeout_s: float,
) -> int:
    """Advance over the leading keys, and wait for blocks that are being fetched from lower tiers.

    ``advance(done)`` processes the blocks after the first ``done`` ones, as far as the pool has
    them. It returns their number and the state of the next block; ``begun`` is the result of the
    first such call. Returns how many blocks were processed in total. The wait ends after
    ``timeout_s`` seconds without progress.
    """
    done, state = begun
    since_s, has_requested = time.monotonic(), False
    while done < len(keys) and state.is_coming:
        waited_s = time.monotonic() - since_s
        if waited_s > timeout_s:
            break
        if state == BlockState.BELOW or not has_requested:  # the block may have been evicted again
            has_requested = True
            if not index.onboard(keys[done:]):
                break
        else:
            time.sleep(min(max(waited_s * _NAP_SHARE, _NAP_S), _NAP_MAX_S))
        count, state = advance(done)
        if count:
            done += count
            since_s, has_requested = time.monotonic(), False
    return done
