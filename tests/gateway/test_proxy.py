# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The proxy forwards requests and responses unchanged, as they arrive, also odd ones."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from email.utils import format_datetime
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("aiohttp", reason="the router's packages are not installed")

import aiohttp
from aiohttp.client_proto import ResponseHandler
from fake_engines import FakeEngine
from multidict import CIMultiDict
from routed import QUICK, Site, routed, until

from beluga.gateway import Address, Limits, director
from beluga.gateway import proxy as relay_module
from beluga.gateway import run as run_loop
from beluga.gateway.metrics import Metrics
from beluga.gateway.protocol import Refusal, error_event, for_client, for_engine, retry_after_s
from beluga.gateway.proxy import Lines, relay
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
        assert await site.status("POST", url, json=requested, headers=headers) == 200
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
    async with routed(engine, stall_s=77.0) as site:
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
        rf" {engine.url} cost {cost}, cached 0 blocks, requests 0, "
        "prefill 0 tokens, decode 0 blocks"
        for engine in (a, b)
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
            b"Transfer-Encoding: chunked\r\n\r\n1388\r\n%s\r\n0\r\n\r\n" % (b"a" * 5000),
            b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body),
        ):
            answer = await asyncio.to_thread(sent, site.service.address, tail)
            assert answer.startswith(b"HTTP/1.1 413 ")
        assert site.counts() == [0]
    assert "head is too large" not in caplog.text


# ---- Headers and answers.


@pytest.mark.parametrize(
    ("text", "wait_s"),
    [
        *[("7", 7.0), ("61", 60.0), ("", 1.0), ("soon", 1.0), ("-3", 1.0), (" 5 ", 5.0)],
        *[("9" * 5000, 60.0), ("1e9", 1.0), ("inf", 1.0), ("nan", 1.0)],
        ("Wed, 21 Oct 2015 07:28:00 +" + "9" * 30, 1.0),  # no offset of any clock
    ],
)
def test_an_engines_requested_pause_is_respected_up_to_a_limit(text: str, wait_s: float) -> None:
    assert retry_after_s({"Retry-After": text}, 60.0) == wait_s


def test_retry_after_may_be_a_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("beluga.gateway.protocol.time", SimpleNamespace(time=lambda: 1000.0))
    for at, wait_s in ((1030, 30.0), (900, 0.0), (2000, 60.0)):
        text = format_datetime(datetime.fromtimestamp(at, timezone.utc), usegmt=True)
        assert retry_after_s({"Retry-After": text}, 60.0) == wait_s
    assert retry_after_s({}, 0.5) == 0.5


# ---- Lines of streams.


def test_only_complete_lines_are_forwarded() -> None:
    lines = Lines()
    assert lines.push(b"da") == b""
    assert lines.push(b"ta\nmo") == b"data\n"
    assert lines.push(b"re\n") == b"more\n"
    assert lines.push(b"end") == b""
    assert (lines.remainder(), lines.remainder()) == (b"end", b"")


def test_a_line_that_is_too_long_is_not_buffered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "HELD_SIZE_MAX", 4)
    lines = Lines()
    assert lines.push(b"1234") == b""
    assert lines.push(b"5") == b"12345"
    assert lines.remainder() == b""
    assert lines.push(b"a\n12345") == b"a\n12345"


def test_events_are_counted_without_the_one_that_ends_a_stream() -> None:
    pieces = [b"data: b\n\n", b"data: [DONE]\n\n", b""]
    written: list[bytes] = []
    counts: list[int] = []
    ends: list[bytes] = []

    class Source:
        has_events = True

        @property
        def ended(self) -> bool:
            return pieces == [b""]

        async def next(self) -> bytes:
            return pieces.pop(0)

    class Target:
        async def write(self, data: bytes) -> None:
            written.append(data)

        async def write_eof(self, data: bytes = b"") -> None:
            written.append(data)
            ends.append(data)

    first = b'data: {"text": "data: [DONE] data: x"}\n\ndata: b\n\n'
    asyncio.run(relay(cast("Any", Source()), first, cast("Any", Target()), counts.append))
    assert counts == [2, 1, 0]
    assert b"".join(written) == first + b"data: b\n\ndata: [DONE]\n\n"
    assert ends == written[-1:]  # the end is sent with the last chunk


def test_headers_of_one_hop_are_dropped_in_both_directions() -> None:
    both = {"Connection": "close, X-Mine", "X-MINE": "1", "Transfer-Encoding": "chunked", "A": "b"}
    assert dict(for_engine({**both, "Host": "h", "Expect": "100-continue"})) == {"A": "b"}
    assert dict(for_client({**both, "Host": "h"}, "http://e:1")) == {"A": "b", "Host": "h"}
    assert dict(for_client({"A": "b"}, "http://e:1")) == {"A": "b"}
    pairs = [("Connection", "close"), ("X-Mine", "1"), ("A", "b"), ("connection", "X-Mine")]
    assert list(for_engine(CIMultiDict(pairs)).items()) == [("A", "b")]


@pytest.mark.parametrize(
    ("status", "kind", "retry_s", "retry_after"),
    [
        (400, "BadRequestError", None, None),
        (404, "NotFoundError", None, None),
        (413, "RequestTooLargeError", None, None),
        (429, "RateLimitError", 0.2, "1"),
        (500, "InternalServerError", None, None),
        (502, "BadGatewayError", None, None),
        (503, "ServiceUnavailableError", 1.0, "1"),
        (504, "GatewayTimeoutError", 1.5, "2"),
    ],
)
def test_errors_have_the_types_of_the_client_library(
    status: int, kind: str, retry_s: float | None, retry_after: str | None
) -> None:
    answer = Refusal(status, "no", retry_after_s=retry_s, param="model").response()
    assert (answer.status, answer.headers.get("Retry-After")) == (status, retry_after)
    error = {"message": "no", "type": kind, "param": "model", "code": status}
    assert json.loads(cast("bytes", answer.body))["error"] == error
    event = error_event(status, "broke")
    assert event.startswith(b"\ndata: {") and event.endswith(b"}\n\n")
    assert json.loads(event[6:])["error"]["type"] == kind
