# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Engines whose responses do not end, clients with invalid HTTP or JSON, and files that never end
cost the router neither memory nor time, and secrets appear in no log and no error.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
from aiohttp import web
from fake_engine import FakeEngine
from routed import QUICK, routed, until

from beluga.errors import BadReplyError, BelugaError, RouterError
from beluga.gateway.engine import Health
from beluga.gateway.fleet import WORKERS_SIZE_MAX, workers_text
from beluga.gateway.parsed_request import parse_request
from beluga.gateway.protocol import ANSWER_MAX
from beluga.gateway.settings import read_engines, read_queues, read_url
from beluga.index import fetch_counters
from beluga.listening import server as listening
from beluga.tiers.remote import split_remote
from beluga.tiers.remote.objects import store_options

if TYPE_CHECKING:
    from beluga.rpc import Client

WORD = "hunter2hunter2"
MIB = 1 << 20


async def test_an_engine_whose_list_of_models_is_too_long_is_down() -> None:
    engine = FakeEngine()
    engine.listed = json.dumps({"data": [{"id": "fake", "more": "a" * ANSWER_MAX}]}).encode()
    async with routed(engine, wait=False) as site:
        (found,) = site.service.fleet
        await until(lambda: found.health is Health.DOWN)
        assert found.why == "its response is longer than 16 MiB"
        engine.listed = None
        await until(lambda: found.health is Health.UP)


class BusyEngine(FakeEngine):
    """An engine that is busy, and explains it at length."""

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        return web.Response(status=429, body=b"a" * (3 * MIB))


async def test_a_busy_engines_long_response_is_not_kept() -> None:
    async with routed(BusyEngine()) as site:
        status, body = await site.completed(stream=False)
        assert status == 429
        assert len(body) < MIB


