# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The fewest runs in which copy engines can move a plan's bytes, to compare them with kernels."""

from __future__ import annotations

import numpy as np

from beluga._ffi import ffi, lib, record_dtype
from beluga.errors import TransferError
from beluga.pool import Pool
from beluga.transfer import CudaEngine, Plan

_SPAN = record_dtype("bl_span")


def runs_of(engine: CudaEngine, pool: Pool, plan: Plan) -> list[tuple[int, int, int]]:
    """Return runs: a GPU address, an offset in the plan's concatenated chunks, and a length.

    All of the plan's windows have to be registered, and to stay so.
    """
    spans = np.zeros(len(plan.pieces) + plan.size // lib.BL_SPAN_SIZE, _SPAN)
    with pool.using() as handle:
        windows = engine.registrar.struct(handle)
        made = ffi.from_buffer("bl_span[]", spans)
        count = lib.bl_spans_make(windows, plan.struct(), ffi.NULL, ffi.NULL, False, made)
    if count < 0:
        raise TransferError("a window of the plan is not registered; call settle() before")
    spans = spans[:count]
    starts, sizes = spans["pool"], spans["length"].astype(np.uint64)
    window = np.searchsorted(engine.registrar.bases, starts, side="right")
    new = np.append(True, (starts[1:] != (starts + sizes)[:-1]) | (np.diff(window) != 0))
    first = np.flatnonzero(new)
    places = (np.cumsum(sizes) - sizes)[first]
    rows = zip(starts[first], places, np.add.reduceat(sizes, first), strict=True)
    return [(int(at), int(place), int(size)) for at, place, size in rows]
