# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The planner's advice on the number of engines, logged every few minutes.

Applying it is up to the operator. With a pool, no KV moves when engines are added or removed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import NamedTuple

from beluga.gateway.fleet import Fleet
from beluga.gateway.metrics import Metrics
from beluga.router import Advice, Goals, Load, Seen, Worker, advise

log = logging.getLogger(__name__)

SAMPLES = 18  # samples of queue and memory per interval: every 10 s by default, as in Dynamo


class _Sample(NamedTuple):
    workers: int
    queued: int
    usage: float | None


class Adviser:
    """Averages its samples over an interval, then logs the planner's advice."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        metrics: Metrics,
        loads: Callable[[], Mapping[Worker, Load]],
        pending: Callable[[], int],
        goals: Goals,
    ) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._loads = loads
        self._pending = pending
        self._goals = goals
        self._samples: list[_Sample] = []
        self._before = metrics.latencies()

    async def run(self, interval_s: float) -> None:
        """Advise forever."""
        while True:
            for _ in range(SAMPLES):
                await asyncio.sleep(interval_s / SAMPLES)
                self.sample()
            for advice in self.advise():
                log.info("advice: %s", advice)

    def sample(self) -> None:
        """Take a sample of the serving engines and of the waiting requests."""
        loads = self._loads()
        serving = [loads[engine.worker] for engine in self._fleet if engine.serving]
        known = [load.gpu_cache_usage_perc for load in serving if load.kv_total_blocks]
        queued = self._pending() + sum(load.num_requests_waiting for load in serving)
        self._samples.append(_Sample(len(serving), queued, fmean(known) if known else None))

    def advise(self) -> list[Advice]:
        """Return the planner's advice from the samples since the last call, or none without
        samples.
        """
        samples, self._samples = self._samples, []
        before, self._before = self._before, self._metrics.latencies()
        if not samples:
            return []
        usages = [sample.usage for sample in samples if sample.usage is not None]
        first, following = (
            (now.seconds - then.seconds) / max(now.times - then.times, 1)
            for now, then in zip(self._before, before, strict=True)
        )
        seen = Seen(
            workers=samples[-1].workers,
            queued=fmean(sample.queued for sample in samples),
            usage=fmean(usages) if usages else None,
            ttft_s=first,
            between_tokens_s=following,
        )
        return advise({"both": seen}, self._goals)
