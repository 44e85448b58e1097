# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Engines that refuse, break off, stall and die: the responses to clients, the routing of requests,
and what one client's failures mean for the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import socket
import ssl
import threading
import time
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="the router's packages are not installed")

import aiohttp
from fake_engines import FakeEngine
from routed import Site, routed, until

from beluga.gateway import EngineSpec, proxy
from beluga.gateway.engine import (
    ACCUSED_S,
    BROKEN_S,
    CLIENTS_MAX,
    PROBE_S,
    Engine,
    GatewayClient,
    Health,
    Standing,
    client_of,
)
from beluga.gateway.engine_client import EngineClient
from beluga.gateway.parsed_request import PROMPT_THREADS as THREADS
from beluga.gateway.parsed_request import SLOW_SIZE, ParsedRequest
from beluga.gateway.protocol import words_of
from beluga.router import Worker

KEY = aiohttp.client_reqrep.ConnectionKey("engine.local", 443, True, True, None, None, None)


def events_of(body: bytes) -> list[Any]:
    """Return a stream's events, each of which must be complete."""
    assert body.endswith(b"\n\n")
    lines = [line for line in body.split(b"\n") if line]
    assert all(line.startswith(b"data: ") for line in lines)
    return [line[6:] if line == b"data: [DONE]" else json.loads(line[6:]) for line in lines]


@pytest.mark.parametrize("status", [429, 503])
async def test_a_busy_engine_gets_no_requests_for_the_pause_it_requested(status: int) -> None:
    a, b = FakeEngine(), FakeEngine()
    a.faults.status, a.faults.retry_after = status, "3600"
    async with routed(a, b, cool_down_max_s=3600) as site:
        for _ in range(6):
            assert (await site.completed())[0] == 200
        assert site.counts() == [1, 6]
        assert [worker["health"] for worker in await site.workers()] == ["up", "up"]


async def test_a_busy_engine_is_retried_after_its_pause() -> None:
    engine = FakeEngine()
    engine.faults.status, engine.faults.retry_after = 503, "1"
    async with routed(engine) as site:
        started = time.monotonic()
        pending = asyncio.create_task(site.completed())
        await until(lambda: site.counts() == [1])
        engine.faults.status = 0
        assert (await pending)[0] == 200
        assert time.monotonic() - started > 0.9
        assert site.counts()[0] >= 2


async def test_without_a_wait_queue_a_busy_engine_is_a_503_with_retry_after() -> None:
    a, b = FakeEngine(), FakeEngine()
    for engine in (a, b):
        engine.faults.status, engine.faults.retry_after = 503, "30"
    async with routed(a, b, queue_s=0) as site:
        async with site.complete() as answer:
            assert answer.status == 503
            assert int(answer.headers["Retry-After"]) >= 1
            assert json.loads(await answer.read())["error"]["code"] == 503
        assert site.counts() == [1, 1]


@pytest.mark.parametrize("drop", [{"drop_first": 9}, {"drop_after": 0}])
async def test_a_request_aborted_by_a_living_engine_is_not_sent_to_another(
    drop: dict[str, int],
) -> None:
    """The engine may still be executing the request. With ``drop_after`` the headers have already
    been sent.
    """
    engines = [FakeEngine() for _ in range(3)]
    for engine in engines:
        engine.faults = dataclasses.replace(engine.faults, **drop)
    async with routed(*engines) as site:
        status, body = await site.completed()
        assert status == 502
        assert b"may have executed the request" in body
        assert sum(site.counts()) == 1


async def test_a_read_only_request_is_sent_to_another_engine() -> None:
    a, b = FakeEngine(), FakeEngine()
    a.drop_listed = True
    async with routed(a, b) as site:
        for _ in range(2):
            async with site.client.get(f"{site.base}/v1/batches") as answer:
                assert (answer.status, await answer.read()) == (200, b"none")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_survives_the_death_of_its_engine_during_prefill(stream: bool) -> None:
    a, b = FakeEngine(), FakeEngine()
    a.faults.hold_first = asyncio.Event()  # the headers of a stream have been sent by then
    async with routed(a, b) as site:
        pending = asyncio.create_task(site.completed(stream=stream))
        await until(lambda: a.under_way == 1)
        await a.__aexit__()
        assert (await pending)[0] == 200
        assert site.counts() == [1, 1]


