# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Makes the tables of a launch (``csrc/cuda/job.cuh``) from a plan, by array operations."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from beluga.transfer.engines.cuda import crc
from beluga.transfer.engines.cuda.rows import runs_of
from beluga.transfer.engines.cuda.windows import Bases
from beluga.transfer.plan.cuts import parts
from beluga.transfer.plan.plan import LINE_SIZE, Plan

TILE = np.dtype([("piece", "<u4"), ("start", "<u4"), ("power", "<u4"), ("extra", "<u4")])
SUM = np.dtype([("crc", "<u4"), ("left", "<u4"), ("expected", "<u4"), ("reserved", "<u4")])
VERDICT = np.dtype([("bad_count", "<u4"), ("first_bad", "<u4"), ("reserved", "<u4", 2)])
# bl_job: every field is 8 bytes.
JOB = np.dtype(
    [
        *(("bases", "<u8"), ("device_count", "<u8"), ("device_stripes", "<u8")),
        *(("interleaved", "<u8"), ("skipped_stripes", "<u8"), ("window_shift", "<u8")),
        *(("first_window", "<u8"), ("window_count", "<u8"), ("pieces", "<u8"), ("tiles", "<u8")),
        *(("sums", "<u8"), ("verdict", "<u8"), ("tables", "<u8"), ("tile_count", "<u8")),
        *(("tile_size", "<u8"), ("chunk_base", "<u8")),
    ]
)

UNROLL = 8  # words in flight for each lane
WORD_SIZE = 16
HALF_BELOW = 2048  # half a warp copies pieces that are shorter, in bytes

_GOOD = np.array([(0, 0xFFFFFFFF, (0, 0))], VERDICT)


@dataclasses.dataclass(frozen=True, slots=True)
class Tables:
    """A plan's tables: ``pieces`` of type PIECE, ``tiles`` of TILE, ``sums`` of SUM or none."""

    pieces: NDArray[np.void]
    tiles: NDArray[np.void]
    sums: NDArray[np.void]
    lanes: int
    chunk_base: int

    @property
    def kernel(self) -> str:
        """The suffix of the kernel's name."""
        return ("_half" if self.lanes == 16 else "") + ("_sum" if len(self.sums) else "")

    @property
    def tile_size(self) -> int:
        return self.lanes * WORD_SIZE * UNROLL


@dataclasses.dataclass(frozen=True, slots=True)
class Upload:
    """The tables of a launch in one buffer, which is uploaded; ``result`` is fetched back."""

    content: NDArray[np.uint8]
    job: NDArray[np.void]
    result: slice  # the verdict, then the sums


def make_tables(plan: Plan, *, write: bool) -> Tables:
    """Make the tables of a plan. A piece without an address is only summed."""
    lanes = 16 if plan.pieces["length"].mean() < HALF_BELOW else 32
    pieces, extra = plan.pieces, np.zeros(len(plan.pieces), np.int64)
    if plan.checksums is None:
        tiles = _tiles(plan, pieces, extra, lanes, write)
        return Tables(pieces, tiles, np.empty(0, SUM), lanes, plan.chunk_base)
    if plan.sparse:
        runs = runs_of(plan)
        pieces, extra = runs.pieces, runs.extra
    tiles = _tiles(plan, pieces, extra, lanes, write)
    chunk = pieces["chunk"][tiles["piece"]] - plan.chunk_base
    sums = np.zeros(len(plan.chunks), SUM)
    sums["crc"] = crc.blank(plan.chunks["length"])
    sums["left"] = np.bincount(chunk, minlength=len(sums)) * lanes
    if not write:
        sums["expected"] = plan.checksums
    return Tables(pieces, tiles, sums, lanes, plan.chunk_base)


def tile_spans(tables: Tables) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return start and end of each tile, as offsets in the pool or in the buffer."""
    pieces = tables.pieces[tables.tiles["piece"]]
    at = tables.tiles["start"].astype(np.int64)
    start = pieces["offset"].astype(np.int64) + at
    return start, start + np.minimum(pieces["length"].astype(np.int64) - at, tables.tile_size)


def _tiles(
    plan: Plan, pieces: NDArray[np.void], extra: NDArray[np.int64], lanes: int, write: bool
) -> NDArray[np.void]:
    """Cut pieces into tiles. ``extra`` is that of ``rows.Runs``; pieces with -1 have no tiles."""
    size = lanes * WORD_SIZE * UNROLL
    lengths = pieces["length"].astype(np.int64)
    counts = np.where(extra < 0, 0, -(-lengths // size))
    piece, step = parts(counts)
    start = step * size
    tiles = np.zeros(len(piece), TILE)
    tiles["piece"], tiles["start"] = piece, start
    if not write and plan.checksums is None:
        return tiles
    chunks = plan.chunks[pieces["chunk"] - plan.chunk_base]
    until = pieces["offset"] - chunks["offset"]
    after = chunks["length"][piece] - until[piece].astype(np.int64)
    after -= np.minimum(start + size, lengths[piece])
    if plan.checksums is not None:
        tiles["power"] = crc.powers(after)
    if write:
        blanks = -chunks["length"].astype(np.int64) % LINE_SIZE
        tiles["extra"] = np.where(after == 0, blanks[piece], 0)
    else:
        tiles["extra"] = extra[piece]
    return tiles


def upload_size(tables: Tables, bases: Bases) -> int:
    """Return the size of :func:`pack`'s content in bytes."""
    return int(_starts(tables, bases)[-1])


def pack(tables: Tables, bases: Bases, *, target: int, crc_tables: int) -> Upload:
    """Lay out all tables of a launch for a buffer at GPU address ``target``."""
    starts = _starts(tables, bases)
    content = np.zeros(int(starts[-1]), np.uint8)
    for start, part in zip(starts.tolist(), _parts(tables, bases), strict=False):
        content[start : start + part.nbytes] = np.ascontiguousarray(part).view(np.uint8).reshape(-1)
    windows, (base, pieces, tiles, verdict, sums, _) = bases.windows, (target + starts).tolist()
    job = np.array(
        (
            *(base, windows.device_count, windows.device_stripes, windows.interleaved),
            *(windows.skipped_stripes, windows.shift, bases.first, bases.table.shape[1]),
            *(pieces, tiles, sums, verdict, crc_tables, len(tables.tiles), tables.tile_size),
            tables.chunk_base,
        ),
        JOB,
    )
    return Upload(content, job, slice(int(starts[3]), len(content)))


def _parts(tables: Tables, bases: Bases) -> tuple[NDArray[np.generic], ...]:
    return bases.table, tables.pieces, tables.tiles, _GOOD, tables.sums


def _starts(tables: Tables, bases: Bases) -> NDArray[np.int64]:
    """Return where each part begins, and where the last one ends."""
    sizes = [-(-part.nbytes // 16) * 16 for part in _parts(tables, bases)]
    return np.cumsum([0, *sizes])
