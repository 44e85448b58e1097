# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Routing by caches: predicted from requests, or announced by engines or a pool. What cannot be
followed is reported.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="the router's packages are not installed")
pytest.importorskip("zmq", reason="pyzmq is not installed")

from fake_engines import Announcer, FakeEngine
from routed import RUNNING, Site, announced, routed, until
from support.prometheus_lint import complaints

from beluga.gateway import EngineSpec
from beluga.gateway.parsed_request import parse_request
from beluga.router import BlockHasher

pytestmark = pytest.mark.usefixtures("quick")
TOKENS = list(range(1000, 1000 + 256))


def stored(name: int, parent: int | None = None, *, size: int = 16) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": [name],
        "parent_block_hash": parent,
        "token_ids": TOKENS[:size],
        "block_size": size,
        "lora_id": None,
        "medium": "GPU",
    }


def warnings(caplog: pytest.LogCaptureFixture, text: str) -> int:
    return sum(text in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("policy", ["linear", "least-cost"])
async def test_blocks_after_unknown_ones_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, policy: str
) -> None:
    async with announced(tmp_path, policy=policy) as (site, announcers):
        for number in range(50):
            announcers[0].publish([stored(500 + number, 400 + number)])
        await site.until_reported(
            "events", "50 KV events could not be applied; the last: worker 1, rank 0: parent"
        )
        [worker] = site.service.fleet
        assert "Name its replay endpoint" in worker.problems["events"]
    assert warnings(caplog, "parent block not found") == 1


async def test_missed_messages_are_reported_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("beluga.gateway.kv_events.UNREAD_S", 0.5)
    async with announced(tmp_path) as (site, announcers):
        for number in range(3):
            announcers[0].publish([stored(number)], live=number == 2)
        await site.until_reported("events", "2 messages of KV events were missed")
        [worker] = site.service.fleet
        await until(lambda: not worker.problems)


