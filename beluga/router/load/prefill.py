# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The prompts that one worker has not prefilled yet, and how many of their tokens should be left.

With predicted durations the count falls while the worker computes, as in Dynamo's modelled decay
(``aic``). If every prefill has a duration, the sum falls at the oldest one's pace, which may exceed
its own tokens. If some prefill has none, at most the oldest one's tokens are subtracted.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple


class _Prefill(NamedTuple):
    tokens: int
    duration_s: float | None


class ActivePrefills:
    def __init__(self) -> None:
        self.tokens = 0  # tokens of all prompts, as they were sent
        self._waiting: dict[Hashable, _Prefill] = {}  # oldest first
        self._unpredicted = 0
        self._seconds = 0.0  # the sum of the predicted durations
        self._oldest_since = 0.0

    def add(self, request: Hashable, tokens: int, duration_s: float | None, now: float) -> None:
        if not self._waiting:
            self._oldest_since = now
        self._waiting[request] = _Prefill(tokens, duration_s)
        self._unpredicted += duration_s is None
        self._seconds += duration_s or 0.0
        self.tokens += tokens

    def remove(self, request: Hashable, now: float) -> None:
        if request == next(iter(self._waiting)):
            self._oldest_since = now
        tokens, duration_s = self._waiting.pop(request)
        self._unpredicted -= duration_s is None
        self._seconds -= duration_s or 0.0
        self.tokens -= tokens

    def seconds_left(self, now: float) -> float:
        """Return the predicted seconds until all prompts are prefilled.

        A prefill that takes longer than predicted is expected to take as much longer again. So the
        wait grows if the oldest prompt cannot begin, for example because HBM is full.
        """
        if not self._waiting:
            return 0.0
        oldest = next(iter(self._waiting.values())).duration_s or 0.0
        return self._seconds - oldest + abs(self._oldest_since + oldest - now)

    def left(self, now: float) -> int:
        """Return the tokens that should be left at that time, at least 0."""
        if not self._waiting:
            return 0
        tokens, duration_s = next(iter(self._waiting.values()))
        if duration_s is None:
            return self.tokens
        elapsed = max(now - self._oldest_since, 0.0)
        done = tokens * elapsed / duration_s if duration_s > 0 else float(tokens)
        if self._unpredicted:
            done = min(done, tokens)
        return max(round(self.tokens - done), 0)
