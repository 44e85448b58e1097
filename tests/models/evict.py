# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The policies of csrc/index/evict.h over plain lists, coldest first."""

from __future__ import annotations


class Lru:
    def __init__(self) -> None:
        self.order: list[int] = []

    def assign(self, number: int, key: int) -> None: ...

    def remove(self, number: int) -> None:
        if number in self.order:
            self.order.remove(number)

    forget = remove

    def touch(self, number: int) -> None:
        self.remove(number)
        self.order.append(number)

    def cool(self, number: int) -> None:
        self.remove(number)
        self.order.insert(0, number)

    def has(self, number: int) -> bool:
        return number in self.order

    def coldest(self) -> int:
        return self.order[0] if self.order else -1


class S3Fifo:
    """``main`` and ``small`` include the pinned blocks."""

    def __init__(self) -> None:
        self.main: list[int] = []
        self.small: list[int] = []
        self.home: dict[int, list[int]] = {}  # the queue of each assigned block
        self.uses: dict[int, int] = {}
        self.keys: dict[int, int] = {}
        self.ghosts: list[int] = []  # keys, the newest last
        self.may_go: set[int] = set()

    def _leave(self, number: int) -> None:
        for queue in (self.main, self.small):
            if number in queue:
                queue.remove(number)
        self.may_go.discard(number)

    def assign(self, number: int, key: int) -> None:
        valid = self.ghosts[-len(self.main + self.small) :] if self.main + self.small else []
        self._leave(number)
        self.home[number] = self.main if key in valid else self.small
        self.uses[number], self.keys[number] = 0, key

    def touch(self, number: int) -> None:
        home = self.home.setdefault(number, self.small)
        if number in home:
            self.uses[number] = min(3, self.uses[number] + 1)
        else:
            home.append(number)
            self.uses.setdefault(number, 0)
        self.may_go.add(number)

    def cool(self, number: int) -> None:
        self._leave(number)
        self.main.insert(0, number)
        self.home[number], self.uses[number] = self.main, 0
        self.may_go.add(number)

    def remove(self, number: int) -> None:
        self.may_go.discard(number)

    def forget(self, number: int) -> None:
        if number in self.small and not self.uses[number]:
            self.ghosts.append(self.keys.get(number, 0))
        self._leave(number)
        for known in (self.home, self.uses, self.keys):
            known.pop(number, None)

    def has(self, number: int) -> bool:
        return number in self.may_go

    def coldest(self) -> int:
        while self.may_go:
            queues = [q for q in (self.main, self.small) if self.may_go & set(q)]
            crowded = len(self.small) * 10 > len(self.main) + len(self.small)
            queue = queues[-1] if crowded else queues[0]
            number = queue[0]
            if number in self.may_go and not self.uses[number]:
                return number
            queue.pop(0)
            if queue is self.small:
                self.uses[number] = 0
            elif number in self.may_go:
                self.uses[number] -= 1
            self.main.append(number)
            self.home[number] = self.main
        return -1
