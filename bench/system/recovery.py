# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The benchmark of a restart: the recovery of a block table, compared with a plain scan with the
same inserts.

The table describes 8 TiB of 4 MiB blocks in sparse files, of which only the metadata is accessed.
Each run opens the pool again, as a starting server does, so both sides include the setup of page
tables. The limit reads the predecessor's entries once and puts their keys into Beluga's own index.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from beluga import IndexServer
from beluga._ffi import ffi as core_ffi
from beluga._ffi import lib as core_lib
from beluga.errors import BelugaError, raise_for_status
from beluga.pool import STRIPE_SIZE, Pool, scratch_folder

from .. import _limit
from .._limit import ffi, lib
from ..harness import drive
from ..harness.ground import coherence_of, pool_folder
from ..harness.machine import cores, memory_of, pinned
from ..harness.options import SOFTWARE, Options
from ..harness.ratio import race
from ..harness.row import Recorder, Row, percentiles, shares

BLOCK_SIZE = 4 << 20
BLOCK_COUNT = 2_000_000
SMOKE_COUNT = 10_000
LINE = 64
MARK_BLOCKS = 512  # blocks that the mark of an extent of several stripes covers
EPOCH = 1  # the epoch of the server whose table is recovered, which uses half 1

_METADATA_PER_BLOCK = 2 * LINE * (2 + BLOCK_SIZE // STRIPE_SIZE)  # entry, name, marks
_ADD = (
    *(0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89),
    *(0x452821E638D01377, 0xBE5466CF34E90C6C, 0xC0AC29B7C97C50DD, 0x3F84D5B5B5470917),
)
_TIMES = (
    *(0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93),
    *(0xA0761D6478BD642F, 0xE7037ED1A0B428DB, 0x8EBC6AF09C88C6E3, 0x589965CC75374CC3),
)
Lines = npt.NDArray[np.uint64]


def bench_recovery(options: Options) -> list[Row]:
    """Return one row: blocks per second from the start to serving."""
    count = SMOKE_COUNT if options.smoke else BLOCK_COUNT
    with pinned(cores()[0]), _table(options, count) as paths, Pool.open(paths) as pool:
        fixed: Row = {
            "memory": memory_of(pool),
            "coherence": coherence_of(pool),
            "bytes": BLOCK_SIZE,
            "threads": 1,
        }
        options.report(f"recovery of {count} blocks")
        samples_ns: list[int] = []
        _recover(paths, count, [])  # this allocates the memory of the unused half
        ratio = race(
            lambda: _scan(paths, count),
            lambda: _recover(paths, count, samples_ns),
            pair_count=options.pair_count,
            retry_count=options.retry_count,
        )
    return [
        Recorder("recovery", options, fixed).row(
            "restart",
            ops_per_s=round(ratio.ours),
            limit=round(ratio.limit),
            limit_unit="ops/s",
            note=f"{count} blocks in {count / ratio.ours:.3f} s, the scan in "
            f"{count / ratio.limit:.3f} s: {1 / ratio.ratio:.2f} times as long",
            **shares(ratio),
            **percentiles(np.array(samples_ns, dtype=np.uint64)),
        )
    ]


def _recover(paths: list[Path], count: int, samples_ns: list[int]) -> float:
    """Recover with a new server. Returns blocks per second."""
    with Pool.open(paths) as pool:
        start_ns = time.perf_counter_ns()
        server = IndexServer(pool)
        server.start()
        elapsed_ns = time.perf_counter_ns() - start_ns
        samples_ns.append(elapsed_ns)
        block_count = server.index_stat().block_count
        server.stop()
    if block_count != count:
        raise BelugaError(f"{block_count} of {count} blocks were recovered")
    return count * 1e9 / elapsed_ns


def _scan(paths: list[Path], count: int) -> float:
    """Run the limit. Returns blocks per second."""
    with Pool.open(paths) as pool:
        half = _epoch(pool) % 2
        first = pool.geometry.table_offset + half * pool.geometry.block_count_max * LINE
        whole = first // STRIPE_SIZE * STRIPE_SIZE
        skipped = (first - whole) // LINE
        starts = range(whole, first + count * LINE, STRIPE_SIZE)
        pieces = ffi.new("uint8_t *[]", [_pointer(pool, offset) for offset in starts])
        index = core_ffi.new("bl_hash **")
        table = ffi.new("limit_table *")
        table.pieces, table.piece_lines = pieces, STRIPE_SIZE // LINE
        table.first, table.lines = skipped, count
        table.coherent = pool.devices[0].coherence != SOFTWARE
        address = core_ffi.addressof(core_lib, "bl_hash_add")
        table.insert = ffi.cast("limit_insert", int(core_ffi.cast("uintptr_t", address)))
        start_ns = time.perf_counter_ns()
        raise_for_status(core_lib.bl_hash_create(index, count), "making an index")
        table.index = ffi.cast("void *", int(core_ffi.cast("uintptr_t", index[0])))
        raise_for_status(lib.limit_scan(table), "scanning the table")
        elapsed_ns = time.perf_counter_ns() - start_ns
        key_count = core_lib.bl_hash_count(index[0])
        core_lib.bl_hash_destroy(index[0])
    if key_count != count:
        raise BelugaError(f"{key_count} of {count} keys were found")
    return count * 1e9 / elapsed_ns


def _pointer(pool: Pool, offset: int) -> _limit.uint8_p:
    return ffi.cast("uint8_t *", drive.address_of(pool, offset))


def _epoch(pool: Pool) -> int:
    """Return the epoch of the last server."""
    lines = [core_lib.bl_pool_address(pool.handle, half * 256) for half in range(2)]
    return max(int(core_ffi.cast("bl_epoch_line *", line).epoch) for line in lines)


@contextmanager
def _table(options: Options, count: int) -> Iterator[list[Path]]:
    """Yield the devices of a pool full of blocks, as a stopped server leaves it."""
    parent, _ = pool_folder(count * _METADATA_PER_BLOCK)
    with scratch_folder("bench", parent) as directory:
        paths = [directory / name for name in "ab"]
        metadata = (count * _METADATA_PER_BLOCK // STRIPE_SIZE + 64) * STRIPE_SIZE
        size = (count * BLOCK_SIZE + metadata) // 2 // STRIPE_SIZE * STRIPE_SIZE
        with Pool.create(
            paths,
            device_size=size,
            sparse=True,
            coherence=options.coherence or SOFTWARE,
            max_blocks=count,
            lane_count=8,
        ) as pool:
            _fill(pool, count, options.seed)
        yield paths


def _fill(pool: Pool, count: int, seed: int) -> None:
    """Write entries in order of age, as in a cache that has filled up, the extents' marks, and the
    epoch.
    """
    geometry = pool.geometry
    numbers = np.arange(count, dtype=np.uint64)
    stripes = numbers * np.uint64(BLOCK_SIZE // STRIPE_SIZE)
    generations = np.uint64(EPOCH << 40) + np.uint64(1) + numbers
    entries = np.zeros((count, 8), dtype=np.uint64)
    entries[:, :2] = np.random.default_rng(seed).integers(1 << 63, size=(count, 2), dtype=np.uint64)
    entries[:, 2] = generations
    entries[:, 3] = np.uint64(geometry.data_offset) + numbers * np.uint64(BLOCK_SIZE)
    entries[:, 5] = BLOCK_SIZE
    entries[:, 6] = core_lib.BL_ENTRY_COMMITTED << 32
    _write(pool, geometry.table_offset + geometry.block_count_max * LINE, entries, numbers)
    marks = np.zeros((count * 2, 8), dtype=np.uint64)
    marks[::2, 0] = EPOCH
    marks[::2, 1] = generations
    marks[::2, 2] = stripes + np.uint64((BLOCK_SIZE // STRIPE_SIZE) << 32)
    marks[::2, 3] = core_lib.BL_PAGE_SIZE + (MARK_BLOCKS << 32)
    marks[::2, 4] = core_lib.BL_EXTENT_OPEN
    marks[1::2, 2] = stripes + np.uint64(1)
    every = np.arange(count * 2, dtype=np.uint64)
    _write(pool, geometry.extent_offset + geometry.stripe_count * LINE, marks, every)
    epoch = np.zeros((1, 8), dtype=np.uint64)
    epoch[0, [0, 3]] = EPOCH
    epoch[0, 4] = core_lib.BL_SERVER_STOPPED << 32
    for copy in range(2):
        _write(pool, 256 * EPOCH + copy * LINE, epoch, np.array([EPOCH], dtype=np.uint64))


def _seal(lines: Lines, keys: Lines) -> None:
    """Compute the check value of ``csrc/format/line.h`` at the end of each line."""
    total = (keys + np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xDA942042E4DD58B5)
    for column, (add, times) in enumerate(zip(_ADD, _TIMES, strict=True)):
        total += (lines[:, column] ^ np.uint64(add)) * np.uint64(times)
    total ^= total >> np.uint64(29)
    total = total * np.uint64(0x9FB21C651E98DF25) >> np.uint64(32)
    lines[:, 7] |= total << np.uint64(32)


def _write(pool: Pool, offset: int, lines: Lines, keys: Lines) -> None:
    _seal(lines, keys)
    source = core_ffi.from_buffer(np.ascontiguousarray(lines))
    raise_for_status(
        core_lib.bl_pool_write(pool.handle, offset, source, lines.nbytes), "writing the table"
    )
