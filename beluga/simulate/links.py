# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Links that copies share: max-min fair, which is equal parts (processor sharing) where copies
cross one link only. With N copies on a link of B bytes/s each gets B/N, and what is left of one,
r, takes the sum over all copies j of min(r_j, r) / B (Dynamo's model, and its test vectors).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_DONE = 64  # bytes: what rounding may leave of a copy
_ROUNDING_S = 1e-9


class Copy:
    """Bytes on their way over one or more links."""

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
    """Links of one direction, by number, and the copies that cross them. Times are in seconds."""

    def __init__(self, speeds: Sequence[float]) -> None:
        self.speeds = list(speeds)  # bytes/s
        self.moved = [0.0] * len(self.speeds)  # bytes
        self.copies: list[Copy] = []
        self.finish = float("inf")  # when the next copy ends
        self.waited_s = 0.0  # of all copies: what sharing cost them
        self.busy_s = 0.0  # of all copies: from start to end
        self.count = 0
        self._now = 0.0

    def add_link(self, speed: float) -> int:
        """One more; its number."""
        self.speeds.append(speed)
        self.moved.append(0.0)
        return len(self.speeds) - 1

    def start(
        self, now: float, size: float, links: tuple[int, ...], then: Callable[[float], None]
    ) -> None:
        """A copy of ``size`` bytes; ``then`` is called with the time when it has ended."""
        self._advance(now)
        copy = Copy(size, links, now, then)
        copy.alone_s = size / min([self.speeds[link] for link in links])
        self.copies.append(copy)
        for link in links:
            self.moved[link] += size
        self._share()

    def end(self, now: float) -> None:
        """Take what has ended by ``now`` off the links, and say so to whoever waits for it."""
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
        """New rates for all, and when the next one ends."""
        copies = self.copies
        if len(copies) > 1:
            self._fill()
        elif copies:
            copies[0].rate = min([self.speeds[link] for link in copies[0].links])
        self.finish = float("inf")
        for copy in copies:
            self.finish = min(self.finish, self._now + max(copy.left, 0.0) / copy.rate)

    def _fill(self) -> None:
        """Progressive filling: the tightest link sets the rate of its copies, then the next."""
        users: dict[int, list[Copy]] = {}
        for copy in self.copies:
            copy.rate = 0.0
            for link in copy.links:
                users.setdefault(link, []).append(copy)
        room = {link: self.speeds[link] for link in users}
        count = {link: len(found) for link, found in users.items()}
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
