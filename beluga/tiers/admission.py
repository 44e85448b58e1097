# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Which committed blocks a lower tier saves.

A write to a disk takes its bandwidth and its life, so a block that nobody asks for again should not
be written. Every policy judges whole batches of keys with numpy, and has a bounded memory. A block
that a lower tier has is not offered again: a key that is offered twice was missed by all tiers.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import numpy as np

from beluga.errors import TierError

if TYPE_CHECKING:
    from numpy.typing import NDArray

REMEMBERED = 1 << 20
"""The keys that a policy remembers by default: 8 MiB, or 4 MiB for ``sketch``."""

BREAK_EVEN = 0.01
"""The share of reused blocks from which on ``adaptive`` saves all. It is low because a write takes
only disk time that is to spare, and wear, while a hit saves time of a GPU."""

TRIAL = 4096
"""The first blocks that ``adaptive`` saves in any case. What is reused first was often committed
first, such as a prompt that all share, and nothing is known of the workload before."""

_WINDOW = 1 << 14  # blocks over which adaptive averages
_ROWS = 4
_COUNT_MAX = 15
_MULTIPLIERS = np.array(
    [0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93], np.uint64
)


class Admission(Protocol):
    """Says which blocks are saved. One thread calls ``admit``; any may call ``hit``."""

    def admit(self, keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Return which of these committed blocks, of shape (count, 2), are saved."""

    def hit(self, count: int) -> None:
        """Note that a lower tier served so many blocks."""


class Always:
    """Saves everything."""

    def admit(self, keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Return True for each."""
        return np.ones(len(keys), np.bool_)

    def hit(self, count: int) -> None:
        """Learn nothing from it."""


class SecondTouch:
    """Saves a block that is committed again: it was evicted too early once. The table is direct
    mapped, so that a new key displaces an older one, and keys are forgotten one by one.
    """

    def __init__(self, remembered: int = REMEMBERED) -> None:
        size = _power_of_two(remembered)
        self._tags = np.zeros(size, np.uint64)
        self._mask = np.uint64(size - 1)

    def admit(self, keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Return which of the keys were offered before, and remember all."""
        places = keys[:, 0] & self._mask
        tags = keys[:, 1] | np.uint64(1)  # 0 is an empty place
        again: NDArray[np.bool_] = self._tags[places] == tags
        self._tags[places] = tags
        return again

    def hit(self, count: int) -> None:
        """Learn nothing from it."""


class Sketch:
    """Saves a block that was offered often enough lately, as TinyLFU does: a count-min sketch
    counts keys, and all counts are halved from time to time.
    """

    def __init__(self, remembered: int = REMEMBERED, least: int = 2) -> None:
        self._width = _power_of_two(remembered)
        self._counts = np.zeros((_ROWS, self._width), np.uint8)
        self._shift = np.uint64(64 - (self._width.bit_length() - 1))
        self._least = least
        self._left = remembered  # keys until the counts are halved

    def admit(self, keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Return which of the keys were offered ``least`` times, with this one, and count all."""
        mixed = keys[:, 0] ^ keys[:, 1]
        places = [(mixed * factor) >> self._shift for factor in _MULTIPLIERS]
        found = [row[place] for row, place in zip(self._counts, places, strict=True)]
        count = np.minimum(np.minimum.reduce(found) + np.uint8(1), np.uint8(_COUNT_MAX))
        for row, place, old in zip(self._counts, places, found, strict=True):
            row[place] = np.maximum(old, count)
        self._left -= len(keys)
        if self._left <= 0:
            self._counts >>= 1
            self._left = self._width
        admitted: NDArray[np.bool_] = count >= self._least
        return admitted

    def hit(self, count: int) -> None:
        """Learn nothing from it."""


class Adaptive:
    """Saves everything while enough blocks are reused, and else only what is committed again.

    The share of reuse is that of blocks that a lower tier served, or could have served because they
    are committed again, averaged over some 16 k blocks. Nothing is committed again before the pool
    has evicted it. So until ``warm_up`` blocks were committed, which should be twice the pool's,
    hits in the pool count, too; ``pool_hits`` returns how many there were so far.

    The first ``trial`` blocks are saved anyhow. Example: a workload without reuse is not saved
    behind them; one whose requests share a prompt and nothing else is saved until the warm-up is
    over.
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
            raise TierError(f"a break-even share is between 0 and 1, not {break_even}")
        self._seen = SecondTouch(remembered)
        self._break_even = break_even
        self._trial = trial
        self._warm_up = warm_up
        self._pool_hits = pool_hits
        self._committed = 0  # during the warm-up
        self._lock = threading.Lock()
        self._hits = 0
        self._reused = 0.0
        self._asked = 0.0

    @property
    def share(self) -> float:
        """The share of reused blocks now."""
        return self._reused / self._asked if self._asked else 0.0

    def admit(self, keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Return all, or those that were offered before, and learn."""
        again = self._seen.admit(keys)
        with self._lock:
            hits, self._hits = self._hits, 0
        decay = math.exp(-(len(keys) + hits) / _WINDOW)
        self._reused = self._reused * decay + int(np.count_nonzero(again)) + hits
        self._asked = self._asked * decay + len(keys) + hits
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
        """Count it as reuse."""
        with self._lock:
            self._hits += count


ADMISSIONS: dict[str, type[Always | SecondTouch | Sketch | Adaptive]] = {
    "adaptive": Adaptive,
    "always": Always,
    "second-touch": SecondTouch,
    "sketch": Sketch,
}
"""The policies by name; the first is the default."""


def _power_of_two(least: int) -> int:
    if not 1 <= least <= 1 << 32:
        raise TierError(f"a policy remembers 1 to 2**32 keys, not {least}")
    return 1 << max(1, (least - 1).bit_length())
