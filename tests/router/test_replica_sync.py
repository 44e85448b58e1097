# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Routers that tell each other of their requests: each comes to account for all of them."""

from __future__ import annotations

import pytest

from beluga.errors import RouterError
from beluga.router import Load, LoadTracker, Overlap, Query, ReplicaSync, Worker

WORKER = Worker(1, 2)
QUERY = Query(64, 16, hashes=(5, 6, 7, 8), sequence=(1, 2, 3, 4))


class Replica:
    def __init__(self, name: str, stride: int = 16) -> None:
        self.sent: list[bytes] = []
        self.tracker = LoadTracker([WORKER])
        self.sync = ReplicaSync(name, self.tracker, stride, self.sent.append)

    def hear(self, other: Replica, now: float = 0.0) -> None:
        for message in other.sent:
            self.sync.hear(message, now)
        other.sent.clear()


def test_a_lifecycle_is_told_in_batches() -> None:
    one, two = Replica("one"), Replica("two")
    one.sync.tell_add("x", WORKER, QUERY, Overlap(device=1), now=1.0)
    assert one.sync.flush(1.0) == pytest.approx(1.001)
    assert one.sent == []
    assert one.sync.flush(1.002) is None
    two.hear(one)
    assert two.tracker.load(WORKER) == Load(
        active_requests=1,
        active_prefill_tokens=48,
        active_decode_blocks=4,
        outstanding_tokens=64,
    )
    one.sync.tell_prefilled("x", 2.0)
    one.sync.tell_free("x", 2.0)
    one.sync.flush(3.0)
    assert len(one.sent) == 1
    two.hear(one)
    assert two.tracker.load(WORKER) == Load()
    assert one.sync.flush(4.0) is None


def test_a_full_batch_goes_at_once() -> None:
    one = Replica("one")
    for _ in range(256):
        one.sync.tell_free("x", 0.0)
    assert len(one.sent) == 1


def test_own_echoes_are_ignored_and_names_do_not_clash() -> None:
    one, two = Replica("one"), Replica("two")
    two.tracker.add("x", WORKER, QUERY, Overlap())
    one.sync.tell_add("x", WORKER, QUERY, Overlap(), now=0.0)
    one.sync.flush(1.0)
    one.sync.hear(one.sent[0], 1.0)
    assert one.tracker.load(WORKER) == Load()
    two.hear(one)
    assert two.tracker.load(WORKER).active_requests == 2


def test_what_does_not_fit_here_is_dropped_and_counted() -> None:
    one, two, other = Replica("one"), Replica("two"), Replica("other", stride=32)
    one.sync.tell_add("x", WORKER, QUERY, Overlap(), now=0.0)
    one.sync.tell_add("y", Worker(9), QUERY, Overlap(), now=0.0)
    one.sync.tell_add("x", WORKER, QUERY, Overlap(), now=0.0)
    one.sync.flush(1.0)
    for message in one.sent:
        other.sync.hear(message, 1.0)
    assert (other.sync.dropped, other.tracker.load(WORKER)) == (3, Load())
    two.hear(one)
    assert two.sync.dropped == 2
    assert two.tracker.load(WORKER).active_requests == 1


def test_phantoms_of_a_router_that_died_expire() -> None:
    one, two = Replica("one"), Replica("two")
    one.sync.tell_add("x", WORKER, QUERY, Overlap(), now=0.0)
    one.sync.flush(1.0)
    two.hear(one, now=1.0)
    two.tracker.sweep(300.0)
    assert two.tracker.load(WORKER).active_requests == 1
    assert two.tracker.sweep(361.0) == [("one", "x")]
    assert two.tracker.load(WORKER) == Load()


@pytest.mark.parametrize("message", [b"", b"\xc1", b"\x80"])
def test_what_is_no_batch_is_refused(message: bytes) -> None:
    with pytest.raises(RouterError, match="cannot be read"):
        Replica("one").sync.hear(message, 0.0)
