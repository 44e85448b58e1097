# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Puts and gets keep every byte, with both kinds of coherence and in a pool that mixes them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.emulation import fewer

from beluga import IndexServer, KVCache, Pool
from beluga._ffi import ffi, lib
from beluga.errors import CallTimeoutError, LayoutError, NoServerError, TooLargeError
from beluga.index import BlockState, IndexClient, check_pool
from beluga.kvcache import CHUNK_SIZE
from tests.kvcache.conftest import DEVICE_SIZE, digests, payload


def place(cache: KVCache, digest: bytes) -> int:
    """Return the pool offset of a block."""
    return IndexClient(cache.client).lookup(cache.keys([digest])).hits[0].offset


def flip(pool: Pool, offset: int) -> None:
    """Damage one byte in the pool."""
    address = ffi.cast("uint8_t *", lib.bl_pool_address(pool.handle, offset))
    address[0] ^= 0x40
    lib.bl_drop(address, 1)


@pytest.mark.parametrize(
    "length", [1, 63, 64, 65, 4096, CHUNK_SIZE, CHUNK_SIZE + 1, 3 * CHUNK_SIZE - 7, 5 << 19]
)
def test_get_returns_the_bytes_of_put(cache: KVCache, length: int) -> None:
    blocks, targets = payload(3, length), np.zeros((3, length), dtype=np.uint8)
    assert cache.put(digests(3), blocks).stored == 3
    result = cache.get(digests(3), targets)
    assert (result.hits, result.mismatches) == (3, 0)
    assert np.array_equal(blocks, targets)


@pytest.mark.parametrize("length", [4096, CHUNK_SIZE])
def test_a_block_that_fills_its_space_leaves_the_next_one_alone(
    cache: KVCache, length: int
) -> None:
    blocks, targets = payload(2, length), np.zeros((2, length), dtype=np.uint8)
    first, second = digests(1), digests(1, start=1)
    cache.put([*first, *second], blocks)
    before = [place(cache, digest) for digest in (*first, *second)]
    assert before[1] == before[0] + length
    cache.remove(first)
    again = digests(1, start=2)
    cache.put(again, blocks[:1])
    assert place(cache, again[0]) == before[0]
    assert cache.get([*again, *second], targets).hits == 2
    assert np.array_equal(blocks, targets)


def test_the_leading_hits_end_at_the_first_of_two_damaged_blocks(
    pool: Pool, cache: KVCache
) -> None:
    blocks, targets = payload(5, 4096), np.zeros((5, 4096), dtype=np.uint8)
    cache.put(digests(5), blocks)
    for damaged in (1, 3):
        flip(pool, place(cache, digests(5)[damaged]))
    result = cache.get(digests(5), targets)
    assert result.hits == 1
    assert list(result.states == int(BlockState.HIT)) == [True, False, True, False, True]


def test_without_a_server_a_put_raises(pool: Pool, server: IndexServer) -> None:
    with KVCache(pool, namespace="test", timeout_s=2) as cache:
        cache.put(digests(1), payload(1, 64))
        server.stop()
        with pytest.raises((NoServerError, CallTimeoutError)):
            cache.put(digests(1, start=1), payload(1, 64))


def test_without_a_server_a_get_raises_and_is_not_a_miss(pool: Pool, server: IndexServer) -> None:
    with KVCache(pool, namespace="test", timeout_s=2) as cache:
        cache.put(digests(1), payload(1, 64))
        server.stop()
        with pytest.raises((NoServerError, CallTimeoutError)):
            cache.get(digests(1), payload(1, 64))


@settings(
    max_examples=fewer(25),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    cuts=st.lists(st.integers(1, 60_000), min_size=1, max_size=12),
    others=st.lists(st.integers(1, 60_000), min_size=1, max_size=12),
    start=st.integers(0, 2**60),
)
def test_fragments_may_be_cut_differently_on_both_sides(
    cache: KVCache, cuts: list[int], others: list[int], start: int
) -> None:
    length = min(sum(cuts), sum(others))
    block = payload(1, length, seed=start % 1000)[0]

    def pieces(sizes: list[int], whole: np.ndarray) -> list[np.ndarray]:
        edges = np.minimum(np.cumsum([0, *sizes]), length)
        edges[-1] = length
        return [whole[a:b] for a, b in itertools.pairwise(edges) if a < b]

    target = np.zeros_like(block)
    key = digests(1, start=start)
    cache.remove(key)
    assert cache.put(key, [pieces(cuts, block)]).stored == 1
    assert cache.get(key, [pieces(others, target)]).hits == 1
    assert np.array_equal(block, target)


def test_only_leading_blocks_are_hits(cache: KVCache) -> None:
    names, blocks = digests(6), payload(6, 5000)
    cache.put([*names[:3], *names[4:]], np.concatenate([blocks[:3], blocks[4:]]))
    targets = np.zeros_like(blocks)
    result = cache.get(names, targets)
    assert result.hits == 3
    assert np.array_equal(targets[:3], blocks[:3])
    assert result.states[3] == BlockState.MISS
    assert not targets[4:].any()


def test_a_batch_larger_than_a_message_is_split(cache: KVCache) -> None:
    count = cache.client.pool.geometry.bulk_size // 32 + 700
    assert count > cache.client.pool.geometry.block_count_max // 2
    names, blocks = digests(count), payload(count, 64)
    assert cache.put(names, blocks).stored == min(count, cache.client.pool.geometry.block_count_max)


def test_present_blocks_are_not_written_again(cache: KVCache) -> None:
    blocks = payload(4, 3000)
    assert cache.put(digests(2), blocks[:2]).stored == 2
    result = cache.put(digests(4), blocks)
    assert (result.present, result.stored) == (2, 2)


