# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The pool of a benchmark: a temporary one, or one that the user names."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from beluga._ffi import ffi, lib
from beluga.errors import NoRoomError, PoolError
from beluga.pool import STRIPE_SIZE, Pool, room, scratch_folder, show_size

from .options import SOFTWARE, Options

_POOL_SIZE = 192 << 20
_SMOKE_SIZE = 40 << 20
_SLOT_COUNT = 256  # the greatest depth that rpc measures
_LANE_COUNT = 8


@contextmanager
def ground(  # noqa: PLR0913  all but one named
    options: Options,
    *,
    coherence: str | None = None,
    metadata_coherence: str | None = None,
    interleave: bool = True,
    devices: int = 2,
    size: int | None = None,
) -> Iterator[Pool]:
    """Yield a pool that may be overwritten, with a metadata device if its coherence is given.

    Raises PoolError if the user's pool has blocks, processes or another coherence, and NoRoomError.
    """
    chosen = coherence or options.coherence or SOFTWARE
    if options.pool:
        with Pool.open(options.pool) as pool:
            _refuse(pool, options.coherence)
            yield pool
        return
    parent, size = pool_folder(size or (_SMOKE_SIZE if options.smoke else _POOL_SIZE))
    with (
        scratch_folder("bench", parent) as directory,
        Pool.create(
            [directory / f"device{index}" for index in range(devices)],
            device_size=size // devices // STRIPE_SIZE * STRIPE_SIZE,
            interleave=interleave,
            coherence=chosen,
            metadata=directory / "metadata" if metadata_coherence else None,
            metadata_coherence=metadata_coherence,
            slot_count=_SLOT_COUNT,
            lane_count=_LANE_COUNT,
        ) as pool,
    ):
        yield pool


def pool_folder(size: int) -> tuple[Path, int]:
    """Return a directory for a pool, in memory if there is space, and how many bytes to use of
    it.
    """
    for parent in (Path("/dev/shm"), Path(tempfile.gettempdir())):  # noqa: S108
        space = room(parent).size if parent.is_dir() else 0
        if space >= _SMOKE_SIZE:
            return parent, min(size, space)
    raise NoRoomError(f"no room for {show_size(_SMOKE_SIZE)} in /dev/shm; name devices with --pool")


def _refuse(pool: Pool, coherence: str | None) -> None:
    """Raise PoolError if the user's pool has another coherence, is in use, or holds blocks."""
    for device in pool.devices:
        if coherence not in (None, device.coherence):
            raise PoolError(f"{device.path} was created {device.coherence}; leave --coherence out")
    pool.refuse_in_use()
    geometry = pool.geometry
    for line in range(lib.BL_HALF_COUNT * geometry.stripe_count):
        address = lib.bl_pool_address(pool.handle, geometry.extent_offset + line * lib.BL_LINE_SIZE)
        if ffi.cast("bl_extent_line *", address).state == lib.BL_EXTENT_OPEN:
            raise PoolError(
                f"the pool on {pool.devices[0].path} holds blocks, which a benchmark would write "
                "over; name an empty one, or none"
            )


def coherence_of(pool: Pool) -> str:
    """Return the coherence of a pool's devices; that of a metadata device last."""
    modes = "+".join(sorted({device.coherence for device in pool.data_devices}))
    if pool.geometry.metadata_device:
        return f"{modes}, metadata {pool.devices[0].coherence}"
    return modes