async def test_removals_of_unknown_blocks_are_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine removes blocks that it had before the router started, or reports them in DRAM."""
    async with announced(tmp_path) as (site, announcers):
        announcers[0].publish([{"type": "BlockRemoved", "block_hashes": [7], "medium": "GPU"}])
        moved = stored(8) | {"medium": "CPU", "token_ids": []}
        announcers[0].publish([moved])
        counts = site.service.index().indexer.counts
        await until(lambda: counts.unknown == 2)
        await asyncio.sleep(0.1)
        assert next(iter(site.service.fleet)).problems == {}
    assert warnings(caplog, "block not found") == 0


def by_rank(announcer: Announcer, rank: int, event: object) -> None:
    """Publish an event of a data-parallel rank."""
    import msgspec

    number = len(announcer._sent).to_bytes(8, "big")
    frames = [b"", number, msgspec.msgpack.encode([time.time(), [event], rank])]
    announcer._sent.append(frames)
    announcer._live.send_multipart(frames)


async def test_ranks_beyond_the_limit_of_the_index_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with announced(tmp_path, index_ranks=4) as (site, announcers):
        for rank in range(9):
            by_rank(announcers[0], rank, stored(rank))
        await site.until_reported(
            "events", "5 KV events could not be applied; the last: worker 1 exceeds the limit"
        )
    assert warnings(caplog, "exceeds the limit") == 1


async def test_workers_beyond_the_limit_of_the_index_are_reported() -> None:
    async with routed(FakeEngine(), FakeEngine(), policy="least-cost", index_ranks=1) as site:
        for _ in range(4):
            await site.completed(prompt=TOKENS)
        problems = [list(worker.problems.values()) for worker in site.service.fleet]
        assert not any(problems)
        for seed in range(20):
            await site.completed(prompt=[seed * 1000 + token for token in TOKENS])
        workers = site.service.fleet
        await until(lambda: any("raise --index-ranks" in str(e.problems) for e in workers))
        kinds = [engine.problems.keys() for engine in workers]
        assert [set(kind) for kind in kinds].count({"events"}) == 1


async def test_blocks_of_any_rank_of_an_engine_count_for_it(tmp_path: Path) -> None:
    async with announced(tmp_path) as (site, announcers):
        announcer = announcers[0]
        chain = stored(1) | {"block_hashes": list(range(16)), "token_ids": TOKENS}
        by_rank(announcer, 0, stored(1))
        by_rank(announcer, 3, chain)
        index = site.service.index()
        await until(lambda: index.indexer.counts.stored == 17)
        await site.completed(prompt=TOKENS)
        [worker] = site.service.fleet
        assert worker.hit_tokens == 256
        await until(lambda: not worker.problems)
        by_rank(announcer, 3, {"type": "AllBlocksCleared"})
        await until(lambda: index.indexer.counts.removed == 16)
        query = site.service._cache.query_of(SimpleNamespace(  # type: ignore[arg-type]
            isl=256, tokens=TOKENS, exact=True, model=None, salt=None
        ))  # fmt: skip
        held = index.indexer.find_matches(query.hashes).held
        assert {worker.dp_rank: own.device for worker, own in held.items()} == {0: 1}


def ranks(count: int) -> str:
    return "".join(f'vllm:num_requests_running{{engine="{n}"}} 0\n' for n in range(count))


async def test_ranks_without_an_endpoint_are_reported(tmp_path: Path) -> None:
    async with announced(tmp_path, metrics=ranks(2)) as (site, announcers):
        announcers[0].stored(TOKENS, 100)
        await site.until_reported(
            "events", "it has 2 data-parallel ranks, but KV events of 1 are configured"
        )
        by_rank(announcers[0], 1, stored(1))  # one endpoint may publish for several engines
        by_rank(announcers[0], 0, stored(2))
        [worker] = site.service.fleet
        await until(lambda: not worker.problems)


async def test_each_rank_may_have_an_endpoint(tmp_path: Path) -> None:
    engine, announcers = FakeEngine(), []
    engine.metrics = ranks(2)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        announcers.append(Announcer(tmp_path / name))
    first, second = announcers
    async with engine:
        spec = EngineSpec(engine.url, (), first.events, None, ((second.events, None),))
        async with routed(engines=(spec,), policy="linear") as site:
            for announcer in announcers:
                await until(announcer.subscribed)
            await until(lambda: all(e.serving for e in site.service.fleet))
            by_rank(first, 0, stored(1))
            by_rank(second, 1, stored(1) | {"block_hashes": [*range(16)], "token_ids": TOKENS})
            index = site.service.index()
            await until(lambda: index.indexer.counts.stored == 17)
            await site.completed(prompt=TOKENS)
            [worker] = site.service.fleet
            assert worker.hit_tokens == 256
            await until(lambda: worker.ranks == 2 and not worker.problems)
            site.service.fleet.remove(worker)
            assert index.indexer.workers() == []
    for announcer in announcers:
        announcer.close()


@pytest.mark.parametrize("first", [128, 16])
async def test_the_first_engine_that_announces_decides_the_block_size(
    tmp_path: Path, first: int
) -> None:
    async with announced(tmp_path, 2) as (site, announcers):
        counts = site.service.index().indexer.counts
        announcers[0].publish([stored(1, size=first)])
        await until(lambda: counts.stored == 1)
        other = 144 - first
        announcers[1].publish([stored(2, size=other)])
        text = f"worker 2 has blocks of {other} tokens, but the router has {first}"
        await site.until_reported("events", text, engine=1)
        assert counts.stored == 1
        assert next(iter(site.service.fleet)).problems == {}


async def test_blocks_of_a_stopped_engine_are_ignored(tmp_path: Path) -> None:
    async with announced(tmp_path, replay=True) as (site, announcers):
        announcers[0].stored(TOKENS, 100)
        index = site.service.index()
        await until(lambda: index.indexer.counts.stored == 16)
        announcers[0].close()
        await until(lambda: index.indexer.counts.removed == 16)
        await site.until_reported("events", "no process publishes KV events")
        await site.completed(prompt=TOKENS)
        [worker] = site.service.fleet
        assert worker.hit_tokens == 0
        # it reconnects, with the blocks that it has computed since
        announcers[0] = Announcer(tmp_path / "0")
        await until(announcers[0].subscribed)
        announcers[0].stored(TOKENS, 100)
        await until(lambda: index.indexer.counts.stored == 32)
        await until(lambda: not worker.problems)


async def test_a_late_replay_does_not_affect_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("beluga.gateway.kv_events.REPLAY_S", 0.3)
    async with announced(tmp_path, replay=True) as (site, [announcer]):
        [listener] = site.service._cache._followed[1].listeners
        announcer.stored(TOKENS, 100, live=False)
        announcer.stored(TOKENS, 200)
        await until(lambda: listener.subscription.feed.lost == 1)  # no engine has responded
        announcer.answer()
        for number in range(3):
            announcer.stored(TOKENS, 300 + 100 * number, live=False)
            announcer.stored(TOKENS, 400 + 100 * number)

            def whole(replays: int = 2 + number) -> bool:
                announcer.answer()
                return announcer.replays == replays and listener.subscription.wanted is None

            await until(whole)
        assert listener.subscription.feed.lost == 1


async def test_an_engine_that_returns_unchanged_gets_a_full_replay_request(tmp_path: Path) -> None:
    """Only its connection was lost: it still has its blocks, and its sequence numbers continue."""
    async with announced(tmp_path, replay=True) as (site, [announcer]):
        index = site.service.index()
        announcer.stored(TOKENS, 100)
        await until(lambda: index.indexer.counts.stored == 16)
        [listener] = site.service._cache._followed[1].listeners
        listener._drop_blocks()
        assert index.indexer.counts.removed == 16
        announcer.stored([token + 5000 for token in TOKENS], 200)

        def whole() -> bool:
            announcer.answer()
            return index.indexer.counts.stored == 48

        await until(whole)


async def test_prompts_sent_before_an_engine_restart_are_ignored() -> None:
    engine = FakeEngine()
    engine.metrics = RUNNING + "process_start_time_seconds 1000\n"
    async with routed(engine, policy="linear") as site:
        [worker] = site.service.fleet
        await until(lambda: worker.started_s == 1000)
        await site.completed(prompt=TOKENS)
        query = site.service._cache.query_of(SimpleNamespace(  # type: ignore[arg-type]
            isl=256, tokens=TOKENS, exact=True, model=None, salt=None
        ))  # fmt: skip
        longest = site.service._cache.longest
        assert longest(query) == 16
        scrapes = engine.scrapes
        await until(lambda: engine.scrapes > scrapes + 2)
        assert longest(query) == 16
        engine.metrics = RUNNING + "process_start_time_seconds 2000.5\n"
        await until(lambda: longest(query) == 0)


async def test_engines_without_events_are_a_problem_of_policies_that_need_them() -> None:
    for policy, kinds in (("least-cost", set()), ("linear", {"events"}), ("random", set())):
        engine = FakeEngine()
        engine.metrics = RUNNING
        async with routed(engine, policy=policy) as site:
            [worker] = site.service.fleet
            await until(lambda load=engine: load.scrapes > 1)
            await site.completed(prompt=TOKENS)
            await until(lambda shown=worker, expected=kinds: shown.problems.keys() == expected)


# ---- Routing by caches
LEADING = TOKENS[:160]  # ten blocks


@pytest.mark.parametrize(
    "prompt", [LEADING, "The whale is white. " * 40], ids=["tokens", "text blocks"]
)
async def test_a_prompt_is_routed_to_the_worker_of_its_prefix(prompt: Any) -> None:
    a, b = FakeEngine(), FakeEngine()
    async with routed(a, b, policy="linear") as site:
        for _ in range(5):
            assert (await site.completed(prompt=prompt))[0] == 200
        assert sorted(site.counts()) == [0, 5]
        rates = [e.hit_tokens / e.prompt_tokens for e in site.service.fleet if e.prompt_tokens]
        assert rates[0] > 0.7
        longer = prompt + prompt[:16]
        async with site.complete(prompt=longer) as answer:
            numbers = {worker["url"]: worker["id"] for worker in await site.workers()}
            chosen = a if a.seen else b
            assert answer.headers["X-Beluga-Worker"] == str(numbers[chosen.url])
            assert float(answer.headers["X-Beluga-Hit-Rate"]) > 0.7
        assert sorted(site.counts()) == [0, 6]
        await site.completed(prompt=longer, cache_salt="another tenant's")
        assert (await site.completed(prompt=prompt[1:]))[0] == 200
        text = await site.text("/metrics")
        assert "dynamo_router_overhead_indexer_find_matches_ms_count 8" in text
        assert "dynamo_router_overhead_block_hashing_ms_count 8" in text


async def test_a_cache_oblivious_policy_costs_no_hashing() -> None:
    async with routed(FakeEngine(), policy="least-tokens") as site:
        await site.completed(prompt=LEADING)
        text = await site.text("/metrics")
        assert "dynamo_router_overhead_block_hashing_ms_count 0" in text


async def prefers(site: Site, engine: FakeEngine, tokens: list[int]) -> None:
    """Check that a prompt goes to that engine only."""
    before = site.counts()
    await site.completed(prompt=tokens)
    after = site.counts()
    gained = [now - then for now, then in zip(after, before, strict=True)]
    assert gained == [int(each is engine) for each in site.engines]


async def test_missed_events_of_engines_are_replayed(tmp_path: Path) -> None:
    other = [token + 5000 for token in LEADING]
    async with announced(tmp_path, 2, replay=True) as (site, announcers):
        _, b = site.engines
        announcer = announcers[1]
        index = site.service.index()
        announcer.stored(LEADING, 100)
        await until(lambda: index.indexer.counts.stored == 10)
        await prefers(site, b, LEADING)
        announcer.stored(other, 200, live=False)
        announcer.stored([token + 9000 for token in LEADING], 300)

        def whole() -> bool:
            announcer.answer()
            return bool(index.indexer.counts.stored == 30)

        await until(whole)
        assert announcer.replays == 1
        await prefers(site, b, other)
        text = await site.text("/metrics")
        applied = 'kv_cache_events_applied{event_type="stored",status="ok"}'
        assert f"dynamo_component_{applied} 30" in text
        number = (await site.workers())[1]["id"]
        assert await site.status("DELETE", f"{site.admin}/workers/{number}") == 200
        assert index.indexer.workers() == []


# ---- Events of a pool

PROMPT = list(range(1000, 1000 + 64))
OURS, THEIRS = 0xFEDCBA9876543210, 0x77


def pooled_blocks(space: int, tokens: list[int], *, block_size: int = 16) -> dict[str, object]:
    """Return the event of a pool that has got the blocks of a prompt."""
    contents = BlockHasher(block_size=block_size).local(tokens)
    return {
        "type": "BlockStored",
        "block_hashes": [100 + index for index in range(len(contents))],  # the same for all models
        "parent_block_hash": None,
        "token_ids": [],
        "block_size": block_size,
        "medium": "SHARED",
        "tokens_hashes": contents,
        "space": space,
    }


def idle(space: int | None) -> str:
    """Return the metrics of an idle vLLM, with Beluga's connector or without."""
    line = f'beluga_vllm_space_info{{engine="0",space="{space:016x}"}} 1.0\n' if space else ""
    return "vllm:num_requests_running 0\n" + line