def test_blocks_of_one_namespace_are_misses_in_another(cache: KVCache, pool: Pool) -> None:
    blocks, targets = payload(2, 2000), np.zeros((2, 2000), dtype=np.uint8)
    cache.put(digests(2), blocks)
    with KVCache(pool, namespace="another") as other:
        assert other.lookup(digests(2)) == 0
        assert other.get(digests(2), targets).hits == 0
    assert not targets.any()


def test_a_block_of_another_length_is_a_miss(cache: KVCache) -> None:
    cache.put(digests(1), payload(1, 2000))
    targets = np.zeros((1, 1999), dtype=np.uint8)
    assert cache.get(digests(1), targets).hits == 0


def test_removed_blocks_are_misses(cache: KVCache) -> None:
    cache.put(digests(3), payload(3, 100))
    assert cache.remove(digests(1)) == 1
    assert cache.remove(digests(1)) == 0
    assert cache.lookup(digests(3)) == 0
    assert cache.lookup(digests(2, start=1)) == 2


@pytest.mark.parametrize("length", [900, 5 * CHUNK_SIZE])
def test_damaged_bytes_are_a_miss_and_never_returned_as_a_hit(
    cache: KVCache, pool: Pool, length: int
) -> None:
    blocks, targets = payload(3, length), np.zeros((3, length), dtype=np.uint8)
    cache.put(digests(3), blocks)
    offset = place(cache, digests(3)[1]) + length - 1
    flip(pool, offset)
    result = cache.get(digests(3), targets)
    assert (result.hits, result.mismatches) == (1, 1)
    assert check_pool(pool, payload=True).finding_count == 1
    flip(pool, offset)
    assert cache.get(digests(3), targets).hits == 3
    assert check_pool(pool, payload=True).finding_count == 0


def test_a_damaged_list_of_checksums_is_a_miss(cache: KVCache, pool: Pool) -> None:
    length = 4 * CHUNK_SIZE
    cache.put(digests(1), payload(1, length))
    flip(pool, place(cache, digests(1)[0]) + length + 5)
    assert cache.get(digests(1), np.zeros((1, length), dtype=np.uint8)).hits == 0


def test_without_verification_the_entry_is_still_checked(cache: KVCache, pool: Pool) -> None:
    blocks, targets = payload(1, 4000), np.zeros((1, 4000), dtype=np.uint8)
    cache.put(digests(1), blocks)
    flip(pool, place(cache, digests(1)[0]))
    with KVCache(cache.client, namespace="test", check_checksums=False) as careless:
        assert careless.get(digests(1), targets).hits == 1
        assert (targets != blocks).sum() == 1
        g, half = pool.geometry, cache.client.stat().epoch % 2
        block = IndexClient(cache.client).lookup(cache.keys(digests(1))).hits[0].block
        flip(pool, g.table_offset + (half * g.block_count_max + block) * 64 + 20)
        assert careless.get(digests(1), targets).hits == 0


def test_a_full_pool_evicts_the_least_recently_used_blocks(cache: KVCache) -> None:
    length, count = 1 << 20, 150  # more than 92 MiB of data stripes
    for i in range(count):
        assert cache.put(digests(1, start=i), payload(1, length, seed=i)).stored == 1
        cache.lookup(digests(1))  # the first block stays warm
    assert cache.stat().evict_count > 0
    assert cache.lookup(digests(1)) == 1
    assert cache.lookup(digests(1, start=1)) == 0
    last = np.zeros((1, length), dtype=np.uint8)
    assert cache.get(digests(1, start=count - 1), last).hits == 1
    assert np.array_equal(last, payload(1, length, seed=count - 1))


def test_a_block_that_cannot_fit_is_refused_with_its_reason(cache: KVCache) -> None:
    result = cache.put(digests(1), np.zeros((1, 8 * DEVICE_SIZE), dtype=np.uint8))
    assert result.refused == 1
    space = IndexClient(cache.client).stat().data_bytes
    words = rf"{8 * DEVICE_SIZE} bytes and its checksums in a pool of {space} bytes"
    with pytest.raises(TooLargeError, match=words):
        result.raise_for_refused()


def test_a_block_above_the_size_limit_is_not_requested(cache: KVCache) -> None:
    with pytest.raises(LayoutError, match=r"takes up to 1073741824"):
        cache.put(digests(1), np.zeros((1, (1 << 30) + 1), dtype=np.uint8))


def test_two_sessions_share_blocks(cache: KVCache, pool: Pool) -> None:
    blocks, targets = payload(5, 70_000), np.zeros((5, 70_000), dtype=np.uint8)
    with KVCache(pool, namespace="test") as other:
        assert other.put(digests(5), blocks).stored == 5
    assert cache.get(digests(5), targets).hits == 5
    assert np.array_equal(blocks, targets)


def test_a_grant_of_another_session_is_pending(cache: KVCache, server: IndexServer) -> None:
    with KVCache(cache.client.pool, namespace="test") as other:
        keys = cache.keys(digests(1))
        grants = IndexClient(other.client).reserve(keys, length=100)
        assert cache.put(digests(1), payload(1, 100)).pending == 1
        assert cache.get(digests(1), payload(1, 100)).states[0] == int(BlockState.PENDING)
        IndexClient(other.client).abort(grants)
        assert cache.put(digests(1), payload(1, 100)).stored == 1


def test_keys_and_blocks_must_have_equal_counts(cache: KVCache) -> None:
    with pytest.raises(LayoutError, match="3 keys but 2 blocks"):
        cache.put(digests(3), payload(2, 10))
