# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The queue of requests that wait because every suitable worker is busy.

It orders requests by their scores, highest first, which are Dynamo's: ``fcfs`` and ``lcfs`` order
by arrival, ``wspt`` by the shortest remaining prefill. ``priority_jump`` moves a request ahead: by
this many seconds, or in ``wspt`` by this multiple of its weight.
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
        return query.priority_jump - arrival
    if order == "lcfs":
        return query.priority_jump + arrival
    return (1 + query.priority_jump) / max(query.isl - overlap * query.block_size, 1)


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
