# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Requests that wait because every worker they may go to is busy, and who of them is next.

A queue ranks by (strict priority, score), highest first; scores are Dynamo's: ``fcfs`` and ``lcfs``
go by arrival, ``wspt`` by the shortest prefill left. ``priority_jump`` moves a request ahead: by so
many seconds, or by so many times its weight.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable
from itertools import count
from typing import Generic, TypeVar

from beluga.errors import RouterError
from beluga.router.policy import Query

ItemT = TypeVar("ItemT")

ORDERS = ("fcfs", "lcfs", "wspt")
REFRESH_S = 10.0  # overlap that is older than this is asked for again when its turn comes


def score(order: str, query: Query, arrival: float, overlap: int) -> float:
    """The higher goes first. ``overlap`` is the blocks found at best where the request may go."""
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
    looked: float  # when its overlap was
    overlap: int


class RouterQueue(Generic[ItemT]):
    """Items with their queries. Times are seconds of one clock; equals leave as they came.

    Raises RouterError for an order that is none of ORDERS.
    """

    def __init__(self, order: str = "fcfs", *, refresh_s: float = REFRESH_S) -> None:
        if order not in ORDERS:
            raise RouterError(
                f"there is no queue order {order!r}; choose one of {', '.join(ORDERS)}"
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
        """Let an item wait; ``overlap`` is as of now."""
        self._insert(_Entry(item, query, strict_priority, now, now, overlap), next(self._numbers))

    def pop(
        self,
        now: float,
        *,
        ready: Callable[[ItemT], bool] | None = None,
        overlap_of: Callable[[ItemT], int] | None = None,
    ) -> ItemT | None:
        """Take out the next item that is ``ready``, or None.

        ``overlap_of`` is asked for an item whose overlap is stale; that may cost it its turn.
        """
        passed = []
        found = None
        while self._heap and found is None:
            top = heapq.heappop(self._heap)
            _, rank, number, entry = top
            if self._order == "wspt" and overlap_of and now - entry.looked > self._refresh_s:
                entry.overlap, entry.looked = overlap_of(entry.item), now
                if self._score(entry) != -rank:
                    self._insert(entry, number)
                    continue
            if ready is None or ready(entry.item):
                found = entry.item
            else:
                passed.append(top)
        for top in passed:
            heapq.heappush(self._heap, top)
        return found

    def discard(self, item: ItemT) -> bool:
        """Take an item out before its turn (its client has gone); False if it does not wait."""
        kept = [top for top in self._heap if top[3].item is not item]
        if len(kept) == len(self._heap):
            return False
        heapq.heapify(kept)
        self._heap = kept
        return True

    def _score(self, entry: _Entry[ItemT]) -> float:
        return score(self._order, entry.query, entry.arrival, entry.overlap)

    def _insert(self, entry: _Entry[ItemT], number: int) -> None:
        heapq.heappush(self._heap, (-entry.strict, -self._score(entry), number, entry))
