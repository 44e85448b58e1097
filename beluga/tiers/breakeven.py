# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Decides whether to fetch blocks from a lower tier or to recompute them.

After ``cached`` tokens, a model computes ``new`` tokens in ``b*new + c*new*(cached + new/2)``. The
fixed time of a prefill (``a``) does not count, because the rest of the prompt needs it anyway.

Example: Qwen3-32B on an H200 computes a token in at least 0.077 ms, and has 256 KiB of KV for it. A
tier of 26 GB/s transfers it in 0.010 ms: fetch. A tier of 2 GB/s takes 0.131 ms: recompute, but
fetch after 36,000 cached tokens, where computing takes longer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from beluga.errors import TierError

_WEIGHT = 0.1  # weight of a new load in the average


class FetchRule(Protocol):
    """Decides whether a fetch pays off."""

    def pays(
        self, cached: int, new: int, size: int, bandwidth: float, latency_s: float = 0.0
    ) -> bool:
        """Return whether to fetch ``new`` tokens, of ``size`` bytes, after ``cached`` ones."""


class AlwaysFetch:
    """Fetches whatever a tier has."""

    def pays(
        self, cached: int, new: int, size: int, bandwidth: float, latency_s: float = 0.0
    ) -> bool:
        """Return True."""
        return True


@dataclass(frozen=True, slots=True)
class BreakEven:
    """Fetches tokens that take longer to compute. ``b_ms`` and ``c_ms`` are those of the model, as
    in ``beluga.router.load.costs``. Raises TierError if one is negative or not finite.
    """

    b_ms: float
    c_ms: float

    def __post_init__(self) -> None:
        for value in (self.b_ms, self.c_ms):
            if not 0 <= value < math.inf:
                raise TierError(
                    f"a prefill cost of {value} ms is invalid; give a finite number of at least 0"
                )

    def compute_s(self, cached: int, new: int) -> float:
        """Return the seconds that computing the tokens takes."""
        return (self.b_ms * new + self.c_ms * new * (cached + new / 2)) / 1e3

    def pays(
        self, cached: int, new: int, size: int, bandwidth: float, latency_s: float = 0.0
    ) -> bool:
        """Return whether transferring the bytes is faster than computing the tokens; never for a
        tier without bandwidth.
        """
        if bandwidth <= 0:
            return False
        return latency_s + size / bandwidth < self.compute_s(cached, new)


class MeasuredBandwidth:
    """The measured bandwidth of a tier: an exponential average over its loads, weighted by size. It
    starts at ``assumed`` bytes per second.
    """

    def __init__(self, assumed: float) -> None:
        if not 0 < assumed < math.inf:
            raise TierError(f"a bandwidth must be greater than 0, but is {assumed}")
        self._bytes, self._seconds = assumed, 1.0
        self._known = False

    def note(self, size: int, seconds: float) -> None:
        """Add a load. The first one replaces the assumed bandwidth."""
        if size <= 0 or seconds <= 0:
            return
        weight = _WEIGHT if self._known else 1.0
        self._known = True
        self._bytes += weight * (size - self._bytes)
        self._seconds += weight * (seconds - self._seconds)

    @property
    def bytes_per_s(self) -> float:
        """The current average."""
        return self._bytes / self._seconds
