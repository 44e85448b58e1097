# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Looking a pool over: damage planted by hand is found, a healthy pool has no findings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from beluga import KVCache, MetaServer, Pool
from beluga._ffi import ffi, lib
from beluga.meta import MetaClient, check_pool

LINE = 64
COUNT = 40


@pytest.fixture
def pool(shm: Path) -> Iterator[Pool]:
    """A dead pool with COUNT committed blocks of 100 kB, written by epoch 1 (half 1)."""
    paths = [shm / name for name in "ab"]
    with Pool.create(paths, device_size=32 << 20, sparse=True) as pool:
        with MetaServer(pool), KVCache(pool, namespace="check") as cache:
            blocks = np.random.default_rng(3).integers(0, 256, (COUNT, 100_000), dtype=np.uint8)
            assert cache.put(names(), blocks).stored == COUNT
        yield pool


def names() -> list[bytes]:
    return [bytes([i]) * 16 for i in range(COUNT)]


def line(pool: Pool, offset: int) -> memoryview:
    """A line of the pool, to be scribbled on."""
    return memoryview(ffi.buffer(lib.bl_pool_address(pool.handle, offset), LINE))


def entry_offset(pool: Pool, block: int) -> int:
    g = pool.geometry
    return g.table_offset + (g.block_count_max + block) * LINE


def extent_offset(pool: Pool, stripe: int) -> int:
    g = pool.geometry
    return g.extent_offset + (g.stripe_count + stripe) * LINE


def findings(pool: Pool, *, payload: bool = False) -> list[str]:
    report = check_pool(pool, payload=payload)
    assert report.finding_count == len(report.findings)
    return list(report.findings)


def test_a_healthy_pool_has_no_findings(pool: Pool) -> None:
    report = check_pool(pool, payload=True)
    assert report.findings == ()
    assert (report.epoch, report.serving) == (1, False)
    assert (report.block_count, report.block_bytes) == (COUNT, COUNT * 100_000)


def test_a_look_over_a_pool_writes_nothing(pool: Pool) -> None:
    g = pool.geometry
    before = [bytes(line(pool, offset)) for offset in range(0, g.data_offset, LINE)]
    check_pool(pool, payload=True)
    assert before == [bytes(line(pool, offset)) for offset in range(0, g.data_offset, LINE)]


def test_a_pool_that_was_never_served_has_no_findings(tmp_path: Path) -> None:
    with Pool.create([tmp_path / "a"], device_size=16 << 20, sparse=True) as pool:
        report = check_pool(pool, payload=True)
        assert (report.epoch, report.block_count, report.findings) == (0, 0, ())


@pytest.mark.parametrize("byte", [0, 17, 25, 40, 44, 48, 52, 60])
def test_a_damaged_entry_is_found(pool: Pool, byte: int) -> None:
    line(pool, entry_offset(pool, 7))[byte] ^= 1
    assert findings(pool) == ["the entry of block 7 is damaged"]


def test_an_entry_copied_to_another_line_is_found(pool: Pool) -> None:
    line(pool, entry_offset(pool, 7))[:] = line(pool, entry_offset(pool, 8))
    assert findings(pool) == ["the entry of block 7 is damaged"]


def test_a_damaged_extent_mark_is_found_and_its_blocks_are_homeless(pool: Pool) -> None:
    first = line(pool, extent_offset(pool, 0))
    assert int.from_bytes(first[28:32], "little") >= COUNT  # all blocks lie in it
    first[20] ^= 1
    found = findings(pool)
    assert "the extent mark of stripe 0 is damaged" in found
    assert len([text for text in found if "lies in no extent" in text]) == COUNT


def test_a_damaged_epoch_line_is_found(pool: Pool) -> None:
    line(pool, 256)[3] ^= 1
    assert "the epoch line of half 1 is damaged" in findings(pool)


def test_damaged_payload_is_found_only_by_its_checksums(pool: Pool) -> None:
    with MetaServer(pool), KVCache(pool, namespace="check") as cache:
        hits = MetaClient(cache.client).lookup(cache.keys(names())).hits
        line(pool, hits[5].offset + 64 * 1000)[9] ^= 1
        assert findings(pool) == []
        (text,) = findings(pool, payload=True)
        assert text == f"block {hits[5].block} at {hits[5].offset:#x}: the checksums do not match"
