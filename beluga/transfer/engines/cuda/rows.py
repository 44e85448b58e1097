# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A sparse plan's chunks as runs of bytes that are read once each, and all the places they go to.

To compare a checksum the whole chunk is read. What is delivered must be what was summed, also where
the pool's bytes change between two reads: so each byte is read by one load, wherever rows overlap.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from beluga.transfer.engines.cuda.windows import STRIPE_SHIFT
from beluga.transfer.plan.cuts import parts
from beluga.transfer.plan.plan import PIECE, Plan

_CHUNK_SHIFT = 33  # bits above a byte's place in its chunk, which has less than 2^32


@dataclasses.dataclass(frozen=True, slots=True)
class Runs:
    """``pieces`` of type PIECE, run by run: those of a run differ in their addresses alone, and one
    without an address is for bytes that nobody wants. ``extra``, of shape (pieces,): how many more
    pieces the run has after this one if it is the run's first, else -1."""

    pieces: NDArray[np.void]
    extra: NDArray[np.int64]


def runs_of(plan: Plan) -> Runs:
    """The chunks of a sparse plan, cut where rows begin and end and where stripes do.

    Rows that overlap make at most two runs each, and a piece for each run that each of them has.
    """
    chunk = (plan.pieces["chunk"] - plan.chunk_base).astype(np.int64)
    origin = plan.chunks["offset"].astype(np.int64)
    lengths = plan.chunks["length"].astype(np.int64)
    start = plan.pieces["offset"].astype(np.int64) - origin[chunk]
    first, last = (chunk << _CHUNK_SHIFT) + start, (chunk << _CHUNK_SHIFT) + start
    last += plan.pieces["length"]
    bottom = np.arange(len(origin)) << _CHUNK_SHIFT
    edges = np.unique(
        np.concatenate([first, last, bottom, bottom + lengths, _stripe_edges(origin, lengths)])
    )
    of_edge = edges >> _CHUNK_SHIFT
    is_run = np.append(of_edge[1:] == of_edge[:-1], False)  # else a chunk ends there
    until = np.append(edges[1:], 0)
    # Which runs each row has: pairs of both, in order of runs.
    begin, end = np.searchsorted(edges, first), np.searchsorted(edges, last)
    row, step = parts(end - begin)
    run = begin[row] + step
    unwanted = np.flatnonzero(is_run & (np.bincount(run, minlength=len(edges)) == 0))
    address = plan.pieces["address"][row] + (edges[run] - first[row]).astype(np.uint64)
    run = np.concatenate([run, unwanted])
    address = np.concatenate([address, np.zeros(len(unwanted), np.uint64)])
    order = np.argsort(run, kind="stable")
    run = run[order]
    pieces = np.empty(len(run), PIECE)
    pieces["address"] = address[order]
    pieces["offset"] = origin[of_edge[run]] + (edges[run] - bottom[of_edge[run]])
    pieces["length"] = until[run] - edges[run]
    pieces["chunk"] = of_edge[run] + plan.chunk_base
    leads = np.append(True, run[1:] != run[:-1])
    extra = np.full(len(run), -1)
    extra[leads] = np.diff(np.append(np.flatnonzero(leads), len(run))) - 1
    return Runs(pieces, extra)


def _stripe_edges(origin: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where stripes end within chunks."""
    stripe = origin >> STRIPE_SHIFT
    chunk, step = parts(((origin + lengths - 1) >> STRIPE_SHIFT) - stripe)
    place: NDArray[np.int64] = ((stripe[chunk] + 1 + step) << STRIPE_SHIFT) - origin[chunk]
    return place + (chunk << _CHUNK_SHIFT)
