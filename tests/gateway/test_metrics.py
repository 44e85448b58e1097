# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The gateway's own metrics, its advice, and the records that it keeps of caches."""

from __future__ import annotations

import asyncio
import logging
import re
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("aiohttp", reason="the router's packages are not installed")

import numpy as np
from fake_engines import FakeEngine
from routed import routed, until
from support.prometheus_lint import complaints

from beluga.disagg import QueueSize
from beluga.gateway import EngineSpec
from beluga.gateway.admin import Adviser
from beluga.gateway.cache import Cache
from beluga.gateway.engine import Engine
from beluga.gateway.fleet import Fleet
from beluga.gateway.kv_events import Listener
from beluga.gateway.metrics import Latency, Metrics
from beluga.gateway.parsed_request import ParsedRequest
from beluga.gateway.remote import _prefill_load
from beluga.metrics import Distribution, Histogram, HistogramSeries
from beluga.router import (
    BlockHasher,
    Choice,
    Goals,
    Indexer,
    Load,
    Overlap,
    Query,
    WireDecoder,
    Worker,
    hash_blocks_by,
)

# Dynamo counts the parts of routing in milliseconds.
KNOWN = re.compile(
    r"dynamo_router_overhead_\w+_ms(_created)? metric names should not contain abbreviated units"
)


async def test_promtool_reports_no_error() -> None:
    async with routed(FakeEngine(), policy="linear") as site:
        assert (await site.completed(prompt=[*range(64)]))[0] == 200
        assert (await site.completed(model="unknown"))[0] == 404
        [worker] = site.service.fleet
        await until(lambda: bool(worker.problems))
        page = await site.text("/metrics")
    problems = complaints(page.encode())
    assert [line for line in problems if line and not KNOWN.fullmatch(line)] == []
    assert {line.split("_ms")[0] for line in problems if line} <= {
        f"dynamo_router_overhead_{part}"
        for part in ("block_hashing", "indexer_find_matches", "seq_hashing", "scheduling", "total")
    }
    names = set(re.findall("^# TYPE ([a-z0-9_]+) ", page, re.MULTILINE))
    assert {name.partition("_")[0] for name in names} == {"beluga", "dynamo"}


def test_faults_are_reported() -> None:
    assert any("_total" in line for line in complaints(b"# TYPE a counter\na 1\n"))


A, B = Worker(1), Worker(2)


