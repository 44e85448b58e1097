# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Queues before a link in virtual time: the waits of onboards, the shares, and the bandwidth of
classes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from beluga_bench.system.linkmodel import BLOCK, OFFLOAD, ONBOARD, PIECE, Outcome, run
from beluga_bench.system.orders import Fair
from beluga_bench.system.throttlers import Queue, TokenBucket

from beluga.transfer.link import BURST, TAU_NS, LinkDirection, Speed

# ---- Queues before a link in virtual time: the waits of onboards, the shares, and the bandwidth
# of classes. The link is that of the benchmark: pieces in flight share its bandwidth equally.


RATE = 26_000_000_000
MS = 1_000_000
S = 1000 * MS
MIB = 1 << 20


def p99(outcome: Outcome) -> float:
    return float(np.percentile(outcome.latencies_ns, 99))


def judged(queues: Callable[[], Fair], regular: bool) -> tuple[Outcome, Outcome]:
    """Onboards that request 30 % of the link, alone and with endless offloads."""
    idle, loaded = (
        run(
            queues(),
            bytes_per_s=RATE,
            onboard_share=0.3,
            offload=offload,
            duration_ns=60 * MS,
            regular=regular,
        )
        for offload in (False, True)
    )
    return idle, loaded


@pytest.mark.parametrize("regular", [True, False])
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("capped", [True, False])
def test_endless_offloads_hardly_delay_onboards(
    capped: bool, processes: int, regular: bool
) -> None:
    """The judged case: onboards request 30 % in blocks of 2.5 MiB, shares are 8 to 1. With an
    uncapped bucket (ours are capped) the bursts of all processes would queue in the link.
    """
    idle, loaded = judged(lambda: Fair(RATE, capped=capped, processes=processes), regular)
    assert len(loaded.latencies_ns) > 150
    assert p99(loaded) <= (1.3 if capped or processes == 1 else 1.6) * p99(idle)
    assert loaded.utilisation >= 0.95
    carried = sum(loaded.bytes.values()) / (RATE * 0.06)
    assert carried >= 0.95
    assert loaded.bytes[OFFLOAD] >= 0.95 * (sum(loaded.bytes.values()) - idle.bytes[ONBOARD])


class Spread(Fair):
    """Each process has blocks of both classes."""

    def queue_of(self, kind: int, block: int) -> Queue:
        return self.queues[block % len(self.queues)]


@pytest.mark.parametrize("regular", [True, False])
@pytest.mark.parametrize("processes", [3, 8])
def test_offloads_of_many_processes_hardly_delay_onboards(processes: int, regular: bool) -> None:
    """Each one may have reserved a piece when an onboard arrives, which is more than may be in
    flight.
    """
    idle, loaded = judged(lambda: Spread(RATE, processes=processes), regular)
    assert p99(loaded) <= 1.3 * p99(idle)
    assert sum(loaded.bytes.values()) >= 0.95 * RATE * 0.06


@pytest.mark.parametrize("processes", [1, 2])
def test_shares_are_followed_on_a_saturated_link(processes: int) -> None:
    loaded = run(
        Fair(RATE, processes=processes),
        bytes_per_s=RATE,
        onboard_share=3,
        offload=True,
        duration_ns=100 * MS,
        regular=True,
    )
    after = [(kind, size) for now, kind, size in loaded.trace if now > 20 * MS]
    totals = {kind: sum(s for k, s in after if k == kind) for kind in (ONBOARD, OFFLOAD)}
    assert totals[ONBOARD] / totals[OFFLOAD] == pytest.approx(8, rel=0.05)


