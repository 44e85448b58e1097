# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Moves bytes between memory and an open file, with many concurrent requests.

C does the work (csrc/disk/disk.c) without the GIL. Tests replace it by an engine that injects
faults.
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
    """Executes requests on one file. Thread-safe; a call returns when all its requests are done.

    Each request gets its ``result``: 0, or a negative errno. -EBADMSG means that the bytes do not
    match the request's ``crc``.
    """

    def read(self, requests: Requests) -> None:
        """Read. The bytes are checked against ``crc``, unless ``length`` is 0."""

    def write(self, requests: Requests) -> None:
        """Write. Reads of other threads have priority. A request with a ``source`` is written from
        there, and its ``crc`` is computed.
        """

    def sync(self) -> int:
        """Make all writes durable. Returns 0, or a negative errno."""

    def close(self) -> None:
        """Free all resources. No call may be running."""


EngineMaker: TypeAlias = Callable[[int, int], DiskEngine]
"""Creates an engine for a file descriptor and a queue depth."""


class CoreEngine:
    """The engine in C, with io_uring or threads. Raises OSError if the kernel lacks io_uring."""

    def __init__(self, fd: int, depth: int, kind: str) -> None:
        self.kind = kind
        number = lib.BL_DISK_URING if kind == "uring" else lib.BL_DISK_THREADS
        out = ffi.new("bl_disk **")
        if (status := lib.bl_disk_create(out, fd, number, depth)) < 0:
            raise OSError(-status, f"creating a disk engine with {kind} failed")
        self._disk = out[0]

    def read(self, requests: Requests) -> None:
        """Read. The bytes are checked against ``crc``, unless ``length`` is 0."""
        status = lib.bl_disk_read(self._disk, c_requests(requests), len(requests))
        if status < 0:
            requests["result"] = status

    def write(self, requests: Requests) -> None:
        """Write. Reads of other threads have priority."""
        status = lib.bl_disk_write(self._disk, c_requests(requests), len(requests))
        if status < 0:
            requests["result"] = status

    def sync(self) -> int:
        """Make all writes durable. Returns 0, or a negative errno."""
        return lib.bl_disk_sync(self._disk)

    def close(self) -> None:
        """Free all resources. No call may be running."""
        lib.bl_disk_destroy(self._disk)


def c_requests(requests: Requests) -> core.bl_disk_request:
    """Convert requests for C."""
    return ffi.from_buffer("bl_disk_request[]", requests)


def make_engine(kind: str) -> EngineMaker:
    """Return the factory of an engine: ``uring``, ``threads``, or ``auto`` (io_uring where the
    kernel has it). Raises TierError for another name.
    """
    if kind not in ("auto", "uring", "threads"):
        raise TierError(f"there is no disk engine {kind!r}; give auto, uring or threads")

    def make(fd: int, depth: int) -> DiskEngine:
        if kind != "auto":
            return CoreEngine(fd, depth, kind)
        try:
            return CoreEngine(fd, depth, "uring")
        except OSError:
            return CoreEngine(fd, depth, "threads")

    return make