class Memory:
    """A cache on its own clock, with blocks of four tokens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.now = 1000.0
        clock = SimpleNamespace(monotonic=lambda: self.now, perf_counter=self._tick)
        monkeypatch.setattr("beluga.gateway.cache.time", clock)
        self._ticks = 0.0
        self.metrics = Metrics()
        given = {"wanted": True, "announced": False, "block_size": 4, **options}
        given.setdefault("space_of", lambda model: None)
        self.cache = Cache(is_adapter=lambda name: name == "tuned", metrics=self.metrics, **given)

    def _tick(self) -> float:
        self._ticks += 1.0
        return self._ticks

    def query(self, count: int = 12, **fields: Any) -> Query:
        tokens = np.arange(count, dtype=np.uint32)
        return self.cache.query_of(ParsedRequest("/p", b"", isl=count, tokens=tokens, **fields))

    def sent(self, query: Query, worker: Worker = A) -> None:
        self.cache.routed(query, Choice(worker, Overlap(), 0.0))

    def blocks(self, query: Query, worker: Worker = A) -> int:
        return self.cache.find_matches(query).of(worker).blocks


@pytest.mark.parametrize(("announced", "ttl_s"), [(False, 120.0), (True, 5.0)])
def test_sent_prompts_count_as_cached_for_a_while(
    monkeypatch: pytest.MonkeyPatch, announced: bool, ttl_s: float
) -> None:
    memory = Memory(monkeypatch, announced=announced)
    query = memory.query()
    memory.sent(query)
    memory.now += ttl_s - 0.5
    assert memory.blocks(query) == 3
    memory.now += 1.0
    assert memory.blocks(query) == 0


def test_the_longest_prefix_of_any_worker_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(monkeypatch)
    query = memory.query()
    assert memory.cache.longest(query) == 0
    memory.sent(memory.query(4), A)
    memory.sent(memory.query(8), B)
    assert memory.cache.longest(query) == 2
    memory.cache.left(Engine(B, EngineSpec("http://b")))
    assert memory.cache.longest(query) == 1


def test_blocks_are_specific_to_salt_and_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(monkeypatch)
    memory.sent(memory.query(model="base"))
    # a base model's name is not part of a hash
    assert memory.blocks(memory.query(model="other")) == 3
    assert memory.blocks(memory.query()) == 3
    assert memory.blocks(memory.query(salt="mine")) == 0
    assert memory.blocks(memory.query(model="tuned")) == 0


def test_the_parts_of_a_lookup_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(monkeypatch)
    memory.cache.find_matches(memory.query())
    text = memory.metrics.text().decode()
    for part in ("block_hashing", "seq_hashing", "indexer_find_matches"):
        assert f"dynamo_router_overhead_{part}_ms_sum 1000" in text


def test_without_the_option_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(monkeypatch, wanted=False)
    query = memory.query()
    assert (query.isl, query.block_size, len(query.hashes)) == (12, 4, 0)
    memory.sent(query)
    assert memory.cache.index is None
    assert memory.cache.longest(query) == 0
    engine = Engine(A, EngineSpec("http://a", events="tcp://127.0.0.1:1"))
    memory.cache.joined(engine)
    memory.cache.left(engine)
    memory.cache.scrape()
    assert 'status="lost"' not in memory.metrics.text().decode()


def test_listeners_live_as_long_as_their_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []

    class RecordingListener:
        subscription = SimpleNamespace(unread=2, feed=SimpleNamespace(lost=2))

        def __init__(self, index: object, decoder: object, events: str, replay: object) -> None:
            self.events = events

        def close(self) -> None:
            closed.append(self.events)

    monkeypatch.setattr("beluga.gateway.cache.Listener", RecordingListener)
    memory = Memory(monkeypatch, announced=True)
    engines = [
        Engine(Worker(number), EngineSpec(f"http://{number}", events=f"tcp://{number}"))
        for number in (1, 2, 3)
    ]
    for engine in engines:
        memory.cache.joined(engine)
    memory.cache.joined(Engine(Worker(4), EngineSpec("http://4")))
    memory.cache.left(engines[1])
    memory.cache.left(engines[1])
    assert closed == ["tcp://2"]
    memory.cache.scrape()
    assert 'event_type="message",status="lost"} 4' in memory.metrics.text().decode()
    memory.cache.close()
    memory.cache.close()
    assert closed == ["tcp://2", "tcp://1", "tcp://3"]


def test_a_closed_listener_receives_no_events() -> None:
    pytest.importorskip("zmq")

    async def scenario() -> None:
        decoder = WireDecoder(
            1, block_size=4, hash_blocks=hash_blocks_by(BlockHasher(block_size=4))
        )
        listener = Listener(Indexer(), decoder, "tcp://127.0.0.1:9", "tcp://127.0.0.1:10")
        await asyncio.sleep(0)
        listener.close()
        await asyncio.wait(listener._tasks, timeout=20)
        assert all(task.cancelled() for task in listener._tasks)

    asyncio.run(scenario())


# ---- Advice.


def test_advice_is_computed_once_per_interval_of_many_lookups(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        if sum(slept) > 370:
            raise asyncio.CancelledError

    monkeypatch.setattr("beluga.gateway.admin.asyncio", SimpleNamespace(sleep=sleep))
    adviser = Adviser(
        fleet=Fleet(), metrics=Metrics(), loads=dict, pending=lambda: 8, goals=Goals()
    )
    with caplog.at_level(logging.INFO), pytest.raises(asyncio.CancelledError):
        asyncio.run(adviser.run(180.0))
    assert slept == [10.0] * 38
    assert [record.message for record in caplog.records] == [
        "advice: add a worker: 8 prompts wait per worker"
    ] * 2


@pytest.mark.parametrize(("claimed", "share"), [(0, 100), (1, 100), (3, 33)])
def test_prefill_workers_share_the_record_of_sent_prompts(claimed: int, share: int) -> None:
    assert _prefill_load(QueueSize(5, claimed), 100).active_prefill_tokens == share


# ---- The router's own metrics.


def figures(metrics: Metrics) -> dict[str, float]:
    """Return all samples that are not zero, by name and labels, without those of buckets."""
    shown: dict[str, float] = {}
    for name, sample in metrics.registry.snapshot().items():
        for labels, value in sample.series.items():
            more = [text for _, text in labels]
            if isinstance(value, Distribution):
                shown[" ".join([f"{name}_sum", *more])] = value.total
                shown[" ".join([f"{name}_count", *more])] = value.count
            else:
                shown[" ".join([name, *more])] = value
    return {name: value for name, value in shown.items() if value}


def test_histogram_buckets_separate_values() -> None:
    """No bucket is five times as wide as its lower bound; shares and blocks have suitable
    buckets.
    """
    made = [(getattr(each, "name", ""), each) for each in vars(Metrics()).values()]
    histograms = [(n, e.bounds) for n, e in made if isinstance(e, Histogram | HistogramSeries)]
    for name, limits in histograms:
        assert list(limits) == sorted(set(limits)), name
        if name.endswith("hit_rate"):
            assert limits == pytest.approx([tenth / 10 for tenth in range(11)])
            continue
        if name.endswith("tokens"):
            assert (limits[0], limits[-1]) == (16, 1 << 20)  # from one block to the longest prompts
        assert max(b / a for a, b in pairwise(limits)) <= 5, name
    assert len(histograms) >= 6


def test_metrics_count_a_request() -> None:
    metrics = Metrics()
    engine = Engine(Worker(1), EngineSpec("http://a"))
    parsed = ParsedRequest("/p", b"", "m")
    metrics.routed(parsed, Query(40, 16), Choice(Worker(1), Overlap(), 0.25), engine, 0.5)
    metrics.part("scheduling", 0.002)
    metrics.first_token(parsed, engine, 3.0)
    metrics.tokens(parsed, engine, [0.125] * 4)
    metrics.ended(parsed, "200", 5)
    metrics.ended(parsed, "broken", 0)
    metrics.prefilled(parsed, "remote")
    metrics.refused(503)
    metrics.retried(engine)
    router, worker = "dynamo_component_router_", "beluga_gateway_worker_"
    assert figures(metrics) == {
        f"{worker}prompt_tokens_total http://a": 40,
        f"{worker}retries_total http://a": 1,
        f"{router}input_sequence_tokens_sum m": 40,
        f"{router}input_sequence_tokens_count m": 1,
        f"{router}kv_hit_rate_sum m": 0.25,
        f"{router}kv_hit_rate_count m": 1,
        f"{router}cached_tokens_sum m": 10,
        f"{router}cached_tokens_count m": 1,
        f"{router}time_to_first_token_seconds_sum m": 3,
        f"{router}time_to_first_token_seconds_count m": 1,
        f"{router}inter_token_latency_seconds_sum m": 0.5,
        f"{router}inter_token_latency_seconds_count m": 4,
        f"{router}output_sequence_tokens_sum m": 5,
        f"{router}output_sequence_tokens_count m": 1,
        f"{router}requests_total m 200": 1,
        f"{router}requests_total m broken": 1,
        "dynamo_frontend_worker_last_time_to_first_token_seconds http://a": 3,
        "dynamo_frontend_worker_last_inter_token_latency_seconds http://a": 0.125,
        "dynamo_routing_latency_seconds_sum": 0.5,
        "dynamo_routing_latency_seconds_count": 1,
        "dynamo_router_overhead_total_ms_sum": 500,
        "dynamo_router_overhead_total_ms_count": 1,
        "dynamo_router_overhead_scheduling_ms_sum": 2,
        "dynamo_router_overhead_scheduling_ms_count": 1,
        "beluga_gateway_prefills_total remote m": 1,
        "beluga_gateway_refused_total 503": 1,
    }
    assert metrics.latencies() == (Latency(3, 1), Latency(0.5, 4))


def test_metrics_of_a_removed_worker_are_dropped() -> None:
    metrics = Metrics()
    engine = Engine(Worker(1), EngineSpec("http://a"))
    engine.passed(0)
    engine.inflight = 2
    load = Load(active_decode_blocks=3, active_prefill_tokens=4, gpu_cache_usage_perc=0.5)
    load.kv_total_blocks = 6
    metrics.state(engine, load)
    assert "dynamo_kv_hit_rate http://a" not in figures(metrics)
    engine.expected(0.5, 10)
    metrics.state(engine, load)
    values = {name.removesuffix(" http://a"): value for name, value in figures(metrics).items()}
    assert values == {
        "dynamo_frontend_worker_active_decode_blocks": 3,
        "dynamo_frontend_worker_active_prefill_tokens": 4,
        "dynamo_kv_hit_rate": 0.5,
        "beluga_gateway_worker_kv_usage_ratio": 0.5,
        "beluga_gateway_worker_kv_blocks": 6,
        "beluga_gateway_worker_up": 1,
        "beluga_gateway_worker_requests": 2,
    }
    load.gpu_prefix_cache_hit_rate = 0.75  # the engine's own measurement has precedence
    metrics.state(engine, load)
    assert figures(metrics)["dynamo_kv_hit_rate http://a"] == 0.75
    metrics.retried(engine)
    metrics.forget(engine)
    assert figures(metrics) == {}
    metrics.retried(engine)
    assert figures(metrics) == {"beluga_gateway_worker_retries_total http://a": 1}


def test_metrics_of_events_have_a_kind_and_an_outcome() -> None:
    metrics = Metrics()
    counts = SimpleNamespace(
        stored=1, repeated=2, parent_not_found=3, invalid=4, refused=5, removed=6, unknown=7
    )
    metrics.kv_events(cast("Indexer", SimpleNamespace(counts=counts)), lost=8, unread=9)
    assert [(name.split(" ", 1)[1], value) for name, value in figures(metrics).items()] == [
        ("stored ok", 1),
        ("stored duplicate", 2),
        ("stored parent_block_not_found", 3),
        ("stored invalid_block", 4),
        ("stored no_room", 5),
        ("removed ok", 6),
        ("removed block_not_found", 7),
        ("message lost", 8),
        ("message unreadable", 9),
    ]


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
        return [str(advice) for advice in [self.adviser.advise()] if advice]


def test_there_is_no_advice_for_an_idle_rack_or_without_samples() -> None:
    rack = Rack()
    assert rack.advice() == []
    assert rack.adviser.advise() is None


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
    rack.metrics.tokens(parsed, rack.engines[0], [0.2] * 4)
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
