# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The planner's advice in the simulator, in numbers that were computed by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from beluga.router import Goals, WorkerMetrics
from beluga.simulate.cluster import Planning


def engine(waiting: int, usage: float = 0.7) -> Any:
    metrics = WorkerMetrics(num_requests_waiting=waiting, gpu_cache_usage_perc=usage)
    return SimpleNamespace(metrics=lambda: metrics)


def test_the_planner_gets_all_active_workers() -> None:
    planning = Planning(Goals(queue_high=3, queue_low=1))
    assert planning.look(30.0, [engine(4), engine(2)]) == 0
    assert planning.look(60.0, [engine(4), engine(3)]) == 1
    assert planning.look(90.0, [engine(0, 0.9), engine(1, 0.0)]) == -1
    assert [(now, advice.action) for now, advice in planning.advised] == [
        (60.0, "grow"),
        (90.0, "shrink"),
    ]


def test_the_planner_gets_first_tokens_since_its_last_run() -> None:
    planning = Planning(Goals(ttft_s=2.0))
    for first in (11.0, 14.0):
        served: Any = SimpleNamespace(arrival=10.0, first_token=first)
        planning.served(served)
    assert planning.look(30.0, [engine(1)]) == 1
    assert planning.look(60.0, [engine(1)]) == 0
