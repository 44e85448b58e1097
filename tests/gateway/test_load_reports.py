# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Engines' load metrics reach the router's loads, and obstacles are reported."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("aiohttp", reason="the router's packages are not installed")

from fake_engines import FakeEngine
from routed import Site, routed, until

from beluga.gateway import health as problems_module
from beluga.gateway import health as report_module
from beluga.router import Load

SGLANG = (
    'sglang:num_running_reqs{tp_rank="0"} 2.0\nsglang:num_queue_reqs{tp_rank="0"} 1.0\n'
    'sglang:token_usage{tp_rank="0"} 0.5\nsglang:num_pages{tp_rank="0"} 100.0\n'
)
ITERATION = {
    "numActiveRequests": 3,
    "numQueuedRequests": 1,
    "maxNumActiveRequests": 64,
    "kvCacheStats": {"maxNumBlocks": 50, "usedNumBlocks": 5, "tokensPerBlock": 32},
}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problems_module, "LOOK_S", 0.01)


def load_of(site: Site) -> Load:
    [worker] = site.service.fleet
    return site.service.loads()[worker.worker]


async def until_reported(site: Site, text: str) -> None:
    """Wait until the load's problem is logged, and check that GET /workers and metrics have it."""
    [worker] = site.service.fleet
    await until(lambda: text in worker.problems.get("metrics", ""))
    [found] = await site.workers()
    assert text in found["problems"]["metrics"]
    metrics = await site.text("/metrics")
    assert f'worker_problem{{problem="metrics",worker="{worker.url}"}} 1.0' in metrics


async def test_compressed_metrics_are_read() -> None:
    engine = FakeEngine()
    engine.metrics = SGLANG + 'sglang:page_size{tp_rank="0"} 64.0\n'
    async with routed(engine) as site:
        await until(lambda: load_of(site).kv_total_blocks == 100)
        load = load_of(site)
        assert (load.request_active_slots, load.num_requests_waiting) == (2, 1)
        assert load.kv_active_blocks == 50
        [worker] = await site.workers()
        assert (worker["engine"], worker["block_size"]) == ("SGLang", 64)
        assert site.service._cache._block_size == 64


async def test_a_page_of_one_token_is_not_used_as_the_block_size() -> None:
    engine = FakeEngine()
    engine.metrics = SGLANG + 'sglang:page_size{tp_rank="0"} 1.0\n'
    async with routed(engine) as site:
        await until(lambda: load_of(site).kv_total_blocks == 100)
        [worker] = await site.workers()
        assert worker["block_size"] is None
        assert site.service._cache._block_size == 16


@pytest.mark.parametrize(
    ("metrics", "text"),
    [
        (None, "returned 404 (SGLang needs --enable-metrics)"),
        ("up 1\n", "reports no load"),
        ("vllm:num_requests_running x\n", "vllm:num_requests_running is 'x'"),
        ("\udcff", "invalid start byte"),
        ("[{}]", "not an iteration of TensorRT-LLM"),
        ("#" * 100, "longer than 0 MiB"),
    ],
)
async def test_unreadable_metrics_are_a_problem_until_they_are_readable(
    metrics: str | None, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_module, "ANSWER_MAX", 90)
    engine = FakeEngine()
    engine.metrics = "vllm:num_requests_running 1\nvllm:num_requests_waiting 2\n"
    async with routed(engine) as site:
        await until(lambda: load_of(site).num_requests_waiting == 2)
        engine.metrics = metrics
        await until_reported(site, text)
        assert load_of(site).num_requests_waiting == 0  # unknown, and not the old figure
        engine.metrics = "vllm:num_requests_running 1\n"
        [worker] = site.service.fleet
        await until(lambda: load_of(site).request_active_slots == 1 and not worker.problems)


async def test_figures_beyond_64_bits_do_not_end_the_checks_of_an_engine() -> None:
    engine = FakeEngine()
    engine.metrics = "".join(
        f'vllm:num_requests_running{{engine="{rank}"}} 1e15\n' for rank in range(9300)
    )
    async with routed(engine) as site:
        await until_reported(site, "the sum of vllm:num_requests_running is")
        engine.metrics = "vllm:num_requests_running 1\n"
        await until(lambda: load_of(site).request_active_slots == 1)
        engine.faults.healthy = False
        [worker] = site.service.fleet
        await until(lambda: worker.health.name == "DOWN")


async def test_an_engine_that_is_down_has_no_load() -> None:
    engine = FakeEngine()
    engine.metrics = SGLANG
    async with routed(engine) as site:
        await until(lambda: load_of(site).kv_total_blocks == 100)
        engine.faults.healthy = False
        await until(lambda: load_of(site).kv_total_blocks == 0)
        [worker] = await site.workers()
        assert worker["health"] == "down" and worker["problems"] == {}


async def test_an_idle_engine_of_tensorrt_keeps_its_figures() -> None:
    engine = FakeEngine()
    engine.metrics = json.dumps([ITERATION])
    async with routed(engine) as site:
        await until(lambda: load_of(site).kv_total_blocks == 50)
        engine.metrics = "[]"
        checks = engine.scrapes
        await until(lambda: engine.scrapes > checks + 2)
        load = load_of(site)
        assert (load.request_active_slots, load.request_total_slots) == (3, 64)
        [worker] = await site.workers()
        assert worker["engine"] == "TensorRT-LLM" and worker["problems"] == {}


async def test_a_tensorrt_engine_without_statistics_is_logged() -> None:
    engine = FakeEngine()
    engine.metrics = "[]"
    async with routed(engine) as site:
        await until(lambda: engine.scrapes > 2)
        assert [worker["problems"] for worker in await site.workers()] == [{}]  # nothing to report
        assert (await site.completed())[0] == 200
        await until_reported(site, "TensorRT-LLM needs enable_iter_perf_stats: true")
