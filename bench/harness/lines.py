# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The bare exchange of lines (``limit.c``), with the layout of a lane: the same pool, strides and
distances.
"""

from __future__ import annotations

from beluga._ffi import lib as core_lib
from beluga.pool import STRIPE_SIZE, Pool

from .. import _limit
from .._limit import ffi
from . import drive

TIMEOUT_S = 5
STRIDE: int = core_lib.BL_POLL_STRIDE


def lines_of(
    pool: Pool, *, depth: int, batch: int, sequence: int, count: int
) -> _limit.limit_lines:
    """Make a ``limit_lines`` at the pool's first data stripe, or on a metadata device, where the
    lanes are.
    """
    geometry = pool.geometry  # a metadata device has a stripe that nothing uses before the data
    first = geometry.data_offset - geometry.data_device * STRIPE_SIZE
    requests = drive.address_of(pool, first)
    return ffi.new(
        "limit_lines *",
        {
            "requests": ffi.cast("uint8_t *", requests),
            "replies": ffi.cast("uint8_t *", requests + geometry.slot_count * STRIDE),
            "slots": geometry.slot_count,
            "stride": STRIDE,
            "coherent": pool.devices[0].coherence == "hardware",
            "depth": depth,
            "batch": batch,
            "sequence": sequence,
            "count": count,
            "timeout_ns": TIMEOUT_S * 10**9,
        },
    )