async def test_a_request_is_not_sent_to_a_third_engine_after_two_died() -> None:
    engines = [FakeEngine() for _ in range(3)]
    for engine in engines:
        engine.faults.hold_first = asyncio.Event()
    async with routed(*engines) as site:
        pending = asyncio.create_task(site.completed())
        for _ in range(2):
            await until(lambda: any(engine.under_way for engine in engines))
            (ill,) = [engine for engine in engines if engine.under_way]
            await ill.__aexit__()
        assert (await pending)[0] == 502
        assert sum(site.counts()) == 2


async def test_a_request_with_tools_is_started_once() -> None:
    """A dead engine may have executed some tool calls."""
    a, b = FakeEngine(), FakeEngine()
    a.hold_response = asyncio.Event()
    async with routed(a, b) as site:
        pending = site.client.post(f"{site.base}/v1/responses", json={"model": "fake"})
        task = asyncio.create_task(pending.__aenter__())
        await until(a.hold_response.is_set)
        await a.__aexit__()
        assert (await task).status == 502
        assert not b.made


async def test_a_dead_engine_is_a_503_at_once_and_is_used_again_after_a_restart() -> None:
    engine = FakeEngine()
    async with routed(engine, retries=9) as site:
        await engine.__aexit__()
        for statuses in ((502, 503), (503,), (503,)):
            status, body = await site.completed()
            assert status in statuses
            assert "error" in json.loads(body)
            assert b"busy" not in body and b"127.0.0.1" not in body
            assert b"accepts no connection" in body
        assert await site.status("GET", f"{site.base}/ready") == 503
        await engine.__aenter__()
        await site.up()
        assert (await site.completed())[0] == 200
        assert await site.text("/ready") == ""


@pytest.mark.parametrize("drop_after", [1, 40, 70, 100, 150])
async def test_a_stream_that_breaks_off_ends_with_an_error_event(drop_after: int) -> None:
    a, b = FakeEngine(), FakeEngine()
    a.faults.drop_after = drop_after
    async with routed(a, b) as site:
        started = asyncio.get_running_loop().time()
        a.faults.sick = True
        status, body = await site.completed()
        whole = a.events({"model": "fake"})
        if drop_after < len(whole[0]) - 1:  # no byte was forwarded
            assert status == 502
        else:
            events = events_of(body)
            assert [json.loads(event[6:]) for event in whole[: len(events) - 1]] == events[:-1]
            error = events[-1]["error"]
            assert error["code"] == 502
            assert error["type"] == "BadGatewayError"
        assert asyncio.get_running_loop().time() - started < 60
        before = site.counts()[0]
        for _ in range(4):
            assert (await site.completed())[0] == 200
        assert site.counts()[0] == before  # an unhealthy engine gets no requests
        a.faults = type(a.faults)()
        await site.up()
        for _ in range(2):
            assert (await site.completed())[0] == 200
        assert site.counts()[0] == before + 1


async def test_a_request_on_a_stalled_engine_is_aborted() -> None:
    engine = FakeEngine()
    engine.faults.hold = asyncio.Event()
    async with routed(engine, stall_s=2) as site:
        status, body = await site.completed()
        assert status == 200
        assert events_of(body)[-1]["error"]["code"] == 502
        await until(lambda: engine.cancelled == 1)


async def test_the_load_is_zero_after_every_kind_of_end() -> None:
    engines = [FakeEngine() for _ in range(3)]
    engines[0].faults.drop_after = 100
    engines[1].faults.status = 500
    async with routed(*engines) as site:
        await asyncio.gather(*(site.completed() for _ in range(20)))
        await until(lambda: site.inflight() == 0)
        assert site.loads() == [(0, 0)] * 3
        assert all(engine.inflight == 0 for engine in site.service.fleet)


