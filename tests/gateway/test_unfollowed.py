# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Engines whose caches the index cannot follow: each is reported to the operator, once a minute,
and a block that is no longer announced does not count.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="the router's packages are not installed")
pytest.importorskip("zmq", reason="pyzmq is not installed")

from fake_engines import Announcer, FakeEngine
from routed import Site, routed, run, until

from beluga.gateway import EngineSpec
from beluga.gateway import cache as cache_module
from beluga.gateway import health as problems_module
from beluga.gateway import kv_events as following_module
from beluga.gateway import kv_events as listener_module

TOKENS = list(range(1000, 1000 + 256))
RUNNING = "vllm:num_requests_running 0\n"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problems_module, "LOOK_S", 0.01)
    monkeypatch.setattr(cache_module, "SILENT_S", 0.05)
    monkeypatch.setattr(listener_module, "ALONE_S", 0.05)


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


def play(
    folder: Path,
    scenario: Callable[[Site, list[Announcer]], Any],
    *,
    engines: int = 1,
    replay: bool = False,
    metrics: str = RUNNING,
    **settings: Any,
) -> None:
    """Run a scenario on a gateway in front of engines that announce their blocks."""

    async def whole() -> None:
        fakes, announcers = [FakeEngine() for _ in range(engines)], []
        try:
            for number, fake in enumerate(fakes):
                (home := folder / str(number)).mkdir()
                announcers.append(Announcer(home))
                fake.metrics = metrics
                await fake.__aenter__()
            specs = tuple(
                EngineSpec(fake.url, (), announcer.events, announcer.replay if replay else None)
                for fake, announcer in zip(fakes, announcers, strict=True)
            )
            async with routed(engines=specs, **{"policy": "linear"} | settings) as site:
                site.engines = fakes
                await site.up()
                for announcer in announcers:
                    await until(announcer.subscribed)
                await scenario(site, announcers)
        finally:
            for announcer in announcers:
                announcer.close()
            for fake in fakes:
                await fake.__aexit__()

    run(whole)


async def until_reported(site: Site, text: str, engine: int = 0) -> None:
    """Wait until a problem of an engine's events is reported everywhere."""
    worker = list(site.service.fleet)[engine]
    await until(lambda: text in worker.problems.get("events", ""))
    assert text in (await site.workers())[engine]["problems"]["events"]
    live = f'worker_problem{{problem="events",worker="{worker.url}"}} 1.0'
    assert live in await site.text("/metrics")


def warnings(caplog: pytest.LogCaptureFixture, text: str) -> int:
    return sum(text in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("policy", ["linear", "least-cost"])
def test_blocks_after_unknown_ones_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, policy: str
) -> None:
    async def scenario(site: Site, announcers: list[Announcer]) -> None:
        for number in range(50):
            announcers[0].publish([stored(500 + number, 400 + number)])
        await until_reported(
            site, "50 KV events could not be applied; the last: worker 1, rank 0: parent"
        )
        [worker] = site.service.fleet
        assert "Name its replay endpoint" in worker.problems["events"]

    with caplog.at_level(logging.WARNING):
        play(tmp_path, scenario, policy=policy)
    assert warnings(caplog, "parent block not found") == 1


def test_missed_messages_are_reported_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following_module, "UNREAD_S", 0.5)

    async def scenario(site: Site, announcers: list[Announcer]) -> None:
        for number in range(3):
            announcers[0].publish([stored(number)], live=number == 2)
        await until_reported(site, "2 messages of KV events were missed")
        [worker] = site.service.fleet
        await until(lambda: not worker.problems)

    play(tmp_path, scenario)


