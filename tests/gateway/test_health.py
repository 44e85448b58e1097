# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Problems with following engines' caches and loads appear in log, metrics and GET /workers; block
sizes and loads are read from the engines.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="the router's packages are not installed")

pytest.importorskip("zmq", reason="pyzmq is not installed")

from fake_engines import Announcer, FakeEngine
from routed import Site, routed, run, until

from beluga.gateway import EngineSpec
from beluga.gateway import cache as cache_module
from beluga.gateway import health as problems_module
from beluga.gateway.conversation import Conversation
from beluga.gateway.engine import Health
from beluga.router import Load

TOKENS = list(range(1000, 1000 + 256))
CONFIG = 'vllm:cache_config_info{block_size="128",num_gpu_blocks="9"} 1.0\n'


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problems_module, "LOOK_S", 0.01)
    monkeypatch.setattr(cache_module, "SILENT_S", 0.05)


async def until_reported(site: Site, kind: str, text: str) -> None:
    """Wait until an engine's problem is logged, and check that metrics have it, too."""

    def there() -> bool:
        return any(text in e.problems.get(kind, "") for e in site.service.fleet)

    await until(there)
    assert any(text in worker["problems"].get(kind, "") for worker in await site.workers())
    metrics = await site.text("/metrics")
    assert f'problem="{kind}",worker="{site.engines[0].url}"}} 1.0' in metrics


def play(
    tmp_path: Path, scenario: Callable[[Site, Announcer, FakeEngine], Any], **settings: Any
) -> None:
    async def whole() -> None:
        announcer, engine = Announcer(tmp_path), FakeEngine()
        engine.metrics = "vllm:num_requests_running 0\n" + settings.pop("metrics", "")
        engine.tokenize_status = settings.pop("tokenize_status", 200)
        try:
            async with engine:
                spec = EngineSpec(engine.url, (), announcer.events, announcer.replay)
                async with routed(engines=(spec,), policy="linear", **settings) as site:
                    site.engines = (engine,)
                    await site.up()
                    await until(announcer.subscribed)
                    await scenario(site, announcer, engine)
        finally:
            announcer.close()

    run(whole)


def of_128(announcer: Announcer) -> None:
    announcer.block_size = 128
    announcer.stored(TOKENS, 100)


@pytest.mark.parametrize("metrics", ["", CONFIG], ids=["by an event", "by its metrics"])
def test_the_block_size_is_read_from_the_engine(tmp_path: Path, metrics: str) -> None:
    async def scenario(site: Site, announcer: Announcer, engine: FakeEngine) -> None:
        if metrics:
            await until(lambda: site.service._cache._block_size == 128)
        of_128(announcer)
        index = site.service.index()
        await until(lambda: index.indexer.counts.stored == 2)
        assert (await site.completed(prompt=TOKENS))[0] == 200
        [worker] = site.service.fleet
        assert worker.hit_tokens == 256
        await until(lambda: not worker.problems)

    play(tmp_path, scenario, metrics=metrics)


def test_a_wrong_block_size_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(site: Site, announcer: Announcer, engine: FakeEngine) -> None:
        of_128(announcer)
        await until_reported(site, "events", "has blocks of 128 tokens, but the router has 16")
        await until_reported(
            site, "block_size", "it has blocks of 128 tokens, but the router has 16"
        )
        text = await site.text("/metrics")
        assert 'applied{event_type="message",status="unreadable"} 1.0' in text

    with caplog.at_level(logging.WARNING):
        play(tmp_path, scenario, block_size=16, metrics=CONFIG)
    about = [r.getMessage() for r in caplog.records if "blocks of 128" in r.getMessage()]
    assert len(about) == len(set(about)) == 2  # although the check ran many times


def test_malformed_events_are_reported(tmp_path: Path) -> None:
    async def scenario(site: Site, announcer: Announcer, engine: FakeEngine) -> None:
        announcer.publish([{"type": "Nonsense"}])
        await until_reported(
            site, "events", "1 KV events are malformed; the last: there is no KV event"
        )

    play(tmp_path, scenario)


def test_an_engine_that_computes_without_events_is_reported(tmp_path: Path) -> None:
    async def scenario(site: Site, announcer: Announcer, engine: FakeEngine) -> None:
        [worker] = site.service.fleet
        await until(lambda: not worker.problems)  # an idle engine has nothing to announce
        await site.completed(prompt=TOKENS)
        await until_reported(site, "events", "published no KV event")
        announcer.stored(TOKENS, 100)
        await until(lambda: not worker.problems)

    play(tmp_path, scenario)