async def pool_of(site: Site) -> dict[str, Any]:
    async with site.client.get(f"{site.admin}/pool") as answer:
        pool: dict[str, Any] = await answer.json()
        return pool


@asynccontextmanager
async def pooled(
    folder: Path, *engines: FakeEngine, **settings: Any
) -> AsyncIterator[tuple[Site, Announcer]]:
    """Start engines behind a router that follows a pool. Yields it and the pool's announcer."""
    server = Announcer(folder)
    server.publish([{"type": "AllBlocksCleared"}])
    try:
        where = f"{server.events},{server.replay}"
        async with routed(*engines, policy="linear", pool_events=where, **settings) as site:
            await until(server.subscribed)
            yield site, server
    finally:
        server.close()


async def followed(site: Site, server: Announcer) -> None:
    """Wait until the gateway has all events of the server."""
    pool = site.service._cache.pool
    assert pool is not None

    def current() -> bool:
        server.answer()
        return pool.feed.up_to_date

    await until(current)


def shared(site: Site, model: str) -> int:
    """Return the number of a prompt's leading blocks that the pool has for a model."""
    cache = site.service._cache
    body = json.dumps({"model": model, "prompt": PROMPT}).encode()
    return cache.find_matches(cache.query_of(parse_request("/v1/completions", body))).shared


