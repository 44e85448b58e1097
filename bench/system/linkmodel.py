# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A link in virtual time, and orders in which blocks are admitted to it.

The link shares its bandwidth evenly among the copies in flight, like Dynamo's own mock of a link.
Onboards arrive at random and use a share of its bandwidth; offloads are continuous. Nothing sleeps
and no clock is read, so a run is the same on every machine.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

ONBOARD, OFFLOAD = 1, 2
BLOCK = 5 << 19  # 2.5 MiB: 16 tokens of a 32B model
PIECE = 256 << 10
BACKLOG = 16  # offload blocks that always wait

NEVER = 1 << 62


class Piece(NamedTuple):
    """A part of a block that is copied at once; ``key`` belongs to its order."""

    kind: int
    block: int
    size: int
    key: int = 0


class Order(Protocol):
    """An order, which chooses the piece that may be copied next."""

    def submit(self, kind: int, block: int, now_ns: int) -> None:
        """Add a block that is to be copied."""
        ...

    def start(self, now_ns: int) -> Piece | None:
        """Return the piece that may start now, or None."""
        ...

    def finish(self, piece: Piece, now_ns: int) -> None:
        """Record that a piece has been copied."""
        ...

    @property
    def wait_ns(self) -> int:
        """Return when to call :meth:`next` again although no copy has ended."""
        ...


class Shared:
    """A link that all copies in flight share evenly."""

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_ns = bytes_per_s / 1e9
        self._now = 0.0
        self._served = 0.0  # bytes that each copy in flight has transferred
        self._active: list[tuple[float, int, Piece]] = []
        self._count = 0
        self.busy_ns = 0.0

    def start(self, piece: Piece, now_ns: int) -> None:
        self._advance(now_ns)
        self._count += 1
        heapq.heappush(self._active, (self._served + piece.size, self._count, piece))

    def next_ns(self) -> float:
        """Return when the next copy ends."""
        if not self._active:
            return float("inf")
        left = self._active[0][0] - self._served
        return self._now + left * len(self._active) / self._bytes_per_ns

    def end(self, now_ns: int) -> list[Piece]:
        """Return the copies that have ended by then."""
        self._advance(now_ns)
        ended = []
        while self._active and self._active[0][0] <= self._served + 1e-3:
            ended.append(heapq.heappop(self._active)[2])
        return ended

    def _advance(self, now_ns: float) -> None:
        if self._active and now_ns > self._now:
            self._served += (now_ns - self._now) * self._bytes_per_ns / len(self._active)
            self.busy_ns += now_ns - self._now
        self._now = max(self._now, now_ns)


@dataclass
class Outcome:
    """The result of a run. ``latencies_ns`` are those of onboards, from submission to the last
    byte.
    """

    latencies_ns: list[int] = field(default_factory=list)
    bytes: dict[int, int] = field(default_factory=lambda: {ONBOARD: 0, OFFLOAD: 0})
    utilisation: float = 0
    trace: list[tuple[int, int, int]] = field(default_factory=list)  # end, class, bytes


def run(  # noqa: PLR0913  what a run is made of
    order: Order,
    *,
    bytes_per_s: int,
    onboard_share: float,
    offload: bool,
    duration_ns: int,
    seed: int = 1,
    regular: bool = False,
) -> Outcome:
    """Run an order; onboards use ``onboard_share`` of the link.

    They arrive at random, or evenly if ``regular``.
    """
    rng = random.Random(seed)  # noqa: S311  arrivals, not secrets
    link, out = Shared(bytes_per_s), Outcome()
    mean_ns = BLOCK / bytes_per_s * 1e9 / onboard_share if onboard_share else 0.0
    arrival = mean_ns if mean_ns else float("inf")
    left: dict[int, int] = {}
    since: dict[int, int] = {}
    now, block, waiting = 0, 0, 0
    while now < duration_ns:
        for piece in link.end(now):
            order.finish(piece, now)
            out.bytes[piece.kind] += piece.size
            out.trace.append((now, piece.kind, piece.size))
            left[piece.block] -= piece.size
            if left[piece.block] == 0:
                del left[piece.block]
                waiting -= piece.kind == OFFLOAD
                if piece.kind == ONBOARD:
                    out.latencies_ns.append(now - since.pop(piece.block))
        while arrival <= now:
            block += 1
            left[block], since[block] = BLOCK, int(arrival)
            order.submit(ONBOARD, block, now)
            arrival += mean_ns if regular else rng.expovariate(1 / mean_ns)
        while offload and waiting < BACKLOG:
            block, waiting = block + 1, waiting + 1
            left[block] = BLOCK
            order.submit(OFFLOAD, block, now)
        while (started := order.start(now)) is not None:
            link.start(started, now)
        now = max(now + 1, int(min(link.next_ns(), arrival, now + order.wait_ns, duration_ns)) + 1)
    out.utilisation = link.busy_ns / now
    return out
