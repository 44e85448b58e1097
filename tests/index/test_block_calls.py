# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The calls of the block index satisfy their contract with one client and with two."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.blocks import held, keys, put, states

from beluga._ffi import lib
from beluga.errors import BadRequestError
from beluga.index import EVICTIONS, BlockState, IndexClient, IndexServer
from beluga.pool import Pool
from beluga.rpc import Client

MIB = 1 << 20
DATA_BLOCKS = 58  # blocks of 1 MiB that certainly fit in the pool of conftest.py

Attach = Callable[[], IndexClient]


def test_a_new_key_is_granted_committed_and_found(index: IndexClient, pool: Pool) -> None:
    assert index.lookup(keys([1])).state is BlockState.MISS
    (grant,) = index.reserve(keys([1]), length=MIB)
    assert grant.state is BlockState.GRANTED
    assert grant.offset >= pool.geometry.data_offset
    assert index.commit([grant]) == [0]
    lookup = index.lookup(keys([1]))
    assert lookup.state is BlockState.HIT
    (hit,) = lookup.hits
    assert (hit.offset, hit.length, hit.generation) == (grant.offset, MIB, grant.generation)


def test_a_granted_key_is_pending_for_all_clients(attach: Attach) -> None:
    writer, other = attach(), attach()
    (grant,) = writer.reserve(keys([1]), length=MIB)
    for index in (writer, other):
        assert index.lookup(keys([1])).state is BlockState.PENDING
        assert states(index.reserve(keys([1]), length=MIB)) == ["PENDING"]
    writer.commit([grant])
    assert states(other.reserve(keys([1]), length=MIB)) == ["HIT"]


def test_a_key_twice_in_one_call_is_granted_once(index: IndexClient) -> None:
    assert states(index.reserve(keys([1, 1, 2]), length=MIB)) == ["GRANTED", "PENDING", "GRANTED"]


def test_a_commit_may_be_repeated(index: IndexClient) -> None:
    grants = index.reserve(keys([1]), length=MIB)
    assert index.commit(grants) == index.commit(grants) == [0]
    assert index.stat().commit_count == 1


def test_only_a_sessions_own_grants_can_be_committed_or_aborted(attach: Attach) -> None:
    writer, other = attach(), attach()
    grants = writer.reserve(keys([1]), length=MIB)
    assert other.commit(grants) == [-lib.BL_ERROR_NO_GRANT]
    assert other.abort(grants) == 0
    assert writer.abort(grants) == 1
    assert writer.abort(grants) == 0
    assert writer.commit(grants) == [-lib.BL_ERROR_NO_GRANT]
    assert other.lookup(keys([1])).state is BlockState.MISS
    assert states(other.reserve(keys([1]), length=MIB)) == ["GRANTED"]


@pytest.mark.parametrize("sessions", [1, 2])
def test_an_old_grant_of_reused_space_is_invalid(attach: Attach, sessions: int) -> None:
    first = attach()
    second = attach() if sessions == 2 else first
    (old,) = first.reserve(keys([1]), length=MIB)
    first.abort([old])
    (new,) = second.reserve(keys([1]), length=MIB)
    assert (new.block, new.offset) == (old.block, old.offset)
    assert new.generation > old.generation
    assert first.abort([old]) == 0
    assert first.commit([old]) == [-lib.BL_ERROR_NO_GRANT]
    assert second.commit([new]) == [0]


def test_lookup_returns_the_leading_hits(index: IndexClient) -> None:
    put(index, [0, 1, 2, 4])
    lookup = index.lookup(keys(range(5)))
    assert len(lookup.hits) == 3
    assert lookup.state is BlockState.MISS
    assert len(index.lookup(keys([4])).hits) == 1


def test_a_chain_longer_than_a_message_is_found_whole(index: IndexClient, pool: Pool) -> None:
    count = pool.geometry.block_count_max
    assert pool.geometry.bulk_size < 5000 * 32
    put(index, range(count), length=4096)
    many = keys([n % count for n in range(5000)])
    assert len(index.lookup(many).hits) == 5000