async def test_an_endpoint_without_a_publisher_is_reported(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with engine:
        spec = EngineSpec(engine.url, (), f"ipc://{tmp_path}/nobody")
        async with routed(engines=(spec,), policy="linear") as site:
            site.engines = (engine,)
            await until_reported(site, "events", "no process publishes KV events at ipc://")


class Letters:
    """The fake engine's tokenizer, whose tokens are bytes; ``more`` is in front of a text."""

    problem = ""

    def __init__(self, more: str = "") -> None:
        self.more = more

    def text(self, text: str, *, special_tokens: bool = True) -> list[int]:
        return list((self.more + text).encode())

    def chat(self, conversation: Conversation) -> list[int]:
        return self.text("".join(str(m["content"]) for m in conversation.messages))


@pytest.mark.parametrize(
    ("more", "engines_template", "kind", "text"),
    [
        ("x", "", "tokenizer", "it computes other tokens for a text"),
        ("", "<user>", "template", "it computes other tokens for a conversation"),
    ],
)
def test_an_engine_with_another_tokenizer_is_reported(  # noqa: PLR0917
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    more: str,
    engines_template: str,
    kind: str,
    text: str,
) -> None:
    words = Letters(more)
    monkeypatch.setattr("beluga.gateway.service.load_tokenizer", lambda *_, **__: words)

    async def scenario(site: Site, announcer: Announcer, engine: FakeEngine) -> None:
        engine.template = engines_template
        [worker] = site.service.fleet
        worker.fail(
            "it was started with another template"
        )  # the worker may have been queried before
        await until_reported(site, kind, text)
        assert worker.problems.keys() == {kind}
        words.more = engine.template = ""  # the engine returns with the expected block size
        worker.fail("it was restarted")
        await until(lambda: not worker.problems)

    play(tmp_path, scenario, tokenizer=tmp_path)


@pytest.mark.parametrize("status", [404, 500])
def test_an_engine_without_a_tokenize_endpoint_is_not_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setattr("beluga.gateway.service.load_tokenizer", lambda *_, **__: Letters("x"))

    async def scenario(site: Site, announcer: Announcer, engine: FakeEngine) -> None:
        [worker] = site.service.fleet
        await until(lambda: worker.probed_after == worker.failures)
        assert worker.token_problems == {}

    play(tmp_path, scenario, tokenizer=tmp_path, tokenize_status=status)


@pytest.mark.parametrize("answer", [b"", b"<html>", b"[" * 100_000])
def test_an_engine_that_fails_to_tokenize_is_checked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    monkeypatch.setattr("beluga.gateway.service.load_tokenizer", lambda *_, **__: Letters("x"))

    async def scenario(site: Site, announcer: Announcer, engine: FakeEngine) -> None:
        [worker] = site.service.fleet
        engine.tokenized = answer
        worker.fail("it is requested again")
        scrapes = engine.scrapes
        await until(lambda: engine.scrapes > scrapes + 2)
        engine.faults.healthy = False
        await until(lambda: worker.health is Health.DOWN)
        engine.faults.healthy, engine.tokenized = True, None
        await until_reported(site, "tokenizer", "it computes other tokens for a text")

    play(tmp_path, scenario, tokenizer=tmp_path)


def test_text_prompts_without_a_tokenizer_are_reported(tmp_path: Path) -> None:
    async def scenario(site: Site, announcer: Announcer, engine: FakeEngine) -> None:
        await site.completed(prompt=TOKENS)
        [worker] = site.service.fleet
        assert "tokenizer" not in worker.problems  # these are tokens of the engine
        await site.completed(prompt="a whale " * 100)
        await until_reported(site, "tokenizer", "prompts are hashed by their text")

    play(tmp_path, scenario)


async def test_estimated_caches_are_a_problem_except_for_oblivious_policies() -> None:
    async with routed(FakeEngine(), policy="linear") as site:
        await until_reported(site, "events", "there are no KV events")
    async with routed(FakeEngine(), policy="least-tokens") as site:
        assert [worker["problems"] for worker in await site.workers()] == [{}]


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


async def until_load_reported(site: Site, text: str) -> None:
    """Wait until the load's problem is logged, and check that GET /workers and metrics have it."""
    [worker] = site.service.fleet
    await until(lambda: text in worker.problems.get("metrics", ""))
    [shown] = await site.workers()
    assert text in shown["problems"]["metrics"]
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
    monkeypatch.setattr(problems_module, "ANSWER_MAX", 90)
    engine = FakeEngine()
    engine.metrics = "vllm:num_requests_running 1\nvllm:num_requests_waiting 2\n"
    async with routed(engine) as site:
        await until(lambda: load_of(site).num_requests_waiting == 2)
        engine.metrics = metrics
        await until_load_reported(site, text)
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
        await until_load_reported(site, "the sum of vllm:num_requests_running is")
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
        await until_load_reported(site, "TensorRT-LLM needs enable_iter_perf_stats: true")
