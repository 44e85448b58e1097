# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Puts and gets keep every byte, with both kinds of coherence and in a pool that mixes them; gets
by records of another session; and what a client counts and reports.
"""

from __future__ import annotations

import itertools
import json
import re
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import roles
from support.blocks import eventually
from support.emulation import fewer, long
from support.role import Process

from beluga import IndexServer, KVCache, Pool
from beluga._ffi import ffi, lib
from beluga.errors import (
    BadRequestError,
    CallTimeoutError,
    LayoutError,
    NoServerError,
    TooLargeError,
)
from beluga.index import BLOCK_RECORD, BlockState, IndexClient, check_pool
from beluga.kvcache import CHUNK_SIZE
from beluga.rpc import KINDS, Operation, report
from beluga.transfer import CpuEngine
from tests.kvcache.conftest import DEVICE_SIZE, digests, flip, payload, place


@pytest.fixture(params=["C", "an engine"])
def reader(request: pytest.FixtureRequest, pool: Pool, server: IndexServer) -> Iterator[KVCache]:
    engine = CpuEngine(pool, threads=1) if request.param == "an engine" else "auto"
    with KVCache(pool, namespace="test", engine=engine) as reader:
        yield reader


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
    pool: Pool, cache: KVCache, reader: KVCache
) -> None:
    blocks, targets = payload(5, 4096), np.zeros((5, 4096), dtype=np.uint8)
    cache.put(digests(5), blocks)
    for damaged in (1, 3):
        flip(pool, place(cache, digests(5)[damaged]))
    result = reader.get(digests(5), targets)
    assert (result.hits, result.mismatches) == (1, 2)
    assert np.array_equal(blocks[0], targets[0])
    assert list(result.states == int(BlockState.HIT)) == [True, False, True, False, True]


def test_without_a_server_calls_raise_and_a_get_is_not_a_miss(
    pool: Pool, server: IndexServer
) -> None:
    with KVCache(pool, namespace="test", timeout_s=2) as cache:
        cache.put(digests(1), payload(1, 64))
        server.stop()
        for call in (cache.put, cache.get):
            with pytest.raises((NoServerError, CallTimeoutError)):
                call(digests(1), payload(1, 64))


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
    cache: KVCache, reader: KVCache, pool: Pool, length: int
) -> None:
    blocks, targets = payload(3, length), np.zeros((3, length), dtype=np.uint8)
    cache.put(digests(3), blocks)
    offset = place(cache, digests(3)[1]) + length - 1
    flip(pool, offset)
    result = reader.get(digests(3), targets)
    assert (result.hits, result.mismatches) == (1, 1)
    assert check_pool(pool, payload=True).finding_count == 1
    flip(pool, offset)
    assert reader.get(digests(3), targets).hits == 3
    assert check_pool(pool, payload=True).finding_count == 0


def test_a_damaged_list_of_checksums_is_a_miss(cache: KVCache, reader: KVCache, pool: Pool) -> None:
    length = 4 * CHUNK_SIZE
    cache.put(digests(1), payload(1, length))
    flip(pool, place(cache, digests(1)[0]) + length + 5)
    assert reader.get(digests(1), np.zeros((1, length), dtype=np.uint8)).hits == 0


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


def test_a_grant_of_another_session_is_pending(cache: KVCache, server: IndexServer) -> None:
    with KVCache(cache.client.pool, namespace="test") as other:
        keys = cache.keys(digests(1))
        grants = IndexClient(other.client).reserve(keys, length=100)
        assert cache.put(digests(1), payload(1, 100)).pending == 1
        assert cache.get(digests(1), payload(1, 100)).states[0] == int(BlockState.PENDING)
        IndexClient(other.client).abort(grants)
        assert cache.put(digests(1), payload(1, 100)).stored == 1


# ---- Gets of blocks that another session has looked up


COUNT, SIZE = 6, 100_000
HIT, MISS = BlockState.HIT, BlockState.MISS


@pytest.fixture
def finder(pool: Pool, server: IndexServer) -> Iterator[KVCache]:
    """The session that stores blocks, looks them up and pins them."""
    with KVCache(pool, namespace="test") as finder:
        assert finder.put(digests(COUNT), payload(COUNT, SIZE)).stored == COUNT
        yield finder


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
    offset = int(records["offset"][2]) + 64
    ffi.cast("uint8_t *", lib.bl_pool_address(pool.handle, offset))[0] ^= 1
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


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients report with each call."""
    monkeypatch.setattr(report, "INTERVAL_S", 0.0)


def call_count(server: IndexServer) -> int:
    found = server.calls().get("report")
    return found.calls if found else 0


@pytest.mark.parametrize("own_engine", [False, True])
def test_a_damaged_block_counts_as_a_checksum_and_a_removed_one_does_not(
    pool: Pool, server: IndexServer, at_once: None, own_engine: bool
) -> None:
    engine = CpuEngine(pool) if own_engine else "auto"
    with KVCache(pool, namespace="test", engine=engine) as cache:
        cache.put(digests(3), payload(3, 40_000))
        flip(pool, place(cache, digests(3)[1]) + 39_999)
        assert cache.get(digests(3), np.zeros((3, 40_000), np.uint8)).hits == 1
        found = server.reported(0)
        assert (found[report.Figure.MISMATCHES], found[report.Figure.CHECKSUM_FAILURES]) == (1, 1)
        assert cache.client.stat().checksum_count == 1
        assert cache.get(digests(1), np.zeros((1, 39_999), np.uint8)).hits == 0  # another length
        found = server.reported(0)
        assert (found[report.Figure.MISMATCHES], found[report.Figure.CHECKSUM_FAILURES]) == (2, 1)


