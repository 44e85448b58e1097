# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Few descriptors, hostile clients and engines, and heavy requests do not harm others."""

from __future__ import annotations

import asyncio
import errno
import gzip
import json
import logging
import resource
import signal
import sys
import threading
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("aiohttp", reason="the router's packages are not installed")

import aiohttp
from aiohttp import web
from fake_engines import Announcer, FakeEngine
from routed import Site, routed, until
from support import role

from beluga import http_server as listening
from beluga.errors import BadReplyError, RouterError
from beluga.gateway import cache as cache_module
from beluga.gateway import director
from beluga.gateway.acceptor import raise_file_limit
from beluga.gateway.cache import Cache
from beluga.gateway.engine import Health
from beluga.gateway.kv_events import Listener, PoolListener
from beluga.gateway.parsed_request import SLOW_SIZE, parse_request
from beluga.gateway.protocol import ANSWER_MAX
from beluga.index import fetch_counters
from beluga.open_files import files_left
from beluga.router import Indexer, WireDecoder
from beluga.rpc import Client

FILES = 64
CLIENTS = 120
WHOLE = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"


def addresses(child: Any) -> tuple[str, str]:
    """Return where a started ``beluga gateway`` listens for clients and for operators."""
    for line in child.stderr:
        if line.startswith("routing on "):
            words = line.split()
            return words[2].rstrip(";"), words[5].rstrip(";")
    raise AssertionError("it ended")


def health(admin: str) -> str:
    with urllib.request.urlopen(f"{admin}/workers", timeout=60) as answer:  # noqa: S310
        return str(json.load(answer)[0]["health"])


def few_files() -> None:
    """Try to follow events with too few descriptors; zmq itself takes some."""
    import zmq.asyncio  # noqa: F401

    indexer, where = Indexer(), ("ipc:///nowhere/e", "ipc:///nowhere/r")
    decoder = WireDecoder(1, block_size=16, hash_blocks=lambda *_: [])

    async def refused() -> None:
        opened = len(list(Path("/proc/self/fd").iterdir()))
        for left in range(11):
            resource.setrlimit(resource.RLIMIT_NOFILE, (opened + left, 1024))
            with pytest.raises(RouterError, match="open files, but only"):
                Listener(indexer, decoder, *where)
            with pytest.raises(RouterError, match="open files, but only"):
                PoolListener(indexer, ",".join(where), block_size=16)
        print("refused")

    asyncio.run(refused())


def test_too_few_files_for_kv_events_are_an_error_and_abort_nothing() -> None:
    """libzmq aborts the process if it cannot open a file for a thread or a socket."""
    pytest.importorskip("zmq", reason="pyzmq is not installed")
    ended = role.run(few_files)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "refused\n", "")


async def test_a_listener_needs_no_more_files_than_are_required_of_it(tmp_path: Path) -> None:
    announcer = Announcer(tmp_path)
    before = files_left()
    decoder = WireDecoder(1, block_size=16, hash_blocks=lambda *_: [])
    listener = Listener(Indexer(), decoder, announcer.events, announcer.replay)
    try:
        await until(lambda: listener.alone_since is None and announcer.subscribed())
        assert before - files_left() <= 11 + 2  # the announcer's ends of the connections
    finally:
        listener.close()
        announcer.close()


@asynccontextmanager
async def started(
    start: Callable[..., Any], engine: FakeEngine, files: int, *words: object
) -> AsyncIterator[tuple[str, str]]:
    """Run ``beluga gateway`` with few descriptors. Yields the addresses of its listeners."""
    async with engine:
        child = start(
            *("gateway", "--worker", engine.url, "--port", 0, "--admin", "127.0.0.1:0"),
            *("--health-interval", 0.1, *words),
        )
        resource.prlimit(child.pid, resource.RLIMIT_NOFILE, (files, files))
        base, admin = await asyncio.to_thread(addresses, child)
        while await asyncio.to_thread(health, admin) != "up":
            await asyncio.sleep(0.02)
        yield base, admin


