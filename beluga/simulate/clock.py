# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The simulated clock, which runs events in the order of their times."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from typing import Any, TypeVar

from beluga.simulate.links import Links

_What = TypeVar("_What")


class Clock:
    """Events in the order of their times, and in the order of creation if times are equal."""

    __slots__ = ("_events", "_made", "_networks")

    def __init__(self, networks: Sequence[Links]) -> None:
        self._events: list[tuple[float, int, Callable[[float, Any], None], Any]] = []
        self._made = 0
        self._networks = networks

    def at(self, when: float, then: Callable[[float, _What], None], what: _What) -> None:
        """Call ``then(when, what)`` at time ``when``."""
        self._made += 1
        heappush(self._events, (when, self._made, then, what))

    def run(
        self, arrivals: Iterator[tuple[float, _What]], arrive: Callable[[float, _What], None]
    ) -> float:
        """Run until no event is left. Returns the time of the last one."""
        events, networks, never = self._events, self._networks, float("inf")
        over: tuple[float, Any] = (never, None)
        now = 0.0
        arrival, request = next(arrivals, over)
        while True:
            when = events[0][0] if events else never
            network = None
            for links in networks:
                if links.finish < when:
                    when, network = links.finish, links
            if arrival <= when:
                if arrival == never:
                    return now
                now = arrival
                arrive(now, request)
                arrival, request = next(arrivals, over)
            elif network is not None:
                now = when
                network.end(now)
            else:
                now, _, then, what = heappop(events)
                then(now, what)
