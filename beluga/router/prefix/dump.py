# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Dumps an index as stored events, parents first."""

from __future__ import annotations

from collections.abc import Iterable

from beluga.router.prefix.events import RouterEvent, Stored, Tier
from beluga.router.prefix.tree import TreeEntry
from beluga.router.worker import Worker


class _Chains:
    """Builds events. A row that continues an event's last block is appended, so that a path without
    forks becomes one event. Each event precedes those that continue it, because its first block is
    less deep than theirs.
    """

    def __init__(self) -> None:
        self.events: list[RouterEvent] = []
        self._ends: dict[tuple[int, Tier, Worker], tuple[list[int], list[int]]] = {}

    def add(self, row: TreeEntry, tier: Tier, publisher: Worker, parent: int | None) -> None:
        end = self._ends.pop((row.before, tier, publisher), None) if row.depth > 1 else None
        if end is None:
            end = ([], [])
            self.events.append(RouterEvent(publisher, Stored(*end, parent), tier=tier))
        end[0].append(row.name)
        end[1].append(row.local)
        self._ends[row.block, tier, publisher] = end


class Dump:
    """A dump: first the workers, then the pool, whose blocks may follow blocks that only a worker
    has. Rows are ordered by depth. A row whose parent no publisher can refer to is dropped, with
    all its descendants.
    """

    def __init__(self) -> None:
        # Block -> the worker that announced it, and that worker's name for it.
        self._named: dict[int, tuple[Worker, int]] = {}

    def of_worker(self, rows: Iterable[TreeEntry], worker: Worker) -> list[RouterEvent]:
        chains, seen = _Chains(), set()
        for row in rows:
            if row.depth > 1 and row.before not in seen:
                continue
            seen.add(row.block)
            self._named.setdefault(row.block, (worker, row.name))
            parent = row.parent if row.depth > 1 else None
            chains.add(row, Tier(row.tier), worker, parent)
        return chains.events

    def of_pool(self, rows: Iterable[TreeEntry]) -> list[RouterEvent]:
        chains = _Chains()
        first: dict[int, Worker] = {}
        anybody = next((worker for worker, _ in self._named.values()), Worker(0))
        for row in rows:
            parent: int | None
            if row.depth == 1:
                publisher, parent = anybody, None
            elif row.before in first:
                publisher, parent = first[row.before], row.parent
            elif row.before in self._named:
                publisher, parent = self._named[row.before]
            else:
                continue
            first[row.block] = publisher
            chains.add(row, Tier.SHARED, publisher, parent)
        return chains.events
