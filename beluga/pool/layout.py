# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The bytes at the start of a pool: the superblock, the geometry, and where each area lies."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from numbers import Integral
from typing import TYPE_CHECKING

from beluga import choices
from beluga._ffi import core, ffi, lib
from beluga.arguments import of_type, short
from beluga.choices import BLOCK_COUNT_MAX, LANE_COUNT_MAX
from beluga.errors import (
    BadTypeError,
    DeviceBusyError,
    DeviceForeignError,
    DeviceMismatchError,
    DeviceTruncatedError,
    FormatError,
    NoRoomError,
    PoolError,
    SuperblockDamagedError,
    raise_for_status,
)
from beluga.pool.device import STRIPE_SIZE, Device, explain, show_size

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
    recorded_size = superblock.geometry.device_size_of(superblock.device_index)
    if device.size < recorded_size:
        raise DeviceTruncatedError(
            f"{device} has {device.size} bytes, but its pool was made with {recorded_size} "
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


_MIB = 1 << 20
_GIB = 1 << 30


# The limits of csrc/pool/superblock.c.
DEVICE_SIZE_MIN, DEVICE_SIZE_MAX = 2 * STRIPE_SIZE, 1 << 47
BLOCK_SIZE_MIN = 64  # smaller blocks may be stored, but no table is made for them
_PAGE_SIZE = 4096
_BLOCK_BYTES = 256 << 10  # unless smaller blocks are configured
_BLOCK_COUNT_MIN = 1024
# Two vLLM engines of one rank take 4 lanes, a server with a disk and a store 6, and each rank of
# SGLang, events, a queue, LMCache and each command 1. So a pool has 32, and from 4 GiB on 64. In
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
        for item in self.coherence or ():
            of_type("coherence", item, str)
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
    if settings.max_blocks is not None and settings.block_bytes is not None:
        raise PoolError(
            "--max-blocks (max_blocks) and --block-bytes (block_bytes) size the same table; give "
            "one of them"
        )
    ranges = {
        "--lanes (lane_count)": (settings.lane_count, 1, LANE_COUNT_MAX),
        "--max-blocks (max_blocks)": (settings.max_blocks, 1, BLOCK_COUNT_MAX),
        "--block-bytes (block_bytes)": (settings.block_bytes, BLOCK_SIZE_MIN, device_size),
        "slot_count": (settings.slot_count, 4, 1024),
        "--bulk-size (bulk_size)": (settings.bulk_size, _PAGE_SIZE, 64 * _MIB),
    }
    for name, (value, low, high) in ranges.items():
        if value is not None and not low <= value <= high:
            raise PoolError(f"{name} is from {low} to {high}, not {value}")
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
    modes: str | Sequence[str] | None, device_count: int
) -> Sequence[str | None]:
    """Return the coherence mode of each device; None stands for the default of its kind."""
    if not modes:
        return [None] * device_count
    named = [modes] if isinstance(modes, str) else list(modes)
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
    return min(max(_BLOCK_COUNT_MIN, -(-size // smallest)), BLOCK_COUNT_MAX)
