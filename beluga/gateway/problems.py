# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Reports why the gateway cannot follow an engine's cache and load: in the log, in
``beluga_gateway_worker_problem`` and in ``GET /workers``.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Mapping

from beluga.gateway.engine import PROBLEMS, Engine
from beluga.gateway.fleet import Fleet
from beluga.gateway.metrics import Metrics
from beluga.limit import LogLimit

log = logging.getLogger(__name__)

LOOK_S = 1.0


class Watch:
    """Checks every engine once per second. ``found`` returns the problems of an engine's cache, by
    kind.
    """

    def __init__(
        self, fleet: Fleet, metrics: Metrics, found: Callable[[Engine], Mapping[str, str]]
    ) -> None:
        self._fleet, self._metrics, self._found = fleet, metrics, found
        self._limit = LogLimit()

    async def run(self) -> None:
        """Check forever."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_S)

    def look(self) -> None:
        """Check all engines now."""
        for engine in self._fleet:
            engine.problems = dict(self._found(engine))
            if engine.load_problem:
                engine.problems["metrics"] = engine.load_problem
            for kind in PROBLEMS:
                self._metrics.problem(engine, kind, there=kind in engine.problems)
            for text in engine.problems.values():
                self._log(engine, text)

    def _log(self, engine: Engine, text: str) -> None:
        kind = re.sub("[0-9]+", "", text)  # counts increase
        if self._limit.passes(engine.worker.worker_id, kind) is not None:
            log.warning("%s: %s", engine.url, text)
