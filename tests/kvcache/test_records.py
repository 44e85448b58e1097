# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Gets of blocks that another session has looked up: no call, and never wrong bytes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from beluga import IndexServer, KVCache, Pool
from beluga._ffi import ffi, lib
from beluga.errors import LayoutError
from beluga.index import BLOCK_RECORD, BlockState
from beluga.transfer import CpuEngine
from tests.kvcache.conftest import digests, payload

COUNT, SIZE = 6, 100_000
HIT, MISS = BlockState.HIT, BlockState.MISS


@pytest.fixture
def finder(pool: Pool, server: IndexServer) -> Iterator[KVCache]:
    """The session that stores blocks, looks them up and pins them."""
    with KVCache(pool, namespace="test") as finder:
        assert finder.put(digests(COUNT), payload(COUNT, SIZE)).stored == COUNT
        yield finder


@pytest.fixture(params=["C", "an engine"])
def reader(request: pytest.FixtureRequest, pool: Pool, server: IndexServer) -> Iterator[KVCache]:
    engine = CpuEngine(pool, threads=1) if request.param == "an engine" else "auto"
    with KVCache(pool, namespace="test", engine=engine) as reader:
        yield reader


def test_unmoved_blocks_are_read_without_a_call(
    finder: KVCache, reader: KVCache, server: IndexServer
) -> None:
    records = finder.pin(digests(COUNT)).records()
    assert (records.dtype, records.shape) == (BLOCK_RECORD, (COUNT,))
    before = server.stat().call_count
    target = np.zeros((COUNT, SIZE), np.uint8)
    result = reader.get(digests(COUNT), target, records=records)
    assert (result.hits, result.states.tolist(), result.mismatches) == (COUNT, [HIT] * COUNT, 0)
    assert (target == payload(COUNT, SIZE)).all()
    assert server.stat().call_count == before


def test_a_moved_block_is_a_hit_and_an_evicted_one_a_miss(finder: KVCache, reader: KVCache) -> None:
    records = finder.pin(digests(COUNT)).records()
    target = np.zeros((COUNT, SIZE), np.uint8)
    others = payload(COUNT + 2, SIZE)[COUNT:]
    for stored, hits in ((True, COUNT), (False, 3)):
        finder.remove(digests(1, start=3))
        finder.put(digests(2, start=COUNT), others)  # these blocks use the space if it is free
        if stored:
            finder.put(digests(1, start=3), payload(COUNT, SIZE)[3:4])
        result = reader.get(digests(COUNT), target, records=records)
        assert (result.hits, result.mismatches) == (hits, 0)
        assert (target[:hits] == payload(COUNT, SIZE)[:hits]).all()
        assert result.states[3] == (HIT if stored else MISS)


def test_a_damaged_block_is_counted_once_and_a_miss(
    pool: Pool, finder: KVCache, reader: KVCache
) -> None:
    records = finder.pin(digests(COUNT)).records()
    place = int(records["offset"][2]) + 64
    ffi.cast("uint8_t *", lib.bl_pool_address(pool.handle, place))[0] ^= 1
    result = reader.get(digests(COUNT), np.zeros((COUNT, SIZE), np.uint8), records=records)
    assert (result.hits, result.mismatches) == (2, 1)


@pytest.mark.parametrize("field", ["block", "generation", "offset"])
def test_records_of_another_pool_only_cost_a_call(
    finder: KVCache, reader: KVCache, server: IndexServer, field: str
) -> None:
    records = finder.pin(digests(COUNT)).records().copy()
    records[field][1:] = np.iinfo(records[field].dtype).max - 7
    before = server.stat().call_count
    target = np.zeros((COUNT, SIZE), np.uint8)
    result = reader.get(digests(COUNT), target, records=records)
    assert (result.hits, result.mismatches) == (COUNT, 0)
    assert (target == payload(COUNT, SIZE)).all()
    assert server.stat().call_count > before


def test_a_reader_finds_blocks_of_a_dead_server_after_a_takeover(
    pool: Pool, reader: KVCache, server: IndexServer
) -> None:
    """Without a call, a session does not detect a takeover."""
    with KVCache(pool, namespace="test") as finder:
        finder.put(digests(COUNT), payload(COUNT, SIZE))
    server.stop()
    with IndexServer(pool), KVCache(pool, namespace="test") as finder:
        records = finder.pin(digests(COUNT)).records()
        target = np.zeros((COUNT, SIZE), np.uint8)
        for _ in range(2):
            result = reader.get(digests(COUNT), target, records=records)
            assert (result.hits, result.mismatches) == (COUNT, 0)
            assert (target == payload(COUNT, SIZE)).all()


@pytest.mark.parametrize("change", ["one less", "another type"])
def test_records_must_have_a_row_for_each_block(
    finder: KVCache, reader: KVCache, change: str
) -> None:
    records = finder.pin(digests(COUNT)).records()
    wrong = records[:-1] if change == "one less" else np.zeros(COUNT, np.uint64)
    with pytest.raises(LayoutError, match=r"6 blocks need 6 records; .*BLOCK_RECORD"):
        reader.get(digests(COUNT), np.zeros((COUNT, SIZE), np.uint8), records=wrong)
