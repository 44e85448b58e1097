# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Quotas: calls that exceed a session's quota fail at once, with their own error, and are
counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from support.blocks import held, keys, put, states

from beluga._ffi import lib
from beluga.errors import PinLimitError, QuotaError
from beluga.index import IndexClient, IndexServer
from beluga.pool import Pool
from beluga.rpc import Client, Quota

LENGTH = 4096
Serve = Callable[[Quota], tuple[IndexServer, IndexClient, IndexClient]]


@pytest.fixture
def serve(pool: Pool) -> Iterator[Serve]:
    """A server with a quota, and two sessions."""
    with ExitStack() as stack:

        def serve(quota: Quota) -> tuple[IndexServer, IndexClient, IndexClient]:
            server = stack.enter_context(IndexServer(pool, quota=quota))
            one, other = (IndexClient(stack.enter_context(Client(pool))) for _ in range(2))
            return server, one, other

        yield serve


def test_grants_beyond_the_quota_are_refused_until_some_end(serve: Serve) -> None:
    server, one, other = serve(Quota(grants=3))
    grants = one.reserve(keys(range(5)), length=LENGTH)
    assert states(grants) == ["GRANTED"] * 3 + ["REFUSED"] * 2
    assert {grant.status for grant in grants[3:]} == {-lib.BL_ERROR_QUOTA}
    assert server.stat().quota_grant_count == 2
    assert states(other.reserve(keys([9]), length=LENGTH)) == ["GRANTED"]
    assert one.commit(grants[:1]) == [0]
    assert one.abort(grants[1:2]) == 1
    assert states(one.reserve(keys(range(3, 6)), length=LENGTH)) == ["GRANTED"] * 2 + ["REFUSED"]


def test_pins_beyond_the_quota_are_refused_until_some_are_released(serve: Serve) -> None:
    server, one, other = serve(Quota(pins=2))
    put(one, range(4), length=LENGTH)
    hits = one.lookup(keys(range(4)), pin=True).hits
    assert len(hits) == 2
    assert len(one.lookup(keys(range(2)), pin=True).hits) == 2  # the same blocks again
    with pytest.raises(PinLimitError):
        one.lookup(keys([3]), pin=True)
    assert server.stat().quota_pin_count == 2
    assert len(other.lookup(keys([3]), pin=True).hits) == 1
    assert one.release([*hits, *hits]) == 4
    assert len(one.lookup(keys([3]), pin=True).hits) == 1


def test_bytes_count_grants_and_pinned_blocks(serve: Serve) -> None:
    server, one, _ = serve(Quota(bytes=3 * LENGTH))
    put(one, range(2), length=LENGTH)
    pinned = one.lookup(keys(range(2)), pin=True).hits
    assert states(one.reserve(keys([2, 3]), length=LENGTH)) == ["GRANTED", "REFUSED"]
    assert states(one.reserve(keys([4]), length=1)) == ["REFUSED"]
    assert (server.stat().quota_grant_count, server.stat().quota_pin_count) == (2, 0)
    assert one.release(pinned[:1]) == 1
    assert len(one.lookup(keys([0, 1]), pin=True).hits) == 2
    put_back = one.lookup(keys([0, 1]), pin=True).hits
    assert one.release([*pinned, *put_back, pinned[1]]) == 5
    assert states(one.reserve(keys([3, 5]), length=LENGTH)) == ["GRANTED"] * 2


def test_a_pin_of_too_many_bytes_is_a_quota_error(serve: Serve) -> None:
    server, one, other = serve(Quota(bytes=2 * LENGTH))
    put(one, range(1), length=2 * LENGTH)
    (grant,) = other.reserve(keys([7]), length=LENGTH)
    with pytest.raises(QuotaError, match="quota"):
        other.lookup(keys([0]), pin=True)
    assert server.stat().quota_pin_count == 1
    assert other.abort([grant]) == 1
    assert len(other.lookup(keys([0]), pin=True).hits) == 1


def test_a_reused_lane_has_a_full_quota(serve: Serve, pool: Pool) -> None:
    serve(Quota(grants=2, pins=1, bytes=3 * LENGTH))
    for turn in range(3):
        with Client(pool) as client:
            index = IndexClient(client)
            (grant,) = index.reserve(keys([100 + turn]), length=LENGTH)
            assert index.commit([grant]) == [0]
            assert len(index.lookup(keys([100 + turn]), pin=True).hits) == 1
            found = index.reserve(keys([200 + turn, 300 + turn]), length=LENGTH)
            assert states(found) == ["GRANTED"] * 2


def test_calls_beyond_the_rate_are_refused_and_do_not_affect_others(serve: Serve) -> None:
    server, one, other = serve(Quota(calls_per_s=5))
    start, answered, refused = time.monotonic(), 0, 0
    for _ in range(60):
        try:
            one.lookup(keys([0]))
            answered += 1
        except QuotaError:
            refused += 1
    elapsed = time.monotonic() - start
    assert 5 <= answered <= 5 + 5 * elapsed + 1
    assert refused == server.stat().quota_call_count
    assert server.stat().error_count == refused
    assert held(other, [0]) == set()


def test_calls_that_release_space_are_not_limited(serve: Serve) -> None:
    _, one, _ = serve(Quota(calls_per_s=2))
    (grant,) = one.reserve(keys([0]), length=LENGTH)
    for _ in range(20):
        try:
            one.lookup(keys([1]))
        except QuotaError:
            break
    else:
        pytest.skip("this machine is too slow to use a quota of two calls a second up")
    assert one.commit([grant]) == [0]


@pytest.mark.parametrize("wrong", [{"grants": -1}, {"pins": 1 << 32}, {"bytes": 1 << 64}])
def test_an_impossible_quota_is_rejected(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be from 0 to"):
        Quota(**wrong)