@pytest.mark.parametrize("woken", [ONBOARD, OFFLOAD])
def test_a_waking_class_has_the_link_alone_for_at_most_tau(woken: int) -> None:
    """One class uses the link for a while; then the other one arrives with more than the link's
    bandwidth.
    """
    order = Fair(RATE)
    other = ONBOARD + OFFLOAD - woken
    for block in range(400):
        order.submit(other, block, 0)
    now, ends = 0, []
    woke = 20 * MS
    submitted = False
    while now < 40 * MS:
        piece = order.start(now)
        if piece is None:
            now += max(1, min(order.wait_ns, MS))
            continue
        now += int(piece.size * 1e9 / RATE)
        order.finish(piece, now)
        ends.append((now, piece.kind))
        if now >= woke and not submitted:
            submitted = True
            for block in range(400, 800):
                order.submit(woken, block, now)
    alone = [at for at, kind in ends if kind == other and at > woke + MS // 10]
    piece_ns = PIECE * 1e9 / RATE
    gaps = np.diff([woke, *alone])
    assert max(gaps) <= TAU_NS + 10 * piece_ns
    assert sum(kind == woken for _, kind in ends) > 100


class Limited:
    """A direction whose classes are limited. It is drained at full bandwidth, millisecond by
    millisecond.
    """

    def __init__(self) -> None:
        self.speed = Speed(10 << 30)
        self.direction = LinkDirection(limit=int(self.speed.tokens(2 << 20)), now_ns=0)
        self.queue = Queue(self.direction, now_ns=0)
        self.moved: dict[int, int] = {}

    def run(self, nodes: list[int], duration_ns: int, *, size: int = 128 << 10) -> None:
        now = 0
        waiting = dict.fromkeys(nodes, 0)
        self.moved = dict.fromkeys(nodes, 0)
        while now < duration_ns:
            for node in nodes:
                while waiting[node] < 4:
                    tokens = int(self.speed.tokens(size))
                    self.queue.push(node, tokens, node, size=size, now_ns=now)
                    waiting[node] += 1
            if (piece := self.queue.poll(now)) is not None:
                waiting[piece.id] -= 1
                self.moved[piece.id] += size
                self.queue.complete(piece.handle, now)
            else:
                now += max(self.queue.wait_ns, 1000)


LIMIT = 100 * MIB
SLACK = BURST + (128 << 10)


def test_a_limited_class_does_not_exceed_its_limit() -> None:
    limited = Limited()
    node = limited.direction.add(10)
    limited.direction.limit(node, LIMIT, now_ns=0)
    limited.run([node], 4 * S)
    assert 0.97 * 4 * LIMIT <= limited.moved[node] <= 1.15 * 4 * LIMIT


def test_a_limited_group_does_not_exceed_its_limit() -> None:
    limited = Limited()
    group = limited.direction.add(10)
    nodes = [limited.direction.add(10, parent=group) for _ in range(3)]
    limited.direction.limit(group, LIMIT, now_ns=0)
    limited.run(nodes, 2 * S)
    assert 0.97 * 2 * LIMIT <= sum(limited.moved.values()) <= 2 * LIMIT + SLACK


def test_limits_of_classes_apply_inside_a_limited_group() -> None:
    limited = Limited()
    group = limited.direction.add(10)
    nodes = [limited.direction.add(10, parent=group) for _ in range(2)]
    for node in nodes:
        limited.direction.limit(node, 70 * MIB, now_ns=0)
    limited.direction.limit(group, LIMIT, now_ns=0)
    limited.run(nodes, 2 * S)
    for moved in limited.moved.values():
        assert moved <= 2 * 70 * MIB + SLACK
    assert 0.97 * 2 * LIMIT <= sum(limited.moved.values()) <= 2 * LIMIT + SLACK


def test_shares_are_followed_inside_a_limited_group() -> None:
    limited = Limited()
    group = limited.direction.add(10)
    nodes = [limited.direction.add(shares, parent=group) for shares in (400, 100)]
    limited.direction.limit(group, LIMIT, now_ns=0)
    limited.run(nodes, 5 * S, size=32 << 10)
    assert 3.95 <= limited.moved[nodes[0]] / limited.moved[nodes[1]] <= 4.05


def test_a_removed_limit_has_no_effect() -> None:
    limited = Limited()
    node = limited.direction.add(10)
    limited.direction.limit(node, LIMIT, now_ns=0)
    limited.direction.limit(node, 0, now_ns=0)
    limited.run([node], S // 10)
    assert limited.moved[node] >= 0.95 * (10 << 30) / 10


def test_a_slow_device_delays_only_its_own_copies() -> None:
    direction = LinkDirection(limit=10**9, now_ns=0)
    queue = Queue(direction, now_ns=0)
    fast, slow = (TokenBucket(10**12, 10**9, now_ns=0) for _ in range(2))
    for device in (slow, fast):
        device.replenish(0)
        queue.add_device(device)
    slow.grab(10**9)  # of another process, worth one millisecond
    a, b = direction.add(1000), direction.add(1)
    queue.push(a, 10, 1, device_tokens=[10**6, 0])
    queue.push(b, 10, 2, device_tokens=[0, 10**6])
    first = queue.poll(0)
    assert first is not None
    assert first.id == 2
    assert queue.poll(0) is None
    assert queue.wait_ns == 1000
    then = queue.poll(1000)
    assert then is not None
    assert then.id == 1


def test_canceling_returns_the_tokens_of_the_device() -> None:
    direction = LinkDirection(limit=10**9, now_ns=0)
    queue = Queue(direction, now_ns=0)
    device = TokenBucket(10**12, 10**9, now_ns=0)
    queue.add_device(device)
    node = direction.add(1)
    device.replenish(0)
    device.grab(10**9)
    handle = queue.push(node, 10, 1, device_tokens=[10**9])
    assert queue.poll(0) is None
    assert queue.cancel(handle)
    assert queue.poll(0) is None
    assert queue.stat().queued == 0
    device.replenish(MS)
    assert device.lacks(device.grab(10**9)) == 0


def test_a_piece_larger_than_the_bucket_is_admitted_at_full_cost() -> None:
    for capped in (False, True):
        direction = LinkDirection(limit=MS * 1000, capped=capped, now_ns=0)  # a millisecond
        queue = Queue(direction, now_ns=0)
        node = direction.add(1)
        for piece in range(10):
            queue.push(node, 5 * MS * 1000, piece)
        now, count = 0, 0
        while count < 10:
            piece_now = queue.poll(now)
            if piece_now is None:
                now += queue.wait_ns
                continue
            count += 1
            queue.complete(piece_now.handle, now)
        assert 44 * MS <= now <= 47 * MS


def test_a_link_that_lags_raises_the_cost_of_pieces() -> None:
    """Without a cap, the flow ratio limits classes that start pieces faster than these complete."""
    direction = LinkDirection(limit=MS * 1000, now_ns=0)
    queue = Queue(direction, goal_ns=MS // 10, now_ns=0)
    node = direction.add(1)
    flying: list[tuple[int, int]] = []
    free_ns, now, started = 0, 0, 0
    ratios = []
    while now < S:
        if queue.stat().queued < 4:
            queue.push(node, 100 * 1000 * 1000, 1)  # 0.1 ms
        piece = queue.poll(now)
        if piece is not None:
            started += 1
            free_ns = max(free_ns, now) + 2 * 100 * 1000  # the link takes twice as long
            flying.append((free_ns, piece.handle))
            continue
        now += min(queue.wait_ns, MS)
        while flying and flying[0][0] <= now:
            queue.complete(flying.pop(0)[1], now)
        ratios.append(queue.stat().flow_ratio)
    assert max(ratios) > 1.1
    assert started < 0.95 * 10_000
    assert direction.handle.used == started * 10**8


def test_a_request_that_no_engine_can_take_now_blocks_no_other() -> None:
    """Two engines: the one with the preferred class is busy, so the other one continues."""
    direction = LinkDirection(limit=1000, now_ns=0)
    better, worse = Queue(direction, now_ns=0), Queue(direction, now_ns=0)
    a, b = direction.add(1000), direction.add(1)
    for piece in range(8):
        better.push(a, 1000, piece)
        worse.push(b, 1000, piece)
    assert worse.poll(0) is not None
    assert better.poll(10) is not None
    assert better.poll(10) is None  # announces that it would take more
    for now in range(20, 40):
        assert worse.poll(now) is None
    assert worse.stat().yields > 0
    better.rest()
    assert worse.poll(41) is not None
    worse.rest()
    while better.poll(50):
        pass
    assert better.stat().queued > 0
    assert worse.poll(60) is None
    assert worse.poll(10 * MS) is not None  # the preferred one has not polled for long: it sleeps


def test_a_canceled_piece_releases_its_reservation() -> None:
    """Immediately: its queue may not be polled for long, and other queues would lack the tokens."""
    direction = LinkDirection(limit=1000, capped=True, now_ns=0)
    busy, queue = Queue(direction, now_ns=0), Queue(direction, now_ns=0)
    node = direction.add(1)
    handle = busy.push(node, 600, 1)
    assert busy.poll(0) is not None
    waiting = [queue.push(node, 600, number) for number in range(2)]
    assert queue.poll(1000) is None
    bucket = direction.handle.bucket
    for piece in waiting:
        assert bucket.ceil - bucket.tail < bucket.limit - 600
        assert queue.cancel(piece)
    assert bucket.ceil - bucket.tail == bucket.limit - 600
    assert [int(member.held) for member in direction.handle.members if member.owner] == [600, 0]
    busy.complete(handle, 2000)
    assert bucket.ceil - bucket.tail == bucket.limit


def test_a_long_waiter_polls_rarely() -> None:
    direction = LinkDirection(limit=1000, capped=True, now_ns=0)
    busy, queue = Queue(direction, now_ns=0), Queue(direction, now_ns=0)
    node = direction.add(1)
    handle = busy.push(node, 1000, 1)
    assert busy.poll(0) is not None
    queue.push(node, 1000, 2)
    assert queue.poll(1000) is None
    assert queue.wait_ns < 50_000  # soon: the other one may end at any time
    assert queue.poll(300_000) is None
    assert queue.wait_ns >= 60_000
    busy.complete(handle, 300_000)
    assert queue.poll(300_001) or queue.poll(300_010)


def test_an_empty_queue_releases_its_reservation() -> None:
    direction = LinkDirection(limit=1000, capped=True, now_ns=0)
    queue, other = Queue(direction, now_ns=0), Queue(direction, now_ns=0)
    node = direction.add(1)
    first = queue.push(node, 1000, 1)
    handle = queue.push(node, 1000, 2)
    assert queue.poll(0) is not None
    assert queue.poll(0) is None  # reserved, but not acquired
    assert queue.stat().pending == 1000
    queue.cancel(handle)
    queue.poll(1)
    assert queue.stat().pending == 0
    queue.complete(first, 2)
    other.push(node, 1000, 3)
    assert other.poll(3) or other.poll(MS)


def test_blocks_and_pieces_are_both_compared() -> None:
    assert BLOCK == 5 * MIB // 2
    assert PIECE == 256 << 10


def test_a_piece_in_flight_for_long_is_a_stall() -> None:
    """100 ms, doubled each time, and a millisecond less with every update of the flow ratio."""
    direction = LinkDirection(limit=1000, now_ns=0)
    node = direction.add(1)
    queue = Queue(direction, now_ns=0)
    now = 0

    def take(took_ms: int) -> None:
        nonlocal now
        handle = queue.push(node, 10, 1, now_ns=now)
        assert queue.poll(now) is not None
        now += took_ms * MS
        queue.complete(handle, now)

    take(100)
    assert queue.stat().stalls == 0
    take(101)
    assert (queue.stat().stalls, queue.stat().stalled_ns) == (1, 101 * MS)
    assert queue.stat().stall_ns == 200 * MS
    take(199)
    assert queue.stat().stalls == 1
    take(250)
    assert (queue.stat().stalls, queue.stat().stalled_ns) == (2, 250 * MS)
    raised = queue.stat().stall_ns
    for _ in range(10):  # the period of updates of the ratio
        now += 75 * MS
        queue.poll(now)
    assert queue.stat().stall_ns == raised - 10 * MS
    for _ in range(1000):
        now += 75 * MS
        queue.poll(now)
    assert queue.stat().stall_ns == 100 * MS
    queue.close()


# ---- Processes that sleep while their class is in contest, in virtual time.


@pytest.mark.parametrize("waiting", [1, 2])
def test_a_process_that_slept_gets_no_extra_tokens(waiting: int) -> None:
    """The process copied a piece, then was busy or stopped, possibly with another piece queued."""
    direction = LinkDirection(limit=2 * MS * 1000, capped=True, now_ns=0)
    slept, other = Queue(direction, now_ns=0), Queue(direction, now_ns=0)
    a, b = direction.add(8), direction.add(1)
    cost = MS * 1000 // 10
    for number in range(waiting):
        slept.push(a, cost, number)
    piece = slept.poll(0)
    assert piece is not None
    slept.complete(piece.handle, MS // 10)
    now, had = MS // 10, {a: 0, b: 0}
    while now < 1000 * MS:
        queues = [(b, other)] if now < 500 * MS else [(a, slept), (b, other)]
        for node, queue in queues:
            if queue.stat().queued < 4:
                queue.push(node, cost, node, now_ns=now)
            if (piece := queue.poll(now)) is not None:
                queue.complete(piece.handle, now + MS // 10)
                had[node] += now >= 500 * MS
        now += MS // 20
    assert had[a] / had[b] == pytest.approx(8, rel=0.15)
    for queue in (slept, other):
        queue.close()
