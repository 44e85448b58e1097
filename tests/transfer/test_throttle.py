# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Both generations of throttlers run on a virtual clock; prices of pieces are right."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from beluga_bench.system.throttlers import Rovers, TokenBucket
from hypothesis import given, settings
from hypothesis import strategies as st

from beluga._ffi import lib
from beluga.errors import TransferError
from beluga.transfer.link import LinkDirection, Speed, speed_of

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