@pytest.mark.parametrize(
    "line",
    [
        f"GET /v1/models HTTP/1.1\r\nAuthorization: Bearer {WORD}\1",
        f"GET /v1/models HTTP/1.1\r\nAuthorization: Bearer {WORD}\0",
        f"GET /v1/models HTTP/1.1\r\nX-Api-Key: {WORD}\n a: b",
        f"GET /v1/models HTTP/1.1\r\n{WORD} : a",
        f"GET /v1/models HTTP/1.1\r\nAuthorization: {WORD}" + "a" * 70_000,
        f"GET /v1/models?key={WORD}\1 HTTP/1.1",
        f"GET /v1/models?key={WORD} HTTP/9.9",
        f"GET /v1/models?key={WORD}" + "a" * 70_000 + " HTTP/1.1",
        f"{WORD} /v1/models HTTP/1.1",
        f"GET x://?{WORD} HTTP/1.1",
        f"POST /v1/completions HTTP/1.1\r\nContent-Length: {WORD}",
        f"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: {WORD}\r\nContent-Length: 2",
    ],
)
async def test_the_log_quotes_nothing_of_an_invalid_request(
    line: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with routed(FakeEngine()) as site:
        reader, writer = await asyncio.open_connection(*site.service.address)
        writer.write(f"{line}\r\nHost: localhost\r\n\r\n{{}}".encode())
        assert b" 400 " in await reader.readline()
        writer.close()
        warned = [record for record in caplog.records if record.levelno == logging.WARNING]
        assert [record.name for record in warned] == ["beluga.listening.server.http"]
        assert len(warned[0].getMessage().splitlines()) == 1
    assert WORD not in caplog.text


@pytest.mark.parametrize("field", ["prompt", "input", "messages", "cache_salt", "stream"])
@pytest.mark.parametrize(
    "value",
    [
        *(b'["\xff"]', b'"\xff"', b'["\\ud800"]', b'"\\ud800"', b'"\\udc00\\ud800"', b"[1e999]"),
        *(b"[" + b"9" * 5000 + b"]", b"[-1]", b"[4294967296]", b"[1.0]", b"[true]", b"[null]"),
        *(b"[[1], 2]", b"[[1], [null]]", b"{}", b"[{}]", b"[[]]", b"[]", b'""', b"NaN", b"null"),
    ],
)
def test_an_unreadable_field_is_forwarded_to_the_engine(field: str, value: bytes) -> None:
    body = b'{"model": "m", "%s": %s}' % (field.encode(), value)
    parsed = parse_request("/v1/completions", body)
    assert parsed.body == body
    assert parsed.model in ("m", None)


@pytest.mark.parametrize(("opens", "closes"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_no_depth_of_json_is_an_error(opens: bytes, closes: bytes) -> None:
    """The fields are decoded at another depth of the stack than the whole."""
    for depth in [*range(1, 1200), 3000, 20_000]:
        value = opens * depth + b"1" + closes * depth
        assert parse_request("/v1/completions", b'{"model": "m", "prompt": %s}' % value).body


def test_an_endless_workers_file_is_rejected(tmp_path: Path) -> None:
    """A read that waits would stop all requests."""
    pipe, large = tmp_path / "pipe", tmp_path / "large"
    os.mkfifo(pipe)
    large.write_bytes(b"#" * (WORKERS_SIZE_MAX + 1))
    for path, why in (
        (pipe, "not a regular file"),
        (Path("/dev/zero"), "not a regular file"),
        (tmp_path, "directory|not a regular file"),
        (large, "more than 4194304 bytes"),
    ):
        with pytest.raises(RouterError, match=why):
            workers_text(path)
    large.write_bytes(b"\xef\xbb\xbfnone\n")
    (tmp_path / "link").symlink_to(large)
    assert workers_text(tmp_path / "link") == "none\n"


@pytest.mark.parametrize(
    "url",
    [
        *(f"http://me:{WORD}@host", f"http://me:{WORD}@host:port", f"http://me:{WORD}/x@host:1"),
        *(f"http://me:{WORD}#x@host:1", f"http://host/?key={WORD}", f"me:{WORD}@host:80"),
        *(f"ftp://me:{WORD}@host", f"http://me:{WORD}@[::1", "http://a b", "http://a/\x07b"),
    ],
)
def test_no_error_of_an_address_has_its_password(url: str) -> None:
    with pytest.raises(BelugaError) as refused:
        read_url(url)
    text = str(refused.value)
    for read in (
        lambda text: read_engines([text]),
        lambda text: read_engines([], [f"m={text}"]),
        lambda text: read_engines([], [f"={text}"]),
        lambda text: read_engines(["http://a"], [], [text]),
        lambda text: read_queues([text]),
        split_remote,
    ):
        try:
            read(url)
        except BelugaError as error:
            text = f"{error}{error.__cause__}"
        assert WORD not in text


@pytest.mark.parametrize(
    "url",
    [
        *(f"redis://:{WORD}/x@host:1", f"redis://me:{WORD}#x@host:1", f"valkey://:{WORD}?x@host"),
        *(f"s3://me:{WORD}/b@host", f"redis://:a/{WORD}@host:1"),
    ],
)
def test_no_error_of_a_store_has_its_password(url: str) -> None:
    with pytest.raises(BelugaError) as error:
        split_remote(url)
    assert WORD not in f"{error.value}{error.value.__cause__}"


def test_no_error_of_a_stores_endpoint_has_its_password() -> None:
    url = split_remote(f"s3://bucket/?endpoint=ftp://me:{WORD}@host")
    with pytest.raises(ValueError, match="its endpoint is 'ftp://host'") as error:
        store_options(url)
    assert WORD not in str(error.value)


HALF_A_HEAD = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX-A: "


async def test_a_client_that_stalls_too_long_is_disconnected_before_the_buffer_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listening, "PATIENCE_S", 0.5)
    async with routed(FakeEngine()) as site:
        for address in (site.service.address, site.service.admin_address):
            for sent in (b"", HALF_A_HEAD):
                reader, writer = await asyncio.open_connection(*address)
                writer.write(sent)
                assert await reader.read() == b""
                writer.close()


async def test_all_unfinished_heads_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections with large heads are closed; those with heads of the usual size stay open."""
    monkeypatch.setattr(listening, "HEADS_SIZE_MAX", 100_000)
    async with routed(FakeEngine()) as site:
        usual_reader, usual = await asyncio.open_connection(*site.service.address)
        usual.write(HALF_A_HEAD + b"a" * 4000)
        peers = []
        for _ in range(10):
            peers.append(await asyncio.open_connection(*site.service.address))
            peers[-1][1].write(HALF_A_HEAD + b"a" * 30_000)
        ended = [asyncio.ensure_future(reader.read()) for reader, _ in peers]
        await until(lambda: sum(task.done() for task in ended) >= 7)
        usual.write(b"\r\n\r\n")
        assert b" 200 " in await usual_reader.readline()
        for task, (_, writer) in zip(ended, peers, strict=True):
            task.cancel()
            writer.close()
        usual.close()


async def test_a_late_body_stays_within_the_total_limit() -> None:
    """There was room when the head of the request arrived."""
    engine = FakeEngine()
    engine.faults.hold_first = asyncio.Event()
    async with routed(engine) as site:
        site.service._handlers._requests_max = 1
        reader, late = await asyncio.open_connection(*site.service.address)
        late.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: 17\r\n\r\n{"
        )
        places = site.service._clients.slots
        await until(lambda: any(place.connection._handled for place in places))
        other = asyncio.ensure_future(site.completed(stream=False))
        await until(lambda: engine.under_way == 1)
        late.write(b'"model": "fake"}')
        assert b" 503 " in await reader.readline()
        assert b"1 requests are running" in await reader.read(4096)
        late.close()
        engine.faults.hold_first.set()
        assert (await other)[0] == 200
        assert len(engine.seen) == 1


@pytest.mark.parametrize("size", [50_000, 300_000])
async def test_a_body_of_unknown_length_is_bounded_too(size: int) -> None:
    """The first one arrives with its head."""
    limits = dataclasses.replace(QUICK, body_size_max=40_000)
    async with routed(FakeEngine(), limits=limits) as site:
        reader, writer = await asyncio.open_connection(*site.service.address)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"%x\r\n%s\r\n0\r\n\r\n" % (size, b"a" * size)
        )
        assert b" 413 " in await reader.readline()
        writer.close()
        assert site.engines[0].seen == []


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/workers"), ("PUT", "/prefill")], ids=["workers", "prefill"]
)
@pytest.mark.parametrize(
    "body", [b"[" * 50_000, b'{"url":' * 5000, b'{"url": "\xff"}', b'{"url\xff": 1}', b"", b"nul"]
)
async def test_malformed_json_of_operators_is_rejected(method: str, path: str, body: bytes) -> None:
    async with routed(FakeEngine()) as site:
        kind = {"Content-Type": "application/json"}
        requested = site.client.request(method, site.admin + path, data=body, headers=kind)
        async with requested as answer:
            assert answer.status == 400


def test_nested_counters_are_an_error_of_the_server() -> None:
    for text in (b"[" * 100_000, b"\xff", b"[]", b"nul"):
        client = cast("Client", SimpleNamespace(call=lambda _, text=text: text))
        with pytest.raises(BadReplyError, match="counters of the lower tiers are not"):
            fetch_counters(client)
