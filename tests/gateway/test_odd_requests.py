# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Requests that only raw HTTP can make: none of them crashes an engine, and the response is the
same as without the gateway.
"""

from __future__ import annotations

import asyncio
import json

import pytest

pytest.importorskip("aiohttp", reason="the router's packages are not installed")

from fake_engine import FakeEngine
from routed import Site, routed, until

from beluga.gateway.parsed_request import FILE_TOKENS, TOKENIZED_SIZE_MAX, parse_request


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
        (line,) = [one for one in caplog.records if "handling request" in one.getMessage()]
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
    one, same, other = (
        parse_request(path, picture(content, question))
        for content, question in (
            ("A" * (2 << 20), "What is this?"),
            ("A" * (2 << 20), "And who made it?"),
            ("B" * (2 << 20), "What is this?"),
        )
    )
    assert FILE_TOKENS < one.isl < FILE_TOKENS + 100
    start = FILE_TOKENS + 20
    assert one.tokens[:start].tolist() == same.tokens[:start].tolist()
    assert one.tokens[:start].tolist() != other.tokens[:start].tolist()
    assert parse_request(path, picture("A" * 400)).isl > 100  # short ones stay as they are