def test_a_client_reports_at_most_once_per_interval(
    cache: KVCache, server: IndexServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(20):
        cache.put(digests(2), payload(2, 100))
    assert call_count(server) == 0
    monkeypatch.setattr(report, "INTERVAL_S", 0.0)
    cache.client.report.take()  # starts again: earlier counts are dropped
    cache.put(digests(2), payload(2, 100))
    assert call_count(server) == 1
    assert server.reported(0)[report.Figure.PRESENT_BLOCKS] == 2
    cache.client.send_report()
    assert call_count(server) == 1  # there was nothing to report


def test_a_server_without_support_gets_no_reports(
    at_once: None, cache: KVCache, server: IndexServer
) -> None:
    with server._running() as handle:
        lib.bl_server_handle_method(handle, lib.BL_METHOD_REPORT, ffi.NULL, ffi.NULL)
    for _ in range(3):
        cache.put(digests(2), payload(2, 100))
    assert server.calls()["report"] == (1, 1)


def test_a_report_that_fails_is_lost_and_no_call_fails_for_it(
    at_once: None, cache: KVCache, server: IndexServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "KINDS", (*("x",) * lib.BL_REPORT_KINDS, *KINDS))
    assert cache.put(digests(2), payload(2, 100)).stored == 2  # of a kind that the server rejects
    assert server.calls()["report"].errors == 1
    monkeypatch.setattr(report, "KINDS", KINDS)
    assert cache.get(digests(2), np.zeros((2, 100), np.uint8)).hits == 2
    found = server.reported(0)
    assert (found[report.Figure.STORED_BLOCKS], found[report.Figure.HIT_BLOCKS]) == (0, 2)


def test_times_fall_into_the_bucket_of_their_bound(
    at_once: None, cache: KVCache, server: IndexServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seconds in (report.SECONDS[0], 0.3, 1.0, 1.5, 7.0):
        with monkeypatch.context() as clock:
            clock.setattr(time, "perf_counter", lambda now=seconds: now)
            cache.client.report.looked_up(0.0)
    cache.client.send_report()
    counts, total = server.reported(0).times(Operation.LOOKUP)
    assert (counts[0], counts[-2], counts[-1], sum(counts)) == (1, 2, 2, 5)
    assert total == pytest.approx(9.80001)


@pytest.mark.parametrize(
    "request_",
    [
        b"",
        bytes(7),
        bytes(8 * (lib.BL_REPORT_FIGURES + 2)),
        bytes(9),
        struct.pack("=2Q", lib.BL_REPORT_KINDS, 1),
        struct.pack("=2Q", 1 << 63, 1),
    ],
    ids=["empty", "short", "long", "uneven", "kind", "far kind"],
)
def test_a_malformed_report_is_rejected(
    cache: KVCache, server: IndexServer, request_: bytes
) -> None:
    with pytest.raises(BadRequestError):
        cache.client.call(lib.BL_METHOD_REPORT, request_)
    assert not any(server.reported(kind) for kind in range(lib.BL_REPORT_KINDS))
    cache.client.call(lib.BL_METHOD_REPORT, bytes(8 * (lib.BL_REPORT_FIGURES + 1)))  # the longest


CHAINS = 12
MIXED = [
    ["hardware", "software"],
    long(["software", "hardware"]),
    long(["hardware", "software", "hardware"]),
]


def hits(server: Process) -> int:
    found = re.search(r"\bhit_count=(\d+)", server.request("stat"))
    assert found
    return int(found[1])


@pytest.mark.parametrize("interleave", [True, long(False)], ids=["interleaved", "one by one"])
@pytest.mark.parametrize("modes", MIXED, ids=",".join)
def test_processes_share_blocks_on_a_mixed_pool(
    shm: Path, modes: list[str], interleave: bool
) -> None:
    paths = [shm / str(index) for index in range(len(modes))]
    with Pool.create(
        paths, device_size=24 << 20, coherence=modes, interleave=interleave, sparse=True
    ) as pool:
        assert [device.coherence for device in pool.devices] == modes
        churn(pool, paths)


@pytest.mark.parametrize("metadata", ["hardware", long("software")])
def test_processes_share_blocks_on_a_pool_with_a_metadata_device(shm: Path, metadata: str) -> None:
    paths, first = [shm / "0", shm / "1"], shm / "metadata"
    with Pool.create(
        paths,
        device_size=24 << 20,
        coherence="software",
        metadata=first,
        metadata_coherence=metadata,
        sparse=True,
    ) as pool:
        churn(pool, [*paths, first])


def churn(pool: Pool, paths: list[Path]) -> None:
    """Run a server, and processes that write, read and remove blocks; no byte is wrong."""
    with Process(roles.serve_index, paths) as server:
        workers = [Process(roles.churn, paths) for _ in range(2)]
        for seed, worker in enumerate(workers):
            worker.send(f"go {seed} {CHAINS}")
        assert eventually(lambda: hits(server) > 200, timeout_s=120)
        results = [json.loads(worker.request("enough")) for worker in workers]
        assert [worker.end() for worker in workers] == [0, 0]
        assert server.end() == 0
    assert [worker["wrong"] for worker in results] == [0, 0]
    report = check_pool(pool, payload=True)
    assert (report.finding_count, report.block_count > 0) == (0, True), report.findings
