# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""What a publisher of events keeps for a replay."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

from beluga.errors import RouterError

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