@pytest.mark.parametrize(
    ("space", "blocks"), [(OURS, 4), (THEIRS, 2), (None, 0)], ids=["ours", "theirs", "silent"]
)
async def test_blocks_of_another_model_are_ignored(
    tmp_path: Path, space: int | None, blocks: int
) -> None:
    engine = FakeEngine()
    engine.metrics = idle(space)
    async with pooled(tmp_path, engine) as (site, server):
        server.publish([pooled_blocks(OURS, PROMPT), pooled_blocks(THEIRS, PROMPT[:32])])
        await followed(site, server)
        [worker] = site.service.fleet
        await until(lambda: worker.space == space and worker.kind != "")
        assert shared(site, "fake") == blocks
        assert (await site.completed(prompt=PROMPT))[0] == 200
        assert worker.hit_tokens == 16 * blocks
        await until(lambda: ("pool" in worker.problems) == (space is None))
        if space is None:
            assert "does not report which of the pool's blocks" in worker.problems["pool"]


async def test_two_models_behind_one_gateway_have_their_own_blocks(tmp_path: Path) -> None:
    large, small = FakeEngine("large"), FakeEngine("small")
    large.metrics, small.metrics = idle(OURS), idle(THEIRS)
    async with pooled(tmp_path, large, small) as (site, server):
        server.publish([pooled_blocks(OURS, PROMPT), pooled_blocks(THEIRS, PROMPT[:16])])
        await followed(site, server)
        await until(lambda: all(worker.space for worker in site.service.fleet))
        assert (shared(site, "large"), shared(site, "small")) == (4, 1)
        removed = {"type": "BlockRemoved", "block_hashes": [102, 103], "space": OURS}
        server.publish([removed, {**removed, "block_hashes": [100], "space": THEIRS}])
        await until(lambda: site.service.index().indexer.shared_count == 2)
        assert (shared(site, "large"), shared(site, "small")) == (2, 0)


