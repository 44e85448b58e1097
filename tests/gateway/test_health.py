# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Checks of engines: what is read from each, and which problems are reported to operators."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("aiohttp", reason="the router's packages are not installed")
pytest.importorskip("zmq", reason="pyzmq is not installed")

import aiohttp
from fake_engines import Announcer, FakeEngine
from routed import RUNNING, Site, announced, routed, until

from beluga.gateway import EngineSpec, Limits
from beluga.gateway import health as problems_module
from beluga.gateway.engine import Engine, Health
from beluga.gateway.fleet import Fleet
from beluga.gateway.health import Checker
from beluga.router import Load, Worker

pytestmark = pytest.mark.usefixtures("quick")
TOKENS = list(range(1000, 1000 + 256))
CONFIG = 'vllm:cache_config_info{block_size="128",num_gpu_blocks="9"} 1.0\n'


def of_128(announcer: Announcer) -> None:
    announcer.block_size = 128
    announcer.stored(TOKENS, 100)


@pytest.mark.parametrize("metrics", ["", CONFIG], ids=["by an event", "by its metrics"])
async def test_the_block_size_is_read_from_the_engine(tmp_path: Path, metrics: str) -> None:
    async with announced(tmp_path, metrics=RUNNING + metrics) as (site, [announcer]):
        if metrics:
            await until(lambda: site.service._cache._block_size == 128)
        of_128(announcer)
        index = site.service.index()
        await until(lambda: index.indexer.counts.stored == 2)
        assert (await site.completed(prompt=TOKENS))[0] == 200
        [worker] = site.service.fleet
        assert worker.hit_tokens == 256
        await until(lambda: not worker.problems)


async def test_a_wrong_block_size_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with announced(tmp_path, block_size=16, metrics=RUNNING + CONFIG) as (site, [announcer]):
        of_128(announcer)
        await site.until_reported("events", "has blocks of 128 tokens, but the router has 16")
        await site.until_reported(
            "block_size", "it has blocks of 128 tokens, but the router has 16"
        )
        text = await site.text("/metrics")
        assert 'applied{event_type="message",status="unreadable"} 1' in text
    about = [r.getMessage() for r in caplog.records if "blocks of 128" in r.getMessage()]
    assert len(about) == len(set(about)) == 2  # although the check ran many times


async def test_malformed_events_are_reported(tmp_path: Path) -> None:
    async with announced(tmp_path) as (site, [announcer]):
        announcer.publish([{"type": "Nonsense"}])
        await site.until_reported(
            "events", "1 KV events are malformed; the last: there is no KV event"
        )


async def test_an_engine_that_computes_without_events_is_reported(tmp_path: Path) -> None:
    async with announced(tmp_path) as (site, [announcer]):
        [worker] = site.service.fleet
        await until(lambda: not worker.problems)  # an idle engine has nothing to announce
        await site.completed(prompt=TOKENS)
        await site.until_reported("events", "published no KV event")
        announcer.stored(TOKENS, 100)
        await until(lambda: not worker.problems)


