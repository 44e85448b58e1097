# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The gateway reports how it follows a pool's events, and never counts blocks of another model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="the router's packages are not installed")
pytest.importorskip("zmq", reason="pyzmq is not installed")

from fake_engines import Announcer, FakeEngine
from routed import Site, routed, run, until
from support.prometheus_lint import complaints

from beluga.gateway import health as problems_module
from beluga.gateway import kv_events as pool_listener_module
from beluga.gateway.parsed_request import parse_request
from beluga.router import BlockHasher

TOKENS = list(range(1000, 1000 + 64))
OURS, THEIRS = 0xFEDCBA9876543210, 0x77


def stored(space: int, tokens: list[int], *, block_size: int = 16) -> dict[str, object]:
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


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problems_module, "LOOK_S", 0.01)
    monkeypatch.setattr(pool_listener_module, "LOOK_S", 0.01)


async def pool_of(site: Site) -> dict[str, Any]:
    async with site.client.get(f"{site.admin}/pool") as answer:
        pool: dict[str, Any] = await answer.json()
        return pool


def play(
    tmp_path: Path, scenario: Callable[[Site, Announcer], Any], *engines: FakeEngine, **more: Any
) -> None:
    async def whole() -> None:
        server = Announcer(tmp_path)
        server.publish([{"type": "AllBlocksCleared"}])
        try:
            where = f"{server.events},{server.replay}"
            async with routed(*engines, policy="linear", pool_events=where, **more) as site:
                await until(server.subscribed)
                await scenario(site, server)
        finally:
            server.close()

    run(whole)


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
    body = json.dumps({"model": model, "prompt": TOKENS}).encode()
    return cache.find_matches(cache.query_of(parse_request("/v1/completions", body))).shared


@pytest.mark.parametrize(
    ("space", "blocks"), [(OURS, 4), (THEIRS, 2), (None, 0)], ids=["ours", "theirs", "silent"]
)
def test_blocks_of_another_model_are_ignored(
    tmp_path: Path, space: int | None, blocks: int
) -> None:
    engine = FakeEngine()
    engine.metrics = idle(space)

    async def scenario(site: Site, server: Announcer) -> None:
        server.publish([stored(OURS, TOKENS), stored(THEIRS, TOKENS[:32])])
        await followed(site, server)
        [worker] = site.service.fleet
        await until(lambda: worker.space == space and worker.kind != "")
        assert shared(site, "fake") == blocks
        assert (await site.completed(prompt=TOKENS))[0] == 200
        assert worker.hit_tokens == 16 * blocks
        await until(lambda: ("pool" in worker.problems) == (space is None))
        if space is None:
            assert "does not report which of the pool's blocks" in worker.problems["pool"]

    play(tmp_path, scenario, engine)


def test_two_models_behind_one_gateway_have_their_own_blocks(tmp_path: Path) -> None:
    large, small = FakeEngine("large"), FakeEngine("small")
    large.metrics, small.metrics = idle(OURS), idle(THEIRS)

    async def scenario(site: Site, server: Announcer) -> None:
        server.publish([stored(OURS, TOKENS), stored(THEIRS, TOKENS[:16])])
        await followed(site, server)
        await until(lambda: all(worker.space for worker in site.service.fleet))
        assert (shared(site, "large"), shared(site, "small")) == (4, 1)
        removed = {"type": "BlockRemoved", "block_hashes": [102, 103], "space": OURS}
        server.publish([removed, {**removed, "block_hashes": [100], "space": THEIRS}])
        await until(lambda: site.service.index().indexer.shared_count == 2)
        assert (shared(site, "large"), shared(site, "small")) == (2, 0)

    play(tmp_path, scenario, large, small)


def test_the_page_shows_the_feed(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.metrics = idle(OURS)

    async def scenario(site: Site, server: Announcer) -> None:
        orphan = {**stored(OURS, TOKENS[:16]), "block_hashes": [7], "parent_block_hash": 6}
        server.publish([stored(OURS, TOKENS), stored(THEIRS, TOKENS, block_size=32), orphan])
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
        assert "beluga_gateway_pool_up_to_date 1.0" in page
        assert "beluga_gateway_pool_blocks 4.0" in page
        assert "beluga_gateway_pool_messages_unread 1.0" in page
        assert [line for line in complaints(page.encode()) if "beluga" in line] == []
        [worker] = await site.workers()
        assert worker["space"] == f"{OURS:016x}"

    play(tmp_path, scenario, engine)


def test_a_pool_with_another_block_size_is_reported(tmp_path: Path) -> None:
    async def scenario(site: Site, server: Announcer) -> None:
        server.publish([stored(OURS, TOKENS, block_size=32)])
        await followed(site, server)
        [worker] = site.service.fleet
        text = "the pool has 2 blocks of another size than the router's 16 tokens"
        await until(lambda: text in worker.problems.get("pool", ""))
        assert text in (await pool_of(site))["problem"]
        page = await site.text("/metrics")
        assert f'problem{{problem="pool",worker="{worker.url}"}} 1.0' in page

    play(tmp_path, scenario, FakeEngine())


def test_a_silent_pool_server_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_listener_module, "BEHIND_S", 0.05)

    async def scenario(site: Site, server: Announcer) -> None:
        [worker] = site.service.fleet
        await until(lambda: "publishes the pool's blocks" in worker.problems.get("pool", ""))
        assert (await pool_of(site))["up_to_date"] is False
        await followed(site, server)
        await until(lambda: "pool" not in worker.problems)

    play(tmp_path, scenario, FakeEngine())


async def test_without_a_pools_events_there_is_nothing_to_show() -> None:
    async with routed(FakeEngine(), policy="linear") as site:
        async with site.client.get(f"{site.admin}/pool") as answer:
            assert answer.status == 404
        assert "beluga_gateway_pool" not in await site.text("/metrics")


def test_text_prompts_without_a_tokenizer_are_reported(tmp_path: Path) -> None:
    async def scenario(site: Site, server: Announcer) -> None:
        assert (await site.completed(prompt="The whale is white. " * 40))[0] == 200
        [worker] = site.service.fleet
        await until(lambda: "KV events do not contain" in worker.problems.get("tokenizer", ""))

    play(tmp_path, scenario, FakeEngine())