async def test_the_page_shows_the_feed(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.metrics = idle(OURS)
    async with pooled(tmp_path, engine) as (site, server):
        orphan = {**pooled_blocks(OURS, PROMPT[:16]), "block_hashes": [7], "parent_block_hash": 6}
        server.publish(
            [pooled_blocks(OURS, PROMPT), pooled_blocks(THEIRS, PROMPT, block_size=32), orphan]
        )
        server.publish([{"type": "Nonsense"}])
        await followed(site, server)
        pool = await pool_of(site)
        assert 0 <= pool.pop("last_message_age_seconds") < 60
        assert pool == {
            "up_to_date": True,
            "blocks": 4,
            "blocks_without_parent": 1,
            "blocks_of_other_sizes": 2,
            "messages_unread": 1,
            "messages_lost": 0,
            "gaps": 0,
            "restarts": 0,
            "spaces": {f"{OURS:016x}": 5},
            "problem": "",
        }
        page = await site.text("/metrics")
        assert "beluga_gateway_pool_up_to_date 1" in page
        assert "beluga_gateway_pool_blocks 4" in page
        assert "beluga_gateway_pool_messages_unread 1" in page
        assert [line for line in complaints(page.encode()) if "beluga" in line] == []
        [worker] = await site.workers()
        assert worker["space"] == f"{OURS:016x}"


async def test_a_pool_with_another_block_size_is_reported(tmp_path: Path) -> None:
    async with pooled(tmp_path, FakeEngine()) as (site, server):
        server.publish([pooled_blocks(OURS, PROMPT, block_size=32)])
        await followed(site, server)
        [worker] = site.service.fleet
        text = "the pool has 2 blocks of another size than the router's 16 tokens"
        await until(lambda: text in worker.problems.get("pool", ""))
        assert text in (await pool_of(site))["problem"]
        page = await site.text("/metrics")
        assert f'problem{{problem="pool",worker="{worker.url}"}} 1' in page


async def test_a_silent_pool_server_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("beluga.gateway.kv_events.BEHIND_S", 0.05)
    async with pooled(tmp_path, FakeEngine()) as (site, server):
        [worker] = site.service.fleet
        await until(lambda: "publishes the pool's blocks" in worker.problems.get("pool", ""))
        assert (await pool_of(site))["up_to_date"] is False
        await followed(site, server)
        await until(lambda: "pool" not in worker.problems)


async def test_without_a_pools_events_there_is_nothing_to_show() -> None:
    async with routed(FakeEngine(), policy="linear") as site:
        assert await site.status("GET", f"{site.admin}/pool") == 404
        assert "beluga_gateway_pool" not in await site.text("/metrics")


async def test_text_prompts_without_a_tokenizer_are_reported(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.tokenize_status = 404
    async with pooled(tmp_path, engine) as (site, _):
        [worker] = site.service.fleet
        await until(lambda: "KV events do not contain" in worker.problems.get("tokenizer", ""))
