# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Tiers (csrc/index/tier.h) compared with a naive model, and the blocks that remain after
evictions.

Links that copies share: the reference's examples, and conservation.
"""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from beluga._ffi import ffi
from beluga.simulate.links import Clock, Links
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
    for eviction, retained in (("lru", True), ("fifo", False)):
        tier = SimulatedTier(10, 2, eviction)
        tier.put(ids(0), 1)
        tier.put(ids(1), 1)
        tier.touch(ids(0), 1)
        tier.put(ids(2), 1)
        assert bool(tier.lead(ids(0), 1)) is retained


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


GB, MB = 1e9, 1e6


def ends(speeds: list[float], copies: list[tuple[float, float, tuple[int, ...]]]) -> list[float]:
    """Return when copies of (start, bytes, links) end, in their order."""
    links = Links(speeds)
    ended = [0.0] * len(copies)

    def start(now: float, number: int) -> None:
        def then(when: float) -> None:
            ended[number] = when

        links.start(now, copies[number][1], copies[number][2], then)

    arrivals = sorted((at, number) for number, (at, _, _) in enumerate(copies))
    Clock((links,)).run(iter(arrivals), start)
    return ended


@pytest.mark.parametrize(
    ("copies", "expected_ms"),
    [
        ([(0.0, MB)], [1]),
        ([(0.0, MB)] * 2, [2, 2]),
        ([(0.0, MB), (0.0005, MB)], [1.5, 2]),
        ([(0.0, MB)] * 10, [10] * 10),
    ],
)
def test_processor_sharing_matches_the_examples(
    copies: list[tuple[float, float]], expected_ms: list[float]
) -> None:
    ends_s = ends([GB], [(at, size, (0,)) for at, size in copies])
    assert [1e3 * at for at in ends_s] == pytest.approx(expected_ms, rel=1e-3)


def test_the_remaining_time_is_the_sum_of_the_others_remaining_bytes() -> None:
    """The deadline of r is the sum over j of min(r_j, r) / B."""
    random = Random(1)
    sizes = [random.uniform(1, 50) * MB for _ in range(12)]
    expected = [sum(min(other, size) for other in sizes) / GB for size in sizes]
    assert ends([GB], [(0.0, size, (0,)) for size in sizes]) == pytest.approx(expected, rel=1e-3)


def test_copies_have_the_speed_of_their_slowest_link() -> None:
    # Two copies use the slow shared link 0. The third has link 1 except for what the second takes
    # of it.
    ends_s = ends([2 * GB, 4 * GB], [(0, GB, (0,)), (0, GB, (0, 1)), (0, 3 * GB, (1,))])
    assert ends_s == pytest.approx([1, 1, 1], rel=1e-3)


def test_links_are_work_conserving() -> None:
    random = Random(2)
    copies = [(random.uniform(0, 0.01), random.uniform(1, 9) * MB, (0,)) for _ in range(200)]
    ends_s = ends([GB], copies)
    assert max(ends_s) == pytest.approx(sum(size for _, size, _ in copies) / GB, abs=0.011)
    assert all(
        end - at >= size / GB * 0.999 for end, (at, size, _) in zip(ends_s, copies, strict=True)
    )


def test_links_report_the_cost_of_sharing() -> None:
    links = Links([GB])
    ended: list[float] = []
    for _ in range(2):
        links.start(1.0, MB, (0,), ended.append)
    links.end(1.001)  # no copy has made progress yet
    assert (ended, links.count) == ([], 0)
    links.end(links.finish)
    assert ended == pytest.approx([1.002] * 2)
    assert (links.count, links.moved) == (2, [2 * MB])
    assert (links.busy_s, links.waited_s) == (pytest.approx(0.004), pytest.approx(0.002))
    assert links.finish == float("inf")


def test_a_single_copy_does_not_wait() -> None:
    links = Links([2 * GB])
    slow = links.add_link(GB / 3)
    links.start(0.0, MB, (0, slow), lambda when: None)
    assert links.finish == pytest.approx(0.003)
    links.end(links.finish)
    assert (links.count, links.waited_s) == (1, 0)
    assert (slow, links.speeds, links.moved) == (1, [2 * GB, GB / 3], [MB, MB])


def test_bandwidth_left_by_a_slow_link_is_shared_by_the_others() -> None:
    links = Links([4 * GB, GB, 3 * GB])
    for route in ((0, 1), (0, 1), (0, 2), (0, 2), (2,)):
        links.start(0.0, GB, route, lambda when: None)
    assert [copy.rate / GB for copy in links.copies] == pytest.approx([0.5, 0.5, 1, 1, 1])


def test_events_are_ordered_by_time_then_by_creation() -> None:
    links = Links([GB])
    clock = Clock((links,))
    seen: list[tuple[str, float]] = []

    def arrive(now: float, name: str) -> None:
        seen.append((name, now))
        if name == "arrival":
            for event in ("event", "later"):
                clock.at(3.0, lambda when, what: seen.append((what, when)), event)
            links.start(now, GB, (0,), lambda when: seen.append(("copy", when)))
            links.start(now, 2 * GB, (0,), lambda when: seen.append(("last copy", when)))

    assert clock.run(iter([(1.0, "arrival"), (3.0, "second")]), arrive) == 4
    assert seen == [("arrival", 1), ("second", 3), ("event", 3), ("later", 3), ("copy", 3),
                    ("last copy", 4)]  # fmt: skip


def test_the_clock_does_not_advance_without_events() -> None:
    assert Clock(()).run(iter(()), lambda now, request: None) == 0
