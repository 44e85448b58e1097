# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The memory of a pool in this process: its mapping, and access to it."""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from beluga._ffi import core, ffi, lib
from beluga._shared import SharedHandle, when_forked
from beluga.errors import (
    BadValueError,
    DeviceBusyError,
    DeviceTruncatedError,
    ForkedSessionError,
    NoRoomError,
    raise_for_status,
)
from beluga.pool.device import Device, open_device
from beluga.pool.layout import SUPERBLOCK_SIZE, Superblock


@dataclass(frozen=True, slots=True)
class Member:
    """A device and its superblock, which may not be written yet."""

    device: Device
    superblock: Superblock


_Key: TypeAlias = "tuple[tuple[object, ...], ...]"


def _key(members: Sequence[Member]) -> _Key:
    """Return the key by which mappings share memory. A device that was formatted again has another
    superblock.
    """
    return tuple(
        (member.device.identity, member.device.spec.offset, bytes(member.superblock.raw))
        for member in members
    )


class _Memory:
    """The mapped devices, and the ``bl_pool`` over them, with a reference count."""

    def __init__(self, members: Sequence[Member]) -> None:
        self.key = _key(members)
        self.user_count = 0
        self._geometry = members[0].superblock.geometry
        self.superblocks = ffi.new("bl_superblock[]", len(members))
        self.addresses = ffi.new("void *[]", len(members))
        self._files = ffi.new("int32_t[]", [-1] * len(members))  # of sparse devices
        self._pid = os.getpid()
        try:
            for index, member in enumerate(members):
                ffi.memmove(self.superblocks + index, member.superblock.raw, SUPERBLOCK_SIZE)
                self._map(index, member)
            handle = ffi.new("bl_pool **")
            raise_for_status(
                lib.bl_pool_open(self.superblocks, self.addresses, handle), "opening the pool"
            )
        except BaseException:
            self._unmap()
            raise
        self.handle = handle[0]
        offsets = ffi.new("uint64_t[]", [member.device.spec.offset for member in members])
        lib.bl_pool_back(self.handle, self._files, offsets)

    def _map(self, index: int, member: Member) -> None:
        """Map one device. The file of a sparse one stays open: it shows why a page fault failed."""
        device = member.device
        fd = open_device(device)
        try:
            address = self.addresses + index
            size = self._geometry.device_size_of(index)
            code = lib.bl_device_map(fd, device.spec.offset, size, address)
            if member.superblock.sparse and code == 0:
                self._files[index], fd = fd, -1
        finally:
            if fd >= 0:
                os.close(fd)
        if code == -errno.ENOMEM:
            raise NoRoomError(f"{device}: no address space to map it; is 'ulimit -v' set?")
        raise_for_status(code, f"mapping {device}")

    def end(self) -> None:
        lib.bl_pool_close(self.handle)
        self._unmap()

    def _unmap(self) -> None:
        for index, address in enumerate(self.addresses):
            if address != ffi.NULL:
                if self._pid == os.getpid():
                    lib.bl_device_unmap(address, self._geometry.device_size_of(index))
                self.addresses[index] = ffi.NULL
        self.close_files()

    def close_files(self) -> None:
        """Close the files of sparse devices."""
        for index, fd in enumerate(self._files):
            self._files[index] = -1
            if fd >= 0:
                os.close(fd)


class _MappingTable:
    """The mapped devices of this process. A forked child has none."""

    def __init__(self) -> None:
        self._memories: dict[_Key, _Memory] = {}
        self._after_fork()
        when_forked(self)

    def _after_fork(self) -> None:
        self._lock = threading.Lock()
        for memory in self._memories.values():
            memory.close_files()  # the child's copies of the descriptors
        self._memories = {}

    def acquire(self, members: Sequence[Member]) -> _Memory:
        """Return the memory of these devices, and map it if necessary. The caller releases it."""
        with self._lock:
            memory = self._memories.get(_key(members))
            if memory is None:
                memory = _Memory(members)
                self._memories[memory.key] = memory
            memory.user_count += 1
        return memory

    def release(self, memory: _Memory) -> None:
        """Unmap the memory if this was its last user."""
        with self._lock:
            memory.user_count -= 1
            if memory.user_count > 0:
                return
            if self._memories.get(memory.key) is memory:
                del self._memories[memory.key]
        memory.end()


_mappings = _MappingTable()


class Mapping:
    """Maps the devices on construction, unless this process has them mapped. It releases them when
    it is closed and no thread uses it any more. A forked child has nothing mapped.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = tuple(members)
        geometry = members[0].superblock.geometry
        for index, member in enumerate(members):
            size = geometry.device_size_of(index)
            if member.device.size < size:  # the kernel maps devdax beyond its end without an error
                raise DeviceTruncatedError(
                    f"{member.device} has {member.device.size} bytes, less than the "
                    f"{size} to be mapped"
                )
        self._memory = _mappings.acquire(self.members)
        self.superblocks, self.addresses = self._memory.superblocks, self._memory.addresses
        self._shared = SharedHandle("pool", self._memory.handle, self._end)

    def using(self) -> SharedHandle[core.bl_pool]:
        """Return the ``bl_pool *`` for C::

            with mapping.using() as pool:
                lib.bl_call(pool)

        It stays mapped that long. Raises BadValueError once this is closed, ForkedSessionError in a
        forked child.
        """
        if self._shared.closed:
            raise BadValueError("the pool is closed; open it again")
        if self._shared.foreign:
            raise ForkedSessionError(
                "the parent process mapped this pool; open it again after fork"
            )
        return self._shared

    @property
    def handle(self) -> core.bl_pool:
        """The ``bl_pool *`` for a caller that ensures that no thread closes the mapping
        meanwhile."""
        self.using()
        return self._memory.handle

    def close(self) -> None:
        """Release the devices as soon as no thread uses them."""
        self._shared.close()

    def _end(self) -> None:
        _mappings.release(self._memory)


_LINE = re.compile(  # of /proc/PID/maps: addresses, rights, offset, device, inode
    r"^([0-9a-f]+)-([0-9a-f]+) \S+ ([0-9a-f]+) ([0-9a-f]+):([0-9a-f]+) (\d+)", re.MULTILINE
)


def refuse_mapped(device: Device) -> None:
    """Raise DeviceBusyError if another process of this host has a part of the device mapped.

    Only root can see processes of other users.
    """
    status = device.spec.path.stat()
    begin, end = device.spec.offset, device.spec.offset + device.size
    for maps in Path("/proc").glob("[0-9]*/maps"):
        if maps.parent.name == str(os.getpid()):
            continue
        try:
            lines = _LINE.findall(maps.read_text(errors="replace"))
        except OSError:
            continue  # the process has ended, or belongs to another user
        for low, high, offset, major, minor, inode in lines:
            first = int(offset, 16)
            if (
                int(inode) == status.st_ino
                and os.makedev(int(major, 16), int(minor, 16)) == status.st_dev
                and first < end
                and begin < first + int(high, 16) - int(low, 16)
            ):
                pid = maps.parent.name
                raise DeviceBusyError(
                    f"process {pid} has {device} in its memory; stop the server ('beluga stop') "
                    f"and the clients of its pool, such as 'kill {pid}'"
                )
