# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""What the router does for each event of a stream, and on which event loop."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="the router's packages are not installed")

from aiohttp.client_proto import ResponseHandler
from fake_engine import FakeEngine
from routed import QUICK, routed

from beluga.gateway import director
from beluga.gateway import run as run_loop
from beluga.gateway.metrics import Metrics

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
    [line] = [one.getMessage() for one in caplog.records if one.name == "beluga.router.router"]
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
