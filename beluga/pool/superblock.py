# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Reads and validates superblocks, the first bytes of a device, and their geometry.

C decides whether a superblock is valid; this module turns the result into an error message.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from beluga import choices
from beluga._ffi import core, ffi, lib
from beluga.errors import (
    DeviceBusyError,
    DeviceForeignError,
    DeviceTruncatedError,
    FormatError,
    PoolError,
    SuperblockDamagedError,
    raise_for_status,
)
from beluga.pool.device import Device, explain
from beluga.pool.spec import STRIPE_SIZE

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_RECREATE = "create the pool again: beluga pool create --force PATH..."

MAGIC = b"BELUGA\r\n"  # the first bytes of a superblock

SUPERBLOCK_SIZE: int = ffi.sizeof("bl_superblock")

COHERENCE_MODES: dict[str, int] = dict(
    zip(
        choices.COHERENCE_MODES,
        (lib.BL_COHERENCE_HARDWARE, lib.BL_COHERENCE_SOFTWARE),
        strict=True,
    )
)


@dataclass(frozen=True, slots=True)
class Geometry:
    """The layout of a pool. Sizes and offsets are in bytes; see ``csrc/format/pool_format.h``."""

    device_count: int
    interleaved: bool
    device_size: int  # of each device with data
    size: int
    lane_count: int
    slot_count: int
    bulk_size: int
    block_count_max: int
    session_offset: int
    lane_offset: int
    lane_stride: int
    table_offset: int
    extent_offset: int
    data_offset: int
    stripe_count: int
    name_offset: int
    metadata_device: bool  # device 0 has all bytes before the data, the others only the data

    @classmethod
    def of(cls, geometry: core.bl_geometry) -> Geometry:
        """Convert a ``bl_geometry``."""
        placement = {
            "interleaved": bool(geometry.interleaved & lib.BL_PLACEMENT_INTERLEAVED),
            "metadata_device": bool(geometry.interleaved & lib.BL_PLACEMENT_METADATA),
        }
        plain = [field.name for field in fields(cls) if field.name not in placement]
        return cls(**{name: getattr(geometry, name) for name in plain}, **placement)

    @property
    def data_device(self) -> int:
        """The index of the first device with data."""
        return int(self.metadata_device)

    def device_size_of(self, index: int) -> int:
        """Return the bytes that the pool uses of a device, including its superblock's stripe."""
        if index < self.data_device:
            return STRIPE_SIZE + self.data_offset
        return self.device_size

    def devices_of(self, offsets: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the device of each offset of data, as ``csrc/format/interleave.h`` does."""
        stripes = offsets // STRIPE_SIZE
        if self.metadata_device:
            stripes = stripes - self.data_offset // STRIPE_SIZE
        if self.interleaved:
            return self.data_device + stripes % (self.device_count - self.data_device)
        return self.data_device + stripes // (self.device_size // STRIPE_SIZE - 1)

    @property
    def data_size(self) -> int:
        """The bytes for payloads."""
        return self.stripe_count * STRIPE_SIZE


@dataclass(frozen=True, slots=True)
class Superblock:
    """A valid superblock."""

    raw: bytes
    pool_id: str  # 32 hex digits
    device_index: int
    coherence: str  # "hardware" or "software"
    sparse: bool
    created_s: int  # seconds since 1970
    geometry: Geometry

    @classmethod
    def of(cls, raw: bytes) -> Superblock:
        """Convert bytes that C has validated."""
        c = ffi.cast("bl_superblock *", ffi.from_buffer(raw))
        coherence = next(name for name, number in COHERENCE_MODES.items() if number == c.coherence)
        return cls(
            raw,
            bytes(c.pool_id).hex(),
            c.device_index,
            coherence,
            bool(c.sparse),
            c.created_s,
            Geometry.of(c.geometry),
        )


def read_first(device: Device, fd: int) -> bytes:
    """Read the bytes where the superblock is or would be. A file that is too short is padded with
    zeros.
    """
    if device.kind == "file":
        try:
            raw = os.pread(fd, SUPERBLOCK_SIZE, device.spec.offset)
        except OSError as error:
            raise explain(error, device.spec.path) from None
        return raw.ljust(SUPERBLOCK_SIZE, b"\0")
    with _first_stripe(device, fd) as address:
        raw_bytes = ffi.new("uint8_t[]", SUPERBLOCK_SIZE)
        raise_for_status(
            lib.bl_device_read(address, raw_bytes, SUPERBLOCK_SIZE), f"reading {device}"
        )
        return bytes(ffi.buffer(raw_bytes))


def slice_with_pool(device: Device, fd: int) -> int | None:
    """Return the offset of another pool's superblock in a file, after its first stripe, or None.

    Only stripes that have data are read; devdax memory is not searched.
    """
    if device.kind != "file":
        return None
    end = device.spec.offset + device.size
    at = device.spec.offset + STRIPE_SIZE
    while at < end:
        try:
            data = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:  # ENXIO: there is no data beyond
            return None
        at = max(at, data // STRIPE_SIZE * STRIPE_SIZE)
        if at < end and os.pread(fd, len(MAGIC), at) == MAGIC:
            return at
        at += STRIPE_SIZE
    return None


def wipe_first(device: Device, fd: int) -> None:
    """Write zeros over the superblock. The device has at least one stripe."""
    with _first_stripe(device, fd) as address:
        zeros = bytes(SUPERBLOCK_SIZE)
        raise_for_status(lib.bl_device_write(address, zeros, SUPERBLOCK_SIZE), f"wiping {device}")


@contextlib.contextmanager
def _first_stripe(device: Device, fd: int) -> Iterator[core.void_p]:
    """Map the first stripe and yield its address. devdax has no read(), and hugetlbfs has no
    write().
    """
    address = ffi.new("void **")
    raise_for_status(
        lib.bl_device_map(fd, device.spec.offset, STRIPE_SIZE, address), f"mapping {device}"
    )
    try:
        code = lib.bl_device_populate(address[0], SUPERBLOCK_SIZE)  # a full file system has no more
        if code < 0:
            raise DeviceBusyError(
                f"{device} can be mapped but not accessed ({os.strerror(-code)}); is its driver "
                "bound, and are huge pages allowed to this process (PR_SET_THP_DISABLE)?"
            )
        yield address[0]
    finally:
        lib.bl_device_unmap(address[0], STRIPE_SIZE)


def fault(raw: bytes) -> int:
    """Return ``bl_superblock_fault`` of the bytes."""
    return int(lib.bl_superblock_fault(ffi.cast("bl_superblock *", ffi.from_buffer(raw))))


def validate(device: Device, raw: bytes) -> Superblock:
    """Return the superblock in ``raw``. Raises a PoolError if it or the device's size is wrong."""
    number = fault(raw)
    if number != lib.BL_SUPERBLOCK_GOOD:
        raise _error_of(device, number, raw)
    superblock = Superblock.of(raw)
    wanted = superblock.geometry.device_size_of(superblock.device_index)
    if device.size < wanted:
        raise DeviceTruncatedError(
            f"{device} has {device.size} bytes, but its pool was made with {wanted} "
            f"of it; restore the device, or {_RECREATE}"
        )
    return superblock


def _error_of(device: Device, number: int, raw: bytes) -> PoolError:
    if number == lib.BL_SUPERBLOCK_EMPTY:
        return DeviceForeignError(f"{device} holds no pool; make one: beluga mount --create PATH")
    if number == lib.BL_SUPERBLOCK_FOREIGN:
        return DeviceForeignError(
            f"{device} holds something other than a Beluga pool; check the path, or destroy what "
            "is there: beluga pool create --force PATH..."
        )
    if number == lib.BL_SUPERBLOCK_VERSION:
        version = ffi.cast("bl_superblock *", ffi.from_buffer(raw)).version
        return FormatError(
            f"{device} has pool format {version}, this Beluga {lib.BL_FORMAT_VERSION}; use the "
            f"Beluga that made it, or {_RECREATE}"
        )
    if number == lib.BL_SUPERBLOCK_FORMAT:
        return FormatError(
            f"{device} was made by a Beluga whose structs differ (format hash); use that build on "
            f"all hosts, or {_RECREATE}"
        )
    return SuperblockDamagedError(
        f"{device}: its superblock is damaged; the pool is lost, {_RECREATE}"
    )