def test_removed_blocks_are_missed_and_their_space_is_free(index: IndexClient) -> None:
    put(index, [1, 2, 3])
    assert index.remove(keys([1, 3, 9])) == 2
    assert held(index, [1, 2, 3]) == {2}
    assert index.stat().used_bytes == index.stat().block_bytes == MIB


def test_a_removed_block_keeps_its_bytes_while_it_is_pinned(attach: Attach) -> None:
    reader, other = attach(), attach()
    put(other, [1])
    (hit,) = reader.lookup(keys([1]), pin=True).hits
    other.remove(keys([1]))
    assert held(other, [1]) == set()
    assert other.stat().used_bytes == MIB
    assert reader.release([hit]) == 1
    assert other.stat().used_bytes == 0


def test_the_coldest_block_makes_room(index: IndexClient) -> None:
    for number in range(2 * DATA_BLOCKS):
        put(index, [number])
    there = held(index, range(2 * DATA_BLOCKS))
    assert there == set(range(2 * DATA_BLOCKS - len(there), 2 * DATA_BLOCKS))
    assert len(there) >= DATA_BLOCKS
    assert index.stat().evict_count == 2 * DATA_BLOCKS - len(there)


def test_a_chain_is_evicted_from_its_end(index: IndexClient) -> None:
    put(index, range(20))
    put(index, range(100, 138))
    assert len(index.lookup(keys(range(20))).hits) == 20
    assert len(index.lookup(keys(range(100, 138))).hits) == 38
    size = 20
    for number in range(200, 240):
        put(index, [number])
        there = held(index, range(20))
        assert there == set(range(len(there)))
        assert len(there) <= size
        size = len(there)
    assert size < 20


def test_a_chain_that_was_only_committed_is_evicted_from_its_end(index: IndexClient) -> None:
    grants = index.reserve(keys(range(20)), length=MIB)
    assert index.commit(grants) == [0] * 20
    for number in range(200, 200 + DATA_BLOCKS - 10):
        put(index, [number])
    there = held(index, range(20))
    assert 0 < len(there) < 20
    assert there == set(range(len(there)))


def test_pinned_blocks_stay_and_released_ones_are_evicted(index: IndexClient) -> None:
    put(index, range(3))
    pinned = index.lookup(keys([0, 1]), pin=True).hits
    assert index.stat().pinned_count == 2
    put(index, range(100, 100 + 2 * DATA_BLOCKS))
    assert held(index, range(3)) == {0, 1}
    assert index.release(pinned) == 2
    assert index.release(pinned) == 0
    put(index, range(300, 300 + 2 * DATA_BLOCKS))
    assert held(index, range(3)) == set()


def test_a_commit_that_is_repeated_leaves_a_pinned_block_unevictable(index: IndexClient) -> None:
    grants = index.reserve(keys([0, 1]), length=MIB)
    assert index.commit(grants) == [0, 0]
    pinned = index.lookup(keys([0]), pin=True).hits
    assert index.commit(grants) == [0, 0]
    put(index, range(100, 100 + 2 * DATA_BLOCKS))
    assert held(index, range(2)) == {0}
    assert index.release(pinned) == 1
    put(index, range(300, 300 + 2 * DATA_BLOCKS))
    assert held(index, range(2)) == set()


def test_a_block_pinned_twice_needs_two_releases(attach: Attach) -> None:
    first_client, second_client = attach(), attach()
    put(first_client, [0])
    first, second = first_client.lookup(keys([0, 0]), pin=True).hits
    (third,) = second_client.lookup(keys([0]), pin=True).hits
    assert first_client.release([first]) == 1
    assert second_client.release([third]) == 1
    assert first_client.stat().pinned_count == 1
    assert second_client.release([third]) == 0
    assert first_client.release([second]) == 1
    assert first_client.stat().pinned_count == 0


def test_a_grant_is_refused_if_all_blocks_are_pinned(index: IndexClient) -> None:
    put(index, range(DATA_BLOCKS + 20))
    there = sorted(held(index, range(DATA_BLOCKS + 20)))
    hits = index.lookup(keys(there), pin=True).hits
    (refused,) = index.reserve(keys([999]), length=MIB)
    assert refused.state is BlockState.REFUSED
    assert refused.status == -lib.BL_ERROR_NO_SPACE
    assert index.stat().refuse_count == 1
    index.release(hits)
    put(index, [999])


