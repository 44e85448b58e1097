# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""An open pool, and its attachment to the pool's other processes."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from beluga._ffi import core, lib
from beluga._shared import OfThisProcess, SharedHandle, when_forked
from beluga.arguments import short
from beluga.errors import (
    BadValueError,
    DeviceMismatchError,
    DeviceMissingError,
    DeviceSpecError,
    PoolError,
    RuntimeDirError,
    ServerAliveError,
    raise_for_status,
)
from beluga.pool.create import Progress, create, destroy
from beluga.pool.device import (
    STRIPE_SIZE,
    SYSFS,
    Device,
    DeviceSpec,
    SpecLike,
    examine,
    listed,
    open_device,
    refuse_twice,
    run_near,
)
from beluga.pool.layout import Geometry, NewPoolSettings, read_first, validate
from beluga.pool.mapping import Mapping, Member
from beluga.pool.runtime import (
    boot_id_error,
    default_specs,
    make_runtime_dir,
    mapped_and_removed,
    refuse_in_use,
    runtime_path,
    server_stop,
)

if TYPE_CHECKING:
    from typing_extensions import Self


def attach(paths: Sequence[SpecLike], *, sysfs: Path = SYSFS) -> Mapping:
    """Map the pool on these devices. Raises a :class:`PoolError`."""
    specs = [DeviceSpec.parse(path) for path in paths]
    if not 1 <= len(specs) <= lib.BL_DEVICE_COUNT_MAX:
        raise PoolError(f"a pool has 1 to {lib.BL_DEVICE_COUNT_MAX} devices, not {len(specs)}")
    devices = [examine(spec, sysfs=sysfs) for spec in specs]
    refuse_twice(devices)
    return Mapping(_in_order([_member(device) for device in devices]))


def _member(device: Device) -> Member:
    fd = open_device(device)
    try:
        return Member(device, validate(device, read_first(device, fd)))
    finally:
        os.close(fd)


def _in_order(members: Sequence[Member]) -> list[Member]:
    """Sort members by device index. Raises DeviceMismatchError unless every index occurs once, on
    devices of one pool.
    """
    first = members[0].superblock
    by_index: dict[int, Member] = {}
    for member in members:
        superblock = member.superblock
        if superblock.pool_id != first.pool_id or superblock.geometry != first.geometry:
            raise DeviceMismatchError(
                f"{member.device} is of pool {superblock.pool_id[:8]}, {members[0].device} of pool "
                f"{first.pool_id[:8]}; name the devices of one pool"
            )
        if other := by_index.get(superblock.device_index):
            raise DeviceMismatchError(
                f"{member.device} and {other.device} are both device {superblock.device_index} of "
                f"pool {first.pool_id[:8]}; one is a copy: name each device once"
            )
        by_index[superblock.device_index] = member
    missing = [str(i) for i in range(first.geometry.device_count) if i not in by_index]
    if missing:
        no_metadata = first.geometry.metadata_device and 0 not in by_index
        raise DeviceMismatchError(
            f"pool {first.pool_id[:8]} has {first.geometry.device_count} devices; "
            f"device {', '.join(missing)} (counted from 0) is not named"
            + "; device 0 is its metadata device"
            * no_metadata
        )
    return [by_index[index] for index in sorted(by_index)]


@dataclass(frozen=True, slots=True)
class DeviceView:
    """One device of a pool."""

    index: int
    path: Path
    kind: str  # "file" or "devdax"
    offset: int  # bytes into path: more than 0 for a slice
    size: int  # bytes used by the pool
    stripe_count: int  # with the superblock's stripe
    coherence: str  # "hardware" or "software"
    holds: str  # "metadata", "data", or "both"
    sparse: bool
    link: str | None  # the adapter that connects it, as specified
    node: int | None  # the NUMA node near it


