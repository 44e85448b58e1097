# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The gateway's own metrics, and the records that it keeps of caches."""

from __future__ import annotations

import asyncio
import logging
import re
from types import SimpleNamespace
from typing import Any

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
from beluga.gateway.metrics import Metrics
from beluga.gateway.parsed_request import ParsedRequest
from beluga.gateway.remote import _prefill_load
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
    pages = []
    async with routed(FakeEngine(), policy="linear") as site:
        assert (await site.completed(prompt=[*range(64)]))[0] == 200
        assert (await site.completed(model="unknown"))[0] == 404
        [worker] = site.service.fleet
        await until(lambda: bool(worker.problems))
        pages.append(await site.text("/metrics"))
    [page] = pages
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
        assert f"dynamo_router_overhead_{part}_ms_sum 1000.0" in text


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
    assert 'event_type="message",status="lost"} 4.0' in memory.metrics.text().decode()
    memory.cache.close()
    memory.cache.close()
    assert closed == ["tcp://2", "tcp://1", "tcp://3"]


def test_salted_blocks_are_found_only_with_their_salt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    msgspec = pytest.importorskip("msgspec")
    decoders: list[WireDecoder] = []

    class RecordingListener:
        def __init__(self, index: Indexer, decoder: WireDecoder, *_: str | None) -> None:
            decoders.append(decoder)

        def close(self) -> None:
            pass

    monkeypatch.setattr("beluga.gateway.cache.Listener", RecordingListener)
    memory = Memory(monkeypatch, announced=True)
    memory.cache.joined(Engine(A, EngineSpec("http://a", events="tcp://a")))
    for name, parent, salt in ((11, None, "mine"), (12, 11, None), (13, 12, None)):
        first = 4 * (name - 11)
        event = {
            "type": "BlockStored",
            "block_hashes": [name],
            "parent_block_hash": parent,
            "token_ids": list(range(first, first + 4)),
            "block_size": 4,
            "extra_keys": [[salt] if salt else None],
        }
        batch = decoders[0].batch(msgspec.msgpack.encode([1.0, [event]]))
        assert memory.cache.index is not None
        assert memory.cache.index.indexer.apply_all(batch.events) == 0
    assert memory.blocks(memory.query(salt="mine")) == 3
    assert memory.blocks(memory.query(salt="another's")) == memory.blocks(memory.query()) == 0
    memory.cache.close()


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


def test_an_objective_is_missed_by_a_single_request() -> None:
    fleet, metrics = Fleet(), Metrics()
    engine = fleet.add(EngineSpec("http://a"))
    engine.passed(0)
    adviser = Adviser(
        fleet=fleet,
        metrics=metrics,
        loads=lambda: {engine.worker: Load()},
        pending=lambda: 0,
        goals=Goals(ttft_s=1.0),
    )
    adviser.sample()
    metrics.first_token(ParsedRequest("/p", b""), engine, 1.5)
    assert [str(advice) for advice in adviser.advise()] == [
        "add a worker: TTFT is 1.5 s, but its objective is 1 s"
    ]
    adviser.sample()
    assert adviser.advise() == []


@pytest.mark.parametrize(("claimed", "share"), [(0, 100), (1, 100), (3, 33)])
def test_prefill_workers_share_the_record_of_sent_prompts(claimed: int, share: int) -> None:
    assert _prefill_load(QueueSize(5, claimed), 100).active_prefill_tokens == share
