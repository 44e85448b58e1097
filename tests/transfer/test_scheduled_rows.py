# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Rows with checksums count as the chunks that are read for them, piece by piece."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import numpy as np

from beluga.kvcache import CHUNK_SIZE
from beluga.pool import Pool
from beluga.transfer import (
    CpuEngine,
    IoHandle,
    Link,
    LinkSettings,
    ScheduledEngine,
    Speed,
    TransferClass,
    plan_blocks,
    plan_rows,
)

WAIT_S = 60
COUNT, ROW = 64, 64
SIZE = COUNT * CHUNK_SIZE
FAST = LinkSettings(read=Speed(8 << 30), write=Speed(8 << 30), device=Speed(8 << 30))


def test_rows_that_are_verified_count_as_their_chunks(pool: Pool, shm: Path) -> None:
    engine = CpuEngine(pool, 1)
    whole = np.random.default_rng(1).integers(0, 256, SIZE, np.uint8)
    offsets = np.array([pool.geometry.data_offset + (2 << 20) - 4096], np.uint64)  # two stripes
    handle = np.array([[whole.ctypes.data]], np.uint64)
    writing = plan_blocks(handle, np.array([SIZE]), offsets, chunk_size=CHUNK_SIZE)
    engine.gather_write(writing).wait(WAIT_S)
    assert writing.checksums is not None
    rows = np.zeros((COUNT, ROW), np.uint8)
    plan = plan_rows(
        (rows.ctypes.data + np.arange(COUNT) * ROW).astype(np.uint64),
        *(np.zeros(COUNT, np.int64), np.arange(COUNT) * CHUNK_SIZE, np.full(COUNT, ROW)),
        offsets=offsets,
        length=SIZE,
        chunk_size=CHUNK_SIZE,
        checksums=writing.checksums.reshape(1, -1),
    )
    link = Link(f"rows-{os.getpid()}", FAST, pool=pool, directory=shm)
    engine.piece_size = FAST.piece_size  # type: ignore[attr-defined]
    handle = IoHandle(link)
    ScheduledEngine(engine, handle).scatter_read(plan).wait(WAIT_S)
    carried = handle.transfer_stats(TransferClass.ONBOARD)
    handle.close()
    assert (rows == whole.reshape(COUNT, CHUNK_SIZE)[:, :ROW]).all()
    assert (carried.pieces, carried.bytes) == (SIZE // FAST.piece_size, SIZE)
    found = link.device_bytes(plan, [len(plan.chunks)]).tolist()[0]
    assert found in ([4096, SIZE - 4096], [SIZE - 4096, 4096])
    bare = dataclasses.replace(plan, checksums=None)
    assert link.device_bytes(bare, [len(bare.chunks)]).sum() == COUNT * ROW


def test_a_chunk_is_no_longer_than_a_piece() -> None:
    """So a link admits no more than a piece of verified bytes, whatever engine copies: chunks are
    longer only where a cache requests it, and then the CPU stops within them."""
    assert CHUNK_SIZE <= LinkSettings().piece_size <= 256 << 10
