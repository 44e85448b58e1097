# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Simulated time: the links that copies share, and the clock that runs events in their order.

Links are shared with max-min fairness. Where copies cross only one link, that is an equal share for
each (processor sharing): with N copies on a link of B bytes/s each gets B/N, and the rest r of one
copy takes the sum over all copies j of min(r_j, r) / B (Dynamo's model, and its test vectors).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from typing import Any, TypeVar

_DONE = 64  # bytes that rounding may leave of a copy
_ROUNDING_S = 1e-9


class Copy:
    """A copy in flight over one or more links."""

    __slots__ = ("alone_s", "left", "links", "rate", "size", "start", "then")

    def __init__(
        self, size: float, links: tuple[int, ...], start: float, then: Callable[[float], None]
    ) -> None:
        self.size = self.left = size
        self.links = links
        self.start = start
        self.then = then
        self.rate = 0.0
        self.alone_s = 0.0


class Links:
    """The links of one direction, by number, and the copies that cross them. Times are in
    seconds.
    """

    def __init__(self, speeds: Sequence[float]) -> None:
        self.speeds = list(speeds)  # bytes/s
        self.moved = [0.0] * len(self.speeds)  # bytes moved over each link
        self.copies: list[Copy] = []
        self.finish = float("inf")  # when the next copy ends
        self.waited_s = 0.0  # what sharing cost all copies
        self.busy_s = 0.0  # the durations of all copies
        self.count = 0
        self._now = 0.0

    def add_link(self, speed: float) -> int:
        """Add a link. Returns its number."""
        self.speeds.append(speed)
        self.moved.append(0.0)
        return len(self.speeds) - 1

    def start(
        self, now: float, size: float, links: tuple[int, ...], then: Callable[[float], None]
    ) -> None:
        """Start a copy of ``size`` bytes. ``then`` is called with the time of its end."""
        self._advance(now)
        copy = Copy(size, links, now, then)
        copy.alone_s = size / min([self.speeds[link] for link in links])
        self.copies.append(copy)
        for link in links:
            self.moved[link] += size
        self._share()

    def end(self, now: float) -> None:
        """Remove the copies that have ended by ``now``, and call their callbacks."""
        self._advance(now)
        ended = [copy for copy in self.copies if copy.left <= _DONE]
        self.copies = [copy for copy in self.copies if copy.left > _DONE]
        self._share()
        for copy in ended:
            self.count += 1
            self.busy_s += now - copy.start
            waited = now - copy.start - copy.alone_s
            self.waited_s += waited if waited > _ROUNDING_S else 0.0
            copy.then(now)

    def _advance(self, now: float) -> None:
        passed = now - self._now
        self._now = now
        for copy in self.copies:
            copy.left -= copy.rate * passed

    def _share(self) -> None:
        """Compute new rates for all copies, and the time when the next one ends."""
        copies = self.copies
        if len(copies) > 1:
            self._fill()
        elif copies:
            copies[0].rate = min([self.speeds[link] for link in copies[0].links])
        self.finish = float("inf")
        for copy in copies:
            self.finish = min(self.finish, self._now + max(copy.left, 0.0) / copy.rate)

    def _fill(self) -> None:
        """Fill progressively: the tightest link sets the rate of its copies, then the next link."""
        users: dict[int, list[Copy]] = {}
        for copy in self.copies:
            copy.rate = 0.0
            for link in copy.links:
                users.setdefault(link, []).append(copy)
        room = {link: self.speeds[link] for link in users}
        count = {link: len(copies) for link, copies in users.items()}
        while count:
            tight = min(count, key=lambda link: room[link] / count[link])
            rate = room[tight] / count[tight]
            for copy in users[tight]:
                if copy.rate:
                    continue
                copy.rate = rate
                for link in copy.links:
                    room[link] -= rate
                    count[link] -= 1
                    if not count[link]:
                        del count[link]


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
