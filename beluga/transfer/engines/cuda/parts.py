# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Derive plans from a plan: for some of its chunks, or with its chunks concatenated in a buffer.

A pinned buffer replaces the pool. Only the offsets of pieces and chunks change, so the checksums
are the same.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from beluga.transfer.plan.plan import CHUNK, LINE_SIZE, Plan

RUN = np.dtype([("offset", "<u8"), ("place", "<u8"), ("size", "<u8")])


@dataclasses.dataclass(frozen=True, slots=True)
class Packed:
    """A ``plan`` for a buffer of ``size`` bytes in place of the pool.

    ``runs``, of type RUN, maps bytes of the pool to bytes of the buffer, in whole lines.
    """

    plan: Plan
    runs: NDArray[np.void]
    size: int


def select(plan: Plan, mask: NDArray[np.bool_]) -> Plan:
    """Return the chunks of ``plan`` for which ``mask`` is True, with a copy of their checksums."""
    chunk = plan.pieces["chunk"] - plan.chunk_base
    number = np.cumsum(mask) - 1
    pieces = plan.pieces[mask[chunk]].copy()
    pieces["chunk"] = number[chunk[mask[chunk]]]
    chunks = plan.chunks[mask].copy()
    chunks["first"] = np.searchsorted(pieces["chunk"], np.arange(len(chunks)))
    return dataclasses.replace(
        plan,
        pieces=pieces,
        chunks=chunks,
        checksums=None if plan.checksums is None else plan.checksums[mask],
        piece_base=0,
        chunk_base=0,
    )


def pack_chunks(plan: Plan) -> Packed:
    """Concatenate the chunks, or the lines of the rows of a sparse plan without checksums."""
    if plan.sparse and plan.checksums is None:
        plan = _by_rows(plan)
    sizes = (plan.chunks["length"].astype(np.int64) + LINE_SIZE - 1) & -LINE_SIZE
    places = np.cumsum(sizes) - sizes
    pieces, chunks = plan.pieces.copy(), plan.chunks.copy()
    number = pieces["chunk"] - plan.chunk_base
    moved = places.astype(np.uint64) - plan.chunks["offset"]  # may wrap; the next line wraps back
    pieces["offset"] += moved[number]
    chunks["offset"] = places
    runs = np.zeros(len(chunks), RUN)
    runs["offset"], runs["place"], runs["size"] = plan.chunks["offset"], places, sizes
    packed = dataclasses.replace(plan, pieces=pieces, chunks=chunks)
    return Packed(packed, _join(runs), int(sizes.sum()))


def _by_rows(plan: Plan) -> Plan:
    """Return a plan in which the lines of each row are a chunk."""
    pieces = plan.pieces.copy()
    pieces["chunk"] = np.arange(len(pieces))
    chunks = np.zeros(len(pieces), CHUNK)
    chunks["offset"] = pieces["offset"] & np.uint64(~(LINE_SIZE - 1) & (1 << 64) - 1)
    chunks["length"] = pieces["offset"] + pieces["length"] - chunks["offset"]
    chunks["first"] = pieces["chunk"]
    return dataclasses.replace(plan, pieces=pieces, chunks=chunks, piece_base=0, chunk_base=0)


def _join(runs: NDArray[np.void]) -> NDArray[np.void]:
    """Merge runs that are adjacent both in the pool and in the buffer."""
    ends = runs["offset"] + runs["size"]
    starts = np.flatnonzero(np.concatenate([[True], runs["offset"][1:] != ends[:-1]]))
    joined: NDArray[np.void] = runs[starts].copy()
    joined["size"] = np.add.reduceat(runs["size"], starts)
    return joined
