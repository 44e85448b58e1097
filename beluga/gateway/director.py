# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The director places each request on an engine and tracks it until it ends."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Collection, Hashable, Set
from functools import partial
from types import TracebackType

from beluga.errors import AllWorkersBusyError, ObjectiveError
from beluga.gateway.answers import Refusal
from beluga.gateway.cache import Cache
from beluga.gateway.engine import Engine
from beluga.gateway.fleet import Fleet
from beluga.gateway.metrics import Metrics
from beluga.gateway.parsed_request import SLOW_SIZE, ParsedRequest
from beluga.gateway.prompt_threads import in_prompt_thread
from beluga.gateway.responses import Responses
from beluga.gateway.settings import Limits
from beluga.gateway.standing import NOBODY, GatewayClient
from beluga.gateway.waiting import WaitQueue
from beluga.router import Choice, Constraints, Query, Router

RECOVERY_S = 1.0
"""How long a request waits if its engine, or that of another client, has just failed and no other
engine is up. A check runs meanwhile, because an idle connection closed by the engine looks like a
failure.
"""

COUNTED_S = 1.0
"""Interval at which a running response's token times are added to the metrics."""


class Placement:
    """A request on a worker. The tracking ends with the context."""

    def __init__(
        self,
        director: Director,
        name: int,
        parsed: ParsedRequest,
        choice: Choice,
        client: GatewayClient,
    ) -> None:
        self.client = client
        self.engine = director.engine_of(choice)
        self._director = director
        self._name = name
        self._parsed = parsed
        self.choice = choice
        self._status = "cancelled"
        self._sent = time.perf_counter()
        self._last: float | None = None
        self._last_gap_s = 0.0
        self._gaps = director.metrics.gaps()
        self._counted_at = self._sent  # last time the gaps were added to the metrics
        self._count = 0

    async def __aenter__(self) -> Placement:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()
        if self._gaps.times:
            self._count_gaps()
        self._director.metrics.ended(self._parsed, self._status, self._count)

    def end(self) -> None:
        """End the tracking of the request."""
        self._director.end(self._name, self.engine)

    def first_token(self) -> None:
        """Record that the engine has started to respond, so its prefill is done."""
        self._director.prefill_done(self._name)
        self._director.metrics.first_token(
            self._parsed, self.engine, time.perf_counter() - self._sent
        )

    def tokens(self, count: int) -> None:
        """Record about ``count`` further tokens."""
        now = time.perf_counter()
        if self._last is not None and count > 0:
            self._last_gap_s = gap_s = (now - self._last) / count
            self._gaps.add(gap_s, count)
            if now - self._counted_at > COUNTED_S:
                self._count_gaps()
                self._counted_at = now
        self._last = now
        self._count += count

    def _count_gaps(self) -> None:
        self._director.metrics.tokens(self._parsed, self.engine, self._gaps, self._last_gap_s)
        self._gaps = self._director.metrics.gaps()

    def answered(self, status: object) -> None:
        """Record how the request ended: the HTTP status of a complete response, or a word."""
        self._status = str(status)


@dataclasses.dataclass(frozen=True, slots=True)
class Past:
    """The sender of a request, and its earlier attempts; see :meth:`Director.place`."""

    client: GatewayClient = NOBODY
    tried: Set[int] = frozenset()
    without: frozenset[int] = frozenset()


