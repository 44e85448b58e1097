# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The places of a listener's connections, and which client loses its place to a new one.

The listener *waits for* a client while it expects a request, receives the body, or sends an answer.
The client's lag is how many seconds it is behind a client that moves RATE bytes per second; the lag
is never negative then. Example: one that has sent nothing for 10 s lags 10 s; one that has sent 100
bytes, one per second, lags 99.9 s; one that has sent 5 MiB and then nothing for 10 s lags 10 s. A
client that lags too long is closed. When all places are taken, a new connection gets that of the
client that lags most, so idle connections, however many, exclude no client. While the server works
for a client, it does not lag.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

RATE = 1024  # bytes per second
PATIENCE_S = 30.0
"""How many seconds a client may lag."""
_LAGS_S = 1.0

ConnectionT = TypeVar("ConnectionT")


class ConnectionSlot(Generic[ConnectionT]):
    """The place of one connection. At first it waits for the client."""

    __slots__ = ("connection", "lost", "peer", "since")

    def __init__(self, connection: ConnectionT, peer: str, now: float) -> None:
        self.connection = connection
        self.peer = peer
        # When a client of RATE would have moved as many bytes; None while not waiting for it.
        self.since: float | None = now
        self.lost = False  # whether the connection was ended

    def wait(self) -> None:
        """Wait for the client from now on."""
        self.since = time.monotonic()

    def move(self, size: int) -> None:
        """Record that this many bytes have moved."""
        if self.since is not None:
            self.since = min(time.monotonic(), self.since + size / RATE)

    def work(self) -> None:
        """Work for the client from now on."""
        self.since = None

    def lag_s(self, now: float) -> float:
        """Return how many seconds the client lags; below 0 while it is not waited for."""
        return -1.0 if self.since is None else now - self.since


class ConnectionSlots(Generic[ConnectionT]):
    """The places of all connections. Not thread-safe: the caller locks, or uses one thread."""

    def __init__(
        self, patience_s: float = PATIENCE_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._patience_s, self._clock = patience_s, clock
        self._places: dict[ConnectionT, ConnectionSlot[ConnectionT]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[ConnectionSlot[ConnectionT]]:
        return iter(self._places.values())

    def take(self, connection: ConnectionT, peer: str) -> ConnectionSlot[ConnectionT]:
        """Return a new connection's place."""
        place = ConnectionSlot(connection, peer, self._clock())
        self._places[connection] = place
        return place

    def leave(self, connection: ConnectionT) -> None:
        """Note that a connection has ended."""
        self._places.pop(connection, None)

    def of(self, connection: ConnectionT) -> ConnectionSlot[ConnectionT] | None:
        """Return a connection's place, or None if the connection has ended."""
        return self._places.get(connection)

    def slowest(self, count: int = 1, lag_min_s: float = 0.0) -> list[ConnectionSlot[ConnectionT]]:
        """Return at most ``count`` places for new connections: of clients that lag a second or
        more, those of the peer with the most of them first, and of these the slowest. Clients that
        do not lag come last. Clients for whom the server works, or that lag less than
        ``lag_min_s``, are excluded.
        """
        now = self._clock()
        waited_for = [place for place in self if place.lag_s(now) >= lag_min_s]
        counts = Counter(place.peer for place in waited_for)

        def rank(place: ConnectionSlot[ConnectionT]) -> tuple[bool, int, float]:
            lag_s = place.lag_s(now)
            return lag_s >= _LAGS_S, counts[place.peer], lag_s

        return heapq.nlargest(count, waited_for, key=rank)

    def overdue(self) -> list[ConnectionSlot[ConnectionT]]:
        """Return the places of clients that lag too long."""
        now = self._clock()
        return [place for place in self if place.lag_s(now) > self._patience_s]
