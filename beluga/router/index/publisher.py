# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A worker's publisher of KV events: it numbers them, suppresses repeated removals, and keeps them
for a replay.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from beluga.errors import RouterError
from beluga.router.index.events import Cleared, Data, Removed, RouterEvent, Stored, Tier
from beluga.router.worker import Worker

RING = 10_000  # how many events are kept (vLLM's buffer_steps)

T = TypeVar("T")


@dataclass(frozen=True)
class Replay(Generic[T]):
    """The events from a number on; ``missed`` earlier ones are no longer kept."""

    events: list[T]
    missed: int


class Kept(Generic[T]):
    """The last ``ring`` numbered items of a publisher, for a replay. Numbers count up by one."""

    def __init__(self, *, first: int = 0, ring: int = RING) -> None:
        if ring < 1:
            raise RouterError(f"a publisher keeps at least one event, not {ring}")
        self._next = first
        self._ring: deque[T] = deque(maxlen=ring)

    @property
    def next_number(self) -> int:
        """The number of the next item."""
        return self._next

    def add(self, item: T) -> int:
        """Keep an item and return its number."""
        self._ring.append(item)
        self._next += 1
        return self._next - 1

    def skip(self) -> None:
        """Give a number to nothing, and keep none of the items before: whoever has only these
        misses something.
        """
        self._ring.clear()
        self._next += 1

    def replay(self, first: int) -> Replay[T]:
        """Return all kept items from number ``first`` on."""
        oldest = self._next - len(self._ring)
        kept = list(self._ring)[max(first - oldest, 0) :]
        return Replay(kept, max(oldest - max(first, 0), 0))


class Publisher:
    """Makes the events of one worker, in any thread.

    References are counted by tier and block. Every store makes an event, because a router may have
    missed an earlier one. A removal makes an event only if it is the last reference or there was
    none. ``cleared`` resets all counts. (Source: Dynamo, lib/llm/src/kv_router/publisher/dedup.rs
    6f64a59b.)
    """

    def __init__(self, worker: Worker, *, ring: int = RING) -> None:
        self._worker = worker
        self._lock = threading.Lock()
        self._references: dict[Tier, Counter[int]] = {tier: Counter() for tier in Tier}
        self._kept: Kept[RouterEvent] = Kept(ring=ring)
        self.suppressed = 0  # removals without an event

    @property
    def next_id(self) -> int:
        """The number of the next event; the first has number 0."""
        return self._kept.next_number

    def stored(
        self,
        block_hashes: Sequence[int],
        tokens_hashes: Sequence[int] | None,
        parent_hash: int | None = None,
        *,
        tier: Tier = Tier.DEVICE,
    ) -> RouterEvent:
        """Announce blocks that are new in a tier, but not those that a request found there."""
        with self._lock:
            self._references[tier].update(block_hashes)
            return self._event(Stored(block_hashes, tokens_hashes, parent_hash), tier)

    def removed(
        self, block_hashes: Sequence[int], *, tier: Tier = Tier.DEVICE
    ) -> RouterEvent | None:
        """Announce blocks that left a tier. Returns None if other references to all of them
        remain.
        """
        references = self._references[tier]
        with self._lock:
            gone = []
            for name in block_hashes:
                left = references.get(name, 1) - 1
                if left:
                    references[name] = left
                    self.suppressed += 1
                else:
                    references.pop(name, None)
                    gone.append(name)
            return self._event(Removed(gone), tier) if gone else None

    def cleared(self) -> RouterEvent:
        """Announce that all tiers are empty, except the shared one, which this worker does not
        own.
        """
        with self._lock:
            for tier, references in self._references.items():
                if tier is not Tier.SHARED:
                    references.clear()
            return self._event(Cleared(), Tier.DEVICE)

    def replay(self, first: int) -> Replay[RouterEvent]:
        """Return all kept events from number ``first`` on."""
        with self._lock:
            return self._kept.replay(first)

    def _event(self, data: Data, tier: Tier) -> RouterEvent:
        event = RouterEvent(self._worker, data, self._kept.next_number, tier)
        self._kept.add(event)
        return event
