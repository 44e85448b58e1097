# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Computes the GPU address of an offset of the pool, like ``csrc/cuda/job.cuh``.

The pool is registered with the driver in windows. A window is a power of two of stripes of one
device's mapping.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from beluga.pool import STRIPE_SIZE, Pool

STRIPE_SHIFT = STRIPE_SIZE.bit_length() - 1

Places = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]


@dataclasses.dataclass(frozen=True, slots=True)
class Windows:
    """The windows of a linear range; ``skipped_stripes`` lie before the range on each device."""

    device_count: int
    device_stripes: int  # stripes of the linear range on each device
    interleaved: bool
    skipped_stripes: int
    shift: int  # log2 of a window's stripes

    @classmethod
    def of(cls, pool: Pool, window_size: int) -> Windows:
        """Return the windows of a pool. ``window_size`` bytes are a power of two of stripes."""
        stripes = window_size // STRIPE_SIZE
        if stripes * STRIPE_SIZE != window_size or stripes & (stripes - 1) or stripes == 0:
            raise ValueError(f"a window is a power of two of stripes, not {window_size} bytes")
        return cls(
            device_count=len(pool.devices),
            device_stripes=pool.devices[0].stripe_count - 1,
            interleaved=bool(pool.geometry.interleaved),
            skipped_stripes=1,
            shift=stripes.bit_length() - 1,
        )

    @classmethod
    def flat(cls) -> Windows:
        """Return the one window of a buffer, whose offset 0 is its address."""
        return cls(1, (1 << 31) - 1, interleaved=False, skipped_stripes=0, shift=30)

    @property
    def size(self) -> int:
        """Return the bytes of a window."""
        return STRIPE_SIZE << self.shift

    def places(self, offsets: NDArray[np.uint64]) -> Places:
        """Return the device, the window on that device, and the byte in it for each offset."""
        at = offsets.astype(np.int64)
        stripe = at >> STRIPE_SHIFT
        if self.interleaved:
            row, device = np.divmod(stripe, self.device_count)
        else:
            device, row = np.divmod(stripe, self.device_stripes)
        row = row + self.skipped_stripes
        window = row >> self.shift
        inside = ((row - (window << self.shift)) << STRIPE_SHIFT) + (at & (STRIPE_SIZE - 1))
        return device, window, inside

    def touched(self, offsets: NDArray[np.uint64]) -> set[tuple[int, int]]:
        """Return the windows, as (device, window), in which these offsets lie."""
        device, window, _ = self.places(offsets)
        return {(int(key) >> 32, int(key) & 0xFFFFFFFF) for key in np.unique(device << 32 | window)}


@dataclasses.dataclass(frozen=True, slots=True)
class Bases:
    """GPU addresses of the windows of one launch, with a row for each device."""

    windows: Windows
    first: int
    table: NDArray[np.uint64]

    @classmethod
    def of(cls, windows: Windows, addresses: Mapping[tuple[int, int], int]) -> Bases:
        """Make bases from the GPU address of each (device, window). Other windows have 0."""
        numbers = [window for _, window in addresses]
        first = min(numbers)
        table = np.zeros((windows.device_count, max(numbers) - first + 1), np.uint64)
        for (device, window), address in addresses.items():
            table[device, window - first] = address
        return cls(windows, first, table)

    @classmethod
    def flat(cls, address: int) -> Bases:
        """Return the bases of one buffer."""
        return cls.of(Windows.flat(), {(0, 0): address})

    def addresses(self, offsets: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return the GPU address of each offset."""
        device, window, inside = self.windows.places(offsets)
        found: NDArray[np.uint64] = self.table[device, window - self.first]
        return found + inside.astype(np.uint64)
