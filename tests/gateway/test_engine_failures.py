# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Engines that refuse, break off, stall and die: the responses to clients, and the routing of
requests.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import socket
import time
from contextlib import AsyncExitStack
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="the router's packages are not installed")

from fake_engine import FakeEngine
from routed import QUICK, routed, until

from beluga.gateway import EngineSpec
from beluga.gateway.engine import Health


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
    limits = dataclasses.replace(QUICK, cool_down_max_s=3600)
    async with routed(a, b, limits=limits) as site:
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
    async with routed(a, b, limits=dataclasses.replace(QUICK, queue_s=0)) as site:
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


async def test_a_failed_engine_gets_requests_again_after_a_passed_check() -> None:
    engine = FakeEngine()
    engine.faults.drop_first = 1
    async with routed(engine) as site:
        assert (await site.completed())[0] == 502
        await site.up()
        assert (await site.completed())[0] == 200
        assert site.counts() == [2]


async def test_a_dead_engine_is_a_503_at_once_and_is_used_again_after_a_restart() -> None:
    engine = FakeEngine()
    async with routed(engine) as site:
        await engine.__aexit__()
        status, body = await site.completed()
        assert status in (502, 503)
        assert "error" in json.loads(body)
        assert (await site.completed())[0] == 503
        async with site.client.get(f"{site.base}/ready") as answer:
            assert answer.status == 503
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
    async with routed(engine, limits=dataclasses.replace(QUICK, stall_s=2)) as site:
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


async def test_a_check_started_before_a_failure_is_ignored() -> None:
    async with routed(FakeEngine()) as site:
        (engine,) = site.service.fleet
        before = engine.failures
        engine.fail("a request broke off")
        assert not engine.passed(before)
        assert engine.health is Health.DOWN
        await site.up()  # the next check succeeds


async def test_a_request_is_retried_if_an_engines_machine_accepts_no_connection() -> None:
    """No request was sent there, so another engine may get it."""
    async with AsyncExitStack() as stack:
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        # more than the listen backlog: the kernel accepts no further connection
        for _ in range(8):
            waits = stack.enter_context(socket.socket())
            waits.setblocking(False)
            waits.connect_ex(silent.getsockname())
        there = FakeEngine()
        await stack.enter_async_context(there)
        gone = "http://{}:{}".format(*silent.getsockname())
        limits = dataclasses.replace(QUICK, connect_s=0.2, health_timeout_s=60)
        engines = [EngineSpec(url, ("fake",)) for url in (gone, there.url)]
        site = await stack.enter_async_context(routed(limits=limits, engines=tuple(engines)))
        await site.up(1)
        (dead,) = (one for one in site.service.fleet if one.url == gone)
        for _ in range(2):
            assert dead.passed(dead.failures)  # the engine was up shortly before
            assert (await site.completed())[0] == 200
        assert dead.failures > 0
        assert len(there.seen) == 2
