# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Clients of OpenAI's SDK get the same results from the gateway as from the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from support.emulation import long

pytest.importorskip("aiohttp", reason="the router's packages are not installed")
pytest.importorskip("openai", reason="OpenAI's SDK is not installed")

from fake_engines import KEY, MODEL, OpenAIEngine
from routed import Site, routed, until
from support.sdk_cases import CASES, calling, observe

from beluga.gateway import EngineSpec


@asynccontextmanager
async def both(*engines: Any, **settings: Any) -> AsyncIterator[tuple[Any, Any, Site]]:
    """Start a gateway. Returns callers of its first engine and of itself, each with its answers."""
    async with AsyncExitStack() as stack:
        site = await stack.enter_async_context(routed(*engines, **settings))
        straight = await stack.enter_async_context(calling(engines[0].url, MODEL))
        through = await stack.enter_async_context(calling(site.base, MODEL))
        yield straight, through, site


async def test_requests_behave_as_without_the_gateway() -> None:
    assert len(CASES) >= 36
    engine = OpenAIEngine()
    async with both(engine) as (straight, through, site):
        different = {}
        for name, run_case in CASES.items():
            expected = await observe(run_case, *straight)
            observed = await observe(run_case, *through)
            if observed != expected:
                different[name] = expected, observed
        for name, (expected, observed) in different.items():
            print(f"{name}\n  straight {expected}\n  gateway  {observed}")
        # The gateway rejects forms with 415; vLLM responds with 400.
        assert sorted(different) == ["raw_other_kind", "raw_text_kind"]
        assert "send Content-Type: application/json" in str(different)
        await until(lambda: engine.under_way == 0)
        await until(lambda: site.inflight() == 0 and site.loads() == [(0, 0)])


async def test_an_api_key_is_forwarded_to_the_engine() -> None:
    engine = OpenAIEngine(guarded=True)
    async with engine:
        spec = EngineSpec(engine.url, (MODEL,))
        async with routed(engines=(spec,), wait=False) as site:
            await site.up(1)
            for key in (KEY, "another"):
                async with (
                    calling(engine.url, MODEL, api_key=key) as straight,
                    calling(site.base, MODEL, api_key=key) as through,
                ):
                    for name in ("models", "chat_plain", "chat_stream", "completion_plain"):
                        expected = await observe(CASES[name], *straight)
                        assert await observe(CASES[name], *through) == expected
                        assert ("error" in expected) == (key != KEY)


async def test_the_model_is_read_from_any_request_if_several_are_served() -> None:
    """Each request is sent to an engine of its model, or to one that responds with the error."""
    names = (
        "chat_plain", "chat_stream", "completion_batch", "response_stream", "embeddings_batch",
        "transcription", "raw_half_a_pair", "raw_not_a_number", "raw_invalid_json",
        "raw_not_utf8", "raw_number_as_model", "raw_not_an_object", "chat_unknown_model",
    )  # fmt: skip
    engine, other = OpenAIEngine(), OpenAIEngine("other")
    async with other, engine:
        specs = (EngineSpec(engine.url), EngineSpec(other.url))
        async with (
            routed(engines=specs, wait=False) as site,
            calling(engine.url, MODEL) as straight,
            calling(site.base, MODEL) as through,
        ):
            await site.up(2)
            for name in names:
                expected = await observe(CASES[name], *straight)
                observed = await observe(CASES[name], *through)
                assert observed == expected, name
            wrong = [name for name in names if name.startswith("raw_n")]
            assert other.count <= len(wrong) + 1


async def test_a_429_is_forwarded_if_no_engine_accepts_the_client() -> None:
    engine = OpenAIEngine()
    async with both(engine, queue_s=0) as (straight, through, site):
        for status in (429, 503):
            observed = []
            for caller in (straight, through):
                engine.busy = [(status, {"Retry-After": "1", "X-Why": "full"})]
                observed.append(await observe(CASES["chat_plain"], *caller))
                await until(lambda: all(e.ready for e in site.service.fleet))
            assert observed[0] == observed[1]
            assert observed[0]["error"][1]["status_code"] == status
            assert observed[0]["answers"][0][2]["retry-after"] == "1"
        text = await site.text("/metrics")
        assert 'requests_total{model="stand-in",status="unanswered"} 2' in text


async def test_the_wait_for_a_busy_engine_is_bounded() -> None:
    engine = OpenAIEngine()
    engine.busy = [(429, {"Retry-After": "0"})] * 1000
    async with both(engine, queue_s=0.5) as (_, through, _):
        seen = await observe(CASES["chat_plain"], *through)
        assert seen["error"][0] == "RateLimitError"
        assert 2 < engine.count < 20


