# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The prompts that one worker has not prefilled yet, and an estimate of their remaining tokens.

With predicted durations the count decreases while the worker computes, as in Dynamo's modelled
decay (``aic``). If every prefill has a duration, the sum decreases at the rate of the oldest
prefill, possibly below that prefill's share. If some prefill has none, at most the oldest one's
tokens are subtracted.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from beluga._ffi import core, ffi, lib


class _Prefill(NamedTuple):
    tokens: int
    duration_s: float | None


class ActivePrefills:
    """The prompts, oldest first. ``row`` has their sums and the oldest one for C
    (csrc/routing/cost.c), which updates the loads of all workers at once.

    Without a duration for the oldest prompt, all tokens remain. A prefill that takes longer than
    predicted is expected to take as much longer again. So the estimated wait grows if the oldest
    prompt cannot start, for example because HBM is full.
    """

    def __init__(self) -> None:
        self.row: core.bl_prefills = ffi.new("bl_prefills *")
        self._waiting: dict[Hashable, _Prefill] = {}

    def add(self, request: Hashable, tokens: int, duration_s: float | None, now: float) -> None:
        first = not self._waiting
        self._waiting[request] = _Prefill(tokens, duration_s)
        row = self.row
        row.count += 1
        row.unpredicted += duration_s is None
        row.seconds += duration_s or 0.0
        row.tokens += tokens
        if first:
            self._begin(now)

    def remove(self, request: Hashable, now: float) -> None:
        first = request == next(iter(self._waiting))
        tokens, duration_s = self._waiting.pop(request)
        row = self.row
        row.count -= 1
        row.unpredicted -= duration_s is None
        row.seconds -= duration_s or 0.0
        row.tokens -= tokens
        if first and self._waiting:
            self._begin(now)

    def _begin(self, now: float) -> None:
        """Assume that the worker starts to prefill the oldest prompt now."""
        row, (tokens, duration_s) = self.row, next(iter(self._waiting.values()))
        row.oldest_tokens = tokens
        row.oldest_predicted = duration_s is not None
        row.oldest_s = duration_s or 0.0
        row.oldest_since = now

    def seconds_left(self, now: float) -> float:
        """Return the predicted seconds until all prompts are prefilled."""
        return lib.bl_prefills_seconds(self.row, now)

    def left(self, now: float) -> int:
        """Return the estimated remaining tokens at that time, at least 0."""
        return lib.bl_prefills_tokens(self.row, now)
