# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A naive block pool: lists, and a search of all blocks for each call."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class ModelBlock:
    """The model's state of a block. A claim is a number; ``request`` of each claim is kept."""

    index: int
    key: int | None = None
    parent: int | None = None
    tokens: int = 0
    is_committed: bool = False
    is_registered: bool = False
    is_saved: bool = False
    claims: list[int] = field(default_factory=list)
    tick: int = 0


class ModelPool:
    """The rules of :class:`beluga.kvbm.BlockPool`, by brute force."""

    def __init__(self, total: int, *, keep_unsaved: bool) -> None:
        self.blocks = [ModelBlock(index) for index in range(total)]
        self.free = list(range(total))
        self.keep_unsaved = keep_unsaved
        self.waiting: list[tuple[int, str, int]] = []  # number, request, count
        self.granted: dict[int, list[int]] = {}  # claims by number of the reservation
        self.owner: dict[int, tuple[int, str | None]] = {}  # claim -> block, request
        self.evicted: list[int] = []
        self.tick = 0
        self.next_claim = 0

    def by_key(self, key: int) -> ModelBlock | None:
        return next((one for one in self.blocks if one.is_registered and one.key == key), None)

    def inactive(self) -> list[ModelBlock]:
        return [one for one in self.blocks if one.is_registered and not one.claims]

    def victim(self) -> ModelBlock | None:
        inactive = self.inactive()
        parents = {one.parent for one in inactive}
        leaves = [
            one
            for one in inactive
            if one.key not in parents and (one.is_saved or not self.keep_unsaved)
        ]
        return min(leaves, key=lambda one: one.tick, default=None)

    def claim(self, block: ModelBlock, request: str | None) -> int:
        self.next_claim += 1
        block.claims.append(self.next_claim)
        self.owner[self.next_claim] = (block.index, request)
        return self.next_claim

    def reset(self, block: ModelBlock) -> None:
        self.blocks[block.index] = ModelBlock(block.index)
        self.free.append(block.index)

    def make_room(self, count: int) -> bool:
        if len(self.free) + len(self.inactive()) < count:
            return False
        while len(self.free) < count:
            victim = self.victim()
            if victim is None:
                return False
            assert victim.key is not None
            self.evicted.append(victim.key)
            self.reset(victim)
        return True

    def reserve(self, number: int, request: str, count: int) -> None:
        self.waiting.append((number, request, count))
        self.grant()

    def grant(self) -> None:
        while self.waiting and self.make_room(self.waiting[0][2]):
            number, request, count = self.waiting.pop(0)
            taken = [self.blocks[self.free.pop(0)] for _ in range(count)]
            self.granted[number] = [self.claim(block, request) for block in taken]

    def drop(self, claim: int) -> None:
        if claim not in self.owner:
            return
        block = self.blocks[self.owner.pop(claim)[0]]
        block.claims.remove(claim)
        if not block.claims:
            if not block.is_registered:
                self.reset(block)
            elif not block.tick:
                self.tick += 1
                block.tick = self.tick
        self.grant()

    def share(self, block: ModelBlock, request: str | None, *, is_use: bool = True) -> int:
        if is_use:
            block.tick = 0
        return self.claim(block, request)

    def register(self, claim: int) -> int:
        index, request = self.owner[claim]
        block = self.blocks[index]
        assert block.key is not None
        known = self.by_key(block.key)
        if known is not None:
            shared = self.share(known, request)
            self.drop(claim)
            return shared
        block.is_registered = True
        shared = self.claim(block, request)
        self.drop(claim)
        return shared

    def match(self, keys: list[int], request: str | None) -> list[int]:
        found = []
        for key in keys:
            block = self.by_key(key)
            if block is None:
                break
            found.append(self.share(block, request))
        return found

    def release(self, request: str) -> list[int]:
        """Return the numbers of the reservations that fail."""
        failed = [number for number, whose, _ in self.waiting if whose == request]
        self.waiting = [one for one in self.waiting if one[1] != request]
        claims = [claim for claim, (_, whose) in self.owner.items() if whose == request]
        order = sorted(claims, reverse=True)  # the newest claim is the end of the chain
        waiting, self.waiting = self.waiting, []  # no blocks are granted in between
        for claim in order:
            self.drop(claim)
        self.waiting = waiting
        self.grant()
        return failed

    def cancel(self, number: int) -> None:
        self.waiting = [one for one in self.waiting if one[0] != number]
        self.grant()

    def save(self, keys: list[int]) -> None:
        for key in keys:
            block = self.by_key(key)
            if block is not None:
                block.is_saved = True
        self.grant()
