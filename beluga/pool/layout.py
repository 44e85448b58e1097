# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The geometry of a new pool: explicit values, and defaults by the pool's size.

The defaults keep metadata near 2 % of pools of 256 MiB and more, and near 1 % from 1 GiB on.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral

from beluga._ffi import ffi, lib
from beluga.arguments import of_type, short
from beluga.choices import BLOCK_COUNT_MAX, LANE_COUNT_MAX
from beluga.errors import (
    BadTypeError,
    DeviceMismatchError,
    NoRoomError,
    PoolError,
    raise_for_status,
)
from beluga.pool.spec import STRIPE_SIZE, show_size
from beluga.pool.superblock import COHERENCE_MODES, Geometry, Superblock

_MIB = 1 << 20
_GIB = 1 << 30


# The limits of csrc/pool/superblock.c.
DEVICE_SIZE_MIN, DEVICE_SIZE_MAX = 2 * STRIPE_SIZE, 1 << 47
BLOCK_SIZE_MIN = 64  # smaller blocks may be stored, but no table is made for them
_PAGE_SIZE = 4096
_BLOCK_BYTES = 256 << 10  # unless smaller blocks are configured
_BLOCKS_LEAST = 1024
# Two vLLM engines of one rank take 8 lanes, a server with a disk and a store 6, each rank of SGLang
# 2, and events, a queue, LMCache and each command 1. So a pool has 32, and from 4 GiB on 64. In
# smaller pools 32 lanes of 124 KiB would take more than 3 % of the space; 12 fit into a stripe that
# other metadata takes anyway. A lane without a session costs nothing but its space.
_ROOMY = 128 * _MIB
_NUMBERS = (
    *("device_size", "max_blocks", "block_bytes"),
    *("lane_count", "slot_count", "bulk_size"),
)


@dataclass(frozen=True, slots=True)
class NewPoolSettings:
    """The settings of a new pool; None takes the default. Sizes are in bytes. See
    :meth:`beluga.pool.Pool.create`.
    """

    device_size: int | None = None
    interleave: bool = True
    coherence: str | Sequence[str] | None = None  # one value for all devices, or one for each
    metadata_coherence: str | None = None
    sparse: bool = False
    force: bool = False
    max_blocks: int | None = None
    block_bytes: int | None = None
    lane_count: int | None = None
    slot_count: int | None = None
    bulk_size: int | None = None

    def __post_init__(self) -> None:
        """Raise BadTypeError."""
        for name in ("interleave", "sparse", "force"):
            of_type(name, getattr(self, name), bool)
        of_type("metadata_coherence", self.metadata_coherence, str, type(None))
        of_type("coherence", self.coherence, str, list, tuple, type(None))
        for one in self.coherence or ():
            of_type("coherence", one, str)
        for name in _NUMBERS:
            value = getattr(self, name)
            if value is not None and (not isinstance(value, Integral) or isinstance(value, bool)):
                raise BadTypeError(f"{name} is a whole number, not {short(value)}; give an int")


