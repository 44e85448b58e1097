# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Cuts a plan without checksums into smaller chunks, so that a link can admit less at a time."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from beluga.transfer.plan.plan import CHUNK, LINE_SIZE, Plan


def finer(plan: Plan, size: int) -> Plan:
    """Return a plan of the same bytes in chunks of at most ``size`` bytes.

    :meth:`~beluga.transfer.Plan.cut` can then cut it. A plan with checksums is unchanged, because
    an engine sums a chunk at once; a link then admits a whole chunk (16 KiB, or a fragment), even
    if it is longer than ``size``. The CPU acquires tokens while it copies, so it can pause in the
    middle of a chunk. A chunk begins with a line, so the plan is cut between fragments only where a
    fragment ends with a line.
    """
    if plan.checksums is not None or (plan.chunks["length"] <= size).all():
        return plan
    pieces = _split(plan.pieces, max(size // 2 // LINE_SIZE, 1) * LINE_SIZE)
    lengths = pieces["length"].astype(np.int64)
    own = pieces["chunk"].astype(np.int64) - plan.chunk_base
    ends = np.cumsum(lengths)
    new = np.concatenate([[True], own[1:] != own[:-1]])
    place = ends - lengths
    place -= np.maximum.accumulate(np.where(new, place, 0))  # the place within the chunk
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
    """Return new pieces of at most ``size`` bytes, a multiple of a line."""
    counts = -(-pieces["length"].astype(np.int64) // size)
    split = np.repeat(pieces, counts)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    skipped = (np.arange(len(split)) - first) * size
    split["address"] += skipped.astype(np.uint64)
    split["offset"] += skipped.astype(np.uint64)
    split["length"] = np.minimum(split["length"] - skipped, size)
    return split
