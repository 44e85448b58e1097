# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The director places each request on an engine and tracks it until it ends; a request for which no
engine has room waits in a line.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import re
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Hashable, Sequence, Set
from functools import partial
from types import TracebackType
from typing import Generic, TypeVar

from beluga.errors import AllWorkersBusyError, ObjectiveError
from beluga.gateway.attempts import Attempts
from beluga.gateway.cache import Cache
from beluga.gateway.engine import NOBODY, Engine, GatewayClient
from beluga.gateway.fleet import Fleet
from beluga.gateway.metrics import Metrics
from beluga.gateway.parsed_request import SLOW_SIZE, ParsedRequest, in_prompt_thread
from beluga.gateway.protocol import Refusal
from beluga.gateway.settings import Limits
from beluga.http_server import PATIENCE_S
from beluga.router import Choice, Constraints, FairQueue, Query, Router

# ---- The wait queue


PlacedT = TypeVar("PlacedT")


@dataclasses.dataclass(slots=True, eq=False)
class _Waiter(Generic[PlacedT]):
    attempt: Callable[[], PlacedT | None]
    placed: asyncio.Future[PlacedT]
    line: FairQueue[_Waiter[PlacedT]]
    client: GatewayClient

    def leave(self, *, served: bool = False) -> None:
        """Leave the line."""
        self.line.discard(self.client.address, self.client.name, self, served=served)


class WaitQueue(Generic[PlacedT]):
    """Waiting requests, limited in number: in a line per model while every suitable worker is full.
    Requests that only one worker can take, because they refer to its response, wait in a line per
    worker. Used by one event loop only.

    In a line addresses take turns, and so do the clients of an address, so one with many requests
    does not delay the others. The next request in a line, in a client's chosen order, is tried
    whenever a request has ended or an engine has come up or cooled down. No later request of its
    line overtakes it. So a request that many workers can take does not block one that few can take.
    The line that was served least recently goes first.

    At the limit, the newest request of the client that has the most is refused for one of a client
    that has fewer, so no client can fill the queue alone. The same holds for addresses, which come
    first: a client may have any number of keys.
    """

    def __init__(
        self,
        queued_max: int,
        *,
        order: str,
        give_back: Callable[[PlacedT], None],
    ) -> None:
        """``order`` is one of RouterQueue's. ``give_back`` gets the placement of a request that was
        cancelled meanwhile. Raises RouterError.
        """
        FairQueue[_Waiter[PlacedT]](order)  # raises if the order is unknown
        self._queued_max = queued_max
        self._order = order
        self._give_back = give_back
        self._lines: dict[Hashable, FairQueue[_Waiter[PlacedT]]] = {}
        self._waiters: dict[_Waiter[PlacedT], None] = {}  # in order of arrival
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def waiting(self, line: Hashable) -> bool:
        """Return whether a request waits in a line."""
        return bool(self._lines.get(line))

    async def wait(  # noqa: PLR0913  all but the first three named
        self,
        name: Hashable,
        query: Query,
        attempt: Callable[[], PlacedT | None],
        *,
        overlap: int,
        patience_s: float,
        client: GatewayClient = NOBODY,
        late: Callable[[float], Refusal] | None = None,
    ) -> PlacedT:
        """Wait in a line until ``attempt`` returns a result, and return it. ``overlap`` is the
        number of the request's blocks that a worker holds, and ``client`` is its sender.

        Raises the errors of ``attempt``, and Refusal if too many requests wait, or after
        ``patience_s`` seconds: then it is what ``late`` returns.
        """
        if len(self) >= self._queued_max and not self._displace(client):
            raise self._full()
        loop = asyncio.get_running_loop()
        line = self._lines.setdefault(name, FairQueue(self._order))
        waiter = _Waiter(attempt, loop.create_future(), line, client)
        self._waiters[waiter] = None
        line.push(client.address, client.name, waiter, query, time.monotonic(), overlap=overlap)
        timer = loop.call_later(patience_s, _give_up, waiter, late or busy_for, patience_s)
        try:
            placed: PlacedT = await waiter.placed
        except asyncio.CancelledError:
            was_placed = waiter.placed.done() and not waiter.placed.cancelled()
            if was_placed and waiter.placed.exception() is None:
                self._give_back(waiter.placed.result())
            raise
        finally:
            timer.cancel()
            del self._waiters[waiter]
            waiter.leave()
            if not line and self._lines.get(name) is line:
                del self._lines[name]
        return placed

    def _full(self) -> Refusal:
        text = f"every worker is busy, and {self._queued_max} requests are waiting already"
        return Refusal(503, text, retry_after_s=1)

    def _displace(self, client: GatewayClient) -> bool:
        """Make room for a request of ``client`` by refusing another one, and return whether there
        is room. If another address has at least two more waiting requests than the client's, one of
        that address is refused; otherwise, one of a client of the same address that has at least
        two more. The client with the most requests loses its newest one.
        """
        waiting = [waiter for waiter in self._waiters if not waiter.placed.done()]
        addresses = Counter(waiter.client.address for waiter in waiting)
        address = addresses.most_common(1)[0][0] if waiting else ""
        own = addresses[address] <= addresses[client.address] + 1
        if own:  # the clients of this address share what it has
            address = client.address
        waiting = [waiter for waiter in waiting if waiter.client.address == address]
        names = Counter(waiter.client.name for waiter in waiting)
        largest = max(names.values(), default=0)
        if own and largest <= names[client.name] + 1:
            return False
        if largest > 1:
            (name, _), *_ = names.most_common(1)
            waiting = [waiter for waiter in waiting if waiter.client.name == name]
        newest = waiting[-1]
        newest.leave()
        newest.placed.set_exception(self._full())
        return True

    def look(self) -> None:
        """Try the next requests after a change."""
        for name, line in list(self._lines.items()):
            served = False
            while (waiter := line.first()) is not None and _settled(waiter):
                waiter.leave(served=True)
                served = True
            if served and self._lines.get(name) is line:
                self._lines[name] = self._lines.pop(name)  # the other lines go first next time

    def look_in(self, seconds: float) -> None:
        """Call :meth:`look` after this many seconds, or sooner."""
        loop = asyncio.get_running_loop()
        when = loop.time() + seconds
        if self._timer is None or self._timer.when() > when:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = loop.call_later(seconds, self._ring)

    def _ring(self) -> None:
        self._timer = None
        self.look()


