# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Whether to fetch blocks from a lower tier, or to compute them again.

Behind ``cached`` tokens, a model computes ``new`` tokens in ``b*new + c*new*(cached + new/2)``. The
fixed time of a prefill (``a``) is no part of it, because the rest of the prompt takes it anyway.

Example: Qwen3-32B on an H200 computes a token in 0.077 ms or more, and has 256 KiB for it. From a
tier of 26 GB/s it comes in 0.010 ms: fetch. From one of 2 GB/s it comes in 0.131 ms: compute, but
fetch behind 36,000 cached tokens, where it takes longer to compute.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from beluga.errors import TierError

_WEIGHT = 0.1  # of a new load in the average


class FetchRule(Protocol):
    """Says whether a fetch pays."""

    def pays(
        self, cached: int, new: int, size: int, bandwidth: float, latency_s: float = 0.0
    ) -> bool:
        """Return whether to fetch ``new`` tokens, of ``size`` bytes, behind ``cached`` ones."""


class AlwaysFetch:
    """Fetches whatever a tier has."""

    def pays(
        self, cached: int, new: int, size: int, bandwidth: float, latency_s: float = 0.0
    ) -> bool:
        """Return True."""
        return True


@dataclass(frozen=True, slots=True)
class BreakEven:
    """Fetches what takes longer to compute. ``b_ms`` and ``c_ms`` are a model's, as in
    ``beluga.router.load.costs``. Raises TierError if one is negative or not finite.
    """

    b_ms: float
    c_ms: float

    def __post_init__(self) -> None:
        for value in (self.b_ms, self.c_ms):
            if not 0 <= value < math.inf:
                raise TierError(f"a prefill takes a finite time of at least 0, not {value} ms")

    def compute_s(self, cached: int, new: int) -> float:
        """Return how long the tokens take to compute."""
        return (self.b_ms * new + self.c_ms * new * (cached + new / 2)) / 1e3

    def pays(
        self, cached: int, new: int, size: int, bandwidth: float, latency_s: float = 0.0
    ) -> bool:
        """Return whether the bytes come sooner than the tokens are computed. Nothing comes from a
        tier without bandwidth.
        """
        if bandwidth <= 0:
            return False
        return latency_s + size / bandwidth < self.compute_s(cached, new)


class MeasuredBandwidth:
    """The bandwidth of a tier, from what its loads took: an exponential average, in which a large
    load counts for its bytes. It begins with ``assumed`` bytes per second.
    """

    def __init__(self, assumed: float) -> None:
        if not 0 < assumed < math.inf:
            raise TierError(f"a bandwidth is greater than 0, not {assumed}")
        self._bytes, self._seconds = assumed, 1.0
        self._known = False

    def note(self, size: int, seconds: float) -> None:
        """Note a load. The first one replaces what was assumed."""
        if size <= 0 or seconds <= 0:
            return
        weight = _WEIGHT if self._known else 1.0
        self._known = True
        self._bytes += weight * (size - self._bytes)
        self._seconds += weight * (seconds - self._seconds)

    @property
    def bytes_per_s(self) -> float:
        """The average now."""
        return self._bytes / self._seconds
