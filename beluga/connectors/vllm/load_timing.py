# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Decides which loads the engine waits for: short ones, before a forward. Longer ones run
concurrently with forwards.

A load before the forward gives the fastest first token, but no request decodes meanwhile. With the
setting ``load`` "auto", the loads before one forward take at most ``LIMIT_S`` in total, estimated
from their bytes and the speed of earlier loads. If no other request computes, the limit is
``IDLE_LIMIT_S``: a load concurrent with forwards costs its own request two more steps of the
engine, and there is no forward to overlap with. A request that arrives meanwhile waits no longer
than that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from beluga.tiers import MeasuredBandwidth

if TYPE_CHECKING:
    from collections.abc import Callable

LIMIT_S = 0.004  # total of the loads before one forward
IDLE_LIMIT_S = 0.020  # the same, while no other request computes
_ASSUMED_BYTES_PER_S = 8e9  # before the first load
_MEASURABLE_BYTES = 4 << 20  # a smaller load is mostly overhead, and does not show the speed


class LoadTiming:
    """Decides for each load. ``load`` is the setting, ``block_bytes()`` the bytes of a block on the
    rank that has the most.
    """

    def __init__(self, load: str, block_bytes: Callable[[], int]) -> None:
        self._load, self._block_bytes = load, block_bytes
        self._speed = MeasuredBandwidth(_ASSUMED_BYTES_PER_S)
        self._planned_s = 0.0  # before the next forward

    def concurrent(self, blocks: int, *, idle: bool) -> bool:
        """Return whether a load of this many blocks runs concurrently with forwards. ``idle`` means
        that no other request computes.
        """
        if self._load != "auto":
            return self._load == "async"
        return self._planned_s + self._takes_s(blocks) > (IDLE_LIMIT_S if idle else LIMIT_S)

    def planned(self, blocks: int) -> None:
        """Record that the next forward waits for a load."""
        self._planned_s += self._takes_s(blocks)

    def began(self) -> None:
        """Record that the workers have their orders for the next forward."""
        self._planned_s = 0.0

    def took(self, blocks: int, seconds: float) -> None:
        """Record that a load of this many blocks took this long on the slowest rank."""
        size = blocks * self._block_bytes()
        if size >= _MEASURABLE_BYTES:
            self._speed.note(size, seconds)

    def _takes_s(self, blocks: int) -> float:
        return blocks * self._block_bytes() / self._speed.bytes_per_s
