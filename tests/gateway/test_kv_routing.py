# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Routing by caches: stored from requests, or received from engines over ZMQ."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("aiohttp", reason="the router's packages are not installed")

from fake_engines import Announcer, FakeEngine
from routed import Site, routed, until

from beluga.gateway import EngineSpec, Limits
from beluga.gateway.conversation import Conversation
from beluga.gateway.parsed_request import parse_request
from beluga.gateway.proxy import Proxy

BLOCK = 16
TOKENS = list(range(1000, 1000 + 10 * BLOCK))


@pytest.mark.parametrize(
    "prompt", [TOKENS, "The whale is white. " * 40], ids=["tokens", "text blocks"]
)
async def test_a_prompt_is_routed_to_the_worker_of_its_prefix(prompt: Any) -> None:
    a, b = FakeEngine(), FakeEngine()
    async with routed(a, b, policy="linear") as site:
        for _ in range(5):
            assert (await site.completed(prompt=prompt))[0] == 200
        assert sorted(site.counts()) == [0, 5]
        rates = [e.hit_tokens / e.prompt_tokens for e in site.service.fleet if e.prompt_tokens]
        assert rates[0] > 0.7
        longer = prompt + prompt[:BLOCK]
        await site.completed(prompt=longer)
        assert sorted(site.counts()) == [0, 6]
        await site.completed(prompt=longer, cache_salt="another tenant's")
        assert (await site.completed(prompt=prompt[1:]))[0] == 200
        text = await site.text("/metrics")
        assert "dynamo_router_overhead_indexer_find_matches_ms_count 8.0" in text
        assert "dynamo_router_overhead_block_hashing_ms_count 8.0" in text


async def test_a_cache_oblivious_policy_costs_no_hashing() -> None:
    async with routed(FakeEngine(), policy="least-tokens") as site:
        await site.completed(prompt=TOKENS)
        text = await site.text("/metrics")
        assert "dynamo_router_overhead_block_hashing_ms_count 0.0" in text


async def prefers(site: Site, engine: FakeEngine, tokens: list[int]) -> None:
    """Check that a prompt goes to that engine only."""
    before = site.counts()
    await site.completed(prompt=tokens)
    after = site.counts()
    gained = [now - then for now, then in zip(after, before, strict=True)]
    assert gained == [int(each is engine) for each in site.engines]


async def test_missed_events_of_engines_are_replayed(tmp_path: Path) -> None:
    a, b = FakeEngine(), FakeEngine()
    announcer = Announcer(tmp_path)
    other = [token + 5000 for token in TOKENS]
    try:
        async with a, b:
            specs = (
                EngineSpec(a.url),
                EngineSpec(b.url, (), announcer.events, announcer.replay),
            )
            async with routed(engines=specs, policy="linear") as site:
                site.engines = (a, b)
                await site.up()
                await until(announcer.subscribed)
                index = site.service.index()
                announcer.stored(TOKENS, 100)
                await until(lambda: index.indexer.counts.stored == 10)
                await prefers(site, b, TOKENS)
                announcer.stored(other, 200, live=False)
                announcer.stored([token + 9000 for token in TOKENS], 300)

                def whole() -> bool:
                    announcer.answer()
                    return bool(index.indexer.counts.stored == 30)

                await until(whole)
                assert announcer.replays == 1
                await prefers(site, b, other)
                text = await site.text("/metrics")
                applied = 'kv_cache_events_applied{event_type="stored",status="ok"}'
                assert f"dynamo_component_{applied} 30.0" in text
                number = (await site.workers())[1]["id"]
                async with site.client.delete(f"{site.admin}/workers/{number}") as answer:
                    assert answer.status == 200
                assert index.indexer.workers() == []
    finally:
        announcer.close()


async def test_an_invalid_endpoint_is_a_one_line_error(tmp_path: Path) -> None:
    pytest.importorskip("zmq", reason="pyzmq is not installed")
    async with routed(FakeEngine(), policy="linear") as site:
        body = {"url": "http://127.0.0.1:9", "events": "nonsense"}
        async with site.client.post(f"{site.admin}/workers", json=body) as answer:
            assert answer.status == 400
            assert "nonsense" in (await answer.json())["error"]["message"]
        assert len(await site.workers()) == 1


def test_tokens_are_ids_or_four_bytes_of_text() -> None:
    def tokens(body: bytes) -> list[int]:
        parsed = parse_request("/v1/completions", body)
        assert parsed.isl == len(parsed.tokens)
        return list(parsed.tokens)

    assert tokens(b'{"prompt": [1, 2, 3]}') == [1, 2, 3]
    assert tokens(b'{"prompt": [[1, 2], [3]]}') == [1, 2, 3]
    assert tokens(b'{"prompt": "abcdefg"}') == [int.from_bytes(b'"abc', "little"), 0x67666564]
    short = tokens(b'{"messages": [{"role": "user", "content": "hello there"}]}')
    longer = tokens(
        b'{"messages": [{"role": "user", "content": "hello there"}, {"role": "assistant"}]}'
    )
    assert short[:-1] == longer[: len(short) - 1]  # a continued conversation has the same prefix
    for odd in (b'{"prompt": [1, -2]}', b'{"prompt": ["a"]}', b'{"prompt": {}}', b"{}"):
        tokens(odd)


@pytest.mark.parametrize(("size", "aside"), [(100, False), (1 << 14, False), (1 << 15, True)])
def test_a_long_prompt_is_tokenized_on_a_thread(size: int, aside: bool) -> None:
    """Other requests do not wait for it. A short prompt needs no thread."""
    seen: list[bool] = []

    class Words:
        def text(self, text: str, *, special_tokens: bool = True) -> list[int]:
            seen.append(threading.current_thread() is not threading.main_thread())
            return [1]

        problem = ""

        def chat(self, conversation: Conversation) -> list[int]:
            raise AssertionError

    async def play() -> None:
        frame = b'{"prompt": ""}'
        body = frame[:-2] + b"a" * (size - len(frame)) + frame[-2:]
        assert len(body) == size
        request = SimpleNamespace(
            method="POST",
            path="/v1/completions",
            rel_url=SimpleNamespace(raw_path="/v1/completions"),
            content_type="application/json",
            headers={},
        )
        no: Any = None
        proxy = Proxy(
            director=no, client=no, metrics=no, limits=Limits(), tokenizer=Words(), remote=no
        )
        await proxy._parsed(cast("Any", request), body)

    asyncio.run(play())
    assert seen == [aside]


def test_a_tokenizer_counts_like_the_engines() -> None:
    class Words:
        def text(self, text: str, *, special_tokens: bool = True) -> list[int]:
            return [len(word) for word in text.split()]

        problem = ""

        def chat(self, conversation: Conversation) -> list[int]:
            messages = conversation.messages
            return [7, *(token for message in messages for token in self.text(message["content"]))]

    def tokens(body: bytes) -> list[int]:
        return list(parse_request("/v1/completions", body, tokenizer=Words()).tokens)

    assert tokens(b'{"prompt": "a whale is white"}') == [1, 5, 2, 5]
    assert tokens(b'{"messages": [{"content": "a whale"}]}') == [7, 1, 5]
    # the template fails, so text blocks are used
    assert tokens(b'{"messages": [{"role": "tool"}]}') != []
