# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""One client's failures do not affect others: rate limits, prompts that crash an engine, waits."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="the router's packages are not installed")

from fake_engine import FakeEngine
from routed import QUICK, Site, routed, run, until

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
from beluga.gateway.parsed_request import PROMPT_THREADS as THREADS
from beluga.gateway.parsed_request import SLOW_SIZE, ParsedRequest
from beluga.router import Worker

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
    async with routed(engine, limits=dataclasses.replace(QUICK, retries=0)) as site:
        (worker,) = site.service.fleet
        for _ in range(5):
            assert await complete(site, "greedy", "poison") == 502
            assert await complete(site, "modest") == 200
        assert worker.failures <= 1


def test_large_prompts_do_not_delay_name_lookups(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop resolves names in its own threads, for health checks, too."""
    parse, go_on, under_way = proxy.parse_request, threading.Event(), []

    def slow(path: str, body: bytes, **more: Any) -> ParsedRequest:
        if len(body) > SLOW_SIZE:
            under_way.append(path)
            assert go_on.wait(60)
        return parse(path, body, **more)

    async def scenario() -> None:
        async with routed(FakeEngine()) as site:
            large = [
                asyncio.create_task(site.completed(prompt="x" * (2 * SLOW_SIZE)))
                for _ in range(4 * THREADS)
            ]
            await until(lambda: len(under_way) >= THREADS)
            loop = asyncio.get_running_loop()
            await asyncio.wait_for(loop.getaddrinfo("localhost", 80), SOON_S)
            assert (await asyncio.wait_for(site.completed(), SOON_S))[0] == 200
            go_on.set()
            assert {(await one)[0] for one in large} == {200}

    monkeypatch.setattr(proxy, "parse_request", slow)
    try:
        run(scenario)
    finally:
        go_on.set()


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
