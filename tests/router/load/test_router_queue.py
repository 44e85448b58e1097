# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The router's queue: scores, order, refreshed overlap, and requests that are not ready."""

from __future__ import annotations

import pytest

from beluga.errors import AllWorkersBusyError, RouterError
from beluga.router import (
    BusyThresholds,
    Constraints,
    Query,
    Router,
    RouterQueue,
    Worker,
    make_policy,
)
from beluga.router.queue import score


def query(isl: int, jump: float = 0.0) -> Query:
    return Query(isl, 16, priority_jump=jump)


@pytest.mark.parametrize(
    ("overlap", "expected"),
    [(60, 1 / 64), (1, 1 / 1008), (64, 1.0), (99, 1.0)],
    ids=["best", "pinned", "all", "beyond"],
)
def test_wspt_matches_the_examples(overlap: int, expected: float) -> None:
    assert score("wspt", query(1024), 5.0, overlap) == expected


def drained(queue: RouterQueue[str], now: float = 0.0) -> list[str]:
    found = []
    while (item := queue.pop(now)) is not None:
        found.append(item)
    return found


def filled(order: str) -> RouterQueue[str]:
    queue: RouterQueue[str] = RouterQueue(order)
    queue.push("first", query(1600), 1.0)
    queue.push("second", query(3200), 2.0, overlap=199)
    queue.push("third", query(160), 3.0)
    return queue


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("fcfs", ["first", "second", "third"]),
        ("lcfs", ["third", "second", "first"]),
        ("wspt", ["second", "third", "first"]),
    ],
)
def test_each_policy_has_its_order(order: str, expected: list[str]) -> None:
    queue = filled(order)
    assert len(queue) == 3
    assert drained(queue) == expected
    assert len(queue) == 0


def test_a_priority_is_in_seconds_or_weight() -> None:
    queue = filled("fcfs")
    queue.push("jumps", query(16, jump=1.5), 3.1)
    assert drained(queue) == ["first", "jumps", "second", "third"]
    queue = filled("wspt")
    queue.push("jumps", query(1600, jump=15.0), 4.0)
    assert drained(queue) == ["second", "jumps", "third", "first"]


def test_strict_priority_precedes_any_score() -> None:
    queue = filled("fcfs")
    queue.push("strict", query(99999), 9.0, strict_priority=1)
    assert drained(queue)[0] == "strict"


def test_equal_requests_leave_in_the_order_of_arrival() -> None:
    queue: RouterQueue[int] = RouterQueue("wspt")
    for item in range(20):
        queue.push(item, query(64), 0.0)
    assert [queue.pop(0.0) for _ in range(20)] == list(range(20))


def test_a_stale_overlap_is_recomputed() -> None:
    requests: list[str] = []

    def overlap_of(item: str) -> int:
        requests.append(item)
        return {"second": 0, "third": 0, "first": 100}[item]

    queue = filled("wspt")
    assert queue.pop(10.0, overlap_of=overlap_of) == "second"
    assert requests == []
    queue = filled("wspt")
    assert queue.pop(13.5, overlap_of=overlap_of) == "third"  # `second` has lost its position
    assert requests == ["second", "third"]
    assert queue.pop(14.0, overlap_of=overlap_of) == "first"


def test_a_request_that_is_not_ready_keeps_its_position() -> None:
    queue = filled("fcfs")
    assert queue.pop(9.0, ready=lambda item: item == "second") == "second"
    assert queue.pop(9.0, ready=lambda item: False) is None
    assert drained(queue) == ["first", "third"]


def test_a_canceled_request_is_removed() -> None:
    queue: RouterQueue[list[int]] = RouterQueue()
    gone, stays = [1], [1]
    queue.push(gone, query(1), 0.0)
    queue.push(stays, query(1), 1.0)
    assert queue.discard(gone)
    assert not queue.discard(gone)
    assert queue.pop(2.0) is stays


def test_requests_wait_only_while_every_worker_is_over_the_threshold() -> None:
    limits = BusyThresholds(prefill_batches=16.0, max_num_batched_tokens=64)
    router = Router(make_policy("least-tokens"), wait_above=limits)
    one, two = Worker(1), Worker(2)
    router.add_worker(one)
    router.add_worker(two)
    router.route("a", query(16 * 64 + 1), Constraints(pin=one))
    assert router.choose(query(1)).worker == two
    with pytest.raises(AllWorkersBusyError, match="1 workers"):
        router.choose(query(1), Constraints(pin=one))
    router.route("b", query(16 * 64), Constraints(pin=two))
    router.choose(query(1))  # the second worker is at the threshold, not over it
    router.route("c", query(1), Constraints(pin=two))
    with pytest.raises(AllWorkersBusyError, match="2 workers"):
        router.choose(query(1))
    router.tracker.prefill_done("c")
    router.choose(query(1))


def test_an_unknown_order_is_rejected() -> None:
    with pytest.raises(RouterError, match=r"'sjf'.*fcfs, lcfs, wspt"):
        RouterQueue("sjf")
