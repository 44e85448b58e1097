# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The choice of csrc/index/order.c over plain lists, for blocks of one size: whose block is evicted
next.
"""

from __future__ import annotations

from collections.abc import Sequence

from models.evict import Lru


class Shares:
    """``parts`` has the number of blocks of each share, first that of tenants without a share;
    ``room`` is that of the pool.
    """

    def __init__(self, parts: Sequence[int], room: int) -> None:
        self.parts, self.room = parts, room
        self.orders = [Lru() for _ in parts]
        self.used = [0 for _ in parts]
        self.share: dict[int, int] = {}  # of each block in the pool
        self.evicted = [0 for _ in parts]

    def take(self, number: int, share: int) -> int | None:
        """Add a new block. Returns the block that was evicted for it, if any."""
        victim = None
        if sum(self.used) == self.room:
            victim = self.victim(share)
            self.evicted[self.share[victim]] += 1
            self.leave(victim)
        self.share[number] = share
        self.used[share] += 1
        return victim

    def leave(self, number: int) -> None:
        share = self.share.pop(number)
        self.used[share] -= 1
        self.orders[share].remove(number)

    def touch(self, number: int) -> None:
        self.orders[self.share[number]].touch(number)

    def victim(self, requester: int) -> int:
        excess = [
            self.used[share] + (share == requester) - part for share, part in enumerate(self.parts)
        ]
        over = [share for share in range(len(excess)) if excess[share] > 0]
        for some in over, [requester], range(len(excess)):
            for share in sorted(some, key=lambda one: -excess[one]):
                if self.orders[share].order:
                    return self.orders[share].coldest()
        raise AssertionError("no block may go")
