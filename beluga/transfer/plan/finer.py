# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Plans cut finer than their chunks, where no checksum holds a chunk together."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from beluga.transfer.plan.plan import CHUNK, LINE_SIZE, Plan


def finer(plan: Plan, size: int) -> Plan:
    """The same bytes in chunks of at most ``size``, for :meth:`~beluga.transfer.Plan.cut`.

    A plan with checksums stays as it is: an engine that sums a chunk does so in one go, so with it
    the most that a link lets on is a chunk (16 KiB, or a fragment), if that is more than ``size``.
    The CPU, which asks for leave as it copies, stops in the midst of one. A chunk begins with a
    line, so fragments that end anywhere are cut only where one happens to end with a line.
    """
    if plan.checksums is not None or len(plan.pieces) == 0:
        return plan
    pieces = _split(plan.pieces, max(size // 2 // LINE_SIZE, 1) * LINE_SIZE)
    lengths = pieces["length"].astype(np.int64)
    own = pieces["chunk"].astype(np.int64) - plan.chunk_base
    ends = np.cumsum(lengths)
    new = np.concatenate([[True], own[1:] != own[:-1]])
    place = ends - lengths
    place -= np.maximum.accumulate(np.where(new, place, 0))  # in its chunk
    may = new | plan.sparse | (pieces["offset"] % LINE_SIZE == 0)
    starts = np.flatnonzero(may)
    step = max(size - int(lengths.max()), 1)
    bucket = place[starts] // step
    starts = starts[new[starts] | np.concatenate([[True], bucket[1:] != bucket[:-1]])]
    chunks = np.zeros(len(starts), CHUNK)
    chunks["first"] = starts
    if plan.sparse:
        chunks["offset"] = plan.chunks["offset"][own[starts]]
        chunks["length"] = plan.chunks["length"][own[starts]]
    else:
        chunks["offset"] = pieces["offset"][starts]
        chunks["length"] = np.add.reduceat(lengths, starts)
    marks = np.zeros(len(pieces), np.uint32)
    marks[starts] = 1
    pieces["chunk"] = np.cumsum(marks) - 1
    return dataclasses.replace(plan, pieces=pieces, chunks=chunks, piece_base=0, chunk_base=0)


def _split(pieces: NDArray[np.void], size: int) -> NDArray[np.void]:
    """Pieces of at most ``size`` bytes, a multiple of a line; always new ones."""
    counts = -(-pieces["length"].astype(np.int64) // size)
    split = np.repeat(pieces, counts)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    skipped = (np.arange(len(split)) - first) * size
    split["address"] += skipped.astype(np.uint64)
    split["offset"] += skipped.astype(np.uint64)
    split["length"] = np.minimum(split["length"] - skipped, size)
    return split
