# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Active health checks: requests each engine's ``/health`` and models periodically."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection

import aiohttp
import msgspec

from beluga.gateway.acceptor import is_own_shortage
from beluga.gateway.engine import Engine, Health
from beluga.gateway.fleet import Fleet
from beluga.gateway.settings import Limits
from beluga.limit import LogLimit

log = logging.getLogger(__name__)

FAILURES = (
    *(aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError),
    *(msgspec.MsgspecError, RecursionError),  # the second: too deeply nested JSON
)
"""The exceptions of a request to an engine that is down or sends invalid responses."""
ANSWER_MAX = 16 << 20
"""Largest size in bytes of an engine's response that the router reads itself."""


class Checker:
    """Checks each engine of a fleet in its own task, and reports when one is up again."""

    def __init__(
        self,
        fleet: Fleet,
        client: aiohttp.ClientSession,
        limits: Limits,
        *,
        up: Callable[[], None],
        also: Callable[[Engine], Awaitable[None]],
    ) -> None:
        """``up`` is called when an engine has come up. ``also`` is awaited after each check."""
        self._client = client
        self._limits = limits
        self._up = up
        self._also = also
        self._timeout = aiohttp.ClientTimeout(total=limits.health_timeout_s)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._limit = LogLimit()
        fleet.on_change(joined=self._watch, left=self._leave)

    def _watch(self, engine: Engine) -> None:
        task = asyncio.get_running_loop().create_task(self._run(engine))
        self._tasks[engine.worker.worker_id] = task

    def _leave(self, engine: Engine) -> None:
        if (task := self._tasks.pop(engine.worker.worker_id, None)) is not None:
            task.cancel()

    async def close(self) -> None:
        """End all checks."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        await end_tasks(tasks)

    async def _run(self, engine: Engine) -> None:
        while self._tasks.get(engine.worker.worker_id) is asyncio.current_task():
            engine.look.clear()
            try:
                await self.check(engine)
                await self._also(engine)
            except Exception as error:  # a defect here must not end the checks of an engine
                if self._limit.passes(engine.worker.worker_id, type(error).__name__) is not None:
                    log.exception("a check of %s could not be finished", engine.url)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._wanted(engine), self._limits.health_interval_s)

    async def _wanted(self, engine: Engine) -> None:
        """Wait until a check is requested. If the engine is down, pause first, unless it is only
        suspected to be.
        """
        if engine.health is not Health.UP and not engine.suspected:
            await asyncio.sleep(self._limits.health_interval_s / 4)
        await engine.look.wait()

    async def check(self, engine: Engine) -> bool:
        """Check an engine now. Returns whether it is up."""
        failures, before = engine.failures, engine.health
        try:
            await self._request_health(engine)
        except FAILURES as error:
            if is_own_shortage(error):
                log.warning("%s cannot be checked: %s", engine.url, words_of(error))
                return before is Health.UP
            if before is not Health.DOWN:
                log.warning("%s is down: %s", engine.url, words_of(error))
            if failures == engine.failures:
                engine.fail(words_of(error))
            return False
        if not engine.passed(failures):
            return False
        if before is not Health.UP:
            log.info("%s is up, with %s", engine.url, ", ".join(engine.models) or "no model")
            self._up()
        return True

    async def _request_health(self, engine: Engine) -> None:
        """Request the engine's health and models. Raises one of :data:`FAILURES`."""
        async with self._client.get(f"{engine.url}/health", timeout=self._timeout) as answer:
            known = answer.status != 404  # an engine without /health still has /v1/models
            if known and answer.status >= 300:
                raise ValueError(f"/health returned {answer.status}")
        async with self._client.get(f"{engine.url}/v1/models", timeout=self._timeout) as answer:
            if answer.status == 200:
                engine.cards = _cards(await read_whole(answer))
            elif not engine.spec.models:
                raise ValueError(
                    f"/v1/models returned {answer.status}; give its models with --model"
                )
            elif not known:
                raise ValueError(f"/health and /v1/models returned 404 and {answer.status}")


def _cards(body: bytes) -> list[dict[str, object]]:
    data = msgspec.json.decode(body)
    listed = data.get("data") if isinstance(data, dict) else None
    if not isinstance(listed, list):
        raise ValueError("/v1/models did not return a list of models")
    return [card for card in listed if isinstance(card, dict)]


async def read_whole(answer: aiohttp.ClientResponse, most: int = ANSWER_MAX) -> bytes:
    """Read an engine's response. Raises one of :data:`FAILURES`, also if it is too long."""
    body = bytearray()
    async for part in answer.content.iter_any():
        body += part
        if len(body) > most:
            raise ValueError(f"its response is longer than {most >> 20} MiB")
    return bytes(body)


async def end_tasks(tasks: Collection[asyncio.Task[None]]) -> None:
    """Cancel tasks repeatedly until they have ended. Before Python 3.12, ``wait_for`` may lose a
    cancellation that coincides with its timeout.
    """
    while left := [task for task in tasks if not task.done()]:
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=0.1)


def words_of(error: BaseException) -> str:
    """Return an error's text, or its type if it has none."""
    return str(error) or type(error).__name__
