# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Admission policies: which committed blocks a lower tier saves.

A write to a disk costs bandwidth and wear, so a block that is never requested again should not be
written. Each policy processes whole batches of keys with numpy, in bounded memory. The server does
not offer a block that a lower tier already has, so a key that is offered twice was a miss in all
tiers.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import numpy as np

from beluga import choices
from beluga.errors import TierError

if TYPE_CHECKING:
    from numpy.typing import NDArray

REMEMBERED = 1 << 20
"""The number of keys that a policy remembers by default: 8 MiB, or 4 MiB for ``sketch``."""

REMEMBERED_MAX = 1 << 32
"""The largest number of keys that a policy can remember."""

BREAK_EVEN = 0.01
"""The share of reused blocks above which ``adaptive`` saves everything. It is low because a write
costs spare disk time and wear, while a hit saves GPU time.
"""

TRIAL = 4096
"""The number of first blocks that ``adaptive`` always saves. Blocks that are reused first, such as
a common prompt, were often committed first, when nothing is known about the workload.
"""

_WINDOW = 1 << 14  # window of the average of adaptive, in blocks
_ROWS = 4
_COUNT_MAX = 15
_MULTIPLIERS = np.array(
    [0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93], np.uint64
)


class Admission(Protocol):
    """Decides which blocks are saved. One thread calls ``admit``; any thread may call ``hit``."""

    def admit(self, keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Return which of these committed blocks, of shape (count, 2), to save."""

    def hit(self, count: int) -> None:
        """Count blocks that a lower tier served."""


class Always:
    """Admits every block."""

    def admit(self, keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Return True for each key."""
        return np.ones(len(keys), np.bool_)

    def hit(self, count: int) -> None:
        """Do nothing."""


class SecondTouch:
    """Saves a block when it is committed again, because its eviction was then too early. The table
    is direct mapped: a new key replaces an older one, so keys are dropped one at a time.
    """

    def __init__(self, remembered: int = REMEMBERED) -> None:
        size = _power_of_two(remembered)
        self._tags = np.zeros(size, np.uint64)
        self._mask = np.uint64(size - 1)

    def admit(self, keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Return which of the keys were offered before, and remember all of them."""
        slots = keys[:, 0] & self._mask
        tags = keys[:, 1] | np.uint64(1)  # 0 is an empty slot
        again: NDArray[np.bool_] = self._tags[slots] == tags
        self._tags[slots] = tags
        return again

    def hit(self, count: int) -> None:
        """Do nothing."""


class Sketch:
    """Saves a block that was offered often enough recently, like TinyLFU: a count-min sketch counts
    keys, and all counts are halved periodically.
    """

    def __init__(self, remembered: int = REMEMBERED, count_min: int = 2) -> None:
        self._width = _power_of_two(remembered)
        self._counts = np.zeros((_ROWS, self._width), np.uint8)
        self._shift = np.uint64(64 - (self._width.bit_length() - 1))
        self._count_min = count_min
        self._remaining = remembered  # keys until the counts are halved

    def admit(self, keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Return which of the keys were offered at least ``count_min`` times, including this one,
        and count all of them.
        """
        mixed = keys[:, 0] ^ keys[:, 1]
        slots = [(mixed * factor) >> self._shift for factor in _MULTIPLIERS]
        counts = [row[slot] for row, slot in zip(self._counts, slots, strict=True)]
        count = np.minimum(np.minimum.reduce(counts) + np.uint8(1), np.uint8(_COUNT_MAX))
        for row, slot, old in zip(self._counts, slots, counts, strict=True):
            row[slot] = np.maximum(old, count)
        self._remaining -= len(keys)
        if self._remaining <= 0:
            self._counts >>= 1
            self._remaining = self._width
        admitted: NDArray[np.bool_] = count >= self._count_min
        return admitted

    def hit(self, count: int) -> None:
        """Do nothing."""


class Adaptive:
    """Saves everything while enough blocks are reused, and otherwise only blocks that are committed
    again.

    The reuse share is the share of blocks that a lower tier served, or could have served because
    they are committed again, averaged over about 16 k blocks. No block is committed again before
    the pool has evicted it. So until ``warm_up`` blocks were committed (set it to twice the pool's
    blocks), hits in the pool count as well; ``pool_hits`` returns their number so far.

    The first ``trial`` blocks are always saved. Examples: for a workload without reuse, nothing
    after them is saved. If requests share only a prompt, everything is saved until the warm-up
    ends.
    """

    def __init__(
        self,
        remembered: int = REMEMBERED,
        *,
        break_even: float = BREAK_EVEN,
        trial: int = TRIAL,
        warm_up: int = REMEMBERED,
        pool_hits: Callable[[], int] | None = None,
    ) -> None:
        if not 0 < break_even < 1:
            raise TierError(f"break_even is {break_even}, but must be between 0 and 1")
        self._seen = SecondTouch(remembered)
        self._break_even = break_even
        self._trial = trial
        self._warm_up = warm_up
        self._pool_hits = pool_hits
        self._committed = 0  # during the warm-up
        self._lock = threading.Lock()
        self._hits = 0
        self._reused = 0.0
        self._offered_count = 0.0

    @property
    def share(self) -> float:
        """The current share of reused blocks."""
        return self._reused / self._offered_count if self._offered_count else 0.0

    def admit(self, keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Return all keys, or those that were offered before, and update the average."""
        again = self._seen.admit(keys)
        with self._lock:
            hits, self._hits = self._hits, 0
        decay = math.exp(-(len(keys) + hits) / _WINDOW)
        self._reused = self._reused * decay + int(np.count_nonzero(again)) + hits
        self._offered_count = self._offered_count * decay + len(keys) + hits
        warms_up = self._warms_up(len(keys))
        self._trial -= len(keys)
        if self._trial >= 0 or warms_up or self.share >= self._break_even:
            return np.ones(len(keys), np.bool_)
        return again

    def _warms_up(self, count: int) -> bool:
        """Return whether hits in the pool still count, and are enough."""
        if self._warm_up <= 0 or self._pool_hits is None:
            return False
        self._warm_up -= count
        self._committed += count
        hits = self._pool_hits()
        return hits >= self._break_even * (hits + self._committed)

    def hit(self, count: int) -> None:
        """Count the hits as reuse."""
        with self._lock:
            self._hits += count


ADMISSIONS: dict[str, type[Always | SecondTouch | Sketch | Adaptive]] = dict(
    zip(choices.ADMISSIONS, (Adaptive, Always, SecondTouch, Sketch), strict=True)
)
"""The policies by name. The first one is the default."""


def _power_of_two(count: int) -> int:
    if not 1 <= count <= REMEMBERED_MAX:
        raise TierError(
            f"a policy can remember 1 to 2**32 keys, not {count}; give a number in this range"
        )
    return 1 << max(1, (count - 1).bit_length())
