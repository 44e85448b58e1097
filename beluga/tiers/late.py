# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A tier that cannot be opened yet, below a pool that must be served without it meanwhile.

A standby takes over from a server whose heartbeat has stopped. The old process still has the disk
open, so the standby cannot open it before that process has ended.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from beluga.errors import TierError
from beluga.metrics import REGISTRY
from beluga.tiers.removals import remove_durably
from beluga.tiers.tier import LowerTier, StoredBlock

_logger = logging.getLogger(__name__)

_BREAKER = REGISTRY.gauge("beluga_tier_breaker_state", "0 is closed, 1 half-open, 2 open.")
_OPEN = 2


class LateTier:
    """Replaces the tier that ``opens`` returns until it no longer raises TierError: a
    :class:`LowerTier`.

    Until then it has no blocks, saves none and removes none. ``names`` are its disks' names in
    metrics, where each counts as a tier with an open circuit breaker; the real tiers replace these
    series. ``block_count_max`` is the most blocks that the tier will have.
    """

    def __init__(
        self, opens: Callable[[], LowerTier], *, names: Sequence[str], block_count_max: int
    ) -> None:
        self.name = "+".join(names)
        self.block_count_max = block_count_max
        self._opens, self._names = opens, tuple(names)
        self._tier: LowerTier | None = None
        self._lost: Callable[[NDArray[np.uint64]], None] = _ignore
        self._why = ""

    def open(self) -> bool:
        """Try to open the tier. Returns whether it is open. Only one thread may call this."""
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
        """Save blocks. Returns which of them are saved now, or were already: none before the tier
        is open.
        """
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
        """Remove blocks. Returns how many there were: none before the tier is open."""
        return 0 if self._tier is None else self._tier.remove(keys)

    def remove_durably(self, keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Remove blocks durably. Returns which keys have no block left: none before the tier is
        open.
        """
        return (
            np.zeros(len(keys), np.bool_)
            if self._tier is None
            else remove_durably(self._tier, keys)
        )

    def keys(self) -> NDArray[np.uint64] | None:
        """Return the keys of all blocks that the tier has; None before it is open."""
        return None if self._tier is None else self._tier.keys()

    def on_lost(self, lost: Callable[[NDArray[np.uint64]], None]) -> None:
        """Register ``lost(keys)``, which is called for blocks that the tier drops."""
        self._lost = lost
        if self._tier is not None:
            self._tier.on_lost(lost)

    def close(self) -> None:
        """Close the tier, or stop trying to open it. Idempotent."""
        if self._tier is not None:
            self._tier.close()
            return
        for name in self._names:
            _BREAKER.remove(tier=name)


def _ignore(keys: NDArray[np.uint64]) -> None:
    """No-op callback."""
