# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Removals from lower tiers, and their retries."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from beluga.tiers.tier import LowerTier

_PAUSE_S = 0.05
_PAUSE_MAX_S = 5.0


def remove_durably(tier: LowerTier, keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Remove blocks durably. Returns which keys have no block left.

    A program's own tier may lack ``remove_durably``; then call ``remove``, and ``contains`` for the
    remaining ones.
    """
    if hasattr(tier, "remove_durably"):
        return tier.remove_durably(keys)
    tier.remove(keys)
    return ~np.asarray(tier.contains(keys), np.bool_)


def replaces(tier: LowerTier) -> bool:
    """Return whether a save replaces a block whose removal failed."""
    return hasattr(tier, "remove_durably")


class Retries:
    """Schedules retries of a tier's failed removals: after a pause, which doubles each time, or at
    once while they succeed. One batch runs at a time. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = False
        self._pause_s, self._at = _PAUSE_S, 0.0

    def begin(self) -> bool:
        """Return whether the caller should retry some now; it must call :meth:`end` afterwards."""
        with self._lock:
            if self._running or time.monotonic() < self._at:
                return False
            self._running = True
            return True

    def end(self, *, done: bool) -> None:
        """Record whether the tier has executed all removals of the batch."""
        with self._lock:
            self._running = False
            self._pause_s = _PAUSE_S if done else min(2 * self._pause_s, _PAUSE_MAX_S)
            self._at = 0.0 if done else time.monotonic() + self._pause_s
