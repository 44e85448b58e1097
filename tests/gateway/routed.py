# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A router and fake engines on one event loop, with a client."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from fake_engines import Announcer, FakeEngine

from beluga.gateway import Address, EngineSpec, Limits, Service, Settings, read_engines
from beluga.gateway.engine import Health

ANY_PORT = Address("127.0.0.1", 0)
QUICK = Limits(health_interval_s=0.05, queue_s=20, drain_s=20)
RUNNING = "vllm:num_requests_running 0\n"  # the metrics of an idle vLLM
WAIT_S = 60.0  # timeout of events that take milliseconds on an idle machine


async def until(condition: Callable[[], bool]) -> None:
    """Wait until the condition is true."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        await asyncio.sleep(0.005)


class Site:
    """A running router; ``engines`` are the fakes behind it."""

    def __init__(
        self, service: Service, client: aiohttp.ClientSession, engines: Sequence[FakeEngine]
    ) -> None:
        self.service = service
        self.client = client
        self.engines = engines
        self.base = "http://{}:{}".format(*service.address)
        assert service.admin_address
        self.admin = "http://{}:{}".format(*service.admin_address)

    def complete(self, *, stream: bool = True, model: str | None = "fake", **more: Any) -> Any:
        """Return the context of a completion; ``more`` are its other fields."""
        requested = {"prompt": "hello", "stream": stream, **more}
        if model is not None:
            requested["model"] = model
        return self.client.post(f"{self.base}/v1/completions", json=requested)

    async def completed(self, **more: Any) -> tuple[int, bytes]:
        """Return status and body of a completion."""
        async with self.complete(**more) as answer:
            return answer.status, await answer.read()

    async def status(self, method: str, url: str, **options: Any) -> int:
        """Return the status of a request's answer."""
        async with self.client.request(method, url, **options) as answer:
            return answer.status

    async def text(self, path: str) -> str:
        async with self.client.get(self.base + path) as answer:
            assert answer.status == 200, path
            return await answer.text()

    async def workers(self) -> list[dict[str, Any]]:
        async with self.client.get(f"{self.admin}/workers") as answer:
            workers: list[dict[str, Any]] = await answer.json()
            return workers

    def counts(self) -> list[int]:
        """Return how many requests each engine has received."""
        return [len(engine.seen) for engine in self.engines]

    def inflight(self) -> int:
        return sum(engine.inflight for engine in self.service.fleet)

    def loads(self) -> list[tuple[int, int]]:
        """Return active requests and outstanding tokens of each worker as the router counts
        them.
        """
        loads = self.service.loads().values()
        return [(load.active_requests, load.outstanding_tokens) for load in loads]

    async def until_reported(self, kind: str, text: str, engine: int = 0) -> None:
        """Wait until an engine has a problem, which GET /workers and the metrics must report."""
        worker = list(self.service.fleet)[engine]
        await until(lambda: text in worker.problems.get(kind, ""))
        assert text in (await self.workers())[engine]["problems"][kind]
        shown = f'worker_problem{{problem="{kind}",worker="{worker.url}"}} 1'
        assert shown in await self.text("/metrics")

    async def up(self, count: int | None = None) -> None:
        """Wait until ``count`` engines are up, by default all."""
        wanted = len(self.engines) if count is None else count
        await until(lambda: [e.health for e in self.service.fleet].count(Health.UP) == wanted)


@asynccontextmanager
async def routed(
    *engines: FakeEngine, limits: Limits = QUICK, wait: bool = True, **settings: Any
) -> AsyncIterator[Site]:
    """Start engines behind a router (by default round robin) and wait until they are up. Settings
    that are limits change these.
    """
    names = {field.name for field in dataclasses.fields(Limits)} & settings.keys()
    limits = dataclasses.replace(limits, **{name: settings.pop(name) for name in names})
    async with AsyncExitStack() as stack:
        for engine in engines:
            await stack.enter_async_context(engine)
        given = {"engines": read_engines(engine.url for engine in engines), **settings}
        service = await stack.enter_async_context(
            Service(
                dataclasses.replace(
                    Settings(policy="round-robin", listen=ANY_PORT, admin=ANY_PORT, limits=limits),
                    **given,
                )
            )
        )
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        client = await stack.enter_async_context(
            aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
        )
        site = Site(service, client, engines)
        if wait and engines:
            await site.up()
        yield site


@asynccontextmanager
async def announced(
    folder: Path,
    count: int = 1,
    *,
    replay: bool = False,
    metrics: str = RUNNING,
    tokenize_status: int = 200,
    **settings: Any,
) -> AsyncIterator[tuple[Site, list[Announcer]]]:
    """Start engines that announce their blocks. Yields the router and the announcers."""
    async with AsyncExitStack() as stack:
        engines = [FakeEngine() for _ in range(count)]
        announcers: list[Announcer] = []
        stack.callback(lambda: [announcer.close() for announcer in announcers])
        specs = []
        for number, engine in enumerate(engines):
            (home := folder / str(number)).mkdir()
            announcers.append(announcer := Announcer(home))
            engine.metrics, engine.tokenize_status = metrics, tokenize_status
            await stack.enter_async_context(engine)
            replays = announcer.replay if replay else None
            specs.append(EngineSpec(engine.url, (), announcer.events, replays))
        given = {"policy": "linear", "engines": tuple(specs), **settings}
        site = await stack.enter_async_context(routed(**given))
        site.engines = engines
        await site.up()
        for announcer in announcers:
            await until(announcer.subscribed)
        yield site, announcers
