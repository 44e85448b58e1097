# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Ranges of a plan's chunks as plans, as C cuts them for a link (csrc/kvcache/engine.c)."""

from collections.abc import Iterator

import numpy as np

from beluga.transfer import Plan


def cut(plan: Plan, size: int) -> Iterator[Plan]:
    """Yield ranges of chunks with at most ``size`` bytes of pieces, or one chunk if it has more.
    They share the plan's arrays: its checksums are written into this plan's.
    """
    firsts = [*(plan.chunks["first"].astype(int) - plan.piece_base), len(plan.pieces)]
    ends = np.append(0, np.cumsum(plan.pieces["length"], dtype=np.int64))[firsts]
    start = 0
    while start < len(plan.chunks):
        end = max(int(np.searchsorted(ends, ends[start] + size, side="right")) - 1, start + 1)
        first, last = int(firsts[start]), int(firsts[end])
        yield Plan(
            plan.pieces[first:last],
            plan.chunks[start:end],
            None if plan.checksums is None else plan.checksums[start:end],
            plan.sparse,
            plan.owners,
            plan.piece_base + first,
            plan.chunk_base + start,
            plan.read_only,
        )
        start = end
