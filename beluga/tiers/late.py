# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A tier that cannot be opened yet, below a pool that must be served without it meanwhile.

A standby takes over from a server that stands still. That one's process still has the disk, so the
standby cannot open it before the process has ended.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from beluga.errors import TierError
from beluga.metrics import REGISTRY
from beluga.tiers.removals import forget
from beluga.tiers.tier import LowerTier, StoredBlock

_logger = logging.getLogger(__name__)

_BREAKER = REGISTRY.gauge("beluga_tier_breaker_state", "0 is closed, 1 half-open, 2 open.")
_OPEN = 2


class LateTier:
    """Stands for the tier that ``opens`` returns, once it no longer raises TierError: a
    :class:`LowerTier`.

    Until then it has no blocks, saves none and forgets none. ``names`` are those of its disks in
    metrics, where each counts as a tier whose circuit breaker is open; their tiers replace these
    series. ``block_count_max`` is the most blocks that it will have.
    """

    def __init__(
        self, opens: Callable[[], LowerTier], *, names: Sequence[str], block_count_max: int
    ) -> None:
        self.name = "+".join(names)
        self.block_count_max = block_count_max
        self._opens, self._names = opens, tuple(names)
        self._tier: LowerTier | None = None
        self._lost: Callable[[NDArray[np.uint64]], None] = _nobody
        self._why = ""

    def open(self) -> bool:
        """Try to open the tier, and return whether it is open. One thread calls this."""
        if self._tier is not None:
            return True
        try:
            tier = self._opens()
        except TierError as error:
            for name in self._names:
                _BREAKER.set(_OPEN, tier=name)
            if str(error) != self._why:
                _logger.warning("the pool is served without a tier until it opens: %s", error)
                self._why = str(error)
            return False
        tier.on_lost(self._lost)
        self._tier = tier
        if self._why:
            _logger.warning("%s is open now", self.name)
        return True

    def save(self, records: NDArray[np.void], payload: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Save blocks, and return which of them are saved now: none before the tier is open."""
        if self._tier is None:
            return np.zeros(len(records), np.bool_)
        return self._tier.save(records, payload)

    def load(self, keys: NDArray[np.uint64]) -> list[StoredBlock | None]:
        """Load blocks; before the tier is open, all are misses."""
        return [None] * len(keys) if self._tier is None else self._tier.load(keys)

    def contains(self, keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Return which blocks the tier may have: all, before it is open."""
        return np.ones(len(keys), np.bool_) if self._tier is None else self._tier.contains(keys)

    def remove(self, keys: NDArray[np.uint64]) -> int:
        """Remove blocks, and return how many there were: none before the tier is open."""
        return 0 if self._tier is None else self._tier.remove(keys)

    def forget(self, keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Remove blocks for good, and return which keys have none any more: none before the tier is
        open.
        """
        return np.zeros(len(keys), np.bool_) if self._tier is None else forget(self._tier, keys)

    def keys(self) -> NDArray[np.uint64] | None:
        """Return the keys of all blocks that the tier has; None before it is open."""
        return None if self._tier is None else self._tier.keys()

    def on_lost(self, lost: Callable[[NDArray[np.uint64]], None]) -> None:
        """Have ``lost(keys)`` called with blocks that the tier drops by itself."""
        self._lost = lost
        if self._tier is not None:
            self._tier.on_lost(lost)

    def close(self) -> None:
        """Close the tier, or give it up if it is not open. A second call does nothing."""
        if self._tier is not None:
            self._tier.close()
            return
        for name in self._names:
            _BREAKER.remove(tier=name)


def _nobody(keys: NDArray[np.uint64]) -> None:
    """Hear of lost blocks where nobody wants to."""
