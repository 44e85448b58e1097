# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Requests that wait for blocks from lower tiers, while vLLM polls."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from beluga.index import BlockState
from beluga.tiers import AlwaysFetch, BreakEven, MeasuredBandwidth

if TYPE_CHECKING:
    from collections.abc import Callable

    from beluga.connectors.vllm.lookups import Lookups
    from beluga.connectors.vllm.settings import VllmSettings
    from beluga.index import Pins
    from beluga.tiers import FetchRule

_ASSUMED_BLOCKS_PER_S = 1e9  # so that the first blocks are fetched, and measured


class Worth:
    """Decides whether fetching blocks from lower tiers is faster than computing them, based on
    earlier fetches. ``block_tokens`` is the size of a block in tokens.
    """

    def __init__(self, settings: VllmSettings, block_tokens: int) -> None:
        b_ms, c_ms = settings.prefill_b_ms, settings.prefill_c_ms
        self._prefill = BreakEven(b_ms, c_ms)
        self._rule: FetchRule = self._prefill if b_ms or c_ms else AlwaysFetch()
        self._tokens = block_tokens
        self._speed = MeasuredBandwidth(_ASSUMED_BLOCKS_PER_S)  # in blocks

    def pays(self, cached: int, new: int) -> bool:
        """Return whether to fetch ``new`` blocks after ``cached`` ones."""
        tokens = self._tokens
        return self._rule.pays(cached * tokens, new * tokens, new, self._speed.bytes_per_s)

    def compute_s(self, cached: int, new: int) -> float:
        """Return how long computing ``new`` blocks after ``cached`` ones takes; 0 if the settings
        do not include it.
        """
        tokens = self._tokens
        return self._prefill.compute_s(cached * tokens, new * tokens)

    def took(self, count: int, seconds: float) -> None:
        """Record that a fetch of ``count`` blocks took this long."""
        self._speed.note(count, seconds)


class LookupWait:
    """The wait of one request: it starts with the first lookup that stops at a block in a lower
    tier, and ends when the blocks have arrived, or after ``limit_s`` seconds.
    """

    def __init__(self, lookups: Lookups, limit_s: float, worth: Worth) -> None:
        self._lookups, self._limit_s, self._worth = lookups, limit_s, worth
        self._since_s: float | None = None
        self._count = 0  # blocks being fetched

    def waits(self, pins: Pins | None, cached: int, rest: Callable[[], list[bytes]]) -> bool:
        """Return whether the request should wait.

        ``pins`` are those of a lookup just now, ``cached`` is the number of blocks before the ones
        that it did not find, and ``rest`` returns the digests of these.
        """
        if pins is None or self._limit_s == 0:
            return False
        now_s = time.monotonic()
        if not pins.state.is_coming:
            if self._count and self._since_s is not None:
                self._worth.took(self._count, now_s - self._since_s)
            return False
        if self._since_s is None:
            self._since_s = now_s
        elif pins.state == BlockState.PENDING:
            return now_s < self._since_s + self._limit_s
        if now_s >= self._since_s + self._limit_s:
            return False
        return self._starts_fetch(cached, rest())

    def _starts_fetch(self, cached: int, rest: list[bytes]) -> bool:
        if not self._worth.pays(cached, len(rest)):
            return False
        self._count = self._lookups.onboard(rest)
        return self._count > 0
