# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Tiers (csrc/index/tier.h) compared with a naive model, and the blocks that remain after
evictions.
"""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from beluga._ffi import ffi
from beluga.simulate.memory import Leads, SimulatedTier


def ids(*blocks: int) -> object:
    return ffi.new("uint32_t[]", list(blocks))


class Naive:
    """An ordered list, coldest first, with counts of users."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.order, self.users, self.reserved = capacity, [], Counter(), 0

    def has(self, block: int) -> bool:
        return block in self.order or self.users[block] > 0

    def held(self) -> int:
        return sum(1 for count in self.users.values() if count)

    def room(self, extra: int) -> bool:
        while len(self.order) + self.held() + self.reserved + extra > self.capacity:
            if not self.order:
                return False
            self.order.pop(0)
        return True

    def touch(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            if block in self.order:
                self.order.remove(block)
                self.order.append(block)

    def put(self, blocks: list[int]) -> int:
        added = 0
        self.touch(blocks)
        for block in reversed(blocks):
            if self.has(block):
                self.touch([block])
            elif self.room(1):
                self.order.append(block)
                added += 1
        return added

    def hold(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.users[block] += 1
            if block in self.order:
                self.order.remove(block)

    def drop(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.users[block] -= 1
            if not self.users[block]:
                self.order.append(block)
        self.room(0)

    def reserve(self, count: int) -> bool:
        if self.held() + self.reserved + count > self.capacity:
            return False
        self.room(count)
        self.reserved += count
        return True

    def lead(self, blocks: list[int]) -> int:
        return next((n for n, block in enumerate(blocks) if not self.has(block)), len(blocks))


@pytest.mark.parametrize("seed", range(20))
def test_a_tier_matches_a_naive_model(seed: int) -> None:
    random = Random(seed)
    chains = [[tree * 10 + depth for depth in range(random.randint(1, 9))] for tree in range(8)]
    capacity = random.randint(0, 30)
    tier, naive = SimulatedTier(100, capacity), Naive(capacity)
    held: list[list[int]] = []
    for _ in range(400):
        chain = random.choice(chains)
        act = random.randrange(6)
        if act == 0:
            assert tier.put(ids(*chain), len(chain)) == naive.put(chain)
        elif act == 1:
            tier.touch(ids(*chain), len(chain))
            naive.touch(chain)
        elif act == 2 and len(held) < 4:
            held.append(chain)
            tier.hold(ids(*chain), len(chain))
            naive.hold(chain)
        elif act == 3 and held:
            chain = held.pop()
            tier.drop(ids(*chain), len(chain))
            naive.drop(chain)
        elif act == 4:
            count = random.randint(1, 5)
            assert tier.reserve(count) == naive.reserve(count)
        elif naive.reserved:
            tier.release(1)
            naive.reserved -= 1
        for chain in chains:
            assert tier.lead(ids(*chain), len(chain)) == naive.lead(chain)
        assert tier.stat.present == len(naive.order) + naive.held()
        assert tier.used == naive.held() + naive.reserved


def test_a_chain_is_evicted_from_its_end() -> None:
    tier = SimulatedTier(10, 4)
    tier.put(ids(0, 1, 2), 3)
    tier.put(ids(5, 6, 7), 3)
    assert tier.lead(ids(0, 1, 2), 3) == 1
    assert tier.lead(ids(5, 6, 7), 3) == 3
    assert tier.stat.evicted == 2


def test_of_a_chain_that_does_not_fit_the_beginning_is_kept() -> None:
    tier = SimulatedTier(10, 3)
    assert tier.put(ids(*range(8)), 8) == 8
    assert tier.lead(ids(*range(8)), 8) == 3


def test_hits_do_not_change_the_order_of_fifo() -> None:
    for eviction, kept in (("lru", True), ("fifo", False)):
        tier = SimulatedTier(10, 2, eviction)
        tier.put(ids(0), 1)
        tier.put(ids(1), 1)
        tier.touch(ids(0), 1)
        tier.put(ids(2), 1)
        assert bool(tier.lead(ids(0), 1)) is kept


def test_held_blocks_are_not_evicted() -> None:
    tier = SimulatedTier(10, 2)
    tier.put(ids(0, 1), 2)
    tier.hold(ids(0, 1), 2)
    assert tier.put(ids(2), 1) == 0
    assert not tier.reserve(1)
    tier.drop(ids(0, 1), 2)
    assert tier.reserve(2)
    assert tier.stat.present == 0


def test_several_tiers_are_queried_at_once() -> None:
    tiers = [SimulatedTier(10, 5) for _ in range(3)]
    tiers[0].put(ids(0, 1), 2)
    tiers[2].put(ids(0), 1)
    assert Leads(tiers)(ids(0, 1, 2), 3).tolist() == [2, 0, 1]
