# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The events that a publisher buffers for a replay."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

from beluga.errors import RouterError

RING = 10_000  # buffered events (vLLM's buffer_steps)

T = TypeVar("T")


@dataclass(frozen=True)
class Replay(Generic[T]):
    """The events from a number on; ``missed`` earlier ones are no longer buffered."""

    events: list[T]
    missed: int


class ReplayBuffer(Generic[T]):
    """The last ``ring`` numbered items of a publisher, for a replay. Numbers increase by one."""

    def __init__(self, *, first: int = 0, ring: int = RING) -> None:
        if ring < 1:
            raise RouterError(f"a publisher must buffer at least one event, not {ring}")
        self._next = first
        self._ring: deque[T] = deque(maxlen=ring)

    @property
    def next_number(self) -> int:
        """The number of the next item."""
        return self._next

    def add(self, item: T) -> int:
        """Append an item and return its number."""
        self._ring.append(item)
        self._next += 1
        return self._next - 1

    def skip(self) -> None:
        """Use up a number and drop all earlier items: a subscriber that has only these detects a
        gap.
        """
        self._ring.clear()
        self._next += 1

    def replay(self, first: int) -> Replay[T]:
        """Return all buffered items from number ``first`` on."""
        oldest = self._next - len(self._ring)
        kept = list(self._ring)[max(first - oldest, 0) :]
        return Replay(kept, max(oldest - max(first, 0), 0))
