# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The part of a pool that copying benchmarks use, and the drivers for it, ours and the limit's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from beluga.pool import STRIPE_SIZE, Pool

from . import drive
from .drive import Driver, Load, Offsets
from .pace import shared_paces

_OFFSET_COUNT_MAX = 4096
_HOT_SHARE = 0.9  # the share of a skewed load's operations in the hot set
_HOT_PART = 4  # The hot set is the first quarter: half of the first of two devices.


@dataclass(frozen=True, slots=True)
class Region:
    """The pool's data from its first stripe on: ``span`` bytes of the linear range.

    The limit does not interleave. It gets the addresses of the same offsets, or, for operations
    larger than a stripe, offsets in the ``piece`` bytes that are contiguous at ``base``.
    ``pace_file`` holds the clocks of paced devices.
    """

    pool: Pool
    span: int
    base: int
    piece: int
    pace_file: Path | None = None

    def size_for(self, size: int) -> int:
        """Return how many bytes may be used by operations of ``size`` bytes."""
        return self.span if size <= STRIPE_SIZE else self.piece

    def ours(self, verb: str, in_data: Offsets, size: int) -> Driver:
        """Return a driver for Beluga's "read" or "write"."""
        offsets = in_data + np.uint64(self.pool.geometry.data_offset)
        operation = drive.ours(self.pool, verb)
        Driver(Load(operation, offsets, size)).count(len(offsets))  # this maps the pages
        paces = None
        if self.pace_file is not None:
            paces = shared_paces(self.pool, self.pace_file, verb, offsets)
        return Driver(Load(operation, offsets, size, paces))

    def limit(self, name: str, offsets: Offsets, size: int) -> Driver:
        """Return a driver for ``limit_<name>``."""
        if size > STRIPE_SIZE:
            return Driver(Load(drive.bare(name, self.base), offsets, size))
        first = self.pool.geometry.data_offset
        addresses = [drive.address_of(self.pool, first + int(offset)) for offset in offsets]
        return Driver(Load(drive.bare(name, 0), np.array(addresses, np.uint64), size))


def region_of(pool: Pool, pace_file: Path | None = None) -> Region:
    """Return the region of all the pool's data."""
    geometry = pool.geometry
    stripe = 0 if geometry.metadata_device else geometry.data_offset // STRIPE_SIZE
    per_device = geometry.device_size // STRIPE_SIZE - 1
    row = stripe // geometry.device_count if geometry.interleaved else stripe % per_device
    span = geometry.stripe_count * STRIPE_SIZE
    piece = min(span, (per_device - row) * STRIPE_SIZE)
    return Region(pool, span, drive.address_of(pool, geometry.data_offset), piece, pace_file)


def touch(base: int, size: int) -> None:
    """Write every byte once, so that pages are mapped before any measurement."""
    offsets = np.arange(0, size, STRIPE_SIZE, dtype=np.uint64)
    Driver(Load(drive.bare("write", base), offsets, STRIPE_SIZE)).count(len(offsets))


def uniform(region_size: int, size: int, seed: int) -> Offsets:
    """Return offsets for operations of ``size`` bytes, in random order."""
    generator = np.random.default_rng(seed)
    numbers = generator.permutation(region_size // size)[:_OFFSET_COUNT_MAX]
    offsets: Offsets = numbers.astype(np.uint64) * np.uint64(size)
    return offsets


def skewed(region_size: int, size: int, seed: int) -> Offsets:
    """Return offsets of which most are in a hot set at the start."""
    generator = np.random.default_rng(seed)
    everywhere = generator.integers(region_size // size, size=_OFFSET_COUNT_MAX, dtype=np.uint64)
    hot = np.uint64(max(1, region_size // _HOT_PART // size))
    in_hot = generator.random(_OFFSET_COUNT_MAX) < _HOT_SHARE
    offsets: Offsets = np.where(in_hot, everywhere % hot, everywhere) * np.uint64(size)
    return offsets


def dealt(offsets: Offsets, count: int) -> Sequence[Offsets]:
    """Divide the offsets among ``count`` threads."""
    return [np.ascontiguousarray(offsets[index::count]) for index in range(count)]
