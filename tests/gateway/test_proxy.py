# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The proxy forwards requests and responses unchanged, as they arrive."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="the router's packages are not installed")

from fake_engine import FakeEngine
from routed import QUICK, routed, until

from beluga.gateway import Limits


def error_of(body: bytes) -> dict[str, Any]:
    """Return the error in OpenAI's form."""
    error: dict[str, Any] = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize("split", [False, True], ids=["events", "single bytes"])
async def test_a_stream_is_forwarded_byte_for_byte(split: bool) -> None:
    engine = FakeEngine()
    engine.faults.split = split
    async with routed(engine) as site, site.complete() as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert await answer.read() == b"".join(engine.events({"model": "fake"}))


async def test_an_event_is_forwarded_before_the_next_is_sent() -> None:
    engine = FakeEngine()
    engine.faults.hold = asyncio.Event()
    async with routed(engine) as site, site.complete() as answer:
        first = engine.events({"model": "fake"})[0]
        assert await answer.content.readexactly(len(first)) == first
        assert site.inflight() == 1
        engine.faults.hold.set()
        assert (await answer.read()).endswith(b"data: [DONE]\n\n")


async def test_a_request_is_tracked_to_its_end() -> None:
    engine = FakeEngine()
    engine.faults.hold, engine.faults.hold_first = asyncio.Event(), asyncio.Event()
    async with routed(engine, policy="least-tokens") as site:
        requested = asyncio.create_task(site.completed(prompt=list(range(100))))
        await until(lambda: site.loads() == [(1, 100)])
        engine.faults.hold_first.set()
        await until(lambda: site.loads() == [(1, 0)])
        engine.faults.hold.set()
        assert (await requested)[0] == 200
        await until(lambda: site.loads() == [(0, 0)])


async def test_complete_responses_and_other_paths_are_forwarded() -> None:
    engine = FakeEngine()
    async with routed(engine) as site:
        status, body = await site.completed(stream=False)
        assert status == 200
        assert json.loads(body)["choices"][0]["text"] == "".join(engine.words)
        for path, requested, name in (
            ("/v1/embeddings", {"model": "fake", "input": "a"}, "data"),
            ("/tokenize", {"model": "fake", "prompt": "a"}, "tokens"),
            ("/v1/chat/completions", {"model": "fake", "messages": []}, "choices"),
        ):
            async with site.client.post(site.base + path, json=requested) as answer:
                assert answer.status == 200
                assert name in await answer.json()
                assert answer.content_length == len(await answer.read())
        async with site.client.get(f"{site.base}/v1/files") as answer:
            assert answer.status == 404  # the engine itself has no such path
            assert await answer.text() == "404: Not Found"
        async with site.client.post(f"{site.base}/sleep") as answer:
            assert answer.status == 404
            error_of(await answer.read())


async def test_an_engines_own_errors_pass_through() -> None:
    engine = FakeEngine()
    engine.faults.status = 400
    async with routed(engine) as site:
        status, body = await site.completed()
        assert status == 400
        assert error_of(body)["type"] == "Fault"


async def test_bodies_reach_the_engine_unchanged() -> None:
    engine = FakeEngine()
    async with routed(engine) as site:
        odd = {"prompt": ["a", 1, None], "messages": {"x": 1}, "stream": "perhaps", "é": 1e300}
        await site.completed(**odd)
        assert engine.seen == [{"model": "fake", **odd}]


async def test_hop_by_hop_headers_are_not_forwarded() -> None:
    engine = FakeEngine()
    async with routed(engine) as site:
        headers = {
            "Authorization": "Bearer me",
            "X-Request-Id": "7",
            "Connection": "keep-alive, X-Private",
            "X-Private": "1",
            "TE": "trailers",
            "Accept-Encoding": "gzip",
        }
        requested = {"model": "fake", "prompt": "a"}
        url = f"{site.base}/v1/completions"
        async with site.client.post(url, json=requested, headers=headers) as answer:
            assert answer.status == 200
        seen = engine.headers[0]
        assert seen["authorization"] == "Bearer me"
        assert seen["x-request-id"] == "7"
        assert seen["accept-encoding"] == "identity"
        assert seen["host"] in engine.url
        assert not {"x-private", "te"} & set(seen)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b'{"model": "other", "prompt": "a"}', 404, "model"),
        (b'{"prompt": "a"}', 400, "model"),
        (b'{"model": "fake", "prompt": "' + b"a" * 2000 + b'"}', 413, None),
    ],
)
async def test_unroutable_requests_get_an_error_in_openais_format(
    body: bytes, status: int, param: str | None
) -> None:
    async with routed(
        FakeEngine(), FakeEngine("second"), limits=Limits(body_size_max=1000)
    ) as site:
        kind = {"Content-Type": "application/json"}
        url = f"{site.base}/v1/completions"
        async with site.client.post(url, data=body, headers=kind) as answer:
            assert answer.status == status
            error = error_of(await answer.read())
        assert error["code"] == status
        assert error["param"] == param
        assert sum(site.counts()) == 0
        assert site.inflight() == 0


async def test_models_are_merged_and_requests_go_to_workers_of_their_model() -> None:
    a, b, c = FakeEngine("fake"), FakeEngine("fake", "org/tuned"), FakeEngine("other")
    async with routed(a, b, c) as site:
        listed = json.loads(await site.text("/v1/models"))
        assert {card["id"] for card in listed["data"]} == {"fake", "org/tuned", "other"}
        assert all(card["owned_by"] == "vllm" for card in listed["data"])
        assert json.loads(await site.text("/v1/models/org/tuned"))["id"] == "org/tuned"
        for _ in range(4):
            assert (await site.completed())[0] == 200
        assert (await site.completed(model="org/tuned"))[0] == 200
        assert (await site.completed(model="other"))[0] == 200
        assert site.counts() == [2, 3, 1]


async def test_a_client_disconnect_aborts_the_engines_request() -> None:
    engine = FakeEngine()
    engine.faults.hold = asyncio.Event()
    async with routed(engine, limits=QUICK) as site:
        async with site.complete() as answer:
            await answer.content.readany()
            assert engine.under_way == 1
        await until(lambda: engine.cancelled == 1)
        await until(lambda: site.inflight() == 0)
        engine.faults.hold = None
        assert (await site.completed())[0] == 200  # this does not count as the engine's failure