class Director:
    """Places requests on the engines of a fleet by a router's policy."""

    def __init__(  # noqa: PLR0913  keyword-only
        self,
        *,
        fleet: Fleet,
        router: Router,
        cache: Cache,
        metrics: Metrics,
        limits: Limits,
        wait_queue: WaitQueue[Placement],
    ) -> None:
        self.metrics = metrics
        self._fleet = fleet
        self._router = router
        self._cache = cache
        self._limits = limits
        self._wait_queue = wait_queue
        self.responses = Responses()
        self.placed = 0  # requests on workers
        self._names = itertools.count()
        self._last = Constraints()
        fleet.on_change(joined=self._joined, left=self._left)

    def _joined(self, engine: Engine) -> None:
        self._router.add_worker(engine.worker)

    def _left(self, engine: Engine) -> None:
        self._router.remove_worker(engine.worker)
        # Skip one that was replaced with other settings
        if all(other.url != engine.url for other in self._fleet):
            self.metrics.forget(engine)
        self._wait_queue.look()

    def engine_of(self, choice: Choice) -> Engine:
        return self._fleet[choice.worker.worker_id]

    def has_other(self, parsed: ParsedRequest, without: Collection[int]) -> bool:
        """Return whether a request may wait for a worker other than these. Raises Refusal."""
        engines = self._maker(parsed) or self._known(parsed)
        return any(each.serving and each.worker.worker_id not in without for each in engines)

    async def place(
        self,
        parsed: ParsedRequest,
        tried: Set[int],
        arrived: float,
        *,
        client: GatewayClient = NOBODY,
        without: Collection[int] = (),
    ) -> Placement:
        """Return a placement on a worker as soon as one has a free slot. Raises Refusal.

        ``tried`` are workers that have just failed the request; like those that ``client`` should
        avoid, they are used only if there is no other. Workers in ``without`` are not used.
        """
        past = Past(client, tried, frozenset(without))
        if len(parsed.body) > SLOW_SIZE:
            query = await in_prompt_thread(partial(self._cache.query_of, parsed))
        else:
            query = self._cache.query_of(parsed)
        line = self._line(parsed)
        attempt = partial(self._try, parsed, query, past)
        placed = None if self._wait_queue.waiting(line) else attempt()
        decided = time.perf_counter()
        if placed is None:
            placed = await self._wait_queue.wait(
                line,
                query,
                attempt,
                overlap=self._cache.longest(query),
                patience_s=self._patience(parsed.model),
                client=client,
            )
        self.metrics.routed(parsed, query, placed.choice, placed.engine, decided - arrived)
        return placed

    def _line(self, parsed: ParsedRequest) -> Hashable:
        """Return the line in which a request waits: a request that only one worker can take must
        not block those that others can take.
        """
        maker = self._maker(parsed)
        return parsed.model, maker[0].worker.worker_id if maker else None

    def _try(self, parsed: ParsedRequest, query: Query, past: Past) -> Placement | None:
        """Try to place a request. Returns None if it must wait. Raises Refusal."""
        engines = self._maker(parsed) or self._known(parsed)
        allowed = self._allowed(engines, past)
        if not allowed:
            self._none(engines, past.tried)
            return None
        name = next(self._names)
        started = time.perf_counter()
        try:
            choice = self._router.route(name, query, self._demands(allowed), now=time.monotonic())
        except AllWorkersBusyError:
            return None
        except ObjectiveError as error:
            raise Refusal(429, str(error), retry_after_s=1) from None
        self.metrics.part("scheduling", time.perf_counter() - started)
        placed = Placement(self, name, parsed, choice, past.client)
        self.placed += 1
        placed.engine.inflight += 1
        placed.engine.placed()
        placed.engine.expected(choice.hit_rate, query.isl)
        self._cache.routed(query, choice)
        return placed

    def _demands(self, allowed: frozenset[int]) -> Constraints:
        """Return the constraints of a request. Most requests have the same as the previous one."""
        if allowed != self._last.allowed:
            self._last = Constraints(allowed=allowed)
        return self._last

    def _maker(self, parsed: ParsedRequest) -> list[Engine]:
        """Return the engine that made the response that a request refers to, if it is known and has
        the request's model.
        """
        worker, model = self.responses.worker_of(parsed.response), parsed.model
        if worker is None:
            return []
        return [
            engine
            for engine in self._fleet
            if engine.worker.worker_id == worker and (model is None or model in engine.models)
        ]

    def _known(self, parsed: ParsedRequest) -> list[Engine]:
        """Return the engines with a request's model. Raises Refusal if there are none, or if the
        model is ambiguous.
        """
        model = parsed.model
        engines = self._fleet.serving(model)
        served = {engine.models for engine in engines if engine.models}
        if parsed.encoding and len(served) > 1:
            raise Refusal(
                415,
                "several models are served here, and a body with Content-Encoding: "
                f"{parsed.encoding} is not read, so its model is unknown; send it uncompressed",
            )
        if model is None and not parsed.odd and len(served) > 1:
            raise Refusal(400, "several models are served here; set the field model", param="model")
        if engines:
            return engines
        if any(not engine.models for engine in self._fleet) or not len(self._fleet):
            raise Refusal(503, "no worker is up yet", retry_after_s=1)
        raise Refusal(404, f"The model `{model}` does not exist.", param="model")

    def _allowed(self, engines: list[Engine], past: Past) -> frozenset[int]:
        most = self._limits.inflight_max
        free = {
            engine.worker.worker_id: engine
            for engine in engines
            if engine.ready and not (most and engine.inflight >= most)
        }
        ready = frozenset(free) - past.without
        others = ready - past.tried
        best = frozenset(each for each in others if not free[each].avoided_by(past.client))
        return best or others or ready

    def _none(self, engines: list[Engine], tried: Set[int]) -> None:
        """Return if an engine may soon have a free slot; otherwise raise Refusal."""
        serving = [engine for engine in engines if engine.serving]
        if not tried and not serving and not any(engine.suspected for engine in engines):
            why = "; ".join(sorted({engine.why for engine in engines if engine.why}))
            raise Refusal(503, f"none of {len(engines)} workers is up: {why}", retry_after_s=1)
        if cooling := [engine.cooling_s for engine in serving if engine.cooling_s > 0]:
            self._wait_queue.look_in(min(cooling))

    def _patience(self, model: str | None) -> float:
        """Return the longest wait of a request in seconds."""
        serving = any(engine.serving for engine in self._fleet.serving(model))
        return self._limits.queue_s if serving else RECOVERY_S

    def prefill_done(self, name: int) -> None:
        if self._router.tracker.prefill_done(name, time.monotonic()):
            self._wait_queue.look()

    def end(self, name: int, engine: Engine) -> None:
        """Record that a request has ended, successfully or not."""
        self._router.tracker.free(name, time.monotonic())
        self.placed -= 1
        engine.inflight -= 1
        self._fleet.settle(engine)
        self._wait_queue.look()
