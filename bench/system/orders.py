# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Scheduling orders of pieces on a shared link in ``linkmodel.py``: ours and other systems'.

Except in Dynamo's, two pieces are in flight, so that the link is never idle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from beluga.transfer.link import LinkDirection, Speed

from .linkmodel import BLOCK, NEVER, ONBOARD, PIECE, Order, Piece
from .throttlers import Queue, Rovers

DEPTH = 2  # pieces in flight
SHARES = (8, 1)


def pieces(kind: int, block: int) -> Iterator[Piece]:
    """Yield the pieces of a block."""
    return (Piece(kind, block, min(PIECE, BLOCK - at)) for at in range(0, BLOCK, PIECE))


class Fair:
    """Our order: a fair queue and a token bucket, in one process or with each class in its own."""

    def __init__(
        self,
        bytes_per_s: int,
        *,
        shares: tuple[int, int] = SHARES,
        capped: bool = True,
        processes: int = 1,
    ) -> None:
        self._speed = Speed(bytes_per_s)
        self.direction = LinkDirection(
            limit=DEPTH * int(self._speed.tokens(PIECE)), capped=capped, now_ns=0
        )
        self._node = {kind: self.direction.add(share) for kind, share in enumerate(shares, ONBOARD)}
        self.queues = [Queue(self.direction, now_ns=0) for _ in range(processes)]
        self._pieces: dict[int, tuple[Piece, Queue, int]] = {}
        self._count = 0
        self.wait_ns = NEVER

    def submit(self, kind: int, block: int, now_ns: int) -> None:
        queue = self.queue_of(kind, block)
        for piece in pieces(kind, block):
            self._count += 1
            tokens = int(self._speed.tokens(piece.size))
            node = self._node[kind]
            handle = queue.push(node, tokens, self._count, size=piece.size, now_ns=now_ns)
            self._pieces[self._count] = (piece._replace(key=self._count), queue, handle)

    def queue_of(self, kind: int, block: int) -> Queue:
        """Return the queue of the process to which a block belongs."""
        return self.queues[kind % len(self.queues)]

    def start(self, now_ns: int) -> Piece | None:
        self.wait_ns = NEVER
        for queue in self.queues:
            if (admitted := queue.poll(now_ns)) is not None:
                return self._pieces[admitted.id][0]
            self.wait_ns = min(self.wait_ns, queue.wait_ns)
        return None

    def finish(self, piece: Piece, now_ns: int) -> None:
        _, queue, handle = self._pieces.pop(piece.key)
        queue.complete(handle, now_ns)


class Fifo:
    """Pieces in the order in which their blocks arrived. With ``strict``, onboards precede all
    others.
    """

    wait_ns = NEVER

    def __init__(self, *, strict: bool = False) -> None:
        self._lines: list[deque[Piece]] = [deque(), deque()]
        self._strict = strict
        self._under_way = 0

    def submit(self, kind: int, block: int, now_ns: int) -> None:
        self._lines[kind != ONBOARD if self._strict else 0].extend(pieces(kind, block))

    def start(self, now_ns: int) -> Piece | None:
        line = next((line for line in self._lines if line), None)
        if line is None or self._under_way == DEPTH:
            return None
        self._under_way += 1
        return line.popleft()

    def finish(self, piece: Piece, now_ns: int) -> None:
        self._under_way -= 1


class Counter:
    """A bare shared counter of the pieces in flight (the rovers of generation 1, without a fair
    queue). Each class has its own process, which takes a ticket for its next piece.
    """

    wait_ns = NEVER

    def __init__(self) -> None:
        self._rovers = Rovers(DEPTH, DEPTH * PIECE)
        self._lines: dict[int, deque[Piece]] = {}
        self._tickets: dict[int, tuple[int, int]] = {}

    def submit(self, kind: int, block: int, now_ns: int) -> None:
        self._lines.setdefault(kind, deque()).extend(pieces(kind, block))

    def start(self, now_ns: int) -> Piece | None:
        for kind, line in self._lines.items():
            if line and kind not in self._tickets:
                self._tickets[kind] = self._rovers.grab(1, line[0].size)
        for kind, ticket in self._tickets.items():
            if self._rovers.ready(ticket):
                del self._tickets[kind]
                return self._lines[kind].popleft()
        return None

    def finish(self, piece: Piece, now_ns: int) -> None:
        self._rovers.complete(1, piece.size)


class CopyFirst:
    """Dynamo's order: a transfer starts its copy, then waits in a queue to be finished. The queue
    holds four of a kind, so the next of that kind waits only when four others are in flight.
    """

    wait_ns = NEVER
    _BOUND = 4

    def __init__(self) -> None:
        self._lines: dict[int, deque[Piece]] = {}
        self._under_way: dict[int, int] = {}

    def submit(self, kind: int, block: int, now_ns: int) -> None:
        self._lines.setdefault(kind, deque()).append(Piece(kind, block, BLOCK))

    def start(self, now_ns: int) -> Piece | None:
        for kind, line in self._lines.items():
            if line and self._under_way.get(kind, 0) <= self._BOUND:
                self._under_way[kind] = self._under_way.get(kind, 0) + 1
                return line.popleft()
        return None

    def finish(self, piece: Piece, now_ns: int) -> None:
        self._under_way[piece.kind] -= 1


def orders(bytes_per_s: int) -> dict[str, Order]:
    """Make the orders, by name."""
    return {
        "ours": Fair(bytes_per_s),
        "ours, 2 processes": Fair(bytes_per_s, processes=2),
        "FIFO": Fifo(),
        "strict priority": Fifo(strict=True),
        "shared counter": Counter(),
        "copy first": CopyFirst(),
    }
