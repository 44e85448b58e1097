# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Hints change the order of eviction inside a tenant's share, within a budget, and end with their
session.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.blocks import eventually, held, keys

from beluga._ffi import lib
from beluga.errors import BadRequestError, BadTypeError, BadValueError
from beluga.index import EVICTIONS, BlockState, HintStat, IndexClient, IndexServer
from beluga.kvcache import HintResult, KVCache, Namespace
from beluga.pool import Pool
from beluga.rpc import Client

MIB = 1 << 20
LOW, HIGH, PINNED = lib.BL_LEVEL_LOW, lib.BL_LEVEL_HIGH, lib.BL_LEVEL_PINNED
NORMAL = lib.BL_LEVEL_NORMAL
ACME, FLOOD = (Namespace.of(name).fingerprint for name in ("acme", "flood"))


@contextmanager
def serving(
    pool: Pool,
    *,
    budget: float = 0.25,
    eviction: str = "lru",
    shares: dict[str, float] | None = None,
) -> Iterator[tuple[IndexServer, IndexClient]]:
    with (
        IndexServer(pool, hint_budget=budget, eviction=eviction, shares=shares) as server,
        Client(pool) as client,
    ):
        yield server, IndexClient(client)


def room(server: IndexServer) -> int:
    return server.index_stat().data_bytes // MIB


def put(index: IndexClient, number: int, fingerprint: int = 1, length: int = MIB) -> None:
    (grant,) = index.reserve(keys([number]), length=length, fingerprint=fingerprint)
    assert grant.state is BlockState.GRANTED
    assert index.commit([grant]) == [0]


def fill(server: IndexServer, index: IndexClient) -> int:
    """Fill the pool with blocks, and return their number."""
    for number in range(room(server)):
        put(index, number)
    return room(server)


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_low_blocks_are_evicted_first_and_high_ones_last(pool: Pool, eviction: str) -> None:
    with serving(pool, eviction=eviction) as (server, index):
        count = fill(server, index)
        high, low = range(4), range(count - 4, count)  # the coldest, and the newest
        assert index.hint(keys(high), level=HIGH) == (4, 0)
        assert index.hint(keys(low), level=LOW) == (4, 0)
        for number in range(1000, 1004):
            put(index, number)
        assert held(index, low) == set()
        for number in range(2000, 2000 + count - 4):
            put(index, number)
        assert held(index, high) == set(high)
        assert server.hints().hint_count == 4


def test_low_blocks_of_a_chain_are_evicted_from_its_end(pool: Pool) -> None:
    with serving(pool) as (server, index):
        fill(server, index)
        index.hint(keys(range(10, 13)), level=LOW)
        for number in (12, 11, 10):
            put(index, 1000 + number)
            assert number not in held(index, [number])


def test_pinned_blocks_are_evicted_only_as_the_last_resort(pool: Pool) -> None:
    with serving(pool, budget=0.9) as (server, index):
        count = fill(server, index)
        pinned = range(0, count, 2)  # every second block: no gap is two blocks wide
        assert index.hint(keys(pinned), level=PINNED) == (len(pinned), 0)
        for number in range(1000, 1000 + 2 * count):
            put(index, number)
        assert held(index, pinned) == set(pinned)
        put(index, 5000, length=2 * MIB)  # granted nevertheless: hints deny space to no session
        assert held(index, [5000]) == {5000}
        assert len(held(index, pinned)) < len(pinned)


def test_a_budget_bounds_what_hints_favor(pool: Pool) -> None:
    with serving(pool, budget=0.25) as (server, index):
        count = fill(server, index)
        budget = int(count * 0.25)
        assert index.hint(keys(range(count)), level=PINNED) == (budget, count - budget)
        assert server.hints().favored_bytes == budget * MIB
        assert server.hints().refuse_count == count - budget
        assert index.hint(keys(range(count)), level=LOW) == (count, 0), "this needs no budget"
        assert server.hints().favored_bytes == 0
        index.hint(keys(range(2)), level=HIGH)
        index.remove(keys(range(2)))
        assert server.hints().favored_bytes == 0
        assert index.hint(keys([2]), level=NORMAL) == (1, 0)
        assert server.hints().hint_count == count - 3


