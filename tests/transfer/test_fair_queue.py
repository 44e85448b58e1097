# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The fair queue against Seastar's own cases, and throttlers on a virtual clock."""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque

import numpy as np
import pytest
from beluga_bench.system.throttlers import Queue, Rovers, TokenBucket
from hypothesis import given, settings
from hypothesis import strategies as st

from beluga._ffi import lib
from beluga.errors import TransferError
from beluga.transfer.link import LinkDirection, Speed, speed_of

# ---- Our fair queue passes Seastar's test cases, with the ratios that Seastar expects.


WEIGHT = 1000
FORGIVING = 50_000


class Fixture:
    """Pieces are named after their class."""

    def __init__(self) -> None:
        self.direction = LinkDirection(limit=1 << 40, forgiving=FORGIVING, now_ns=0)
        self.queue = Queue(self.direction, now_ns=0)
        self.done: Counter[int] = Counter()

    def push(self, node: int, count: int = 1, *, weight: int = 1) -> None:
        for _ in range(count):
            self.queue.push(node, weight * WEIGHT, node)

    def tick(self, count: int = 1) -> int:
        """Serve up to that many pieces. Returns their number."""
        served = 0
        while served < count and (piece := self.queue.pop()) is not None:
            self.done[piece.id] += 1
            self.queue.complete(piece.handle, 0)
            served += 1
        return served

    def counts(self, *nodes: int) -> tuple[int, ...]:
        return tuple(self.done[node] for node in nodes)

    def verify(self, nodes: list[int], ratios: list[float], slack: int = 1) -> None:
        first = self.done[nodes[0]]
        for node, ratio in zip(nodes, ratios, strict=True):
            assert ratio * (first - slack) <= self.done[node] <= ratio * (first + slack), (
                self.counts(*nodes)
            )


def test_two_equal_classes_are_served_equally() -> None:
    fix = Fixture()
    a, b = fix.direction.add(10), fix.direction.add(10)
    fix.push(a, 100)
    fix.push(b, 100)
    fix.tick(10)
    assert fix.counts(a, b) == (5, 5)
    fix.tick(90)
    assert fix.counts(a, b) == (50, 50)


def test_four_equal_classes_are_served_equally() -> None:
    fix = Fixture()
    nodes = [fix.direction.add(10) for _ in range(4)]
    for node in nodes:
        fix.push(node, 100)
    fix.tick(200)
    fix.verify(nodes, [1, 1, 1, 1])


@pytest.mark.parametrize("case", ["shares 10:20", "weights 2:1"])
def test_shares_and_weights_are_followed(case: str) -> None:
    fix = Fixture()
    a, b = fix.direction.add(10), fix.direction.add(20 if case == "shares 10:20" else 10)
    fix.push(a, 100, weight=1 if case == "shares 10:20" else 2)
    fix.push(b, 100)
    fix.tick(10)
    fix.verify([a, b], [1, 2])
    assert fix.counts(a, b) in ((4, 6), (3, 7))
    fix.tick(90)
    fix.verify([a, b], [1, 2])
    assert fix.counts(a, b) in ((34, 66), (33, 67))


def test_a_class_with_the_whole_link_yields_to_a_waking_class() -> None:
    fix = Fixture()
    a, b = fix.direction.add(1), fix.direction.add(1)
    fix.push(b, 100)
    fix.tick(100)
    fix.done.clear()
    fix.push(a, 20)
    fix.push(b, 20)
    fix.tick(20)
    assert fix.done[b] <= 1
    assert sum(fix.counts(a, b)) == 20


def test_a_waking_class_has_a_bounded_head_start() -> None:
    fix = Fixture()
    a, b = fix.direction.add(1), fix.direction.add(1)
    fix.push(a, 100)
    fix.tick(100)
    fix.done.clear()
    fix.push(a, 100)
    fix.push(b, 100)
    fix.tick(100)
    fix.verify([a, b], [1, 3], slack=2)
    assert fix.counts(a, b) == (25, 75)


def test_changed_shares_apply_immediately() -> None:
    fix = Fixture()
    a, b = fix.direction.add(20), fix.direction.add(10)
    fix.push(a, 500)
    fix.push(b, 500)
    fix.tick(250)
    fix.direction.set_shares(a, 10)
    fix.direction.set_shares(b, 20)
    fix.tick(250)
    fix.verify([a, b], [1, 1], slack=2)


