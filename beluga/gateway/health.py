# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Checks of engines: their health and models, and their own metrics. Reports why the gateway cannot
follow an engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Awaitable, Callable, Collection, Mapping

import aiohttp
import msgspec

from beluga.errors import RouterError
from beluga.gateway.engine import PROBLEMS, Engine, Health
from beluga.gateway.fleet import Fleet
from beluga.gateway.metrics import Metrics
from beluga.gateway.protocol import ANSWER_MAX, FAILURES, read_whole, words_of
from beluga.gateway.settings import Limits
from beluga.http_server import is_own_shortage
from beluga.limit import LogLimit
from beluga.router import LoadReport, LoadTracker, WorkerMetrics, read_load

# ---- Health


log = logging.getLogger(__name__)


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
            has_health = answer.status != 404  # an engine without /health still has /v1/models
            if has_health and answer.status >= 300:
                raise ValueError(f"/health returned {answer.status}")
        async with self._client.get(f"{engine.url}/v1/models", timeout=self._timeout) as answer:
            if answer.status == 200:
                engine.cards = _cards(await read_whole(answer))
            elif not engine.spec.models:
                raise ValueError(
                    f"/v1/models returned {answer.status}; give its models with --model"
                )
            elif not has_health:
                raise ValueError(f"/health and /v1/models returned 404 and {answer.status}")


def _cards(body: bytes) -> list[dict[str, object]]:
    data = msgspec.json.decode(body)
    listed = data.get("data") if isinstance(data, dict) else None
    if not isinstance(listed, list):
        raise ValueError("/v1/models did not return a list of models")
    return [card for card in listed if isinstance(card, dict)]


async def end_tasks(tasks: Collection[asyncio.Task[None]]) -> None:
    """Cancel tasks repeatedly until they have ended. Before Python 3.12, ``wait_for`` may lose a
    cancellation that coincides with its timeout.
    """
    while left := [task for task in tasks if not task.done()]:
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=0.1)


# ---- Load


_UNREAD = (
    "its /metrics cannot be read, so its load is estimated from the requests that this router "
    "sends it"
)
_HOW = "SGLang needs --enable-metrics"
_HOW_TRT = "TensorRT-LLM needs enable_iter_perf_stats: true"


class Reports:
    """Reads ``/metrics`` of engines into the load tracker, after every health check. This polling
    replaces a metrics aggregator.
    """

    def __init__(
        self,
        client: aiohttp.ClientSession,
        tracker: LoadTracker,
        limits: Limits,
        learn: Callable[[int], object],
        restarted: Callable[[Engine], None] = lambda _: None,
    ) -> None:
        """``learn`` gets the block sizes that engines report, and ``restarted`` each restarted
        engine.
        """
        self._client = client
        self._tracker = tracker
        self._learn = learn
        self._restarted = restarted
        self._timeout = aiohttp.ClientTimeout(total=limits.health_timeout_s)

    async def read(self, engine: Engine) -> None:
        """Read one engine's metrics, which replace its earlier ones. The reason of a failure is
        stored as the engine's ``load_problem``; an engine that is down has none.
        """
        metrics, problem = None, ""
        try:
            if engine.health is Health.UP:
                report = read_load(await self._page(engine))
                if report is None:
                    raise RouterError(f"it reports no load ({_HOW})")
                if report.metrics is None and (engine.kind or not _should_have_figures(engine)):
                    engine.load_problem = ""
                    return
                metrics = self._apply(engine, report)
        except RouterError as error:
            problem = f"{_UNREAD}: {error}"
        except FAILURES as error:
            problem = f"{_UNREAD}: {words_of(error)}"
        engine.load_problem = problem
        self._tracker.publish(engine.worker, metrics)

    def _apply(self, engine: Engine, report: LoadReport) -> WorkerMetrics:
        if report.metrics is None:
            raise RouterError(f"it reports no iteration ({_HOW_TRT})")
        engine.kind = report.engine
        engine.ranks = report.ranks
        if report.started_s is not None:
            if engine.started_s not in (None, report.started_s):
                log.info("%s has restarted", engine.url)
                self._restarted(engine)
            engine.started_s = report.started_s
        if report.space is not None:
            engine.space = report.space
        # SGLang's default is a page of one token, which is too small for hashing prompts. Its KV
        # events also report the size, if they are configured.
        if report.block_size > 1:
            engine.block_size = report.block_size
            self._learn(report.block_size)
        return report.metrics

    async def _page(self, engine: Engine) -> str:
        """Return the text of ``/metrics``. Raises RouterError or one of ``health.FAILURES``."""
        url = f"{engine.url}/metrics"
        async with self._client.get(url, timeout=self._timeout) as answer:
            if answer.status != 200:
                raise RouterError(f"it returned {answer.status} ({_HOW})")
            return (await read_whole(answer, ANSWER_MAX)).decode()


def _should_have_figures(engine: Engine) -> bool:
    """Return whether an engine without a reported iteration has computed something."""
    return engine.prompt_tokens > 0 and engine.inflight == 0


# ---- Problems


LOOK_S = 1.0


class Watch:
    """Reports every second why the gateway cannot follow an engine's cache and load: in the log, in
    ``beluga_gateway_worker_problem`` and in ``GET /workers``. ``found`` returns the problems of an
    engine's cache, by kind.
    """

    def __init__(
        self, fleet: Fleet, metrics: Metrics, labels_of: Callable[[Engine], Mapping[str, str]]
    ) -> None:
        self._fleet, self._metrics, self._labels_of = fleet, metrics, labels_of
        self._limit = LogLimit()

    async def run(self) -> None:
        """Check forever."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_S)

    def look(self) -> None:
        """Check all engines now."""
        for engine in self._fleet:
            engine.problems = dict(self._labels_of(engine))
            if engine.load_problem:
                engine.problems["metrics"] = engine.load_problem
            for kind in PROBLEMS:
                self._metrics.problem(engine, kind, present=kind in engine.problems)
            for text in engine.problems.values():
                self._log(engine, text)

    def _log(self, engine: Engine, text: str) -> None:
        kind = re.sub("[0-9]+", "", text)  # counts increase
        if self._limit.passes(engine.worker.worker_id, kind) is not None:
            log.warning("%s: %s", engine.url, text)