def test_the_budget_is_that_of_the_blocks_tenant(pool: Pool) -> None:
    with serving(pool, shares={"acme": 0.4}) as (server, index):
        own = range(int(room(server) * 0.2))
        for number in own:
            put(index, number, ACME)
        for number in range(1000, 1000 + 3 * room(server)):
            put(index, number, FLOOD)
        flood = [n for n in range(1000, 1000 + 3 * room(server)) if n in held(index, [n])]
        given, _ = index.hint(keys(flood), level=PINNED)
        assert given == int(room(server) * 0.6 * 0.25)
        others, acme = server.shares()
        assert (others.hinted_bytes, acme.hinted_bytes) == (given * MIB, 0)
        assert others.hinted_bytes <= others.hint_bytes < others.hinted_bytes + MIB
        assert acme.hint_bytes == pytest.approx(0.25 * acme.bytes, abs=1)
        assert index.hint(keys(own[:2]), level=PINNED) == (2, 0), "the flood took this budget"
        for number in range(9000, 9000 + room(server)):
            put(index, number, FLOOD)
        assert held(index, own) == set(own), "pins of one tenant cost another one blocks"


def test_a_budget_favors_the_leading_blocks_of_a_chain(
    pool: Pool,
) -> None:
    with serving(pool, budget=0.25) as (server, index):
        big = range(room(server))
        for number in big:
            put(index, number)
        budget = server.shares()[0].hint_bytes // MIB
        assert index.hint(keys(big), level=HIGH) == (budget, len(big) - budget)
        for number in range(10_000, 10_000 + 2 * room(server)):
            put(index, number)
        assert held(index, big) == set(big[:budget])


def test_a_budget_favors_the_leading_blocks_of_many_calls(shm: Path) -> None:
    pool = Pool.create([shm / "a"], device_size=64 << 20, sparse=True, max_blocks=2000)
    with pool, serving(pool, budget=0.03) as (server, index):
        for number in range(1000):
            put(index, number, length=4096)
        budget = server.shares()[0].hint_bytes // 4096
        assert lib.BL_CALL_KEYS_MAX < budget < 1000 - lib.BL_CALL_KEYS_MAX
        assert index.hint(keys(range(1000)), level=PINNED) == (budget, 1000 - budget)
        index.hint(keys(range(budget, 1000)), level=NORMAL)
        assert server.hints().favored_bytes == budget * 4096, "none of the last was favored"


def test_a_small_share_has_a_nonzero_budget(pool: Pool) -> None:
    with serving(pool, shares={"acme": 0.01}, budget=0.5) as (server, index):
        for number in range(10):
            put(index, number, ACME, length=4096)
        assert index.hint(keys(range(10)), level=HIGH) == (10, 0)
        assert 10 * 4096 == server.shares()[1].hinted_bytes < 300_000
        assert server.shares()[1].hint_bytes == server.shares()[1].bytes // 2 < 1_000_000


def test_a_block_becomes_the_coldest_when_its_hint_expires(pool: Pool) -> None:
    with serving(pool) as (server, index):
        count = fill(server, index)
        index.hint(keys([count - 1]), level=PINNED, ttl_ms=1)
        index.hint(keys([count - 2]), level=PINNED, ttl_ms=3_600_000)
        index.hint(keys([count - 3]), level=NORMAL, ttl_ms=1)

        def expired() -> bool:
            index.hint(keys([10_000]), level=NORMAL)  # a new hint replaces earlier ones
            return server.hints().expire_count == 2

        assert eventually(expired)
        assert server.hints().favored_bytes == MIB
        for number in (1000, 1001):
            put(index, number)
        assert held(index, range(count)) == {*range(count - 3), count - 2}


def test_a_hit_restarts_the_lifetime_of_a_hint(pool: Pool) -> None:
    with serving(pool) as (server, index):
        fill(server, index)
        index.hint(keys([5]), level=PINNED, ttl_ms=600_000)
        index.hint(keys([6]), level=PINNED, ttl_ms=1)
        assert eventually(lambda: not _hinted(server, index, 1))
        assert server.hints().hint_count == 1