class Pool(OfThisProcess):
    """A pool mapped into this process; a context manager that unmaps it."""

    def __init__(self, mapping: Mapping) -> None:
        self._mapping = mapping
        self._closing = False
        self._after_fork()
        when_forked(self)
        self._ends: list[weakref.WeakMethod[Callable[[], None]]] = []
        first = mapping.members[0].superblock
        self.id: str = first.pool_id
        self.geometry: Geometry = first.geometry
        self.created_s: int = first.created_s
        self.devices: tuple[DeviceView, ...] = tuple(
            DeviceView(
                index=index,
                path=member.device.spec.path,
                kind=member.device.kind,
                offset=member.device.spec.offset,
                size=self.geometry.device_size_of(index),
                stripe_count=self.geometry.device_size_of(index) // STRIPE_SIZE,
                coherence=member.superblock.coherence,
                holds="both"
                if not self.geometry.metadata_device
                else "metadata"
                if index < self.geometry.data_device
                else "data",
                sparse=member.superblock.sparse,
                link=member.device.spec.link,
                node=member.device.node,
            )
            for index, member in enumerate(mapping.members)
        )
        self._files: dict[Path, tuple[int, int]] = {}  # device and inode of a path
        for device in self.devices:
            with suppress(OSError):
                stat = device.path.stat()
                if device.kind == "file":
                    self._files[device.path] = stat.st_dev, stat.st_ino

    @classmethod
    def create(  # noqa: PLR0913  all of them named
        cls,
        paths: SpecLike | Sequence[SpecLike],
        *,
        device_size: int | None = None,
        interleave: bool = True,
        coherence: str | Sequence[str] | None = None,
        metadata: SpecLike | None = None,
        metadata_coherence: str | None = None,
        sparse: bool = False,
        force: bool = False,
        max_blocks: int | None = None,
        block_bytes: int | None = None,
        lane_count: int | None = None,
        slot_count: int | None = None,
        bulk_size: int | None = None,
        progress: Progress | None = None,
    ) -> Pool:
        """Format ``paths``, which may be one path, as a new, empty pool and open it. Files are
        created and allocated.

        ``device_size`` is in bytes, a multiple of 2 MiB; None takes the devices' own size, or a
        share of the free space for new files. ``coherence`` is "hardware" or "software", or a list
        with one value for each path; None means "hardware" for files and "software" for devdax
        nodes. A pool with a device of hardware coherence is for one host, unless that is the
        ``metadata`` device: a device of its own for everything but the blocks, which is as large as
        they require, with a coherence mode of its own (``metadata_coherence``). ``paths`` are then
        the devices for blocks. Hardware coherence there means that the caches of all hosts that
        share the pool are coherent for that device. ``block_bytes`` is the smallest block that will
        be stored, 256 KiB if it is None: the block table gets an entry for each that fits, or
        ``max_blocks`` entries. If smaller blocks are stored, the table is full before the space is.
        ``sparse`` reserves space in files only for the tables (for tests). ``force`` overwrites
        existing data on the devices. ``progress`` is called with the bytes pre-faulted and the
        total.

        Raises a :class:`~beluga.errors.PoolError`; then nothing has changed.
        """
        settings = NewPoolSettings(
            device_size=device_size,
            interleave=interleave,
            coherence=coherence,
            metadata_coherence=metadata_coherence,
            sparse=sparse,
            force=force,
            max_blocks=max_blocks,
            block_bytes=block_bytes,
            lane_count=lane_count,
            slot_count=slot_count,
            bulk_size=bulk_size,
        )
        return cls(create(listed(paths), settings, metadata=metadata, progress=progress))

    @classmethod
    def open(cls, paths: SpecLike | Sequence[SpecLike]) -> Pool:
        """Open the pool on ``paths``, one or several, named in any order. Raises a
        :class:`~beluga.errors.PoolError`.
        """
        return cls(attach(listed(paths)))

    @classmethod
    def mount(cls) -> Pool:
        """Open the default pool. Raises NoDefaultPoolError, or a PoolError."""
        return cls.open(default_specs())

    @staticmethod
    def destroy(paths: SpecLike | Sequence[SpecLike], *, force: bool = False) -> None:
        """Wipe the superblocks on ``paths``. Remove the devices that are files, and the runtime
        directory.

        A damaged pool, or one of another version, can be destroyed too. ``force`` destroys these
        devices even if other devices of their pool are not listed. Raises DeviceMismatchError if
        devices are not listed, DeviceForeignError if a device has no Beluga superblock, and
        DeviceBusyError if processes of this host use the pool; then nothing is changed.
        """
        destroy(listed(paths), force=force)

    def using(self) -> SharedHandle[core.bl_pool]:
        """Return the ``bl_pool *`` for C. The memory stays mapped meanwhile, even if another thread
        closes the pool::

            with pool.using() as handle:
                lib.bl_call(handle)

        Raises ValueError once this is closed, ForkedSessionError in a forked child.
        """
        return self._mapping.using()

    @property
    def handle(self) -> core.bl_pool:
        """The ``bl_pool *`` for tests, which ensure that no thread closes the pool meanwhile."""
        return self._mapping.handle

    def _after_fork(self) -> None:
        """Make a new lock. In a forked child one of the parent's threads may hold the old one."""
        self._lock = threading.Lock()

    @property
    def runtime_dir(self) -> Path:
        """The directory of this pool's lock files on this host. It is created on first access."""
        return make_runtime_dir(self._mapping.members[0].device, self.id)

    @property
    def has_runtime_dir(self) -> bool:
        """Whether the directory exists. Without it no process of this host uses the pool."""
        return runtime_path(self._mapping.members[0].device, self.id).is_dir()

    def raise_for_status(self, code: int, doing: str) -> int:
        """Do what :func:`beluga.errors.raise_for_status` does, for a status of this pool's server.

        An error of the runtime directory, or an errno, includes the path, and that of a living
        server its pid.
        """
        try:
            return raise_for_status(code, doing)
        except OSError as error:  # about the files that processes of a host share
            raise boot_id_error(doing) or OSError(
                error.errno, error.strerror, str(self.runtime_dir)
            ) from None
        except ServerAliveError as error:
            raise ServerAliveError(f"{error}{server_stop(self.runtime_dir)}") from None
        except RuntimeDirError as error:
            raise RuntimeDirError(f"{error} (this process uses {self.runtime_dir})") from None

    @property
    def data_devices(self) -> tuple[DeviceView, ...]:
        """The devices with data: all but a metadata device."""
        return self.devices[self.geometry.data_device :]

    @property
    def one_host(self) -> bool:
        """Whether a device with data is one host's own memory, so that no other host may use the
        pool.
        """
        return any(device.coherence == "hardware" for device in self.data_devices)

    def refuse_in_use(self) -> None:
        """Raise DeviceBusyError if a process of this host serves the pool or has a session."""
        refuse_in_use(self.runtime_dir)

    def refuse_removed(self) -> None:
        """Raise DeviceMissingError if the file of a device was removed: this process still has its
        memory, but no other process can open it.
        """
        for path, identity in self._files.items():
            try:
                stat = path.stat()
                if (stat.st_dev, stat.st_ino) == identity:
                    continue
            except OSError:
                pass
            if mapped_and_removed(identity[1], path.name):
                raise DeviceMissingError(
                    f"{path} was removed while it was in use; make a new pool and start a server "
                    "on that"
                )

    def run_near(self) -> set[int]:
        """Pin the calling thread to CPUs near the devices, if their node is known. Returns those
        CPUs.
        """
        return run_near({device.node for device in self.devices if device.node is not None})

    def host_number(self, host: int | None) -> int:
        """Return this machine's number among those that share the pool: ``host``, or 0 for files.

        Raises DeviceSpecError if ``host`` is not given for devdax devices, which other machines may
        share, and BadValueError if it is not a valid host number.
        """
        if host is None and any(device.kind == "devdax" for device in self.devices):
            raise DeviceSpecError(
                "several machines may share a devdax pool: give each its own number with --host N"
            )
        number = 0 if host is None else host
        is_integer = isinstance(number, int) and not isinstance(number, bool)
        if not is_integer or not 0 <= number < lib.BL_HOST_COUNT:
            raise BadValueError(
                f"host numbers are whole, from 0 to {lib.BL_HOST_COUNT - 1}; {short(host)} is not"
            )
        return number

    def prefault(self, start: int = 0, size: int | None = None) -> None:
        """Map every page now, so that the first copy of each page is as fast as later ones; or
        those of ``size`` bytes from the offset ``start`` on, as far as the pool reaches.

        This takes a fraction of a second for a GiB, without Python's lock. It does nothing for
        sparse files, because it would allocate their space.
        """
        if not any(device.sparse for device in self.devices):
            with self.using() as handle:
                rest = self.geometry.size - start
                lib.bl_pool_prefault(handle, start, rest if size is None else min(size, rest))

    def before_close(self, end: Callable[[], None]) -> None:
        """Call ``end``, a bound method, before the devices are unmapped, if its object still
        exists.

        Sessions and servers have threads in C that write to the pool; ``end`` stops them. A session
        or server calls this before it is made, and holds the lock that ``end`` waits for. Raises
        BadValueError once the pool is closed or is being closed.
        """
        with self._lock:
            if self._closing:
                raise BadValueError("the pool is closed; open it again")
            self._ends = [method for method in self._ends if method() is not None]
            self._ends.append(weakref.WeakMethod(end))

    def close(self) -> None:
        """End the pool's sessions and servers, the newest first, and unmap it. A second call does
        nothing.
        """
        with self._lock:
            self._closing = True
        while self._ends:
            end = self._ends[-1]
            call = end()
            if call is not None:
                call()  # if it fails or is interrupted, the pool stays mapped
            with self._lock:
                if end in self._ends:
                    self._ends.remove(end)
        self._mapping.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        names = ", ".join(str(device.path) for device in self.devices)
        return f"<Pool {self.id[:8]} on {names}>"
