# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Moves bytes between memory and an open file, with many requests under way.

The work is done in C (csrc/disk/disk.c) without the interpreter's lock. Tests put an engine that
fails in front of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from beluga._ffi import core, ffi, lib, record_dtype
from beluga.errors import TierError

REQUEST = record_dtype("bl_disk_request")
"""One range of the file, and its bytes in memory: ``bl_disk_request`` of csrc/api/disk.h."""

Requests: TypeAlias = NDArray[np.void]


class DiskEngine(Protocol):
    """Executes requests on one file. Any thread may call it; a call returns when all are done.

    Each request gets its ``result``: 0, or a negative errno. -EBADMSG says that what was read does
    not have the request's ``crc``.
    """

    def read(self, requests: Requests) -> None:
        """Read; the bytes are checked against ``crc``, except where ``length`` is 0."""

    def write(self, requests: Requests) -> None:
        """Write; reads of other threads go first. A request with a ``source`` gets its bytes from
        there, and its ``crc`` computed.
        """

    def sync(self) -> int:
        """Make what was written durable: 0, or a negative errno."""

    def close(self) -> None:
        """Free everything. Nothing may be under way."""


EngineMaker: TypeAlias = Callable[[int, int], DiskEngine]
"""Makes an engine for a file descriptor and a depth."""


class CoreEngine:
    """The engine in C, by io_uring or by threads. Raises OSError if the kernel lacks io_uring."""

    def __init__(self, fd: int, depth: int, kind: str) -> None:
        self.kind = kind
        number = lib.BL_DISK_URING if kind == "uring" else lib.BL_DISK_THREADS
        out = ffi.new("bl_disk **")
        if (status := lib.bl_disk_create(out, fd, number, depth)) < 0:
            raise OSError(-status, f"a disk engine by {kind} cannot be made")
        self._disk = out[0]

    def read(self, requests: Requests) -> None:
        """Read; the bytes are checked against ``crc``, except where ``length`` is 0."""
        status = lib.bl_disk_read(self._disk, c_requests(requests), len(requests))
        if status < 0:
            requests["result"] = status

    def write(self, requests: Requests) -> None:
        """Write; reads of other threads go first."""
        status = lib.bl_disk_write(self._disk, c_requests(requests), len(requests))
        if status < 0:
            requests["result"] = status

    def sync(self) -> int:
        """Make what was written durable: 0, or a negative errno."""
        return lib.bl_disk_sync(self._disk)

    def close(self) -> None:
        """Free everything. Nothing may be under way."""
        lib.bl_disk_destroy(self._disk)


def c_requests(requests: Requests) -> core.bl_disk_request:
    """Return the requests for C."""
    return ffi.from_buffer("bl_disk_request[]", requests)


def make_engine(kind: str) -> EngineMaker:
    """Return the maker of an engine: ``uring``, ``threads``, or ``auto``: io_uring where the kernel
    has it. Raises TierError for another name.
    """
    if kind not in ("auto", "uring", "threads"):
        raise TierError(f"io={kind!r} is not known; give auto, uring or threads")

    def make(fd: int, depth: int) -> DiskEngine:
        if kind != "auto":
            return CoreEngine(fd, depth, kind)
        try:
            return CoreEngine(fd, depth, "uring")
        except OSError:
            return CoreEngine(fd, depth, "threads")

    return make
