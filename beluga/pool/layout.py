# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The geometry of a new pool: the values that its creator chose, and defaults by the pool's size.

The defaults keep metadata near 1 % of pools of 256 MiB and more.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from beluga._ffi import ffi, lib
from beluga.errors import DeviceMismatchError, NoRoomError, PoolError, raise_for_status
from beluga.pool.spec import show_size
from beluga.pool.superblock import COHERENCE_MODES, Geometry, Superblock

_MIB = 1 << 20
_GIB = 1 << 30


_BLOCK_BYTES = 256 << 10  # if no smaller blocks are asked for
_BLOCKS_LEAST = 1024


@dataclass(frozen=True, slots=True)
class Wishes:
    """The choices of a pool's creator; None leaves a choice to Beluga. Sizes are in bytes. See
    :meth:`beluga.pool.Pool.create`.
    """

    device_size: int | None = None
    interleave: bool = True
    coherence: str | Sequence[str] | None = None  # one value for all devices, or one for each
    sparse: bool = False
    force: bool = False
    max_blocks: int | None = None
    block_bytes: int | None = None
    lane_count: int | None = None
    slot_count: int | None = None
    bulk_size: int | None = None


class Layout:
    """A new pool's identity and geometry. It makes the superblock of each of its devices."""

    def __init__(self, device_count: int, device_size: int, wishes: Wishes) -> None:
        """Raises NoRoomError if no space is left for blocks, and PoolError if a choice is
        impossible.
        """
        size = device_count * device_size
        small, large = size < 512 * _MIB, size >= 4 * _GIB
        self._sparse = wishes.sparse
        self._coherence_of_each = _coherence_of_each(wishes.coherence, device_count)
        self._config = ffi.new("bl_pool_config *", {"pool_id": os.urandom(16)})
        config = self._config
        config.created_s = int(time.time())
        config.device_count = device_count
        config.device_size = device_size
        config.interleaved = wishes.interleave
        config.sparse = wishes.sparse
        self._geometry = ffi.new("bl_geometry *")
        try:
            config.lane_count = wishes.lane_count or (64 if large else 8 if small else 16)
            config.slot_count = wishes.slot_count or (64 if small else 256)
            config.bulk_size = wishes.bulk_size or (32 if small else 64) << 10
            config.block_count_max = _block_count_max(wishes, size)
            code = lib.bl_geometry_make(config, self._geometry)
        except OverflowError:
            code = -errno.EINVAL
        if code == -errno.ENOSPC:
            raise NoRoomError(
                f"{device_count} x {show_size(device_size)} leave no room for blocks beside the "
                "tables; use larger devices, or fewer --lanes and --max-blocks"
            )
        if code == -errno.EINVAL:
            raise PoolError(
                "impossible geometry: sizes in 2 MiB steps from 4 MiB; 1..4096 lanes; 4..1024 "
                "slots, a power of two; bulk in 4 KiB steps up to 64 MiB; at least one block"
            )
        raise_for_status(code, "laying the pool out")

    def superblock(self, device_index: int, kind: str) -> Superblock:
        """Make the superblock of the device at that index. ``kind`` is "file" or "devdax"."""
        default = "hardware" if kind == "file" else "software"
        coherence = self._coherence_of_each[device_index] or default
        raw = ffi.new("bl_superblock *")
        lib.bl_superblock_make(
            self._config, self._geometry, device_index, COHERENCE_MODES[coherence], raw
        )
        return Superblock.of(bytes(ffi.buffer(raw)))


def geometry_for(device_count: int, device_size: int, max_blocks: int | None = None) -> Geometry:
    """Return the geometry of a new pool, without making it. Raises as :class:`Layout` does."""
    layout = Layout(device_count, device_size, Wishes(max_blocks=max_blocks))
    return layout.superblock(0, "file").geometry


def _coherence_of_each(
    wanted: str | Sequence[str] | None, device_count: int
) -> list[str] | list[None]:
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


def _block_count_max(wishes: Wishes, size: int) -> int:
    """Return the entries of the block table: as many as blocks of the smallest size fit."""
    if wishes.max_blocks is not None:
        return wishes.max_blocks
    smallest = wishes.block_bytes or _BLOCK_BYTES
    return max(_BLOCKS_LEAST, -(-size // smallest))
