# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The events of one publisher: restores the order of messages, and requests replays to fill
gaps.
"""

from __future__ import annotations

import dataclasses
from typing import Generic, TypeVar

T = TypeVar("T")

HELD_MAX = 1 << 14  # more than an engine buffers for a replay (vLLM's buffer_steps: 10,000)


@dataclasses.dataclass(slots=True)
class Ready(Generic[T]):
    """The items that may be applied now, in order. ``restarted`` means that they start from an
    empty cache.
    """

    items: list[T]
    restarted: bool = False


class Feed(Generic[T]):
    """The numbered items of one publisher, starting with number 0.

    An item after a gap is buffered, and ``wanted`` is the number from which a replay is needed.
    Items of the replay go to ``replayed``. When it ends, or no replay is possible, ``give_up``
    continues without the missing items. Without ``replay``, gaps are skipped at once. A live number
    that has already passed is a duplicate, unless its item is newer than all earlier ones: then the
    publisher has restarted.
    """

    def __init__(self, *, replay: bool = True, held_max: int = HELD_MAX) -> None:
        self._replay, self._held_max = replay, held_max
        self._next = 0
        self._latest = float("-inf")  # time of the newest item
        self._held: dict[int, T] = {}
        self.gaps = 0
        self.lost = 0  # items that no replay delivered
        self.repeated = 0
        self.restarts = 0

    @property
    def next_number(self) -> int:
        """The number of the next item to apply."""
        return self._next

    @property
    def wanted(self) -> int | None:
        """The number from which a replay is needed, or None if nothing is missing."""
        return self._next if self._held else None

    def offer(self, number: int, item: T, made_s: float) -> Ready[T]:
        """Add a published item, created at ``made_s`` by the publisher's clock. Returns the items
        that may be applied.
        """
        restarted = number < self._next and made_s > self._latest
        if restarted:
            self.restarts += 1
            self._next, self._held = 0, {}
        elif number < self._next:
            self.repeated += 1
            return Ready([])
        self._latest = max(self._latest, made_s)
        if number > self._next and not self._held:
            self.gaps += 1
        self._held[number] = item
        ready = self._drain()
        if self._held and (not self._replay or len(self._held) > self._held_max):
            ready += self.give_up()
        return Ready(ready, restarted)

    def replayed(self, number: int, item: T, made_s: float) -> list[T]:
        """Add an item of a replay. Returns the items that may be applied."""
        if number >= self._next and len(self._held) <= self._held_max:
            self._latest = max(self._latest, made_s)  # the event may arrive again, live
            self._held.setdefault(number, item)
        return self._drain()

    def replaced(self, number: int, item: T, made_s: float) -> list[T]:
        """Add an item of a replay that replaces all items up to its number. Returns the items that
        may be applied.
        """
        if number < self._next:
            return []
        self._latest = max(self._latest, made_s)
        self._held = {held: one for held, one in self._held.items() if held > number}
        self._next = number + 1
        return [item, *self._drain()]

    def give_up(self) -> list[T]:
        """Skip the gap before the buffered items, and return these."""
        ready: list[T] = []
        for number in sorted(self._held):
            self.lost += number - self._next
            self._next = number + 1
            ready.append(self._held[number])
        self._held = {}
        return ready

    def reset(self) -> None:
        """Restart at number 0, because the publisher has disconnected. If it returns without a
        restart, a replay of all its items is requested.
        """
        self._next, self._held, self._latest = 0, {}, float("-inf")

    def _drain(self) -> list[T]:
        ready = []
        while self._next in self._held:
            ready.append(self._held.pop(self._next))
            self._next += 1
        return ready
