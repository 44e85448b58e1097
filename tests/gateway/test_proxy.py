# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The proxy forwards requests and responses unchanged, as they arrive, also odd ones."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import re
import socket
import sys
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="the router's packages are not installed")

import aiohttp
from aiohttp.client_proto import ResponseHandler
from fake_engines import FakeEngine
from multidict import CIMultiDict
from routed import QUICK, Site, routed, until

from beluga.gateway import Address, Limits, director
from beluga.gateway import run as run_loop
from beluga.gateway.metrics import Metrics
from beluga.gateway.parsed_request import FILE_TOKENS, TOKENIZED_SIZE_MAX, parse_request
from beluga.gateway.protocol import for_engine
from beluga.http_server import HEAD_SIZE_MAX


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


WORDS = tuple(f"w{number}" for number in range(40))


def counted(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> list[None]:
    """Return a list that grows with each call of a method."""
    calls: list[None] = []
    method: Callable[..., Any] = getattr(owner, name)

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        calls.append(None)
        return method(self, *arguments, **named)

    monkeypatch.setattr(owner, name, call)
    return calls


async def test_a_stream_is_counted_once_and_each_of_its_events_in_the_histogram(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(director, "COUNTED_S", 60.0, raising=False)
    calls = counted(monkeypatch, Metrics, "tokens")
    pages = []
    engine = FakeEngine(words=WORDS)
    engine.faults.pause_s = 0.002
    async with routed(engine) as site:
        assert (await site.completed())[0] == 200
        pages.append(await site.text("/metrics"))
    assert len(calls) == 1
    name = 'inter_token_latency_seconds_count{model="fake"} '
    [line] = [line for line in pages[0].splitlines() if name in line]
    assert float(line.split()[-1]) >= len(WORDS) - 1


async def test_a_stream_is_counted_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(director, "COUNTED_S", 0.0)
    engine = FakeEngine(words=WORDS)
    engine.faults.pause_s = 0.002
    async with routed(engine) as site, site.complete() as answer:
        name = 'inter_token_latency_seconds_count{model="fake"} '
        while name not in await site.text("/metrics"):
            assert await answer.content.readany()  # the answer has not ended
        engine.faults.pause_s = 0.0


async def test_no_timer_is_set_for_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    timers: list[float | None] = []

    def reschedule(self: ResponseHandler) -> None:
        timers.append(self.read_timeout)
        original(self)

    original = ResponseHandler._reschedule_timeout
    monkeypatch.setattr(ResponseHandler, "_reschedule_timeout", reschedule)
    engine = FakeEngine(words=WORDS)
    engine.faults.pause_s = 0.002
    limits = dataclasses.replace(QUICK, stall_s=77.0)
    async with routed(engine, limits=limits) as site:
        assert (await site.completed())[0] == 200
    assert 0 < timers.count(77.0) < 10


@pytest.mark.parametrize("policy", ["least-cost", "least-tokens", "linear", "round-robin"])
async def test_a_decision_is_one_debug_line_with_the_costs(
    policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = FakeEngine(), FakeEngine()
    async with routed(a, b, policy=policy) as site:
        with caplog.at_level(logging.DEBUG, "beluga.router.router"):
            assert (await site.completed())[0] == 200
    [line] = [
        record.getMessage() for record in caplog.records if record.name == "beluga.router.router"
    ]
    cost = "none" if policy == "round-robin" else r"[\d.e+-]+"
    seen = ";.*".join(
        rf" {engine.url} cost {cost}, cached 0 blocks, requests 0" for engine in (a, b)
    )
    assert re.fullmatch(rf"{policy} chose ({a.url}|{b.url}) of:{seen}", line)


def test_the_gateway_runs_without_uvloop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    loops: list[object] = []

    async def scenario() -> None:
        loops.append(asyncio.get_running_loop())
        async with routed(FakeEngine()) as site:
            assert (await site.completed())[0] == 200

    run_loop(scenario())
    assert type(loops[0]).__module__.startswith("asyncio.")


def test_the_gateway_runs_on_uvloop_where_it_is_installed() -> None:
    uvloop = pytest.importorskip("uvloop", reason="uvloop is not installed")
    loops: list[object] = []

    async def scenario() -> None:
        loops.append(asyncio.get_running_loop())

    run_loop(scenario())
    assert isinstance(loops[0], uvloop.Loop)


async def send(
    site: Site, target: str, body: bytes | None = None, *headers: str
) -> tuple[int, bytes]:
    """Send a completion to a request target, word for word. Returns status and body."""
    if body is None:
        body = json.dumps({"model": "fake", "prompt": "hello"}).encode()
    host, port = site.service.address
    fixed = ("Content-Type: application/json", f"Content-Length: {len(body)}", "Connection: close")
    head = "\r\n".join((f"POST {target} HTTP/1.1", f"Host: {host}", *fixed, *headers))
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(head.encode("latin-1") + b"\r\n\r\n" + body)
    answer = await reader.read()
    writer.close()
    head_of_answer, _, text = answer.partition(b"\r\n\r\n")
    if b"chunked" in head_of_answer.lower():
        text = text.partition(b"\r\n")[2].rpartition(b"\r\n0\r\n")[0]
    return int(answer.split(b" ", 2)[1]), text


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        ("http://127.0.0.1", 200),
        ("http://127.0.0.1:80", 200),
        ("http://127.0.0.1:99999", 400),
        ("http://a.example", 421),  # an absolute target replaces the Host header
        ("http://a.example:99999", 400),
        ("a.example://b.example", 400),
        ("x://u:p@b.example", 421),
    ],
)
async def test_a_request_with_an_absolute_url_reaches_only_the_engine(
    start: str, expected: int
) -> None:
    async with routed(FakeEngine()) as site:
        (engine,) = site.service.fleet
        status, answer = await send(site, f"{start}/v1/completions?a=%20b")
        assert (status, engine.serving, engine.failures) == (expected, True, 0)
        assert (b"choices" in answer) == (status == 200)
        assert len(site.engines[0].seen) == (status == 200)


async def test_a_request_that_cannot_be_sent_is_not_an_engine_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with routed(FakeEngine()) as site:
        (engine,) = site.service.fleet
        with monkeypatch.context() as patched:
            patched.setattr("beluga.gateway.proxy._target", lambda _: "x:y")
            status, answer = await send(site, "/v1/completions")
        assert status == 400
        assert b"cannot be forwarded" in answer
        await until(lambda: engine.inflight == 0)
        assert (engine.serving, engine.failures) == (True, 0)


@pytest.mark.parametrize("field", ["prompt", "messages", "tools"])
async def test_deeply_nested_json_is_forwarded_to_the_engine(field: str) -> None:
    async with routed(FakeEngine()) as site:
        deep = b"[" * 100_000 + b"]" * 100_000
        status, answer = await send(
            site, "/v1/completions", b'{"model": "fake", "%s": %s}' % (field.encode(), deep)
        )
        # The text of the stand-in engine, which does not catch the error.
        assert (status, b"Server got itself in trouble" in answer) == (500, True)


async def test_an_empty_model_name_counts_as_missing() -> None:
    """vLLM serves such a request with its only model."""
    async with routed(FakeEngine()) as site:
        assert (await site.completed(model="", stream=False))[0] == 200
    async with routed(FakeEngine("a"), FakeEngine("b")) as site:
        status, body = await site.completed(model="", stream=False)
        assert status == 400
        assert b"several models are served here; set the field model" in body


async def test_long_headers_are_forwarded_up_to_the_engines_limit() -> None:
    """Keys and cookies may exceed 8 KiB, and an engine may return a name in a header."""
    async with routed(FakeEngine()) as site:
        key = "k" * 60_000
        status, _ = await send(site, "/v1/completions", None, f"Authorization: Bearer {key}")
        assert status == 200
        assert site.engines[0].headers[0]["authorization"] == f"Bearer {key}"
        more = [f"X-{number}: v" for number in range(200)]
        assert (await send(site, "/v1/completions", None, *more))[0] == 200


@pytest.mark.parametrize(
    "sent", [b"GET / HTTP/7.3.1\r\n\r\n", b"GET / HTTP/1.1\r\nContent-Length: x\r\n\r\n"]
)
async def test_bytes_that_are_not_http_cause_one_log_line(
    sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with routed(FakeEngine()) as site:
        reader, writer = await asyncio.open_connection(*site.service.address)
        writer.write(sent)
        assert b" 400 " in await reader.readline()
        writer.close()
        (line,) = [record for record in caplog.records if "handling request" in record.getMessage()]
        assert (line.levelname, line.exc_info) == ("WARNING", None)
        assert "\n" not in line.getMessage()


class Rude:
    """A tokenizer that raises its own kind of error."""

    problem = ""

    def text(self, *_: object, **__: object) -> list[int]:
        raise IndexError("no first token")

    chat = text


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_prompt_on_which_the_tokenizer_fails_is_hashed_as_text(path: str) -> None:
    body = json.dumps({"prompt": [[]]} if path == "/v1/completions" else {"messages": [{}]})
    parsed = parse_request(path, body.encode(), tokenizer=Rude())
    assert (parsed.exact, parsed.isl) == (False, 1)


def test_a_prompt_longer_than_any_context_is_not_tokenized() -> None:
    class Counting(Rude):
        tokenized = 0

        def text(self, *_: object, **__: object) -> list[int]:
            self.tokenized += 1
            return [7]

    for length, tokenized in ((1000, 1), (TOKENIZED_SIZE_MAX, 0)):
        tokenizer = Counting()
        body = json.dumps({"prompt": "a" * length}).encode()
        parsed = parse_request("/v1/completions", body, tokenizer=tokenizer)
        assert (tokenizer.tokenized, parsed.exact) == (tokenized, bool(tokenized))


def picture(content: str, question: str = "What is this?") -> bytes:
    parts = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{content}"}},
        {"type": "text", "text": question},
    ]
    messages = [{"role": "user", "content": parts}]
    return json.dumps({"model": "m", "messages": messages}).encode()


def test_an_image_counts_as_about_its_tokens_not_as_its_bytes() -> None:
    path = "/v1/chat/completions"
    short, same, other = (
        parse_request(path, picture(content, question))
        for content, question in (
            ("A" * (2 << 20), "What is this?"),
            ("A" * (2 << 20), "And who made it?"),
            ("B" * (2 << 20), "What is this?"),
        )
    )
    assert FILE_TOKENS < short.isl < FILE_TOKENS + 100
    start = FILE_TOKENS + 20
    assert short.tokens[:start].tolist() == same.tokens[:start].tolist()
    assert short.tokens[:start].tolist() != other.tokens[:start].tolist()
    assert parse_request(path, picture("A" * 400)).isl > 100  # short ones stay as they are


async def test_every_connection_header_names_headers_of_one_hop() -> None:
    pairs = [("Connection", "close"), ("X-Mine", "1"), ("A", "b"), ("connection", "X-Mine")]
    assert list(for_engine(CIMultiDict(pairs)).items()) == [("A", "b")]


async def test_a_websocket_is_refused_with_a_reason() -> None:
    engine = FakeEngine()
    async with routed(engine) as site:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await site.client.ws_connect(f"{site.base}/v1/realtime?model=fake")
        assert refused.value.status == 501
        headers = {"Upgrade": "websocket", "Connection": "Upgrade"}
        async with site.client.get(f"{site.base}/v1/realtime", headers=headers) as answer:
            error = error_of(await answer.read())
    assert error["message"].startswith("this router forwards no WebSockets; open /v1/realtime on")


async def test_a_client_that_sends_a_too_large_body_reads_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The client sends all of it before it reads; the rest of the body is no head of a request."""
    body = json.dumps({"model": "fake", "prompt": "a" * (9 * HEAD_SIZE_MAX)}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"

    def sent(address: Address, tail: bytes) -> bytes:
        with socket.create_connection(address, timeout=60) as client:
            client.sendall(head + tail)
            return client.recv(1 << 16)

    async with routed(FakeEngine(), limits=Limits(body_size_max=1000)) as site:
        for tail in (
            b"Content-Length: %d\r\n\r\n%s" % (len(body), body),
            b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body),
        ):
            answer = await asyncio.to_thread(sent, site.service.address, tail)
            assert answer.startswith(b"HTTP/1.1 413 ")
    assert "head is too large" not in caplog.text