@pytest.mark.parametrize(("shares", "ratio", "ticks"), [(10, 1, 2), (20, 2, 3)])
def test_a_long_run_keeps_the_ratio(shares: int, ratio: int, ticks: int) -> None:
    fix = Fixture()
    a, b = fix.direction.add(10), fix.direction.add(shares)
    fix.push(a, 20_000)
    fix.push(b, 20_000)
    for _ in range(1000):
        fix.tick(ticks)
    fix.verify([a, b], [1, ratio], slack=2)
    assert fix.counts(a, b) == (1000, 1000 * ratio)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_random_shares_and_weights_are_followed(seed: int, grouped: bool) -> None:
    rng = random.Random(seed)
    fix = Fixture()
    parent = fix.direction.add(rng.randint(1, 5)) if grouped else 0
    shares = [rng.randint(1, 5) for _ in range(rng.randint(2, 5))]
    weights = [rng.randint(1, 5) for _ in shares]
    nodes = [fix.direction.add(share, parent=parent) for share in shares]
    for node, weight in zip(nodes, weights, strict=True):
        fix.push(node, 3000, weight=weight)
    fix.tick(3000)
    right = [share / weight for share, weight in zip(shares, weights, strict=True)]
    for node, share in zip(nodes, right, strict=True):
        expected = 3000 * share / sum(right)
        assert abs(fix.done[node] - expected) <= 0.05 * expected + 1


def test_nested_classes_wake_one_by_one() -> None:
    for length in range(1, 5):
        for order in itertools.product(range(7), repeat=length):
            fix = nested()
            for leaf in order:
                fix.push(fix.leaves[leaf])
            assert fix.tick(length) == length
            assert fix.tick() == 0
            fix.queue.close()


class Nested(Fixture):
    leaves: list[int]


def nested() -> Nested:
    """Seven classes: some at the top, some in a group, some in a subgroup."""
    fix = Nested()
    outer = fix.direction.add(10)
    inner = fix.direction.add(10, parent=outer)
    parents = [0, 0, outer, outer, inner, inner, 0]
    fix.leaves = [fix.direction.add(10, parent=parent) for parent in parents]
    return fix


@pytest.mark.parametrize(
    ("pushes", "steps"),
    [
        (
            [("c", 300), ("a", 200), ("b", 100), None],
            [(0, 0, 100), (75, 0, 125), (75, 50, 175), (100, 75, 225)],
        ),
        (
            [("a", 300), ("c", 200), ("b", 100), None],
            [(100, 0, 0), (125, 0, 75), (125, 50, 125), (150, 75, 175)],
        ),
        (
            [("a", 300), ("b", 200), ("c", 100), ("c", 50)],
            [(100, 0, 0), (125, 75, 0), (137, 88, 75), (162, 113, 125)],
        ),
    ],
)
def test_groups_have_a_bounded_head_start_like_classes(
    pushes: list[tuple[str, int] | None], steps: list[tuple[int, int, int]]
) -> None:
    fix = Fixture()
    group = fix.direction.add(10)
    node = {"a": fix.direction.add(10, parent=group), "b": fix.direction.add(10, parent=group)}
    node["c"] = fix.direction.add(10)
    for push, step in zip(pushes, steps, strict=True):
        if push is not None:
            fix.push(node[push[0]], push[1])
        fix.tick(100)
        assert fix.counts(node["a"], node["b"], node["c"]) == step


def test_a_canceled_piece_costs_nothing_and_is_not_admitted() -> None:
    fix = Fixture()
    a, b = fix.direction.add(10), fix.direction.add(10)
    dropped = [fix.queue.push(a, WEIGHT, a) for _ in range(50)]
    fix.push(a, 50)
    fix.push(b, 100)
    assert all(fix.queue.cancel(handle) for handle in dropped)
    assert not fix.queue.cancel(dropped[0])
    fix.tick(100)
    assert fix.counts(a, b) == (50, 50)
    assert fix.tick(100) == 50
    assert fix.queue.stat().queued == 0


def test_a_piece_that_was_admitted_cannot_be_cancelled() -> None:
    fix = Fixture()
    a = fix.direction.add(10)
    handle = fix.queue.push(a, WEIGHT, 7)
    admitted = fix.queue.pop()
    assert admitted is not None
    assert admitted.handle == handle
    assert not fix.queue.cancel(handle)
    fix.queue.complete(handle, 0)
    fix.push(a)  # takes the place of the first, under another handle
    assert not fix.queue.cancel(handle)
    assert fix.tick() == 1