async def test_an_endpoint_without_a_publisher_is_reported(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with engine:
        spec = EngineSpec(engine.url, (), f"ipc://{tmp_path}/nobody")
        async with routed(engines=(spec,), policy="linear") as site:
            site.engines = (engine,)
            await site.until_reported("events", "no process publishes KV events at ipc://")


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


def load_of(site: Site) -> Load:
    [worker] = site.service.fleet
    return site.service.loads()[worker.worker]


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
    monkeypatch.setattr(problems_module, "ANSWER_MAX", 90)
    engine = FakeEngine()
    engine.metrics = "vllm:num_requests_running 1\nvllm:num_requests_waiting 2\n"
    async with routed(engine) as site:
        await until(lambda: load_of(site).num_requests_waiting == 2)
        engine.metrics = metrics
        await site.until_reported("metrics", text)
        assert load_of(site).num_requests_waiting == 0  # unknown, and not the old figure
        engine.metrics = "vllm:num_requests_running 1\n"
        [worker] = site.service.fleet
        await until(lambda: load_of(site).request_active_slots == 1 and not worker.problems)


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
        await site.until_reported("metrics", "TensorRT-LLM needs enable_iter_perf_stats: true")


class Clock:
    """Replaces the module ``time``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
        self.now = 1000.0
        for module in modules:
            monkeypatch.setattr(f"beluga.gateway.{module}.time", self)

    def monotonic(self) -> float:
        return self.now

    perf_counter = time = monotonic


# ---- Engines and fleets.


def test_an_engine_cools_down_for_its_longest_requested_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch, "engine")
    engine = Engine(Worker(1), EngineSpec("http://a"))
    assert not engine.ready  # no check has run
    assert engine.passed(0)
    assert engine.ready and engine.cooling_s == 0
    engine.cool_down(5)
    engine.cool_down(2)
    assert not engine.ready and engine.serving and engine.cooling_s == 5
    clock.now += 5
    assert engine.ready and engine.cooling_s == 0
    engine.draining = True
    assert not engine.ready and not engine.serving


def test_a_failure_outdates_the_checks_that_began_before_it() -> None:
    engine = Engine(Worker(1), EngineSpec("http://a"))
    assert engine.why == "not checked yet"
    engine.fail("gone")
    assert (engine.health, engine.why, engine.failures) == (Health.DOWN, "gone", 1)
    assert engine.look.is_set()
    assert not engine.passed(0)
    assert engine.health is Health.DOWN
    assert engine.passed(1)
    assert (engine.health, engine.why) == (Health.UP, "")


def test_expected_cache_hits_of_an_engine_are_summed() -> None:
    engine = Engine(Worker(1), EngineSpec("http://a"))
    engine.expected(0.5, 10)
    engine.expected(0.26, 10)
    assert (engine.hit_tokens, engine.prompt_tokens) == (8, 20)


# ---- Checks.


class FakeClient:
    """Answers by path: a status and a body."""

    def __init__(self, **answers: tuple[int, bytes]) -> None:
        self.answers = answers

    def get(self, url: str, *, timeout: aiohttp.ClientTimeout) -> Any:
        status, body = self.answers[url.rpartition("/")[2]]

        async def iter_any() -> AsyncIterator[bytes]:
            yield body

        class Answer:
            async def __aenter__(self) -> Any:
                return SimpleNamespace(status=status, content=SimpleNamespace(iter_any=iter_any))

            async def __aexit__(self, *_: object) -> None:
                pass

        return Answer()


MODELS = (200, b'{"data": [{"id": "m"}, 7]}')


@pytest.mark.parametrize(
    ("declared", "health", "models", "why"),
    [
        ((), 200, MODELS, ""),
        ((), 204, MODELS, ""),
        ((), 404, MODELS, ""),
        ((), 300, MODELS, "/health returned 300"),
        ((), 503, MODELS, "/health returned 503"),
        ((), 200, (404, b""), "/v1/models returned 404; give its models with --model"),
        (("m",), 200, (404, b""), ""),
        (("m",), 404, (404, b""), "/health and /v1/models returned 404 and 404"),
        ((), 200, (200, b"[]"), "did not return a list"),
        ((), 200, (200, b'{"data": 1}'), "did not return a list"),
        ((), 200, (200, b"{"), "truncated"),
    ],
)
async def test_a_check_passes_where_an_engine_is_up_and_its_models_are_known(
    declared: tuple[str, ...], health: int, models: tuple[int, bytes], why: str
) -> None:
    fleet, ups = Fleet(), []
    engine = fleet.add(EngineSpec("http://a", declared))
    client = cast("aiohttp.ClientSession", FakeClient(health=(health, b""), models=models))

    async def also(_: Engine) -> None: ...

    checker = Checker(fleet, client, Limits(), up=lambda: ups.append(1), also=also)
    passed = await checker.check(engine)
    assert (passed, engine.health is Health.UP, len(ups)) == (not why, not why, int(not why))
    assert why in engine.why
    assert engine.failures == int(bool(why))
    if passed:
        assert engine.models == ("m",)
        assert await checker.check(engine)
        assert len(ups) == 1  # the engine was up before


async def test_a_defect_does_not_end_the_checks_of_an_engine(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An OverflowError once did: the engine stayed up for ever. The log has it once."""
    fleet, ended = Fleet(), []
    client = cast("aiohttp.ClientSession", FakeClient(health=(200, b""), models=MODELS))

    async def also(engine: Engine) -> None:
        ended.append(engine)
        engine.look.set()
        await asyncio.sleep(0.001)
        raise OverflowError("beyond 64 bits")

    checker = Checker(fleet, client, Limits(), up=lambda: None, also=also)
    fleet.add(EngineSpec("http://a"))
    await until(lambda: len(ended) >= 3)
    await checker.close()
    assert [record.getMessage() for record in caplog.records if record.exc_info] == [
        "a check of http://a could not be finished"
    ]
