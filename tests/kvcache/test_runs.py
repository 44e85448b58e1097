# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Engines use blocks at known addresses, and pins without a Python object for each block."""

from __future__ import annotations

import numpy as np
import pytest

from beluga import KVCache, Pool
from beluga._ffi import ffi, lib
from beluga.errors import LayoutError
from beluga.index import BlockState, IndexClient, IndexServer
from beluga.kvcache import Run
from tests.kvcache.conftest import digests, payload

COUNT, PARTS, SIZE = 5, 3, 4096


def scattered(memory: np.ndarray) -> Run:
    """Return blocks whose fragments lie apart: memory has the axes (part, block, byte)."""
    fragments = np.empty((COUNT, PARTS, 2), dtype=np.uint64)
    for block in range(COUNT):
        for part in range(PARTS):
            fragments[block, part] = memory[part, block].ctypes.data, SIZE
    return Run(COUNT, PARTS * SIZE, PARTS, fragments.reshape(-1, 2), [memory])


def test_a_run_is_gathered_and_scattered(cache: KVCache) -> None:
    source = payload(PARTS * COUNT, SIZE).reshape(PARTS, COUNT, SIZE)
    target = np.zeros_like(source)
    assert cache.put(digests(COUNT), scattered(source)).stored == COUNT
    assert cache.get(digests(COUNT), scattered(target)).hits == COUNT
    assert (source == target).all()


@pytest.mark.parametrize("threads", [1, 3])
def test_several_threads_read_and_detect_the_damaged_block(
    pool: Pool, server: IndexServer, threads: int
) -> None:
    count, size = 12, 100_000
    source = payload(count, size)
    target = np.zeros_like(source)
    with KVCache(pool, namespace="threads", threads=threads) as cache:
        assert cache.put(digests(count), source).stored == count
        assert cache.get(digests(count), target).hits == count
        assert (source == target).all()
        place = IndexClient(cache.client).lookup(cache.keys(digests(count))).hits[7].offset
        ffi.cast("uint8_t *", lib.bl_pool_address(pool.handle, place + 64))[0] ^= 1
        result = cache.get(digests(count), target)
        assert (result.hits, result.mismatches) == (7, 1)
        hit, miss = BlockState.HIT, BlockState.MISS
        assert result.states.tolist() == [hit] * 7 + [miss] + [hit] * 4


def test_a_run_must_have_a_key_for_each_block(cache: KVCache) -> None:
    with pytest.raises(LayoutError, match="4 keys but 5 blocks"):
        cache.put(digests(4), scattered(payload(PARTS * COUNT, SIZE).reshape(PARTS, COUNT, SIZE)))


def test_pins_hold_blocks_until_they_are_released_once(pool: Pool, cache: KVCache) -> None:
    cache.put(digests(3), payload(3, SIZE))
    pins = cache.pin(digests(5))
    assert pins.count == 3
    assert cache.stat().pinned_count == 3
    assert cache.release(pins) == 3
    assert cache.stat().pinned_count == 0
    assert cache.release(pins) == 0
    assert cache.pin(digests(2, start=10)).count == 0


def test_pins_end_with_the_session(pool: Pool, server: IndexServer, cache: KVCache) -> None:
    cache.put(digests(3), payload(3, SIZE))
    with KVCache(pool, namespace="test") as other:
        assert other.pin(digests(3)).count == 3
        assert cache.stat().pinned_count == 3
    assert cache.stat().pinned_count == 0
