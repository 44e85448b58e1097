# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The queue of requests that wait because every suitable worker is busy.

It orders requests by (strict priority, score), highest first. Scores are Dynamo's: ``fcfs`` and
``lcfs`` order by arrival, ``wspt`` by the shortest remaining prefill. ``priority_jump`` moves a
request ahead: by this many seconds, or in ``wspt`` by this multiple of its weight.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable
from itertools import count
from typing import Generic, TypeVar

from beluga import choices
from beluga.errors import RouterError
from beluga.router.policy import Query

ItemT = TypeVar("ItemT")

ORDERS = choices.QUEUE_ORDERS
REFRESH_S = 10.0  # an older overlap is looked up again when the request is next


def score(order: str, query: Query, arrival: float, overlap: int) -> float:
    """Return a request's score; the highest is next. ``overlap`` is the largest number of cached
    blocks on a suitable worker.
    """
    if order == "fcfs":
        return query.priority_jump - arrival
    if order == "lcfs":
        return query.priority_jump + arrival
    return (1 + query.priority_jump) / max(query.isl - overlap * query.block_size, 1)


@dataclasses.dataclass(slots=True)
class _Entry(Generic[ItemT]):
    item: ItemT
    query: Query
    strict: int
    arrival: float
    looked: float  # time of the last lookup of its overlap
    overlap: int


class RouterQueue(Generic[ItemT]):
    """Items with their queries. Times are seconds of one clock; equal items leave in order of
    arrival.

    Raises RouterError for an order that is not in ORDERS.
    """

    def __init__(self, order: str = "fcfs", *, refresh_s: float = REFRESH_S) -> None:
        if order not in ORDERS:
            raise RouterError(
                f"the queue order {order!r} does not exist; choose one of {', '.join(ORDERS)}"
            )
        self._order = order
        self._refresh_s = refresh_s
        self._numbers = count()
        self._heap: list[tuple[int, float, int, _Entry[ItemT]]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def push(
        self, item: ItemT, query: Query, now: float, *, overlap: int = 0, strict_priority: int = 0
    ) -> None:
        """Add an item. ``overlap`` is its overlap at time ``now``."""
        self._insert(_Entry(item, query, strict_priority, now, now, overlap), next(self._numbers))

    def pop(
        self,
        now: float,
        *,
        ready: Callable[[ItemT], bool] | None = None,
        overlap_of: Callable[[ItemT], int] | None = None,
    ) -> ItemT | None:
        """Remove and return the next item that is ``ready``, or None.

        ``overlap_of`` is called for an item whose overlap is stale, which may change its rank.
        """
        passed = []
        ready_item = None
        while self._heap and ready_item is None:
            top = heapq.heappop(self._heap)
            _, rank, number, entry = top
            if self._order == "wspt" and overlap_of and now - entry.looked > self._refresh_s:
                entry.overlap, entry.looked = overlap_of(entry.item), now
                if self._score(entry) != -rank:
                    self._insert(entry, number)
                    continue
            if ready is None or ready(entry.item):
                ready_item = entry.item
            else:
                passed.append(top)
        for top in passed:
            heapq.heappush(self._heap, top)
        return ready_item

    def discard(self, item: ItemT) -> bool:
        """Remove an item before its turn, because its client has disconnected. Returns False if it
        was not waiting.
        """
        others = [top for top in self._heap if top[3].item is not item]
        if len(others) == len(self._heap):
            return False
        heapq.heapify(others)
        self._heap = others
        return True

    def _score(self, entry: _Entry[ItemT]) -> float:
        return score(self._order, entry.query, entry.arrival, entry.overlap)

    def _insert(self, entry: _Entry[ItemT], number: int) -> None:
        heapq.heappush(self._heap, (-entry.strict, -self._score(entry), number, entry))