def test_an_unplugged_class_waits_and_delays_no_other() -> None:
    fix = Fixture()
    group = fix.direction.add(10)
    a, b, c = (
        fix.direction.add(10, parent=group),
        fix.direction.add(10, parent=group),
        fix.direction.add(10),
    )
    for node in (a, b, c):
        fix.push(node, 20)
    fix.queue.plug(a, plugged=False)
    fix.tick(20)
    assert fix.counts(a, b, c) == (0, 10, 10)
    fix.queue.plug(group, plugged=False)
    fix.tick(5)
    assert fix.counts(a, b, c) == (0, 10, 15)
    fix.push(b)  # does not activate it
    fix.tick(5)
    assert fix.counts(a, b, c) == (0, 10, 20)
    fix.queue.plug(group, plugged=True)
    fix.tick(11)
    assert fix.counts(a, b, c) == (0, 21, 20)
    assert fix.tick() == 0
    fix.queue.plug(a, plugged=True)
    assert fix.tick(100) == 20


def test_counters_wrap_correctly() -> None:
    """The queue compares distances of counters, so a counter may wrap at 64 bits."""
    fix = Fixture()
    a, b = fix.direction.add(1), fix.direction.add(1)
    for node in (0, a, b):
        fix.direction.handle.nodes[node].accumulated = 2**64 - 10 * WEIGHT
        fix.direction.handle.nodes[node].last = 2**64 - 10 * WEIGHT
    fix.push(a, 100)
    fix.push(b, 100)
    fix.tick(100)
    assert fix.counts(a, b) == (50, 50)
    assert fix.direction.handle.nodes[a].accumulated < 100 * WEIGHT


def test_a_group_is_served_again_after_all_its_classes_were_stopped() -> None:
    """Its class has used up its bandwidth; only time makes it eligible again, without another
    push.
    """
    fix = Fixture()
    group, other = fix.direction.add(10), fix.direction.add(10)
    limited = fix.direction.add(10, parent=group)
    mib, second = 1 << 20, 10**9
    fix.direction.limit(limited, mib, burst=mib, now_ns=0)
    for _ in range(8):
        fix.queue.push(limited, WEIGHT, limited, size=mib)
    fix.push(other)
    served = []
    for now_s in range(20):
        while (piece := fix.queue.poll(now_s * second)) is not None:
            served.append((piece.id, now_s))
            fix.queue.complete(piece.handle, now_s * second)
    assert [kind for kind, _ in served].count(other) == 1
    times = [now_s for kind, now_s in served if kind == limited]
    assert len(times) == 8
    assert times[-1] >= 4  # and the class was suspended