def test_removals_of_unknown_blocks_are_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine removes blocks that it had before the router started, or reports them in DRAM."""

    async def scenario(site: Site, announcers: list[Announcer]) -> None:
        announcers[0].publish([{"type": "BlockRemoved", "block_hashes": [7], "medium": "GPU"}])
        moved = stored(8) | {"medium": "CPU", "token_ids": []}
        announcers[0].publish([moved])
        counts = site.service.index().indexer.counts
        await until(lambda: counts.unknown == 2)
        await asyncio.sleep(0.1)
        assert next(iter(site.service.fleet)).problems == {}

    with caplog.at_level(logging.WARNING):
        play(tmp_path, scenario)
    assert warnings(caplog, "block not found") == 0


def by_rank(announcer: Announcer, rank: int, event: object) -> None:
    """Publish an event of a data-parallel rank."""
    import msgspec

    number = len(announcer._sent).to_bytes(8, "big")
    frames = [b"", number, msgspec.msgpack.encode([time.time(), [event], rank])]
    announcer._sent.append(frames)
    announcer._live.send_multipart(frames)


def test_ranks_beyond_the_limit_of_the_index_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(site: Site, announcers: list[Announcer]) -> None:
        for rank in range(9):
            by_rank(announcers[0], rank, stored(rank))
        await until_reported(
            site, "5 KV events could not be applied; the last: worker 1 exceeds the limit"
        )

    with caplog.at_level(logging.WARNING):
        play(tmp_path, scenario, index_ranks=4)
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


def test_blocks_of_any_rank_of_an_engine_count_for_it(tmp_path: Path) -> None:
    async def scenario(site: Site, announcers: list[Announcer]) -> None:
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

    play(tmp_path, scenario)


def ranks(count: int) -> str:
    return "".join(f'vllm:num_requests_running{{engine="{n}"}} 0\n' for n in range(count))


def test_ranks_without_an_endpoint_are_reported(tmp_path: Path) -> None:
    async def scenario(site: Site, announcers: list[Announcer]) -> None:
        announcers[0].stored(TOKENS, 100)
        await until_reported(
            site, "it has 2 data-parallel ranks, but KV events of 1 are configured"
        )
        by_rank(announcers[0], 1, stored(1))  # one endpoint may publish for several engines
        by_rank(announcers[0], 0, stored(2))
        [worker] = site.service.fleet
        await until(lambda: not worker.problems)

    play(tmp_path, scenario, metrics=ranks(2))


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
def test_the_first_engine_that_announces_decides_the_block_size(tmp_path: Path, first: int) -> None:
    async def scenario(site: Site, announcers: list[Announcer]) -> None:
        counts = site.service.index().indexer.counts
        announcers[0].publish([stored(1, size=first)])
        await until(lambda: counts.stored == 1)
        other = 144 - first
        announcers[1].publish([stored(2, size=other)])
        text = f"worker 2 has blocks of {other} tokens, but the router has {first}"
        await until_reported(site, text, engine=1)
        assert counts.stored == 1
        assert next(iter(site.service.fleet)).problems == {}

    play(tmp_path, scenario, engines=2)


def test_blocks_of_a_stopped_engine_are_ignored(tmp_path: Path) -> None:
    async def scenario(site: Site, announcers: list[Announcer]) -> None:
        announcers[0].stored(TOKENS, 100)
        index = site.service.index()
        await until(lambda: index.indexer.counts.stored == 16)
        announcers[0].close()
        await until(lambda: index.indexer.counts.removed == 16)
        await until_reported(site, "no process publishes KV events")
        await site.completed(prompt=TOKENS)
        [worker] = site.service.fleet
        assert worker.hit_tokens == 0
        # it reconnects, with the blocks that it has computed since
        announcers[0] = Announcer(tmp_path / "0")
        await until(announcers[0].subscribed)
        announcers[0].stored(TOKENS, 100)
        await until(lambda: index.indexer.counts.stored == 32)
        await until(lambda: not worker.problems)

    play(tmp_path, scenario, replay=True)


def test_a_late_replay_does_not_affect_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("beluga.gateway.kv_events.REPLAY_S", 0.3)

    async def scenario(site: Site, announcers: list[Announcer]) -> None:
        [announcer] = announcers
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

    play(tmp_path, scenario, replay=True)


def test_an_engine_that_returns_unchanged_gets_a_full_replay_request(tmp_path: Path) -> None:
    """Only its connection was lost: it still has its blocks, and its sequence numbers continue."""

    async def scenario(site: Site, announcers: list[Announcer]) -> None:
        [announcer] = announcers
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

    play(tmp_path, scenario, replay=True)


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
