# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Reports of engines: their own metrics, read after every health check, in the format that Dynamo's
workers publish. This polling replaces a metrics aggregator.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import aiohttp

from beluga.errors import RouterError
from beluga.gateway.engine import Engine, Health
from beluga.gateway.health import ANSWER_MAX, FAILURES, read_whole, words_of
from beluga.gateway.settings import Limits
from beluga.router import LoadReport, LoadTracker, WorkerMetrics, read_load

log = logging.getLogger(__name__)

_UNREAD = (
    "its /metrics cannot be read, so its load is estimated from the requests that this router "
    "sends it"
)
_HOW = "SGLang needs --enable-metrics"
_HOW_TRT = "TensorRT-LLM needs enable_iter_perf_stats: true"


class Reports:
    """Reads ``/metrics`` of engines into the load tracker."""

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
                metrics = self._taken(engine, report)
        except RouterError as error:
            problem = f"{_UNREAD}: {error}"
        except FAILURES as error:
            problem = f"{_UNREAD}: {words_of(error)}"
        engine.load_problem = problem
        self._tracker.publish(engine.worker, metrics)

    def _taken(self, engine: Engine, report: LoadReport) -> WorkerMetrics:
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
