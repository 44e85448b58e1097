# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Cut a sparse plan's chunks into runs of bytes that are read once, with all their targets.

To compare a checksum, the whole chunk is read. The delivered bytes must be the summed bytes, even
if the pool's bytes change between two reads. So each byte is loaded once, even where rows overlap.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from beluga.transfer.plan.cuts import STRIPE_SIZE, parts
from beluga.transfer.plan.plan import PIECE, Plan

_STRIPE_SHIFT = STRIPE_SIZE.bit_length() - 1
_CHUNK_SHIFT = 33  # above the bits of a byte's offset in its chunk, which is below 2^32


@dataclasses.dataclass(frozen=True, slots=True)
class Runs:
    """The runs of a sparse plan's chunks.

    ``pieces``, of type PIECE, are in order of runs. The pieces of a run differ only in their
    addresses; a piece without an address covers bytes that no row requests. ``extra``, of shape
    (pieces,), is -1, or for the first piece of a run the number of further pieces in the run.
    """

    pieces: NDArray[np.void]
    extra: NDArray[np.int64]


def runs_of(plan: Plan) -> Runs:
    """Cut the chunks of a sparse plan where rows and stripes begin and end.

    A row that overlaps others adds at most two runs, and has a piece in each of its runs.
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
    is_run = np.append(of_edge[1:] == of_edge[:-1], False)  # otherwise a chunk ends there
    until = np.append(edges[1:], 0)
    # The pairs of a run and a row that contains it, in order of runs.
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
    """Return where stripes end within chunks."""
    stripe = origin >> _STRIPE_SHIFT
    chunk, step = parts(((origin + lengths - 1) >> _STRIPE_SHIFT) - stripe)
    place: NDArray[np.int64] = ((stripe[chunk] + 1 + step) << _STRIPE_SHIFT) - origin[chunk]
    return place + (chunk << _CHUNK_SHIFT)
