# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Scaling by the planner (beluga/router/planner.py), which adds and removes workers."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from beluga.router import Advice, Goals, Seen, advise
from beluga.simulate.engine import ChunkedEngine
from beluga.simulate.request import Request
from beluga.simulate.serial import SerialEngine

INTERVAL_S = 30.0  # seconds between two decisions


class Planning:
    """Runs the planner at each interval, and records its decisions with their times."""

    def __init__(self, goals: Goals) -> None:
        self.goals = goals
        self.advised: list[tuple[float, Advice]] = []
        self._ttft: list[float] = []

    def served(self, request: Request) -> None:
        """Record a first token."""
        self._ttft.append(request.first_token - request.arrival)

    def look(self, now: float, engines: Sequence[ChunkedEngine | SerialEngine]) -> int:
        """Return how many workers to add: -1, 0 or 1. ``engines`` are the active ones."""
        metrics = [engine.metrics() for engine in engines]
        seen = Seen(
            workers=len(engines),
            queued=sum(worker.num_requests_waiting for worker in metrics),
            usage=fmean(worker.gpu_cache_usage_perc for worker in metrics),
            ttft_s=fmean(self._ttft) if self._ttft else 0.0,
        )
        self._ttft.clear()
        advice = advise({"both": seen}, self.goals)
        self.advised += [(now, found) for found in advice]
        return sum({"grow": 1, "shrink": -1}.get(found.action, 0) for found in advice)
