# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Requests that cost the gateway much: large ones, compressed ones, and those whose body never
ends. No request delays the others.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gzip
import json
import threading
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="the router's packages are not installed")

from fake_engine import FakeEngine
from routed import QUICK, Site, routed

from beluga.gateway import cache as cache_module
from beluga.gateway import parsed_request
from beluga.gateway.cache import Cache
from beluga.gateway.parsed_request import FILE_TOKENS, SLOW_SIZE, parse_request

CHAT = "/v1/chat/completions"
PART = b'; name="model"\r\n'


def quickest_s(work: Callable[[], object]) -> float:
    """Return the shortest CPU time of several runs."""
    found = []
    for _ in range(3):
        started = time.process_time()
        work()
        found.append(time.process_time() - started)
    return min(found)


def test_parsing_a_form_is_linear_in_its_length() -> None:
    small, large = (PART * count for count in (1 << 9, 1 << 13))

    def read(body: bytes) -> float:
        return quickest_s(lambda: [parse_request(CHAT, body, is_json=False) for _ in range(3)])

    assert read(large) < 64 * max(read(small), 1e-4)  # with quadratic cost it would be 256 times


def test_a_forms_model_is_read_after_other_fields() -> None:
    form = (
        b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n'
        b"Content-Type: audio/wav\r\n\r\n" + bytes(1 << 16) + PART * 3 + b"\r\n"
        b'--x\r\nContent-Disposition: form-data; name="model"\r\n'
        b"Content-Type: text/plain\r\nX-More: a\r\n\r\norg/m\r\n--x--\r\n"
    )
    assert parse_request(CHAT, form, is_json=False).model == "org/m"
    long = PART + b"\r\n" + b"m" * 5000 + b"\r\n--x"
    assert parse_request(CHAT, long, is_json=False).model is None


@pytest.mark.parametrize("field", ["tools", "model", "cache_salt", "stream", "instructions"])
def test_fields_that_routing_does_not_use_are_not_decoded(field: str) -> None:
    body = b'{"messages": [], "%s": [%s1]}' % (field.encode(), b"[]," * (1 << 18))
    tracemalloc.start()
    try:
        parse_request(CHAT, body)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * len(body)  # 262,144 lists of 56 bytes each


@pytest.mark.parametrize("wrong", [b"NaN", b'"\\ud83d"'])
@pytest.mark.parametrize("size", [10, 1 << 18])
def test_the_model_of_an_unusual_body_of_any_size_is_read(wrong: bytes, size: int) -> None:
    body = b'{"prompt": "\\"model\\": \\"no\\" %s", "x": %s, "model" : "m"}' % (b"a" * size, wrong)
    parsed = parse_request(CHAT, body)
    assert (parsed.model, parsed.odd) == ("m", False)


@pytest.mark.parametrize("before", [0, parsed_request._PIECE - 200, parsed_request._PIECE])
def test_a_file_part_is_hashed_at_any_position(before: int) -> None:
    parts = b'[{"text": "%s"}, {"url" : "%s"}, {"url": "short"}]'
    isl = {
        parse_request(CHAT, b'{"messages": %s}' % (parts % (b"x" * before, b"A" * size))).isl
        for size in (5000, 1 << 19)
    }
    assert len(isl) == 1
    assert 0 <= isl.pop() - before // 4 - FILE_TOKENS < 100


async def test_large_requests_are_parsed_and_hashed_on_a_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[str, bool]] = []

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            seen.append((name, threading.current_thread() is threading.main_thread()))
            return function(*arguments, **named)

        return call

    monkeypatch.setattr("beluga.gateway.proxy.parse_request", noted("parse", parse_request))
    monkeypatch.setattr(Cache, "query_of", noted("hash", Cache.query_of))
    async with routed(FakeEngine(), policy="least-cost") as site:
        for size, on_loop in ((100, True), (2 * SLOW_SIZE, False)):
            seen.clear()
            assert (await site.completed(prompt="a" * size))[0] == 200
            assert seen == [("parse", on_loop), ("hash", on_loop)]


async def test_only_a_bounded_prefix_of_a_long_prompt_is_hashed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cache_module, "HASHED_TOKENS_MAX", 64)
    async with routed(FakeEngine(), policy="least-cost") as site:
        body = json.dumps({"prompt": list(range(1000))}).encode()
        query = site.service._cache.query_of(parse_request(CHAT, body))
        assert (query.isl, len(query.hashes), len(query.sequence)) == (1000, 4, 4)


