# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A link: the fabric between engines and the pool, which all processes of this host share.

There is a link for each CXL adapter or GPU, and NUMA node. A duplex link has a direction for reads
and one for writes. Each memory device behind it has a bucket, shared by all links.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import mmap
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from beluga._ffi import core, ffi, lib
from beluga.errors import TransferError, raise_for_status
from beluga.transfer.engine import Direction
from beluga.transfer.iosched.cost import (
    DEVICE_SPEED,
    PICOSECONDS,
    READ_SPEED,
    WRITE_SPEED,
    Speed,
    speed_of,
)
from beluga.transfer.iosched.fair import TAU_NS, LinkDirection
from beluga.transfer.iosched.segment import at, links_directory, share
from beluga.transfer.plan.cuts import STRIPE_SIZE, cut_at

if TYPE_CHECKING:
    from beluga.pool import Pool
    from beluga.transfer.plan.plan import Plan

_PAGE = 4096
_HEADER = _PAGE  # the settings, as JSON
_DIRECTION_SIZE = -(-ffi.sizeof("bl_direction") // _PAGE) * _PAGE


class TransferClass(enum.IntEnum):
    """Classes of transfers; the number is that of the class in a direction."""

    ONBOARD = 1
    """Pool to engine, while a request waits."""
    PREFETCH = 2
    """Pool to engine, ahead of a request."""
    OFFLOAD = 3
    """Engine to pool, best effort."""
    SCRUB = 4
    """Maintenance of the blocks in the pool."""


SHARES = (1000, 200, 100, 10)


@dataclasses.dataclass(frozen=True, slots=True)
class LinkSettings:
    """The speed of a link and the shares of its classes; the paper's speeds are the default.

    ``piece_size`` is the largest piece that is admitted at once, in bytes; ``pieces`` of that size
    may be in flight in each direction. ``device`` is the speed of each memory device behind the
    link; None if the devices are not slower than the link. ``shares`` has one number per
    :class:`TransferClass`, in order. If ``capped``, new pieces wait for completed ones, so a link
    that is slower than its settings is not flooded. Otherwise the rate alone limits them, and costs
    grow when the link lags behind (the flow ratio).
    """

    read: Speed = READ_SPEED
    write: Speed = WRITE_SPEED
    device: Speed | None = DEVICE_SPEED
    duplex: bool = True
    piece_size: int = 256 << 10
    pieces: int = 2
    shares: tuple[int, ...] = SHARES
    tau_ns: int = TAU_NS
    capped: bool = True

    def __post_init__(self) -> None:
        if min(self.piece_size, self.pieces) <= 0 or self.tau_ns < 0:
            raise TransferError(f"{self} is invalid; see LinkSettings")
        if len(self.shares) != len(TransferClass):
            raise TransferError(f"{self} is invalid; see LinkSettings")
        if any(not 0 < share < 1 << 31 for share in self.shares):
            raise TransferError(f"shares must be whole numbers of at least 1, not {self.shares}")


class Link:
    """A link of this host, attached to by name.

    The first process's ``settings`` apply to all processes; :attr:`settings` has them. With a
    ``pool``, copies also count for the memory devices that they access. Raises TransferError if the
    shared file is unusable.
    """

    def __init__(
        self,
        name: str,
        settings: LinkSettings | None = None,
        *,
        node: int | None = None,
        pool: Pool | None = None,
        directory: Path | None = None,
    ) -> None:
        self.name = name
        self.path = link_path(name, node, directory)
        where = self.path.parent
        wanted = settings or LinkSettings()
        self._shared = [
            share(self.path, _HEADER + 2 * _DIRECTION_SIZE, lambda memory: _fill(memory, wanted))
        ]
        self._memory = self._shared[0].memory
        self.settings = _read(self._memory, self.path)
        self.directions = self._find_directions()
        self.pool = pool
        self.devices: list[core.bl_tokens] = (
            [] if pool is None else self._attach_devices(where, pool)
        )
        self._since = (
            time.monotonic(),
            tuple(int(direction.handle.used) for direction in self.directions),
        )

    def price(self) -> core.bl_price:
        """Return the price of pieces, a ``bl_price *``, which the caller has to reference."""
        settings = self.settings
        speeds = (settings.read, settings.write)
        device = settings.device
        return ffi.new(
            "bl_price *",
            {
                "byte_ps": [PICOSECONDS / speed.bytes_per_s for speed in speeds],
                "piece_ps": [speed.operation_ps for speed in speeds],
                "device_byte_ps": 0.0 if device is None else PICOSECONDS / device.bytes_per_s,
                "device_piece_ps": 0.0 if device is None else device.operation_ps,
                "piece_size": settings.piece_size,
                "piece_count": settings.pieces,
            },
        )

    def device_bytes(self, plan: Plan, ends: list[int]) -> NDArray[np.uint64]:
        """Return the bytes on each memory device, of shape (ranges, devices).

        The ranges are those of a plan's chunks that end at ``ends``.
        """
        assert self.pool is not None  # noqa: S101  otherwise there are no devices
        geometry = self.pool.geometry
        offsets = plan.link_ranges["offset"].astype(np.int64)
        row, at, end = cut_at(offsets, offsets + plan.link_ranges["length"], STRIPE_SIZE)
        device = geometry.devices_of(at)
        whole = plan.link_ranges is plan.chunks
        chunk = row if whole else plan.pieces["chunk"].astype(np.int64)[row] - plan.chunk_base
        shape = len(ends), len(self.devices)
        place = np.searchsorted(ends, chunk, side="right") * shape[1] + device
        found = np.bincount(place, end - at, minlength=shape[0] * shape[1])
        return found.astype(np.uint64).reshape(shape)

    def close(self) -> None:
        """Release the shared memory; the handles of the link have been closed.

        The last process of the host removes the file.
        """
        for segment in self._shared:
            segment.release()

    def set_shares(self, kind: TransferClass, shares: int) -> None:
        """Set a class's shares for all processes, from the next piece on."""
        for direction in self.directions:
            direction.set_shares(kind, shares)

    def limit(self, kind: TransferClass, bytes_per_s: int) -> None:
        """Limit a class's bandwidth in each direction for all processes; 0 lifts the limit."""
        for direction in self.directions:
            direction.limit(kind, bytes_per_s)

    def bytes_of(self, kind: TransferClass) -> tuple[int, int]:
        """Return the bytes that all processes have read and written so far."""
        read, write = self.directions
        return read.bytes_of(kind), write.bytes_of(kind) if self.settings.duplex else 0

    def pieces_of(self, kind: TransferClass) -> tuple[int, int]:
        """Return how many pieces of all processes were admitted, to read and to write."""
        read, write = (int(direction.handle.nodes[kind].pieces) for direction in self.directions)
        return read, write if self.settings.duplex else 0

    def utilisation(self) -> tuple[float, float]:
        """Return the share of each direction's time that was admitted to copies of all processes.

        The time counts from the last call, or from attaching.
        """
        now, used = (
            time.monotonic(),
            tuple(int(direction.handle.used) for direction in self.directions),
        )
        (before, since), self._since = self._since, (now, used)
        elapsed = max(now - before, 1e-9) * PICOSECONDS
        read, write = ((u - s) / elapsed for u, s in zip(used, since, strict=True))
        return read, write

    def _find_directions(self) -> tuple[LinkDirection, LinkDirection]:
        found = [LinkDirection.at(_direction_at(self._memory, place)) for place in Direction]
        for direction in found:
            if not lib.bl_direction_valid(
                direction.handle
            ) or direction.handle.node_count != 1 + len(TransferClass):
                raise TransferError(
                    f"{self.path} is damaged; stop the processes that use it, and remove it"
                )
        return (found[0], found[1]) if self.settings.duplex else (found[0], found[0])

    def _attach_devices(self, where: Path, pool: Pool) -> list[core.bl_tokens]:
        if self.settings.device is None:
            return []
        if len(pool.devices) > lib.BL_LINK_DEVICES:
            raise TransferError(f"a link has at most {lib.BL_LINK_DEVICES} devices")
        found = []
        for device in pool.devices:
            path = where / f"device-{_file_name(str(device.path.resolve()))}"
            self._shared.append(share(path, _PAGE, self._fill_device))
            bucket = ffi.cast("bl_tokens *", at(self._shared[-1].memory, 0))
            if bucket.rate != PICOSECONDS:
                raise TransferError(
                    f"{path} is damaged; stop the processes that use it, and remove it"
                )
            found.append(bucket)
        return found

    def _fill_device(self, memory: mmap.mmap) -> None:
        settings = self.settings
        assert settings.device is not None  # noqa: S101  otherwise there are none
        limit = settings.pieces * int(settings.device.tokens(settings.piece_size))
        bucket = ffi.cast("bl_tokens *", at(memory, 0))
        status = lib.bl_tokens_init(bucket, PICOSECONDS, limit, 1, 0, lib.bl_io_queue_now_ns())
        raise_for_status(status, "making a device's bucket")


def link_path(name: str, node: int | None, directory: Path | None) -> Path:
    """Return the shared file of a link."""
    where = links_directory() if directory is None else directory
    return where / f"link-{_file_name(name)}{'' if node is None else f'-node{node}'}"


def _direction_at(memory: mmap.mmap, direction: Direction) -> core.bl_direction:
    return ffi.cast("bl_direction *", at(memory, _HEADER + direction * _DIRECTION_SIZE))


def _fill(memory: mmap.mmap, settings: LinkSettings) -> None:
    """Write the first process's settings for all processes."""
    for place, speed in zip(Direction, (settings.read, settings.write), strict=True):
        direction = LinkDirection(
            _direction_at(memory, place),
            limit=settings.pieces * int(speed.tokens(settings.piece_size)),
            forgiving=settings.tau_ns * (PICOSECONDS // 10**9),
            capped=settings.capped,
            now_ns=lib.bl_io_queue_now_ns(),
        )
        for shares in settings.shares:
            direction.add(shares)
    text = json.dumps(dataclasses.asdict(settings)).encode()
    memory[: len(text)] = text


def _read(memory: mmap.mmap, path: Path) -> LinkSettings:
    try:
        fields = json.loads(memory[:_HEADER].rstrip(b"\0"))
        for name in ("read", "write", "device"):
            fields[name] = None if fields[name] is None else speed_of(fields[name])
        return LinkSettings(**{**fields, "shares": tuple(fields["shares"])})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise TransferError(
            f"{path} is damaged; stop the processes that use it, and remove it"
        ) from error


def _file_name(name: str) -> str:
    """Return a file name for a link or device, whose name may be a path. Different names have
    different files.
    """
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.]{0,63}", name):
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:12]
    return f"{re.sub(r'[^A-Za-z0-9_.]+', '_', name)[-40:]}-{digest}"
