# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The forecast, and the planner's advice in the simulator, in numbers that were computed by
hand.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from beluga.router import Candidate, Goals, Overlap, Query, Worker, WorkerMetrics, costs
from beluga.simulate import Options
from beluga.simulate.forecast import Forecast
from beluga.simulate.planning import Planning

# A token costs 1 ms, and a step of 100 tokens 2 ms more.
MODEL = dataclasses.replace(
    costs.MODELS[costs.DEFAULT_MODEL], a=0.0, b=1.0, c=0.0, e=0.0, f=0.0, g=0.0, h=2.0
)
OPTIONS = Options(model=MODEL, step_tokens=100, bandwidth=1000.0, local_bandwidth=500.0)


@pytest.fixture
def forecast() -> Forecast:
    return Forecast(OPTIONS, block_bytes=10)


def query(tokens: int) -> Query:
    return Query(tokens, 10, (), ())


def ready_in(forecast: Forecast, worker: int) -> float:
    """Return the seconds until the worker has prefilled everything that it was sent."""
    return forecast(query(10), candidate(worker), 0).queue_s


def candidate(worker: int) -> Candidate:
    return SimpleNamespace(worker=Worker(worker), overlap=Overlap())  # type: ignore[return-value]


def test_work_is_tokens_steps_and_copies(forecast: Forecast) -> None:
    prefill_s, transfer_s = forecast.work(query(250), Overlap(2, 3, 0, 1))
    assert prefill_s == pytest.approx(0.190 + 2 * 0.002)
    assert transfer_s == pytest.approx(3 * 10 / 500 + 1 * 10 / 1000)


def test_one_token_is_always_computed(forecast: Forecast) -> None:
    prefill_s, _ = forecast.work(query(20), Overlap(2))
    assert prefill_s == pytest.approx(0.001 + 0.002)


def test_a_worker_is_ready_after_all_that_it_was_sent(forecast: Forecast) -> None:
    forecast.now = 5.0
    assert ready_in(forecast, 1) == 0
    forecast.sent(7, 1, query(100), Overlap())
    forecast.sent(8, 1, query(300), Overlap())
    assert ready_in(forecast, 1) == pytest.approx(0.102 + 0.306)
    assert ready_in(forecast, 0) == 0
    forecast.now = 5.4
    assert ready_in(forecast, 1) == pytest.approx(0.008)
    forecast.now = 6.0
    assert ready_in(forecast, 1) == 0


def test_a_first_token_says_how_far_the_worker_is(forecast: Forecast) -> None:
    forecast.sent(7, 1, query(100), Overlap())
    forecast.sent(8, 1, query(300), Overlap())
    forecast.now = 2.0
    forecast.prefilled(7, 1, 2.0)
    assert ready_in(forecast, 1) == pytest.approx(0.306)
    forecast.sent(9, 1, query(100), Overlap())
    assert ready_in(forecast, 1) == pytest.approx(0.408)
    forecast.now = 3.0
    forecast.prefilled(8, 1, 3.0)
    assert ready_in(forecast, 1) == pytest.approx(0.102)


def engine(waiting: int, usage: float = 0.7) -> Any:
    metrics = WorkerMetrics(num_requests_waiting=waiting, gpu_cache_usage_perc=usage)
    return SimpleNamespace(metrics=lambda: metrics)


def test_the_planner_sees_all_workers_that_are_in_use() -> None:
    planning = Planning(Goals(queue_high=3, queue_low=1))
    assert planning.look(30.0, [engine(4), engine(2)]) == 0
    assert planning.look(60.0, [engine(4), engine(3)]) == 1
    assert planning.look(90.0, [engine(0, 0.9), engine(1, 0.0)]) == -1
    assert [(now, advice.action) for now, advice in planning.advised] == [
        (60.0, "grow"),
        (90.0, "shrink"),
    ]


def test_the_planner_sees_first_tokens_since_it_looked_last() -> None:
    planning = Planning(Goals(ttft_s=2.0))
    for first in (11.0, 14.0):
        served: Any = SimpleNamespace(arrival=10.0, first_token=first)
        planning.served(served)
    assert planning.look(30.0, [engine(1)]) == 1
    assert planning.look(60.0, [engine(1)]) == 0
