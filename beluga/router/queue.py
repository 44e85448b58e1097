# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The queue of requests that wait because every suitable worker is busy.

It orders requests by their scores, highest first, which are Dynamo's: ``fcfs`` and ``lcfs`` order
by arrival, ``wspt`` by the shortest remaining prefill.
"""

from __future__ import annotations

import heapq
from itertools import count
from typing import Generic, TypeVar

from beluga import choices
from beluga.errors import RouterError
from beluga.router.policy import Query

ItemT = TypeVar("ItemT")

ORDERS = choices.QUEUE_ORDERS


def score(order: str, query: Query, arrival: float, overlap: int) -> float:
    """Return a request's score; the highest is next. ``overlap`` is the largest number of cached
    blocks on a suitable worker.
    """
    if order == "fcfs":
        return -arrival
    if order == "lcfs":
        return arrival
    return 1 / max(query.isl - overlap * query.block_size, 1)


class RouterQueue(Generic[ItemT]):
    """Items with their queries. Times are seconds of one clock; equal items leave in order of
    arrival.

    Raises RouterError for an order that is not in ORDERS.
    """

    def __init__(self, order: str = "fcfs") -> None:
        if order not in ORDERS:
            raise RouterError(
                f"the queue order {order!r} does not exist; choose one of {', '.join(ORDERS)}"
            )
        self._order = order
        self._numbers = count()
        self._heap: list[tuple[float, int, ItemT]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, item: ItemT, query: Query, arrival: float, *, overlap: int = 0) -> None:
        """Add an item. ``overlap``: the blocks of it that a suitable worker has cached."""
        rank = -score(self._order, query, arrival, overlap)
        heapq.heappush(self._heap, (rank, next(self._numbers), item))

    def first(self) -> ItemT | None:
        """Return the next item, which stays, or None."""
        return self._heap[0][2] if self._heap else None

    def pop(self) -> ItemT | None:
        """Remove and return the next item, or None."""
        return heapq.heappop(self._heap)[2] if self._heap else None

    def discard(self, item: ItemT) -> bool:
        """Remove an item before its turn, because its client has disconnected. Returns False if it
        was not waiting.
        """
        others = [top for top in self._heap if top[2] is not item]
        if len(others) == len(self._heap):
            return False
        heapq.heapify(others)
        self._heap = others
        return True


class FairQueue(Generic[ItemT]):
    """Items of clients that take turns: the address that was served least recently goes first, and
    of its clients the one that was. ``order`` is that of a client's own items (RouterQueue).
    """

    def __init__(self, order: str = "fcfs") -> None:
        RouterQueue[ItemT](order)  # raises if it is unknown
        self._order = order
        self._addresses: dict[str, dict[str, RouterQueue[ItemT]]] = {}  # the next turn first

    def __len__(self) -> int:
        return sum(len(queue) for clients in self._addresses.values() for queue in clients.values())

    def push(  # noqa: PLR0913  as RouterQueue.push, with the client
        self,
        address: str,
        client: str,
        item: ItemT,
        query: Query,
        arrival: float,
        *,
        overlap: int = 0,
    ) -> None:
        """Add an item of a client. Those that have none so far get the last turn."""
        clients = self._addresses.setdefault(address, {})
        clients.setdefault(client, RouterQueue(self._order)).push(
            item, query, arrival, overlap=overlap
        )

    def first(self) -> ItemT | None:
        """Return the next item, which stays, or None."""
        clients = next(iter(self._addresses.values()), {})
        queue = next(iter(clients.values()), None)
        return None if queue is None else queue.first()

    def discard(self, address: str, client: str, item: ItemT, *, served: bool = False) -> None:
        """Remove an item if it waits. ``served``: this was its client's turn."""
        clients = self._addresses.get(address, {})
        if (queue := clients.get(client)) is None or not queue.discard(item):
            return
        if served:
            clients[client] = clients.pop(client)
            self._addresses[address] = self._addresses.pop(address)
        if not queue:
            del clients[client]
        if not clients:
            del self._addresses[address]
