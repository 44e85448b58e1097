# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A worker's side of KV events: numbered, without repetitions of removals, kept for a replay."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

from beluga.errors import RouterError
from beluga.router.index.events import Cleared, Data, Removed, RouterEvent, Stored, Tier
from beluga.router.worker import Worker

RING = 10_000  # events kept; vLLM's buffer_steps


class Replay(NamedTuple):
    """Events from a number on; ``missed`` of them before those were kept no longer."""

    events: list[RouterEvent]
    missed: int


class Publisher:
    """Events of one worker, from any thread.

    References are counted by tier and block: every store is told, because it may be the one that a
    router missed; a removal only when as many were told as stores, or none was. ``cleared`` forgets
    all counts. (Dynamo, lib/llm/src/kv_router/publisher/dedup.rs 6f64a59b.)
    """

    def __init__(self, worker: Worker, *, ring: int = RING) -> None:
        if ring < 1:
            raise RouterError(f"a publisher keeps at least one event, not {ring}")
        self._worker = worker
        self._lock = threading.Lock()
        self._references: dict[Tier, Counter[int]] = {tier: Counter() for tier in Tier}
        self._next = 0
        self._ring: deque[RouterEvent] = deque(maxlen=ring)
        self.suppressed = 0  # removals that were not told

    @property
    def next_id(self) -> int:
        """The number that the next event will have; the first one has 0."""
        return self._next

    def stored(
        self,
        block_hashes: Sequence[int],
        tokens_hashes: Sequence[int] | None,
        parent_hash: int | None = None,
        *,
        tier: Tier = Tier.DEVICE,
    ) -> RouterEvent:
        """Blocks that are new in a tier: not those that a request found there."""
        with self._lock:
            self._references[tier].update(block_hashes)
            return self._event(Stored(block_hashes, tokens_hashes, parent_hash), tier)

    def removed(
        self, block_hashes: Sequence[int], *, tier: Tier = Tier.DEVICE
    ) -> RouterEvent | None:
        """Blocks that are gone from a tier, or None if others of the same names are still there."""
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
        """Everything is gone, from all tiers but the shared one, which is not this worker's."""
        with self._lock:
            for tier, references in self._references.items():
                if tier is not Tier.SHARED:
                    references.clear()
            return self._event(Cleared(), Tier.DEVICE)

    def replay(self, first: int) -> Replay:
        """All events from number ``first`` on that are still kept."""
        with self._lock:
            oldest = self._next - len(self._ring)
            kept = [event for event in self._ring if (event.event_id or 0) >= first]
            return Replay(kept, max(oldest - max(first, 0), 0))

    def _event(self, data: Data, tier: Tier) -> RouterEvent:
        event = RouterEvent(self._worker, data, self._next, tier)
        self._next += 1
        self._ring.append(event)
        return event