def test_a_group_is_served_again_after_its_pieces_waited_for_their_device() -> None:
    """The queue is polled continuously, so no waiter is woken; no other piece is pushed."""
    fix = Fixture()
    group, other = fix.direction.add(10), fix.direction.add(10)
    gated = fix.direction.add(10, parent=group)
    device = TokenBucket(1_000_000, WEIGHT, now_ns=0)  # two pieces, then one per millisecond
    fix.queue.add_device(device)
    for _ in range(4):
        fix.queue.push(gated, WEIGHT, gated, device_tokens=[WEIGHT])
    for _ in range(8):
        fix.queue.push(other, WEIGHT, other, device_tokens=[0])
    served = []
    for now_ns in range(0, 8_000_000, 100_000):
        while (piece := fix.queue.poll(now_ns)) is not None:
            served.append((piece.id, now_ns))
            fix.queue.complete(piece.handle, now_ns)
    assert [now_ns for kind, now_ns in served if kind == other] == [0] * 8
    assert [now_ns // 1_000_000 for kind, now_ns in served if kind == gated] == [0, 0, 1, 2]


def test_a_waking_group_has_a_bounded_head_start() -> None:
    fix = Fixture()
    group, other = fix.direction.add(10), fix.direction.add(10)
    sleeper = fix.direction.add(10, parent=group)
    fix.push(sleeper, 10)
    fix.push(other, 310)
    fix.tick(220)
    fix.done.clear()
    fix.push(sleeper, 200)
    fix.tick(100)
    assert fix.counts(sleeper, other) == (75, 25)


def test_the_smallest_piece_is_charged_for() -> None:
    """The cost is below the shares, so a class of such pieces would always come first."""
    fix = Fixture()
    a, b = fix.direction.add(10), fix.direction.add(10)
    for _ in range(40):
        fix.queue.push(a, 1, a)
        fix.queue.push(b, 10, b)
    fix.tick(20)
    assert fix.counts(a, b) == (10, 10)


def test_an_unplugged_class_does_not_delay_other_processes() -> None:
    """A process does not announce a class that cannot be served to the other members of its
    link.
    """
    direction = LinkDirection(limit=WEIGHT, forgiving=FORGIVING, capped=True, now_ns=0)
    first, second = Queue(direction, now_ns=0), Queue(direction, now_ns=0)
    a, b = direction.add(1000), direction.add(10)
    first.push(a, WEIGHT, a)
    first.plug(a, plugged=False)
    second.push(b, WEIGHT, b)
    admitted = []
    for now_ns in range(0, 10_000, 1000):
        assert first.poll(now_ns) is None
        if (piece := second.poll(now_ns)) is not None:
            admitted.append((piece.id, now_ns))
    assert admitted == [(b, 0)]
    first.close()
    second.close()


# ---- Both generations of throttlers run on a virtual clock; prices of pieces are right.


S = 10**9
HOUR = 3600 * S


def test_ten_tickets_are_admitted_and_the_eleventh_waits() -> None:
    rovers = Rovers(10, 1000)
    tickets = [rovers.grab(1, 10) for _ in range(11)]
    assert [rovers.ready(ticket) for ticket in tickets] == [True] * 10 + [False]
    rovers.complete(1, 10)
    assert rovers.ready(tickets[10])


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 900)), max_size=60), st.randoms())
def test_the_two_rovers_bound_pieces_in_flight_and_keep_their_order(
    requested: list[tuple[int, int]], random: object
) -> None:
    rovers = Rovers(4, 1000)
    waiting = deque((rovers.grab(*piece), piece) for piece in requested)
    flying: list[tuple[int, int]] = []
    while waiting or flying:
        while waiting and rovers.ready(waiting[0][0]):
            flying.append(waiting.popleft()[1])
        assert not any(rovers.ready(ticket) for ticket, _ in waiting)
        assert sum(weight for weight, _ in flying) <= 4
        assert sum(size for _, size in flying) <= 1000
        assert flying  # one of them can always proceed
        rovers.complete(*flying.pop(random.randrange(len(flying))))  # type: ignore[attr-defined]
    assert rovers.ready(rovers.grab(4, 1000))  # all of it is there again
    assert not rovers.ready(rovers.grab(0, 1))


def test_time_fills_the_bucket() -> None:
    bucket = TokenBucket(1, 1, threshold=0, now_ns=0)
    assert bucket.lacks(bucket.grab(1)) == 1
    bucket.replenish(S)
    assert bucket.lacks(1) == 0
    ticket = bucket.grab(2)  # one token that is unused, and one that is due
    assert bucket.lacks(ticket) == 1
    bucket.replenish(2 * S)
    assert bucket.lacks(ticket) == 0


def test_time_alone_does_not_fill_a_capped_bucket() -> None:
    bucket = TokenBucket(1, 1, threshold=0, capped=True, now_ns=0)
    bucket.grab(1)
    bucket.replenish(S)
    ticket = bucket.grab(1)
    bucket.replenish(2 * S)
    assert bucket.lacks(ticket) == 1
    bucket.release(1)
    assert bucket.lacks(ticket) == 1
    bucket.replenish(3 * S)
    assert bucket.lacks(ticket) == 0


@pytest.mark.parametrize("capped", [False, True])
def test_a_bucket_never_holds_more_than_its_limit(capped: bool) -> None:
    bucket = TokenBucket(1000, 50, capped=capped, now_ns=0)
    bucket.replenish(HOUR)
    bucket.replenish(2 * HOUR)
    assert bucket.lacks(bucket.grab(50)) == 0
    assert bucket.lacks(bucket.grab(1)) == 1


