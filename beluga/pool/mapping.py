# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A mapping: the devices of one pool, mapped into this process in superblock order."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass

from beluga._ffi import core, ffi, lib
from beluga._shared import SharedHandle
from beluga.errors import DeviceTruncatedError, ForkedSessionError, NoRoomError, raise_for_status
from beluga.pool.device import Device, open_device
from beluga.pool.superblock import SUPERBLOCK_SIZE, Superblock


@dataclass(frozen=True, slots=True)
class Member:
    """A device and its superblock, which may not be written yet."""

    device: Device
    superblock: Superblock


class Mapping:
    """Maps the devices on construction. It unmaps them when it has been closed and no thread uses
    it any more. A forked child has nothing mapped.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = tuple(members)
        self.device_size = members[0].superblock.geometry.device_size
        self.superblocks = ffi.new("bl_superblock[]", len(members))
        self.addresses = ffi.new("void *[]", len(members))
        self._pid = os.getpid()
        try:
            for index, member in enumerate(members):
                ffi.memmove(self.superblocks + index, member.superblock.raw, SUPERBLOCK_SIZE)
                self._map(index, member.device)
            handle = ffi.new("bl_pool **")
            raise_for_status(
                lib.bl_pool_open(self.superblocks, self.addresses, handle), "opening the pool"
            )
        except BaseException:
            self._unmap()
            raise
        self._handle = handle[0]
        self._shared = SharedHandle("pool", self._handle, self._end)

    def _map(self, index: int, device: Device) -> None:
        if device.size < self.device_size:  # the kernel maps devdax beyond its end without an error
            raise DeviceTruncatedError(
                f"{device} has {device.size} bytes, less than the {self.device_size} to be mapped"
            )
        fd = open_device(device)
        try:
            place = self.addresses + index
            code = lib.bl_device_map(fd, device.spec.offset, self.device_size, place)
        finally:
            os.close(fd)
        if code == -errno.ENOMEM:
            raise NoRoomError(f"{device}: no address space to map it; is 'ulimit -v' set?")
        raise_for_status(code, f"mapping {device}")

    def using(self) -> SharedHandle[core.bl_pool]:
        """Return the ``bl_pool *`` for C::

            with mapping.using() as pool:
                lib.bl_call(pool)

        It stays mapped that long. Raises ValueError once this is closed, ForkedSessionError in a
        forked child.
        """
        if self._shared.closed:
            raise ValueError("the pool is closed")
        if self._pid != os.getpid():
            raise ForkedSessionError("the parent process mapped this pool; open it anew after fork")
        return self._shared

    @property
    def handle(self) -> core.bl_pool:
        """The ``bl_pool *`` for a caller that knows that no thread closes the mapping meanwhile."""
        self.using()
        return self._handle

    def close(self) -> None:
        """Unmap the devices as soon as no thread uses them."""
        self._shared.close()

    def _end(self) -> None:
        lib.bl_pool_close(self._handle)
        self._unmap()

    def _unmap(self) -> None:
        for index, address in enumerate(self.addresses):
            if address != ffi.NULL:
                if self._pid == os.getpid():
                    lib.bl_device_unmap(address, self.device_size)
                self.addresses[index] = ffi.NULL