def _settled(waiter: _Waiter[PlacedT]) -> bool:
    """Try a request. Returns whether it need not wait any longer."""
    if waiter.placed.done():
        return True
    try:
        placed = waiter.attempt()
    except Exception as error:
        waiter.placed.set_exception(error)
        return True
    if placed is None:
        return False
    waiter.placed.set_result(placed)
    return True


def _give_up(waiter: _Waiter[PlacedT], late: Callable[[float], Refusal], patience_s: float) -> None:
    if not waiter.placed.done():
        waiter.placed.set_exception(late(patience_s))


def busy_for(waited_s: float) -> Refusal:
    """Return the refusal of a request that has waited too long for a free slot."""
    text = f"every worker has been busy, or requested a pause, for {waited_s:g} s"
    return Refusal(503, text, retry_after_s=1)


# ---- Responses of /v1/responses


RESPONSES_MAX = 100_000
"""The number of remembered responses."""

_RESPONSE_ID = re.compile(rb'"id"\s*:\s*"(resp_[\w.:-]{1,200})"')


class Responses:
    """The workers that made the last responses of ``/v1/responses``: only that engine can show,
    cancel or continue one.

    The first piece of a response contains its ``id``, in a whole response and in an event stream.
    Requests for responses that are not remembered are sent to any engine, which reports that there
    is no such response.
    """

    def __init__(self, limit: int = RESPONSES_MAX) -> None:
        self._limit = limit
        self._workers: OrderedDict[str, int] = OrderedDict()

    def made(self, piece: bytes, worker: int) -> None:
        """Record the response that starts with this piece."""
        if (match := _RESPONSE_ID.search(piece)) is None:
            return
        name = match[1].decode()
        self._workers[name] = worker
        self._workers.move_to_end(name)
        while len(self._workers) > self._limit:
            self._workers.popitem(last=False)

    def worker_of(self, name: str | None) -> int | None:
        """Return the worker that made a response, or None if unknown."""
        return None if name is None else self._workers.get(name)


# ---- Placements


RECOVERY_S = 1.0
"""How long a request waits if its engine, or that of another client, has just failed and no other
engine is up. A check runs meanwhile, because an idle connection closed by the engine looks like a
failure.
"""

