# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The advice of a running router, from its queue, its engines' memory and its latencies."""

from __future__ import annotations

import asyncio
import logging

import pytest
from fake_engine import FakeEngine
from routed import routed, until

from beluga.gateway import EngineSpec
from beluga.gateway.admin import Adviser
from beluga.gateway.engine import Engine
from beluga.gateway.fleet import Fleet
from beluga.gateway.metrics import Metrics
from beluga.gateway.parsed_request import ParsedRequest
from beluga.router import Goals, Load, Worker


class Rack:
    """Two engines that are up, as an adviser sees them."""

    def __init__(self, goals: Goals | None = None) -> None:
        self.fleet, self.metrics = Fleet(), Metrics()
        self.engines: list[Engine] = []
        self.loads: dict[Worker, Load] = {}
        for number in range(2):
            engine = self.fleet.add(EngineSpec(f"http://engine{number}"))
            engine.passed(0)
            self.engines.append(engine)
            self.loads[engine.worker] = Load(kv_total_blocks=100, gpu_cache_usage_perc=0.7)
        self.pending = 0
        self.adviser = Adviser(
            fleet=self.fleet,
            metrics=self.metrics,
            loads=lambda: self.loads,
            pending=lambda: self.pending,
            goals=goals or Goals(),
        )

    def advice(self) -> list[str]:
        self.adviser.sample()
        return [str(advice) for advice in self.adviser.advise()]


def test_there_is_no_advice_for_an_idle_rack_or_without_samples() -> None:
    rack = Rack()
    assert rack.advice() == []
    assert rack.adviser.advise() == []


def test_the_queue_is_averaged_over_the_interval() -> None:
    rack = Rack()
    rack.pending = 16
    rack.adviser.sample()
    rack.pending = 0
    rack.loads[rack.engines[0].worker].num_requests_waiting = 8
    assert rack.advice() == ["add a worker: 6 prompts wait per worker"]
    rack.loads[rack.engines[0].worker].num_requests_waiting = 4
    assert rack.advice() == []


def test_memory_is_considered_if_engines_report_it() -> None:
    rack = Rack()
    for engine in rack.engines:
        rack.loads[engine.worker].gpu_cache_usage_perc = 0.3
    assert len(rack.advice()) == 1
    for engine in rack.engines:
        rack.loads[engine.worker].kv_total_blocks = 0
    assert rack.advice() == []


def test_engines_that_are_down_are_ignored() -> None:
    rack = Rack()
    for engine in rack.engines:
        engine.fail("gone")
    rack.pending = 1
    assert rack.advice() == ["add a worker: 1 prompts wait per worker"]


def test_objectives_are_of_the_last_interval() -> None:
    rack = Rack(Goals(ttft_s=1.0, between_tokens_s=0.1))
    parsed = ParsedRequest("/v1/completions", b"{}")
    rack.metrics.first_token(parsed, rack.engines[0], 3.0)
    rack.metrics.first_token(parsed, rack.engines[0], 1.0)
    assert rack.advice() == ["add a worker: TTFT is 2 s, but its objective is 1 s"]
    rack.metrics.first_token(parsed, rack.engines[0], 0.5)
    assert rack.advice() == []
    gaps = rack.metrics.gaps()
    gaps.add(0.2, 4)
    rack.metrics.tokens(parsed, rack.engines[0], gaps, 0.2)
    assert rack.advice() == [
        "add a worker: the time between tokens is 0.2 s, but its objective is 0.1 s"
    ]


async def test_a_router_logs_its_advice(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine()
    engine.metrics = (
        'vllm:num_requests_running{engine="0"} 1\n'
        'vllm:kv_cache_usage_perc{engine="0"} 0.95\n'
        'vllm:cache_config_info{engine="0",num_gpu_blocks="100"} 1\n'
    )
    with caplog.at_level(logging.INFO):
        async with routed(engine, advise_s=0.1):
            await until(lambda: "95% of KV memory is in use" in caplog.text)
            await asyncio.sleep(0)
    assert "advice: add a worker" in caplog.text
