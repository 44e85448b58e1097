# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The operators' listener: workers join, leave and drain while the router runs. Its advice."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

pytest.importorskip("aiohttp", reason="the router's packages are not installed")

from fake_engines import FakeEngine
from routed import routed, until

from beluga.gateway import EngineSpec
from beluga.gateway.admin import Adviser
from beluga.gateway.engine import Engine
from beluga.gateway.fleet import Fleet
from beluga.gateway.metrics import Metrics
from beluga.gateway.parsed_request import ParsedRequest
from beluga.router import Goals, Load, Worker


async def test_a_worker_joins_and_leaves() -> None:
    late = FakeEngine()
    async with late, routed(FakeEngine()) as site:
        workers = f"{site.admin}/workers"
        async with site.client.post(workers, json={"url": late.url + "/v1/"}) as answer:
            assert answer.status == 201
            number = (await answer.json())["id"]
        await site.up(2)
        for _ in range(4):
            assert (await site.completed())[0] == 200
        assert len(late.seen) == 2
        async with site.client.delete(f"{workers}/{number}") as answer:
            assert answer.status == 200
        for _ in range(2):
            assert (await site.completed())[0] == 200
        assert len(late.seen) == 2
        assert [worker["requests"] for worker in await site.workers()] == [0]
        assert late.url not in await site.text("/metrics")


async def test_a_drained_worker_completes_its_requests_and_gets_no_new_ones() -> None:
    a, b = FakeEngine(), FakeEngine()
    a.faults.hold = asyncio.Event()
    async with routed(a, b) as site:
        pending = asyncio.create_task(site.completed())
        await until(lambda: a.under_way == 1)
        number = (await site.workers())[0]["id"]
        async with site.client.post(f"{site.admin}/workers/{number}/drain") as answer:
            assert (await answer.json())["draining"] is True
        for _ in range(3):
            assert (await site.completed())[0] == 200
        assert site.counts() == [1, 3]
        assert len(await site.workers()) == 2
        a.faults.hold.set()
        assert (await pending)[1].endswith(b"[DONE]\n\n")
        await until(lambda: len(site.service.fleet) == 1)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_removed_worker_has_no_metrics_while_its_requests_continue(
    stream: bool,
) -> None:
    engine = FakeEngine()
    engine.faults.hold = engine.faults.hold_first = asyncio.Event()
    async with routed(engine) as site:
        (worker,) = site.service.fleet
        pending = asyncio.create_task(site.completed(stream=stream))
        await until(lambda: engine.under_way == 1)
        number = worker.worker.worker_id
        async with site.client.delete(f"{site.admin}/workers/{number}") as answer:
            assert answer.status == 200
        engine.faults.hold.set()
        assert (await pending)[0] == 200
        await until(lambda: worker.inflight == 0)
        assert engine.url not in await site.text("/metrics")


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"url": "nonsense"}, 400),
        ({"url": "http://[::1:8000"}, 400),
        ({"url": "http://127.0.0.1:1", "more": 1}, 400),
        ({}, 400),
    ],
)
async def test_invalid_requests_are_rejected(body: dict[str, object], status: int) -> None:
    async with routed(FakeEngine()) as site:
        async with site.client.post(f"{site.admin}/workers", json=body) as answer:
            assert answer.status == status
            assert (await answer.json())["error"]["message"]
        async with site.client.post(
            f"{site.admin}/workers", data=b'{"url": "http://127.0.0.1:1"}'
        ) as answer:
            assert answer.status == 415  # a web page could cause a browser to send this
        async with site.client.delete(f"{site.admin}/workers/99") as answer:
            assert answer.status == 404
        assert len(await site.workers()) == 1
        async with site.client.get(f"{site.base}/workers") as answer:
            assert answer.status == 404  # clients cannot use it


async def test_a_workers_file_is_followed(tmp_path: Path) -> None:
    a, b = FakeEngine(), FakeEngine()
    path = tmp_path / "workers"
    async with a, b:
        path.write_text(f"# ours\n{a.url}  # the first\n")
        async with routed(engines=(), workers_file=path) as site:
            await site.up(1)
            assert (await site.completed())[0] == 200
            path.write_text(f"{b.url} model=fake\n")
            await until(lambda: [e.url for e in site.service.fleet] == [b.url])
            await site.up(1)
            assert (await site.completed())[0] == 200
            for wrong in ("not a url\n", "http://[::1:8000\n"):
                path.write_text(wrong)
                await asyncio.sleep(1.2)
                assert (await site.completed())[0] == 200
            assert (len(a.seen), len(b.seen)) == (1, 3)
            path.write_text(f"{a.url}\n")
            await until(lambda: [e.url for e in site.service.fleet] == [a.url])


async def test_a_worker_with_invalid_new_settings_keeps_the_old_ones(tmp_path: Path) -> None:
    a, b = FakeEngine(), FakeEngine()
    path = tmp_path / "workers"
    async with a, b:
        path.write_text(f"{a.url}\n")
        async with routed(engines=(), workers_file=path, policy="linear") as site:
            await site.up(1)
            [first] = site.service.fleet
            assert (await site.completed())[0] == 200
            sent = f'beluga_gateway_worker_prompt_tokens_total{{worker="{a.url}"}}'
            assert sent in await site.text("/metrics")
            path.write_text(f"{a.url} events=nonsense\n{b.url}\n")
            await site.up(2)
            assert first in list(site.service.fleet)
            assert sent in await site.text("/metrics")
            path.write_text(f"{a.url} model=fake\n{b.url}\n")
            await until(lambda: first not in list(site.service.fleet))
            await site.up(2)
            assert (await site.completed())[0] == 200
            path.write_text(f"{b.url}\n")
            await until(lambda: [e.url for e in site.service.fleet] == [b.url])


async def test_alert_rules_have_the_targets_of_the_article() -> None:
    async with (
        routed(FakeEngine()) as site,
        site.client.get(f"{site.admin}/alerts") as answer,
    ):
        text = await answer.text()
        for target in ("avg(dynamo_kv_hit_rate) < 0.30", "> 0.005", "> 0.2"):
            assert target in text


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


async def test_the_operators_port_lists_its_routes() -> None:
    async with routed(FakeEngine()) as site, site.client.get(f"{site.admin}/") as answer:
        lines = (await answer.text()).splitlines()
    assert {"GET /workers", "POST /workers/{id}/drain", "PUT /prefill"} <= set(lines)


async def test_a_gateway_without_a_worker_warns(caplog: pytest.LogCaptureFixture) -> None:
    async with routed():
        assert "no worker is configured" in caplog.text