WANTED_S = 3.0
"""How long a client may read nothing of its response while requests wait for its place."""

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
        self._gaps_s: list[float] = []  # between tokens, not yet in the metrics
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
        self._count_gaps()
        self._director.metrics.ended(self._parsed, self._status, self._count)

    def end(self) -> None:
        """End the tracking of the request."""
        self._director.end(self._name, self.engine)

    def reader_patience_s(self) -> float:
        """Return for how many seconds the client may read nothing of the response."""
        return self._director.reader_patience_s(self.engine)

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
            self._gaps_s += [(now - self._last) / count] * count
            if now - self._counted_at > COUNTED_S:
                self._count_gaps()
                self._counted_at = now
        self._last = now
        self._count += count

    def _count_gaps(self) -> None:
        if self._gaps_s:
            self._director.metrics.tokens(self._parsed, self.engine, self._gaps_s)
            self._gaps_s.clear()

    def answered(self, status: object) -> None:
        """Record how the request ended: the HTTP status of a complete response, or a word."""
        self._status = str(status)


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
        engines = self._maker(parsed) or self._with_model(parsed)
        return any(engine.serving and engine.worker.worker_id not in without for engine in engines)

    async def place(self, parsed: ParsedRequest, attempts: Attempts) -> Placement:
        """Return a placement on a worker as soon as one has a free slot. Raises Refusal.

        Workers that have failed the request, and those that its client should avoid, are used only
        if there is no other. Workers that requested a pause are not used.
        """
        if len(parsed.body) > SLOW_SIZE:
            query = await in_prompt_thread(partial(self._cache.query_of, parsed))
        else:
            query = self._cache.query_of(parsed)
        line = self._line(parsed)
        attempt = partial(self._try, parsed, query, attempts)
        placed = None if self._wait_queue.waiting(line) else attempt()
        decided = time.perf_counter()
        if placed is None:
            placed = await self._wait_queue.wait(
                line,
                query,
                attempt,
                overlap=self._cache.longest(query),
                patience_s=self._patience(parsed.model),
                client=attempts.client,
                late=partial(self._late, parsed.model),
            )
        waited_s = decided - attempts.last_s
        self.metrics.routed(parsed, query, placed.choice, placed.engine, waited_s)
        return placed

    def _line(self, parsed: ParsedRequest) -> Hashable:
        """Return the line in which a request waits: a request that only one worker can take must
        not block those that others can take.
        """
        maker = self._maker(parsed)
        return parsed.model, maker[0].worker.worker_id if maker else None

    def _try(self, parsed: ParsedRequest, query: Query, attempts: Attempts) -> Placement | None:
        """Try to place a request. Returns None if it must wait. Raises Refusal."""
        engines = self._maker(parsed) or self._with_model(parsed)
        allowed = self._allowed(engines, attempts)
        if not allowed:
            self._none(engines, attempts.tried)
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
        placed = Placement(self, name, parsed, choice, attempts.client)
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

    def _with_model(self, parsed: ParsedRequest) -> list[Engine]:
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

    def _allowed(self, engines: list[Engine], attempts: Attempts) -> frozenset[int]:
        limit = self._limits.inflight_max
        free = {
            engine.worker.worker_id: engine
            for engine in engines
            if engine.ready and not (limit and engine.inflight >= limit)
        }
        ready = frozenset(free) - attempts.paused_until.keys()
        untried = ready - attempts.tried
        best = frozenset(key for key in untried if not free[key].avoided_by(attempts.client))
        return best or untried or ready

    def _none(self, engines: list[Engine], tried: Set[int]) -> None:
        """Return if an engine may soon have a free slot; otherwise raise Refusal."""
        serving = [engine for engine in engines if engine.serving]
        if not tried and not serving and not any(engine.suspected for engine in engines):
            raise _none_up(engines)
        if cooling := [engine.cooling_s for engine in serving if engine.cooling_s > 0]:
            self._wait_queue.look_in(min(cooling))

    def _patience(self, model: str | None) -> float:
        """Return the longest wait of a request in seconds."""
        serving = any(engine.serving for engine in self._fleet.serving(model))
        return self._limits.queue_s if serving else RECOVERY_S

    def _late(self, model: str | None, waited_s: float) -> Refusal:
        """Return the refusal of a request that has waited too long."""
        engines = self._fleet.serving(model)
        serving = any(engine.serving for engine in engines)
        return busy_for(waited_s) if serving else _none_up(engines)

    def reader_patience_s(self, engine: Engine) -> float:
        """Return for how many seconds a client of an engine may read nothing of its response. It
        is a few seconds while requests wait that the engine could serve.
        """
        wanted = any(
            self._wait_queue.waiting((model, maker))
            for model in (None, *engine.models)
            for maker in (None, engine.worker.worker_id)
        )
        return min(self._limits.stall_s, WANTED_S if wanted else PATIENCE_S)

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


def _none_up(engines: Sequence[Engine]) -> Refusal:
    why = "; ".join(sorted({engine.why for engine in engines if engine.why}))
    return Refusal(503, f"none of {len(engines)} workers is up: {why}", retry_after_s=1)