@pytest.mark.parametrize("body", [b"[" * 100_000, b"<html>", b'{"data": 5}'])
async def test_an_engine_whose_models_cannot_be_read_is_down_until_they_can(body: bytes) -> None:
    engine = FakeEngine()
    async with routed(engine) as site:
        engine.listed = body
        (worker,) = site.service.fleet
        await until(lambda: worker.health is Health.DOWN)
        engine.listed = None
        await site.up()


async def test_a_request_is_retried_if_an_engines_machine_accepts_no_connection() -> None:
    """No request was sent there, so another engine may get it."""
    async with AsyncExitStack() as stack:
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        # more than the listen backlog: the kernel accepts no further connection
        for _ in range(8):
            waits = stack.enter_context(socket.socket())
            waits.setblocking(False)
            waits.connect_ex(silent.getsockname())
        alive = FakeEngine()
        await stack.enter_async_context(alive)
        dead_url = "http://{}:{}".format(*silent.getsockname())
        engines = [EngineSpec(url, ("fake",)) for url in (dead_url, alive.url)]
        site = await stack.enter_async_context(
            routed(connect_s=0.2, health_timeout_s=60, engines=tuple(engines))
        )
        await site.up(1)
        (dead,) = (engine for engine in site.service.fleet if engine.url == dead_url)
        for _ in range(2):
            assert dead.passed(dead.failures)  # the engine was up shortly before
            assert (await site.completed())[0] == 200
        assert dead.failures > 0
        assert len(alive.seen) == 2


SOON_S = 20.0  # far less than the Retry-After of the engines here


async def complete(site: Site, client: str, prompt: str = "hello") -> int:
    """Return the status of a client's completion, which must arrive soon."""
    headers = {"Authorization": f"Bearer {client}"}
    body = {"model": "fake", "prompt": prompt}
    url = f"{site.base}/v1/completions"

    async def answered() -> int:
        async with site.client.post(url, json=body, headers=headers) as answer:
            await answer.read()
            return answer.status

    return await asyncio.wait_for(answered(), SOON_S)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=100.0)
    fake = SimpleNamespace(monotonic=lambda: clock.now)
    monkeypatch.setattr("beluga.gateway.engine.time", fake)
    return clock


def up() -> Engine:
    engine = Engine(Worker(1), EngineSpec("http://a"))
    assert engine.passed(0)
    return engine


async def test_the_rate_limit_of_one_client_does_not_affect_others() -> None:
    engine = FakeEngine()
    engine.faults.limited, engine.faults.retry_after = frozenset({"Bearer greedy"}), "60"
    async with routed(engine) as site:
        for _ in range(3):
            assert await complete(site, "greedy") == 429
            assert await complete(site, "modest") == 200
        assert [worker["cooling_s"] for worker in await site.workers()] == [0]


@pytest.mark.parametrize("status", [429, 503])
async def test_one_429_without_a_key_does_not_block_later_requests(status: int) -> None:
    engine = FakeEngine()
    engine.faults.status, engine.faults.retry_after = status, "60"
    async with routed(engine) as site:
        pending = asyncio.create_task(site.completed())
        await until(lambda: len(engine.seen) == 1)
        engine.faults.status = 0
        assert (await asyncio.wait_for(site.completed(), SOON_S))[0] == 200
        assert (await asyncio.wait_for(pending, SOON_S))[0] == status


async def test_a_request_waiting_for_its_own_pause_does_not_block_others() -> None:
    engine = FakeEngine()
    engine.faults.limited, engine.faults.retry_after = frozenset({"Bearer greedy"}), "15"
    async with routed(engine) as site:
        waits = asyncio.create_task(complete(site, "greedy"))
        await until(lambda: len(engine.seen) == 1)
        for _ in range(5):
            assert await complete(site, "modest") == 200
        assert not waits.done()
        engine.faults.limited = frozenset()
        assert await waits == 200


async def test_a_request_waiting_for_a_paused_worker_goes_to_a_new_one() -> None:
    a, b = FakeEngine(), FakeEngine()
    a.faults.status, a.faults.retry_after = 503, "15"
    b.faults.healthy = False
    async with routed(a, b, wait=False) as site:
        await site.up(1)
        pending = asyncio.create_task(complete(site, "one"))
        await until(lambda: len(a.seen) == 1)
        b.faults.healthy = True
        assert await pending == 200
        assert site.counts() == [1, 1]


