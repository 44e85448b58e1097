# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The windows in which a pool is registered with the driver, and their GPU addresses.

Each memory device of a pool is divided into windows of equal size, a power of two of stripes. A
piece of a plan lies in one stripe, and so in one window. ``csrc/transfer/spans.c`` computes the
GPU address of each piece from the table of this module.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from beluga._ffi import core, ffi, lib
from beluga.errors import LayoutError
from beluga.pool import STRIPE_SIZE, Pool
from beluga.transfer.engines.cuda.holds import WindowId
from beluga.transfer.plan.plan import Plan


class Windows:
    """The windows of a pool, of ``size`` bytes.

    ``bases`` has the GPU address of each window, or 0: uint64 of shape (devices, windows). A
    metadata device has a row, too, which no copy uses.
    """

    def __init__(self, pool: Pool, window_size: int) -> None:
        stripes = window_size // STRIPE_SIZE
        if stripes * STRIPE_SIZE != window_size or stripes & (stripes - 1) or stripes == 0:
            raise ValueError(f"a window is a power of two of stripes, not {window_size} bytes")
        self.size = window_size
        count = -(-pool.data_devices[0].stripe_count // stripes)
        self.bases: NDArray[np.uint64] = np.zeros((len(pool.devices), count), np.uint64)
        self._table = ffi.from_buffer("uint64_t[]", self.bases)

    def struct(self, pool: core.bl_pool) -> core.bl_windows:
        """Return the ``bl_windows *`` for C. It is valid while this object and ``pool`` are."""
        return self._struct(pool, self._table)

    def touched(self, pool: Pool, plan: Plan) -> set[WindowId]:
        """Return the windows in which a valid plan's bytes lie.

        Raises :class:`~beluga.errors.LayoutError` if a piece lies in two stripes.
        """
        touched = np.zeros(self.bases.shape, np.uint8)
        with pool.using() as handle:
            code = lib.bl_spans_touch(
                self.struct(handle), plan.struct(), ffi.from_buffer("uint8_t[]", touched)
            )
        if code < 0:
            raise LayoutError("a piece of the plan lies in two stripes; cut it where they end")
        return set(zip(*(column.tolist() for column in np.nonzero(touched)), strict=True))

    def reached(
        self, pool: Pool, plan: Plan, addresses: Mapping[WindowId, int]
    ) -> NDArray[np.bool_]:
        """Return for each chunk of a valid plan whether it lies in windows with an address in
        ``addresses``: shape (chunks,)."""
        bases, found = np.zeros_like(self.bases), np.empty(len(plan.chunks), np.uint8)
        for window, address in addresses.items():
            bases[window] = address
        table, reached = (
            ffi.from_buffer("uint64_t[]", bases),
            ffi.from_buffer("uint8_t[]", found),
        )
        with pool.using() as handle:
            lib.bl_spans_reach(self._struct(handle, table), plan.struct(), reached)
        return found.astype(bool)

    def _struct(self, pool: core.bl_pool, table: core.uint64_p) -> core.bl_windows:
        made = ffi.new("bl_windows *")
        made.pool, made.bases = pool, table
        made.window_count, made.window_shift = self.bases.shape[1], self.size.bit_length() - 1
        return made


class BufferWindows:
    """The one window of a buffer that replaces the pool: its offset 0 is ``address``."""

    def __init__(self, address: int) -> None:
        self._table = ffi.from_buffer("uint64_t[]", np.array([address], np.uint64))
        self.struct = ffi.new("bl_windows *")
        """The ``bl_windows *`` for C, which is valid while this object is."""
        self.struct.bases = self._table