async def test_the_sdk_retries_as_without_the_gateway() -> None:
    engine = OpenAIEngine()
    async with both(engine, queue_s=0) as (straight, through, _):
        for caller, answers in (straight, through):
            engine.busy = [(429, {"Retry-After-Ms": "1200", "Retry-After": "1"})]
            patient = caller.other(max_retries=3)
            seen = await observe(CASES["chat_stream"], patient, answers)
            assert [answer[1] for answer in seen["answers"]] == [429, 200]
            assert len(seen["chunks"]) > 3


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("leaves", ["times out", "is cancelled"])
async def test_a_client_disconnect_aborts_the_engines_request(stream: bool, leaves: str) -> None:
    engine = OpenAIEngine()
    async with both(engine) as (straight, through, site):
        for caller, answers in (straight, through):
            before, timeout_s = engine.cancelled, 0.2
            # on a busy machine the client may disconnect too early
            while engine.cancelled == before:
                brief = caller.other(timeout=timeout_s if leaves == "times out" else 60)
                pending = asyncio.create_task(
                    observe(lambda sdk: sdk.chat(stream=stream, user="hold"), brief, answers)
                )
                if leaves == "times out":
                    assert (await pending)["error"][0] == "APITimeoutError"
                else:
                    await until(lambda: engine.under_way == 1)
                    pending.cancel()
                    await asyncio.wait([pending])
                await until(lambda: engine.under_way == 0)
                timeout_s *= 2
        await until(lambda: site.inflight() == 0 and site.loads() == [(0, 0)])


@pytest.mark.parametrize("count", [20, long(200)])
async def test_concurrent_streams_leave_no_state(count: int) -> None:
    """All streams are open at the same time; some clients disconnect."""
    engines = OpenAIEngine(), OpenAIEngine()
    async with both(*engines, policy="least-tokens", health_timeout_s=60) as (
        direct,
        through,
        site,
    ):
        caller, _ = through
        expected = await observe(lambda c: c.chat(stream=True, user="hold2"), direct[0], [])

        async def call(number: int) -> int:
            events = await caller.chat(stream=True, user="hold", n=1, seed=number)
            texts = []
            async for event in events:
                texts += [choice.delta.content or "" for choice in event.choices]
                if number % 10 == 3:
                    await events.close()
                    return 0
            assert f" {number}" in texts
            return len(texts)

        pending = [asyncio.create_task(call(number)) for number in range(count)]
        left = len(range(3, count, 10))
        await until(lambda: sum(engine.under_way for engine in engines) == count - left)
        await until(lambda: sum(engine.cancelled for engine in engines) == left)
        assert site.inflight() == count - left
        assert min(engine.under_way for engine in engines) > 0
        for engine in engines:
            engine.release.set()
        got = await asyncio.gather(*pending)
        assert sorted(set(got)) == [0, len(expected["chunks"])]
        assert got.count(0) == left
        await until(lambda: sum(engine.under_way for engine in engines) == 0)
        await until(lambda: site.inflight() == 0 and site.loads() == [(0, 0)] * 2)
        assert site.service.pending() == 0


async def test_errors_of_the_gateway_have_openais_shape() -> None:
    engine = OpenAIEngine()
    async with both(engine, body_size_max=10_000) as (_, (caller, answers), site):
        options = {"extra_headers": {"X-Request-Id": "mine"}}
        for call, name, status, kind, param in (
            (lambda c: c.chat("a" * 20_000, **options), "APIStatusError", 413,
             "RequestTooLargeError", None),
            (lambda c: c.chat(model="another", **options), "NotFoundError", 404,
             "NotFoundError", "model"),
            (lambda c: c.client.models.retrieve("another", **options), "NotFoundError", 404,
             "NotFoundError", "model"),
            (lambda c: c.other(base_url=site.base).client.post("/sleep", cast_to=object,
             options={"headers": options["extra_headers"]}), "NotFoundError", 404,
             "NotFoundError", None),
            (lambda c: c.other(base_url=site.base).client.post("/health", cast_to=object,
             options={"headers": options["extra_headers"]}), "APIStatusError", 405,
             "BadRequestError", None),
        ):  # fmt: skip
            seen = await observe(call, caller, answers)
            error, fields = seen["error"]
            assert (error, fields["status_code"]) == (name, status)
            assert (fields["type"], fields["param"]) == (kind, param)
            assert fields["code"] == str(status)
            assert fields["request_id"] == "mine"
            assert set(fields["body"]) == {"message", "type", "param", "code"}
        await site.service.drain()
        seen = await observe(CASES["chat_plain"], caller, answers)
        assert seen["error"][0] == "InternalServerError"
        assert seen["error"][1]["type"] == "ServiceUnavailableError"
        assert seen["answers"][0][2]["retry-after"] == "1"