def test_a_bucket_is_full_after_months_without_requests() -> None:
    """The tokens of months do not fit into 64 bits."""
    bucket = TokenBucket(10**12, 1000, now_ns=0)
    bucket.replenish(0)
    ticket = bucket.grab(2000)
    assert bucket.lacks(ticket) == 1000
    bucket.replenish(2**64 // 1000 + 1)  # 2**64 + 384 tokens
    assert bucket.lacks(ticket) == 0


def test_replenishing_starts_at_a_threshold() -> None:
    bucket = TokenBucket(1000, 50, threshold=10, now_ns=0)
    bucket.replenish(S)
    ticket = bucket.grab(60)
    bucket.replenish(S + 9_000_000)
    assert bucket.lacks(ticket) == 10
    bucket.replenish(S + 10_000_000)
    assert bucket.lacks(ticket) == 0


def test_refunded_tokens_are_available_at_once() -> None:
    for capped in (False, True):
        bucket = TokenBucket(1000, 50, capped=capped, now_ns=0)
        bucket.replenish(0)
        bucket.grab(50)
        bucket.refund(20)
        assert bucket.lacks(bucket.grab(20)) == 0
        assert bucket.lacks(bucket.grab(1)) == 1


def test_a_stalled_or_backward_clock_adds_no_tokens() -> None:
    bucket = TokenBucket(1000, 50, now_ns=5 * S)
    bucket.replenish(5 * S)
    ticket = bucket.grab(60)
    for now in (5 * S, 0):
        bucket.replenish(now)
        assert bucket.lacks(ticket) == 10


@pytest.mark.parametrize("capped", [False, True])
def test_counters_of_buckets_wrap_correctly(capped: bool) -> None:
    bucket = TokenBucket(1000, 50, capped=capped, now_ns=0)
    start = 2**64 - 75
    bucket.handle.tail = bucket.handle.head = start
    bucket.handle.ceil = (start + 50) % 2**64
    now, used = 0, 0
    for _ in range(20):
        now += S // 20
        bucket.replenish(now)
        assert bucket.lacks(bucket.grab(50)) == 0
        bucket.release(50)
        used += 50
    assert int(bucket.handle.tail) == (start + used) % 2**64 < 2000


@pytest.mark.parametrize(("rate", "limit"), [(0, 1), (1, 0), (2**64 // 3600, 1)])
def test_an_impossible_bucket_is_rejected(rate: int, limit: int) -> None:
    with pytest.raises(OSError, match="token bucket"):
        TokenBucket(rate, limit, now_ns=0)


def test_the_time_of_tokens_follows_the_rate() -> None:
    assert TokenBucket(1000, 50, now_ns=0).duration_ns(3) == 3_000_000
    bucket = TokenBucket(3, 50, now_ns=0)
    assert bucket.duration_ns(1) == 333_333_334
    bucket.handle.rate = 0  # a limit that was lifted meanwhile
    assert bucket.duration_ns(1) == 0


def test_a_piece_takes_the_time_of_an_operation_and_of_its_bytes() -> None:
    slow = Speed(1 << 30, 15_000)  # a MiB in 976.5625 us, an operation in 66.6667 us
    assert slow.tokens(1 << 20) == 1_043_229_167
    assert slow.tokens(1 << 20, operations=2) == 1_109_895_833
    assert Speed(64 << 30, 240_000).tokens(1 << 20) == 19_425_456


def test_the_longest_piece_follows_from_the_limit() -> None:
    speed = Speed(1 << 30)
    limit = int(speed.tokens(300_000))
    assert speed.longest(limit) == 256 << 10
    assert speed.longest(10**13) == 16 << 20
    assert speed.longest(0) == 1


def test_speeds_are_numbers_or_fields() -> None:
    assert speed_of(5) == speed_of({"bytes_per_s": 5}) == speed_of(Speed(5)) == Speed(5)
    assert Speed(10**9).tokens(np.array([0, 1, 1000])).tolist() == [0, 1000, 1_000_000]
    for wrong in (0, -1, {"bytes_per_s": 1, "ops_per_s": -1}):
        with pytest.raises(TransferError, match="not a speed"):
            speed_of(wrong)


def test_python_and_c_use_the_same_token_unit() -> None:
    direction = LinkDirection(limit=10, now_ns=0)
    assert int(direction.handle.bucket.rate) == 10**12
    assert lib.bl_direction_valid(direction.handle)


def test_time_is_rounded_to_the_nearest_token() -> None:
    bucket = TokenBucket(1, 10, now_ns=0)
    bucket.replenish(0)
    ticket = bucket.grab(12)
    assert bucket.lacks(ticket) == 2
    bucket.replenish(S // 2 - 1)
    assert bucket.lacks(ticket) == 2
    bucket.replenish(S // 2)
    assert bucket.lacks(ticket) == 1
    bucket.replenish(S // 2 + 3 * S // 2 - 1)
    assert bucket.lacks(ticket) == 0