@pytest.mark.parametrize("sent", [b"", b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n", WHOLE])
async def test_idle_connections_do_not_block_others(start: Callable[..., Any], sent: bytes) -> None:
    engine = FakeEngine()
    body = {"model": "fake", "prompt": "a"}
    async with started(start, engine, FILES) as (base, _), aiohttp.ClientSession() as client:
        url = f"{base}/v1/completions"
        engine.faults.hold = asyncio.Event()
        async with client.post(url, json={**body, "stream": True}) as stream:
            host, port = base.removeprefix("http://").split(":")
            idle = [await asyncio.open_connection(host, int(port)) for _ in range(FILES)]
            for _, writer in idle:
                writer.write(sent)
            async with aiohttp.ClientSession() as other:
                for _ in range(3):
                    async with other.post(url, json=body) as answer:
                        assert answer.status == 200
            for _, writer in idle:
                writer.close()
            engine.faults.hold.set()
            assert (await stream.read()).endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("feeds", [0, 3])
async def test_clients_beyond_the_file_limit_get_an_error_and_others_are_served(
    start: Callable[..., Any], tmp_path: Path, feeds: int
) -> None:
    """Each feed of KV events needs about 11 descriptors, which are then not available for
    clients.
    """
    if feeds:
        pytest.importorskip("zmq", reason="pyzmq is not installed")
    engine = FakeEngine()
    engine.faults.hold = asyncio.Event()
    words: list[object] = ["--policy", "linear"]
    async with engine:  # for its address
        for number in range(feeds):
            where = f"{engine.url}=ipc://{tmp_path}/e{number},ipc://{tmp_path}/r{number}"
            words += ["--kv-events", where]
    async with (
        started(start, engine, FILES + 12 * feeds, *words) as (base, admin),
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client,
    ):

        async def complete() -> tuple[int, bytes]:
            body = {"model": "fake", "prompt": "a", "stream": True}
            while True:
                try:
                    async with client.post(f"{base}/v1/completions", json=body) as answer:
                        return answer.status, await answer.read()
                except aiohttp.ClientConnectionError:
                    # closed before it had sent anything, to make room for another connection
                    pass

        clients = [asyncio.create_task(complete()) for _ in range(CLIENTS)]
        await until(lambda: engine.under_way + sum(c.done() for c in clients) == CLIENTS)
        served = engine.under_way
        assert FILES / 5 < served < FILES / 2  # the event loop uses some descriptors, too
        assert await asyncio.to_thread(health, admin) == "up"
        engine.faults.hold.set()
        answers = await asyncio.gather(*clients)
        assert Counter(status for status, _ in answers) == {200: served, 503: CLIENTS - served}
        for status, body in answers:
            whole = body.endswith(b"data: [DONE]\n\n")
            assert whole if status == 200 else b"open files allows; raise it (ulimit -n)" in body
        for _ in range(FILES):
            assert (await complete())[0] == 200
        assert await asyncio.to_thread(health, admin) == "up"


async def test_exhausted_descriptors_of_the_gateway_are_not_an_engine_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with routed(FakeEngine()) as site:
        (engine,) = site.service.fleet
        failed = 0
        connect = aiohttp.TCPConnector.connect

        async def starved(self: Any, request: Any, **more: Any) -> Any:
            nonlocal failed
            if str(request.url).startswith(engine.url):
                failed += 1
                error = OSError(errno.EMFILE, "Too many open files")
                raise aiohttp.ClientConnectorError(request.connection_key, error)
            return await connect(self, request, **more)

        with monkeypatch.context() as patched:
            patched.setattr(aiohttp.TCPConnector, "connect", starved)
            status, body = await site.completed()
            assert status == 503
            assert b"this router cannot open a connection" in body
            await until(lambda: failed > 3)  # also by health checks
        assert (engine.serving, engine.failures) == (True, 0)
        assert (await site.completed())[0] == 200
        assert site.loads() == [(0, 0)]


def test_the_limit_of_open_files_is_raised_to_the_hard_limit() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before[1] // 2, before[1]))
        raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


WORD = "hunter2hunter2"
MIB = 1 << 20


async def test_an_engine_whose_list_of_models_is_too_long_is_down() -> None:
    engine = FakeEngine()
    engine.listed = json.dumps({"data": [{"id": "fake", "more": "a" * ANSWER_MAX}]}).encode()
    async with routed(engine, wait=False) as site:
        (worker,) = site.service.fleet
        await until(lambda: worker.health is Health.DOWN)
        assert worker.why == "its response is longer than 16 MiB"
        engine.listed = None
        await until(lambda: worker.health is Health.UP)


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
        assert [record.name for record in warned] == ["beluga.http_server.http"]
        assert len(warned[0].getMessage().splitlines()) == 1
    assert WORD not in caplog.text


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


READER = """
import socket, sys, time
peer = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
peer.sendall(sys.argv[2].encode())
print(len(peer.recv(100)), flush=True)
time.sleep(float(sys.argv[3]))
while peer.recv(1 << 16):
    time.sleep(0.001)
"""


@pytest.mark.parametrize(
    ("stopped", "waiting", "stall_s", "is_cut"),
    [
        (False, True, 60, True),
        (True, True, 60, True),
        (True, False, 60, False),
        (True, False, 1, True),
    ],
)
async def test_a_client_that_reads_nothing_loses_its_place_to_one_that_waits(
    stopped: bool, waiting: bool, stall_s: float, is_cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without one it has the patience of ``--stall``."""
    monkeypatch.setattr(director, "WANTED_S", 1.0)
    engine = FakeEngine(words=("x" * (1 << 16),) * 400)
    async with routed(engine, inflight_max=1, stall_s=stall_s) as site:
        body = '{"model": "fake", "prompt": "a", "stream": true}'
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}"
        arguments = (
            str(site.service.address.port),
            f"{head}\r\n\r\n{body}",
            "0.01" if stopped else "99",
        )
        reader = await asyncio.create_subprocess_exec(
            sys.executable, "-c", READER, *arguments, stdout=asyncio.subprocess.PIPE
        )
        assert reader.stdout is not None
        try:
            assert await reader.stdout.readline() == b"100\n"
            if stopped:
                reader.send_signal(signal.SIGSTOP)
            if waiting:
                engine.words = ("y",)
                assert (await asyncio.wait_for(site.completed(), 10))[0] == 200
            else:
                await asyncio.sleep(4)
            assert (engine.cancelled, site.inflight()) == (is_cut, not is_cut)
        finally:
            reader.kill()
            await reader.wait()


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
        slots = site.service._clients.slots
        await until(lambda: any(slot.connection._handled for slot in slots))
        other = asyncio.ensure_future(site.completed(stream=False))
        await until(lambda: engine.under_way == 1)
        late.write(b'"model": "fake"}')
        assert b" 503 " in await reader.readline()
        assert b"1 requests are running" in await reader.read(4096)
        late.close()
        engine.faults.hold_first.set()
        assert (await other)[0] == 200
        assert len(engine.seen) == 1


def test_nested_counters_are_an_error_of_the_server() -> None:
    for text in (b"[" * 100_000, b"\xff", b"[]", b"nul"):
        client = cast("Client", SimpleNamespace(call=lambda _, text=text: text))
        with pytest.raises(BadReplyError, match="counters of the lower tiers are not"):
            fetch_counters(client)


CHAT = "/v1/chat/completions"


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
    url = f"{site.base}/v1/completions"
    async with site.client.post(url, data=body, headers=sent) as answer:
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
    async with routed(FakeEngine(), body_s=0.2) as site:
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
    assert [record for record in caplog.records if record.exc_info] == []


async def test_half_a_surrogate_pair_in_a_models_name_is_a_404() -> None:
    async with routed(FakeEngine()) as site:
        status, text = await post(site, b'{"model": "\\ud800"}', "application/json")
        assert (status, text["error"]["code"]) == (404, 404)
        assert text["error"]["message"] == "The model `?` does not exist."


async def test_a_stored_response_does_not_admit_an_unavailable_model() -> None:
    async with routed(FakeEngine(), FakeEngine("other")) as site:
        url = f"{site.base}/v1/responses"
        async with site.client.post(url, json={"model": "fake", "input": "a"}) as answer:
            made = (await answer.json())["id"]
        for number in range(3):
            body = {"model": f"m{number}", "input": "a", "previous_response_id": made}
            async with site.client.post(url, json=body) as answer:
                assert answer.status == 404
                assert (await answer.json())["error"]["param"] == "model"
        body = {"model": "fake", "input": "a", "previous_response_id": made}
        assert await site.status("POST", url, json=body) == 200
        body["model"] = "other"  # the engine responds that it has no such response
        assert await site.status("POST", url, json=body) == 404
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