def test_the_table_takes_as_many_blocks_as_it_has_lines(index: IndexClient, pool: Pool) -> None:
    count = pool.geometry.block_count_max
    put(index, [0], length=4096)
    put(index, range(1, count), length=4096)
    assert index.stat().block_count == count
    put(index, [count], length=4096)
    assert held(index, range(count + 1)) == set(range(1, count + 1))
    hits = index.lookup(keys(range(1, count + 1)), pin=True).hits
    assert len(hits) == count
    (refused,) = index.reserve(keys([5000]), length=4096)
    assert refused.status == -lib.BL_ERROR_TABLE_FULL


@pytest.fixture
def roomy(shm: Path) -> Iterator[IndexClient]:
    """A pool with room for blocks of many sizes."""
    paths = [shm / "roomy"]
    with (
        Pool.create(paths, device_size=512 * MIB, sparse=True) as pool,
        IndexServer(pool),
        Client(pool) as client,
    ):
        yield IndexClient(client)


def test_any_number_of_sizes_share_a_pool(roomy: IndexClient) -> None:
    for number in range(1000):
        put(roomy, [number], length=4096 * (number % 120) + number + 1)
    assert held(roomy, range(1000)) == set(range(1000))
    assert roomy.stat().evict_count == 0


@pytest.mark.parametrize(("length", "chunk_size"), [(0, 0), (4096, 1), (4096, 63), (0, 16384)])
def test_invalid_sizes_are_rejected(index: IndexClient, length: int, chunk_size: int) -> None:
    with pytest.raises(BadRequestError):
        index.reserve(keys([1]), length=length, chunk_size=chunk_size)


@pytest.mark.parametrize("length", [64 * MIB, 1024 * MIB, 1024 * MIB + 1, 0xFFFFFFFF])
def test_a_block_larger_than_the_pool_is_rejected_without_an_eviction(
    index: IndexClient, length: int
) -> None:
    put(index, range(DATA_BLOCKS))
    (refused,) = index.reserve(keys([99]), length=length)
    assert refused.status == -lib.BL_ERROR_TOO_LARGE
    assert held(index, range(DATA_BLOCKS)) == set(range(DATA_BLOCKS))


def test_freed_space_can_hold_any_other_size(index: IndexClient) -> None:
    for turn, length in enumerate([MIB, 3 * MIB, 4096, 5 * MIB // 2, MIB]):
        numbers = range(turn * 1000, turn * 1000 + 10)
        put(index, numbers, length=length)
        assert index.remove(keys(numbers)) == 10
        stat = index.stat()
        assert (stat.used_bytes, stat.extent_count, stat.evict_count) == (0, 0, 0)
        assert stat.free_stripe_count == stat.stripe_count


def test_a_pool_whose_blocks_were_removed_accepts_other_sizes(index: IndexClient) -> None:
    put(index, range(DATA_BLOCKS))
    index.remove(keys(range(DATA_BLOCKS)))
    put(index, range(100, 110), length=5 * MIB // 2)
    aborted = index.reserve(keys(range(200, 208)), length=5 * MIB // 2)
    index.abort(aborted)
    put(index, range(300, 330))


def test_an_empty_batch_has_no_effect(index: IndexClient) -> None:
    assert index.lookup(keys([])).hits == ()
    assert index.reserve(keys([]), length=MIB) == []
    assert index.commit([]) == []
    assert index.abort([]) == index.release([]) == index.remove(keys([])) == 0


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_each_policy_evicts_unused_chains_before_a_used_one(pool: Pool, eviction: str) -> None:
    with IndexServer(pool, eviction=eviction), Client(pool) as client:
        index = IndexClient(client)
        put(index, range(8))
        for number in range(100, 100 + 2 * DATA_BLOCKS):
            hits = index.lookup(keys(range(8)), pin=True).hits
            assert len(hits) == 8
            index.release(hits)
            put(index, [number])
        assert index.stat().evict_count > DATA_BLOCKS


def test_an_unknown_policy_is_refused(pool: Pool) -> None:
    with pytest.raises(ValueError, match=r"no eviction policy 'x'; choose one of lru, s3fifo$"):
        IndexServer(pool, eviction="x")
