# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A list of stripes, each with its extent's first one, as the model of csrc/space/extent.h."""

from __future__ import annotations

from errno import EBUSY, EEXIST, EINVAL

STRIPES_MAX = 64


class Extents:
    def __init__(self, stripe_count: int) -> None:
        self.first: list[int | None] = [None] * stripe_count
        self.generation: dict[int, int] = {}
        self.retired: set[int] = set()
        self.group = 8
        while self.group > 1 and stripe_count < 16 * self.group:
            self.group //= 2

    def open(self, stripe: int, generation: int) -> tuple[int, int] | int:
        if stripe >= len(self.first):
            return -EINVAL
        if self.first[stripe] is not None:
            return -EEXIST
        group = [s for s in range(len(self.first)) if s // self.group == stripe // self.group]
        below = [s for s in group if s < stripe and self.first[s] is not None]
        above = [s for s in group if s > stripe and self.first[s] is not None]
        first = max(below) + 1 if below else group[0]
        end = min(above) if above else group[-1] + 1
        self.make(first, end - first, generation)
        return first, end - first

    def make(self, first: int, count: int, generation: int) -> None:
        self.first[first : first + count] = [first] * count
        self.generation[first] = generation

    def adopt(self, first: int, count: int, generation: int, retired: bool) -> int:
        if not 1 <= count <= STRIPES_MAX or first + count > len(self.first):
            return -EINVAL
        if any(owner is not None for owner in self.first[first : first + count]):
            return -EEXIST
        self.make(first, count, generation)
        self.retired |= {first} if retired else set()
        return 0

    def begins(self, first: int) -> bool:
        return first < len(self.first) and self.first[first] == first

    def close(self, first: int) -> int:
        if not self.begins(first):
            return -EINVAL
        if first in self.retired:
            return -EBUSY
        self.first = [None if owner == first else owner for owner in self.first]
        return 0

    def retire(self, first: int) -> int:
        if not self.begins(first):
            return -EINVAL
        self.retired.add(first)
        return 0

    def views(self) -> list[tuple[int, int, int, int]]:
        firsts = sorted({first for first in self.first if first is not None})
        return [
            (self.generation[f], f, self.first.count(f), int(f in self.retired)) for f in firsts
        ]