async def test_long_salts_are_not_cached() -> None:
    async with routed(FakeEngine(), policy="least-cost") as site:
        await site.completed(prompt=[1] * 32, cache_salt="short")
        before = cache_module._hasher.cache_info().currsize
        for number in range(3):
            await site.completed(prompt=[1] * 32, cache_salt="s" * 10_000 + str(number))
        assert cache_module._hasher.cache_info().currsize == before


async def post(site: Site, body: bytes, kind: str, **headers: str) -> tuple[int, dict[str, Any]]:
    sent = {"Content-Type": kind} | {n.replace("_", "-"): text for n, text in headers.items()}
    place = f"{site.base}/v1/completions"
    async with site.client.post(place, data=body, headers=sent) as answer:
        return answer.status, await answer.json()


async def test_a_body_of_a_json_type_names_its_model() -> None:
    async with routed(FakeEngine("a"), FakeEngine("b")) as site:
        for _ in range(3):
            status, _ = await post(site, b'{"model": "b", "prompt": "x"}', "application/a+json")
            assert status == 200
        assert site.counts() == [0, 3]


async def test_a_compressed_body_is_rejected_if_its_model_is_needed() -> None:
    packed = gzip.compress(b'{"model": "b", "prompt": "x"}')
    async with routed(FakeEngine("a"), FakeEngine("b")) as site:
        status, text = await post(site, packed, "application/json", Content_Encoding="gzip")
        assert status == 415
        assert "Content-Encoding: gzip" in text["error"]["message"]
        plain = b'{"model": "b", "prompt": "x"}'
        for coding in ("identity", "Identity"):
            sent = {"Content_Encoding": coding}
            assert (await post(site, plain, "application/json", **sent))[0] == 200
        assert site.counts() == [0, 2]


async def test_a_missing_body_ends_in_a_timeout() -> None:
    limits = dataclasses.replace(QUICK, body_s=0.2)
    async with routed(FakeEngine(), limits=limits) as site:
        reader, writer = await asyncio.open_connection(*site.service.address)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: 1000\r\n\r\n{"
        )
        answer = await asyncio.wait_for(reader.readuntil(b"}}"), 20)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"has not arrived within 0.2 s" in answer
        assert b"Connection: close" in answer
        await asyncio.wait_for(reader.read(), 60)  # the connection ends
        writer.close()
        assert site.counts() == [0]


async def test_a_client_that_disconnects_in_its_body_is_not_an_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with routed(FakeEngine()) as site:
        _, writer = await asyncio.open_connection(*site.service.address)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
        await asyncio.sleep(0.2)
        writer.close()
        await asyncio.sleep(0.2)
        assert (await site.completed())[0] == 200
    assert [one for one in caplog.records if one.exc_info] == []


async def test_half_a_surrogate_pair_in_a_models_name_is_a_404() -> None:
    async with routed(FakeEngine()) as site:
        status, text = await post(site, b'{"model": "\\ud800"}', "application/json")
        assert (status, text["error"]["code"]) == (404, 404)
        assert text["error"]["message"] == "The model `?` does not exist."


async def test_a_stored_response_does_not_admit_an_unavailable_model() -> None:
    async with routed(FakeEngine(), FakeEngine("other")) as site:
        place = f"{site.base}/v1/responses"
        async with site.client.post(place, json={"model": "fake", "input": "a"}) as answer:
            made = (await answer.json())["id"]
        for number in range(3):
            body = {"model": f"m{number}", "input": "a", "previous_response_id": made}
            async with site.client.post(place, json=body) as answer:
                assert answer.status == 404
                assert (await answer.json())["error"]["param"] == "model"
        body = {"model": "fake", "input": "a", "previous_response_id": made}
        async with site.client.post(place, json=body) as answer:
            assert answer.status == 200
        body["model"] = "other"  # the engine responds that it has no such response
        async with site.client.post(place, json=body) as answer:
            assert answer.status == 404
        text = await site.text("/metrics")
        assert 'model="fake"' in text
        assert 'model="m0"' not in text


async def test_clients_cannot_load_adapters() -> None:
    async with routed(FakeEngine()) as site:
        for name in ("load_lora_adapter", "unload_lora_adapter"):
            body = {"lora_name": "a", "lora_path": "/b"}
            async with site.client.post(f"{site.base}/v1/{name}", json=body) as answer:
                assert answer.status == 404
                assert "send it to that engine" in await answer.text()
