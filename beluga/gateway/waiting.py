# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The wait queue: requests wait in a line per model while every suitable worker is full. Requests
that only one worker can take, because they refer to its response, wait in a line per worker.

The next request in a line, by the chosen order, is tried whenever a request has ended or an engine
has come up or cooled down. No later request of its line overtakes it. So a request that many
workers can take does not block one that few can take. The line that was served least recently goes
first.

The number of waiting requests is limited. At the limit, the newest request of the client that has
the most is refused for one of a client that has fewer, so no client can fill the queue alone. The
same holds for addresses, which come first: a client may have any number of keys.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from beluga.gateway.answers import Refusal
from beluga.gateway.standing import NOBODY, GatewayClient
from beluga.router import Query, RouterQueue

PlacedT = TypeVar("PlacedT")


@dataclasses.dataclass(slots=True, eq=False)
class _Waiter(Generic[PlacedT]):
    query: Query
    overlap: int  # blocks
    arrived: float  # time.monotonic()
    attempt: Callable[[], PlacedT | None]
    placed: asyncio.Future[PlacedT]
    line: RouterQueue[_Waiter[PlacedT]]
    client: GatewayClient


class WaitQueue(Generic[PlacedT]):
    """Waiting requests, limited in number. Used by one event loop only."""

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
        RouterQueue[_Waiter[PlacedT]](order)  # raises if the order is unknown
        self._queued_max = queued_max
        self._order = order
        self._give_back = give_back
        self._lines: dict[Hashable, RouterQueue[_Waiter[PlacedT]]] = {}
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
    ) -> PlacedT:
        """Wait in a line until ``attempt`` returns a result, and return it. ``overlap`` is the
        number of the request's blocks that a worker holds, and ``client`` is its sender.

        Raises the errors of ``attempt``, and Refusal if the wait is too long or too many requests
        wait.
        """
        if len(self) >= self._queued_max and not self._displace(client):
            raise self._full()
        loop = asyncio.get_running_loop()
        line = self._lines.setdefault(name, RouterQueue(self._order))
        waiter = _Waiter(
            *(query, overlap, time.monotonic(), attempt, loop.create_future(), line, client)
        )
        self._waiters[waiter] = None
        _push(line, waiter)
        timer = loop.call_later(patience_s, _give_up, waiter, patience_s)
        try:
            placed: PlacedT = await waiter.placed
        except asyncio.CancelledError:
            found = waiter.placed.done() and not waiter.placed.cancelled()
            if found and waiter.placed.exception() is None:
                self._give_back(waiter.placed.result())
            raise
        finally:
            timer.cancel()
            del self._waiters[waiter]
            line.discard(waiter)
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
        most = max(names.values(), default=0)
        if own and most <= names[client.name] + 1:
            return False
        if most > 1:
            (name, _), *_ = names.most_common(1)
            waiting = [waiter for waiter in waiting if waiter.client.name == name]
        newest = waiting[-1]
        newest.line.discard(newest)
        newest.placed.set_exception(self._full())
        return True

    def look(self) -> None:
        """Try the next requests after a change."""
        for name, line in list(self._lines.items()):
            served = False
            while (waiter := line.pop(time.monotonic())) is not None:
                if not _settled(waiter):
                    _push(line, waiter)
                    break
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


def _push(line: RouterQueue[_Waiter[PlacedT]], waiter: _Waiter[PlacedT]) -> None:
    """Add a request to a line by its arrival, so that a returned one gets its old position."""
    line.push(waiter, waiter.query, waiter.arrived, overlap=waiter.overlap)


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


def _give_up(waiter: _Waiter[PlacedT], patience_s: float) -> None:
    if not waiter.placed.done():
        text = f"every worker has been busy, or requested a pause, for {patience_s:g} s"
        waiter.placed.set_exception(Refusal(503, text, retry_after_s=1))