def _hinted(server: IndexServer, index: IndexClient, minimum: int) -> bool:
    index.lookup(keys([5]))
    index.hint(keys([10_000]), level=NORMAL)
    return server.hints().hint_count > minimum


def test_hints_end_with_their_session(
    pool: Pool, server: IndexServer, attach: Callable[[], IndexClient]
) -> None:
    index = attach()
    count = fill(server, index)
    with Client(pool) as client:
        other = IndexClient(client)
        assert other.hint(keys(range(3)), level=PINNED) == (3, 0)
        assert other.hint(keys([count - 1]), level=LOW) == (1, 0)
        assert index.hint(keys([2]), level=HIGH) == (1, 0), "the last hint counts"
        assert server.hints().hint_count == 4
    assert eventually(lambda: server.hints().hint_count == 1)
    assert server.hints().favored_bytes == MIB
    for number in range(1000, 1000 + 2 * count):
        put(index, number)
    assert held(index, range(count)) == {2}


def test_hints_end_with_the_server(pool: Pool) -> None:
    with serving(pool) as (server, index):
        count = fill(server, index)
        index.hint(keys([0, 1]), level=PINNED)
    with serving(pool) as (server, index):
        assert server.hints() == HintStat(0, 0, 0, 0, 0, 0)
        for number in range(1000, 1000 + count):
            put(index, number)
        assert held(index, [0, 1]) == set()


def test_hints_of_absent_keys_do_nothing_and_are_counted(
    server: IndexServer, index: IndexClient
) -> None:
    (grant,) = index.reserve(keys([1]), length=MIB)
    assert index.hint(keys(range(1000)), level=PINNED) == (0, 0), "it is not committed"
    assert server.hints() == HintStat(0, 0, 0, 1000, 0, 0)
    index.abort([grant])


def test_a_pinned_hint_and_a_reader_keep_a_block_together(
    server: IndexServer, index: IndexClient
) -> None:
    count = fill(server, index)
    pins = index.lookup(keys([0]), pin=True).hits
    index.hint(keys([0]), level=LOW)
    for number in range(1000, 1000 + 2 * count):
        put(index, number)
    assert held(index, [0]) == {0}, "a reader's pin holds in spite of a hint"
    assert index.release(pins) == 1
    put(index, 5000)
    assert held(index, [0]) == set()


def test_an_invalid_level_is_rejected(index: IndexClient) -> None:
    with pytest.raises(BadRequestError):
        index.hint(keys([1]), level=4)


def test_a_cache_sends_hints_and_rejects_invalid_ones(pool: Pool, server: IndexServer) -> None:
    digests = [bytes([n]) * 16 for n in range(4)]
    with KVCache(pool, namespace="a", tenant="acme") as cache:
        cache.put(digests[:3], [bytearray(4096)] * 3)
        assert cache.hint(digests, priority="high", ttl=60) == HintResult(3, 0, 1, 0)
        assert cache.hint(digests, pin=True, prefetch=True).given == 3
        assert cache.hint([]) == HintResult(0, 0, 0, 0)
        for wrong, why in (
            ({"priority": "urgent"}, "the priority of a hint is 'urgent'; give low, normal, high"),
            ({"ttl": 0}, "the ttl of a hint is 0; give seconds, from 0.001"),
            ({"ttl": float("nan")}, "the ttl of a hint is nan"),
            ({"ttl": True}, "the ttl of a hint is True"),
            ({"pin": True, "priority": "low"}, "a hint has both pin and low priority"),
        ):
            with pytest.raises(BadValueError, match=why):
                cache.hint(digests, **wrong)  # type: ignore[arg-type]
        for wrong in {"priority": 1}, {"ttl": "1"}, {"pin": 1}:
            with pytest.raises(BadTypeError):
                cache.hint(digests, **wrong)  # type: ignore[arg-type]
    for budget in (-0.1, 1.5, float("nan")):
        with pytest.raises(BadValueError, match="hint_budget is"):
            IndexServer(pool, hint_budget=budget)
