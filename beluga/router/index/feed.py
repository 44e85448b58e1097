# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""What one publisher sends, brought in order: gaps are waited for while a replay may fill them."""

from __future__ import annotations

import dataclasses
from typing import Generic, TypeVar

T = TypeVar("T")

HELD_MAX = 1 << 14  # more than an engine keeps for a replay (vLLM's buffer_steps, 10,000)


@dataclasses.dataclass(slots=True)
class Ready(Generic[T]):
    """What may be applied now, in order; ``restarted``: to an empty cache."""

    items: list[T]
    restarted: bool = False


class Feed(Generic[T]):
    """Numbered items of one publisher, the first of them 0.

    Something new may come behind a gap: then it is held, and ``wanted`` says from which number on
    the publisher should send again. What is sent again goes to ``replayed``; when that ends, or
    there is nobody to ask, ``give_up`` goes on without what is still missing. Without ``replay``
    gaps are given up as they are met. A live number that was passed already is a repetition, or, if
    it was made later than all before it, the publisher's new start.
    """

    def __init__(self, *, replay: bool = True, held_max: int = HELD_MAX) -> None:
        self._replay, self._held_max = replay, held_max
        self._next = 0
        self._latest = float("-inf")  # when the newest item was made
        self._held: dict[int, T] = {}
        self.gaps = 0
        self.lost = 0  # items that nobody sent again
        self.repeated = 0
        self.restarts = 0

    @property
    def wanted(self) -> int | None:
        """From which number on a replay would help; None: nothing is missing."""
        return self._next if self._held else None

    def offer(self, number: int, item: T, made_s: float) -> Ready[T]:
        """An item as it is published, made at ``made_s`` by the publisher's clock."""
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

    def replayed(self, number: int, item: T) -> list[T]:
        """An item that was sent again."""
        if number >= self._next and len(self._held) <= self._held_max:
            self._held.setdefault(number, item)
        return self._drain()

    def give_up(self) -> list[T]:
        """Do without what is missing before the items that are held."""
        ready: list[T] = []
        for number in sorted(self._held):
            self.lost += number - self._next
            self._next = number + 1
            ready.append(self._held[number])
        self._held = {}
        return ready

    def _drain(self) -> list[T]:
        ready = []
        while self._next in self._held:
            ready.append(self._held.pop(self._next))
            self._next += 1
        return ready
