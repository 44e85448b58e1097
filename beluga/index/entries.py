# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Reads the lines of the block table from the pool, for diagnosis (``csrc/check/entries.c``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from beluga._ffi import ffi, lib, record_dtype
from beluga.errors import raise_for_status

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from beluga.pool import Pool

ENTRY = record_dtype("bl_entry")
"""A line of the block table (``bl_entry``). A free line still has the key of its last block."""

COMMITTED: int = lib.BL_ENTRY_COMMITTED
FREE: int = lib.BL_ENTRY_FREE
TORN: int = lib.BL_ENTRY_TORN
# Upper bits of a generation are the epoch, lower ones a counter (csrc/index/blocks.h)
EPOCH_SHIFT = 40
_LINES = 1 << 14  # read in one call: 1 MiB


def read_entries(pool: Pool, half: int) -> Iterator[NDArray[np.void]]:
    """Yield the lines of a half of the block table in order, in arrays of :data:`ENTRY`.

    A running server may change lines during the read; a torn line is returned as :data:`TORN`.
    """
    for first in range(0, pool.geometry.block_count_max, _LINES):
        lines = np.zeros(min(_LINES, pool.geometry.block_count_max - first), ENTRY)
        into = ffi.from_buffer("bl_entry[]", lines, require_writable=True)
        with pool.using() as handle:
            raise_for_status(
                lib.bl_entries_read(handle, half, first, len(lines), into), "reading the table"
            )
        yield lines