class Layout:
    """A new pool's identity and geometry. It makes the superblock of each of its devices."""

    def __init__(
        self,
        device_count: int,
        device_size: int,
        settings: NewPoolSettings,
        *,
        metadata_device: bool = False,
    ) -> None:
        """Lay out ``device_count`` devices with data, after the metadata device if there is one.

        Raises NoRoomError if no space remains for blocks, PoolError for invalid settings.
        """
        _validate(settings, device_size)
        size = device_count * device_size
        small, large = size < 512 * _MIB, size >= 4 * _GIB
        self._sparse = settings.sparse
        self._coherence_of_each = _coherence_of_each(settings.coherence, device_count)
        if metadata_device:
            first = _coherence_of_each(settings.metadata_coherence, 1)
            self._coherence_of_each = [*first, *self._coherence_of_each]
        self._config = ffi.new("bl_pool_config *", {"pool_id": os.urandom(16)})
        config = self._config
        config.created_s = int(time.time())
        config.device_count = metadata_device + device_count
        config.device_size = device_size
        config.interleaved = (
            settings.interleave * lib.BL_PLACEMENT_INTERLEAVED
            + metadata_device * lib.BL_PLACEMENT_METADATA
        )
        config.sparse = settings.sparse
        self._geometry = ffi.new("bl_geometry *")
        config.lane_count = settings.lane_count or (64 if large else 32 if size >= _ROOMY else 12)
        config.slot_count = settings.slot_count or (64 if small else 256)
        config.bulk_size = settings.bulk_size or (32 if small else 64) << 10
        config.block_count_max = _block_count_max(settings, size)
        code = lib.bl_geometry_make(config, self._geometry)
        if code == -errno.ENOSPC:
            raise NoRoomError(
                f"{device_count} x {show_size(device_size)} leave no room for blocks beside the "
                f"tables of {config.lane_count} lanes and {config.block_count_max} blocks; use "
                "larger devices, or fewer --lanes and --max-blocks, or a larger --block-bytes"
            )
        if code == -errno.EINVAL:
            raise PoolError(
                f"{device_count} x {show_size(device_size)} have more stripes than an extent can "
                "name; use fewer or smaller devices"
            )
        raise_for_status(code, "laying the pool out")
        self.geometry = Geometry.of(self._geometry[0])

    def superblock(self, device_index: int, kind: str) -> Superblock:
        """Make the superblock of the device at that index. ``kind`` is "file" or "devdax"."""
        default = "hardware" if kind == "file" else "software"
        coherence = self._coherence_of_each[device_index] or default
        raw = ffi.new("bl_superblock *")
        lib.bl_superblock_make(
            self._config, self._geometry, device_index, COHERENCE_MODES[coherence], raw
        )
        return Superblock.of(bytes(ffi.buffer(raw)))


def _validate(settings: NewPoolSettings, device_size: int) -> None:
    """Raise PoolError for a number that is out of range."""
    if device_size % STRIPE_SIZE or not DEVICE_SIZE_MIN <= device_size <= DEVICE_SIZE_MAX:
        raise PoolError(
            "a device's size (--size; device_size) is a multiple of 2 MiB, from 4 MiB to "
            f"128 TiB, not {device_size} bytes"
        )
    ranges = {
        "--lanes (lane_count)": (settings.lane_count, 1, LANE_COUNT_MAX),
        "--max-blocks (max_blocks)": (settings.max_blocks, 1, BLOCK_COUNT_MAX),
        "--block-bytes (block_bytes)": (settings.block_bytes, BLOCK_SIZE_MIN, device_size),
        "slot_count": (settings.slot_count, 4, 1024),
        "--bulk-size (bulk_size)": (settings.bulk_size, _PAGE_SIZE, 64 * _MIB),
    }
    for name, (value, least, most) in ranges.items():
        if value is not None and not least <= value <= most:
            raise PoolError(f"{name} is from {least} to {most}, not {value}")
    if settings.slot_count is not None and settings.slot_count & (settings.slot_count - 1):
        raise PoolError(f"slot_count is a power of two, not {settings.slot_count}")
    if settings.bulk_size is not None and settings.bulk_size % _PAGE_SIZE:
        raise PoolError(
            f"--bulk-size (bulk_size) is a multiple of {_PAGE_SIZE}, not {settings.bulk_size}"
        )


def geometry_for(device_count: int, device_size: int, max_blocks: int | None = None) -> Geometry:
    """Return the geometry of a new pool, without making it. Raises as :class:`Layout` does."""
    return Layout(device_count, device_size, NewPoolSettings(max_blocks=max_blocks)).geometry


def _coherence_of_each(
    wanted: str | Sequence[str] | None, device_count: int
) -> Sequence[str | None]:
    """Return the coherence mode of each device; None stands for the default of its kind."""
    if not wanted:
        return [None] * device_count
    named = [wanted] if isinstance(wanted, str) else list(wanted)
    if len(named) == 1:
        named *= device_count
    for coherence in named:
        if coherence not in COHERENCE_MODES:
            raise PoolError(
                f"no coherence mode '{coherence}'; there are {', '.join(COHERENCE_MODES)}"
            )
    if len(named) != device_count:
        raise DeviceMismatchError(
            f"{len(named)} coherence modes for {device_count} devices; name one for all or one for "
            "each, in the devices' order"
        )
    return named


def _block_count_max(settings: NewPoolSettings, size: int) -> int:
    """Return the entries of the block table: as many as blocks of the smallest size fit."""
    if settings.max_blocks is not None:
        return settings.max_blocks
    smallest = settings.block_bytes or _BLOCK_BYTES
    return min(max(_BLOCKS_LEAST, -(-size // smallest)), BLOCK_COUNT_MAX)
