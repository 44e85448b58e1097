# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Processes that sleep while their class is in contest, in virtual time."""

from __future__ import annotations

import pytest
from beluga_bench.system.throttlers import Queue

from beluga.transfer.link import LinkDirection

MS = 1_000_000


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