async def test_a_prompt_that_crashes_engines_does_not_suspend_them_for_other_clients() -> None:
    engine = FakeEngine()
    engine.faults.poison = "poison"
    async with routed(engine, retries=0) as site:
        (worker,) = site.service.fleet
        for _ in range(5):
            assert await complete(site, "greedy", "poison") == 502
            assert await complete(site, "modest") == 200
        assert worker.failures <= 1


async def test_large_prompts_do_not_delay_name_lookups(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop resolves names in its own threads, for health checks, too."""
    parse, go_on, under_way = proxy.parse_request, threading.Event(), []

    def slow(path: str, body: bytes, **more: Any) -> ParsedRequest:
        if len(body) > SLOW_SIZE:
            under_way.append(path)
            assert go_on.wait(60)
        return parse(path, body, **more)

    monkeypatch.setattr(proxy, "parse_request", slow)
    async with routed(FakeEngine()) as site:
        large = [
            asyncio.create_task(site.completed(prompt="x" * (2 * SLOW_SIZE)))
            for _ in range(4 * THREADS)
        ]
        try:
            await until(lambda: len(under_way) >= THREADS)
            loop = asyncio.get_running_loop()
            await asyncio.wait_for(loop.getaddrinfo("localhost", 80), SOON_S)
            assert (await asyncio.wait_for(site.completed(), SOON_S))[0] == 200
        finally:
            go_on.set()
        assert {(await answer)[0] for answer in large} == {200}


ONE, TWO = GatewayClient("one", "1"), GatewayClient("two", "2")


def test_two_clients_without_a_success_in_between_pause_an_engine(clock: Any) -> None:
    engine = up()
    for _ in range(9):
        engine.busy(ONE, 60)
        assert engine.ready
    engine.busy(TWO, 60)
    assert not engine.ready
    assert engine.serving
    assert engine.cooling_s == PROBE_S  # not the minute that it requests
    clock.now += PROBE_S
    assert engine.ready
    engine.placed()  # this request is the probe
    assert not engine.ready
    engine.answered(500)  # this status does not show that the engine has capacity
    assert not engine.ready
    engine.answered(200)
    assert engine.ready
    engine.placed()
    engine.busy(TWO, 60)
    assert engine.ready


def test_a_success_in_between_shows_that_each_client_has_its_own_limit() -> None:
    engine = up()
    for client in (ONE, TWO, GatewayClient("three", "3")):
        engine.busy(client, 60)
        engine.answered(200)
        assert engine.ready


def test_a_client_is_not_sent_to_an_engine_during_its_pause(clock: Any) -> None:
    standing = Standing()
    standing.busy(ONE, 60)
    standing.busy(ONE, 1)
    assert standing.avoided_by(ONE)
    assert not standing.avoided_by(TWO)
    clock.now += 60
    assert not standing.avoided_by(ONE)


def test_the_table_of_clients_is_bounded() -> None:
    standing = Standing()
    for number in range(CLIENTS_MAX + 1):
        standing.busy(GatewayClient(str(number), str(number)), 60)
    assert not standing.avoided_by(GatewayClient("0"))
    assert standing.avoided_by(GatewayClient("1"))
    assert standing.avoided_by(GatewayClient(str(CLIENTS_MAX)))


def test_an_engine_is_suspected_by_one_client_once_a_minute(clock: Any) -> None:
    engine = up()
    engine.broke_off(ONE, "cut")
    assert (engine.health, engine.suspected, engine.failures) == (Health.DOWN, True, 1)
    assert engine.avoided_by(ONE)
    assert engine.passed(1)
    assert not engine.suspected
    assert engine.avoided_by(ONE)  # the engine is alive, so this client's request was the cause
    clock.now += BROKEN_S
    assert not engine.avoided_by(ONE)
    engine.look.clear()
    engine.broke_off(ONE, "cut")
    assert engine.ready
    assert engine.look.is_set()
    engine.broke_off(TWO, "cut")
    assert (engine.health, engine.failures) == (Health.DOWN, 2)
    engine.broke_off(ONE, "cut")
    assert engine.passed(2)  # failures of the first client do not cancel a passed check
    clock.now += ACCUSED_S
    engine.broke_off(ONE, "cut")
    assert engine.health is Health.DOWN


def test_an_engine_that_was_down_starts_without_suspicion() -> None:
    engine = up()
    engine.busy(ONE, 60)
    engine.broke_off(TWO, "cut")
    engine.fail("/health returned 503")  # the next health check
    assert not engine.suspected
    assert engine.passed(2)
    assert not (engine.avoided_by(ONE) or engine.avoided_by(TWO))


def test_names_of_one_address_pause_an_engine_for_that_address_alone(clock: Any) -> None:
    engine = up()
    for number in range(1000):
        engine.busy(GatewayClient(f"name {number}", "1"), 60)
    assert engine.ready
    assert engine.avoided_by(GatewayClient("another name", "1"))
    assert not engine.avoided_by(TWO)
    clock.now += PROBE_S
    assert not engine.avoided_by(GatewayClient("another name", "1"))
    engine.busy(TWO, 60)
    assert not engine.ready


def test_names_of_one_address_make_an_engine_suspected_once_a_minute(clock: Any) -> None:
    engine = up()
    for number in range(1000):
        engine.broke_off(GatewayClient(f"name {number}", "1"), "cut")
    assert (engine.health, engine.failures) == (Health.DOWN, 1)
    assert engine.passed(1)
    clock.now += ACCUSED_S - 1
    engine.broke_off(GatewayClient("another name", "1"), "cut")
    assert engine.ready
    engine.broke_off(TWO, "cut")
    assert (engine.health, engine.failures) == (Health.DOWN, 2)


def test_clients_are_identified_by_key_then_by_address() -> None:
    one, two = ({"Authorization": f"Bearer {name}"} for name in ("one", "two"))
    assert client_of(one, "::1").name == client_of(one, "::2").name != client_of(two, "::1").name
    assert client_of({"X-Api-Key": "k"}, "::1") != client_of({}, "::1") != client_of({}, "::2")
    assert "one" not in client_of(one, None).name
    assert client_of({}, None) == ("", "")
    assert client_of(one, "::1").address == client_of({}, "::1").address == "::1"


class ClosingEngine:
    """Answers the first request of each connection. It then closes the connection without
    announcing it, if ``reads`` after it has read a second request.
    """

    def __init__(self, *, reads: bool) -> None:
        self.seen = 0
        self._reads = reads
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = "http://127.0.0.1:{1}".format(*self._listening.getsockname())
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                threading.Thread(target=self._answer, args=(client,), daemon=True).start()

    def _answer(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            self.seen += bool(client.recv(1 << 16))
            client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
            if self._reads:
                self.seen += bool(client.recv(1 << 16))


@pytest.mark.parametrize("reads", [False, True], ids=["unread", "read"])
async def test_only_a_request_that_crosses_the_close_of_its_connection_is_sent_again(
    reads: bool,
) -> None:
    engine = ClosingEngine(reads=reads)
    async with EngineClient() as client:
        statuses = []
        for _ in range(4):
            with contextlib.suppress(aiohttp.ServerDisconnectedError):
                async with await client.request("POST", engine.url) as answer:
                    statuses.append(answer.status)
            time.sleep(0.05)  # the close arrives meanwhile, and the event loop does not see it
    engine.close()
    assert len(statuses) == (2 if reads else 4)
    assert engine.seen == 4


@pytest.mark.parametrize(
    "error",
    [
        aiohttp.ClientConnectorCertificateError(KEY, ssl.CertificateError("not for engine.local")),
        aiohttp.ClientConnectorDNSError(KEY, OSError(-2, "Name or service not known")),
        aiohttp.ConnectionTimeoutError("Connection timeout to host http://engine.local"),
        aiohttp.InvalidURL("http://engine.local:99999/"),
    ],
)
def test_the_words_of_a_failure_have_no_address_of_an_engine(error: Exception) -> None:
    """Clients get them, in the answer 503."""
    words = words_of(error)
    assert words.startswith("it")
    assert "engine.local" not in words and "None" not in words
