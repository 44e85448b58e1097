# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A small file in memory, which the processes of one host map to share a link.

The memory is this host's own coherent memory, never the pool's. The first process creates the file
atomically. It remains when that process ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

from beluga import config
from beluga._ffi import core, ffi
from beluga.errors import TransferError

_SHM = Path("/dev/shm")  # noqa: S108  links_directory rejects directories of other users


def links_directory() -> Path:
    """Return the directory of this user's links, which lies in memory, and create it if necessary.

    Engines of several users that share a link set their own directory. Raises TransferError if the
    directory belongs to another user.
    """
    root = _SHM if os.access(_SHM, os.W_OK) else config.runtime_root()
    path = root / f"beluga-links-{os.geteuid()}"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise TransferError(f"{path} belongs to another user; remove it")
    return path


class Segment:
    """The mapped file, and a lock on it: the last process that releases it removes the file."""

    def __init__(self, path: Path, handle: int, memory: mmap.mmap) -> None:
        self.memory = memory
        self._path, self._handle = path, handle
        self._pid = os.getpid()

    def release(self) -> None:
        """Release the lock; the kernel does so for a process that was killed.

        The memory stays mapped while it is referenced.
        """
        if self._handle < 0:
            return
        if self._pid == os.getpid():  # a forked child shares the lock with its parent
            with contextlib.suppress(OSError):  # other processes hold it, or the file was removed
                fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._path.unlink()
        os.close(self._handle)
        self._handle = -1


def share(path: Path, size: int, fill: Callable[[mmap.mmap], None]) -> Segment:
    """Map the file with ``size`` bytes; ``fill`` writes it if it does not exist. Raises
    TransferError.

    The mode of a new file is its directory's, without the right to execute.
    """
    while True:
        with contextlib.suppress(FileNotFoundError):
            if (found := _map(path, size)) is not None:
                return found
            continue
        handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        made = Path(name)
        try:
            os.fchmod(handle, path.parent.stat().st_mode & 0o666)
            os.ftruncate(handle, size)
            with mmap.mmap(handle, size) as memory:
                fill(memory)
            with contextlib.suppress(FileExistsError):  # another process was faster
                os.link(made, path)
        finally:
            os.close(handle)
            made.unlink()


def _map(path: Path, size: int) -> Segment | None:
    """Map the file, or return None if its last user has just removed it."""
    handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or found.st_size != size:
            raise TransferError(
                f"{path} belongs to another version of Beluga; stop the processes that use it, "
                "and remove it"
            )
        fcntl.flock(handle, fcntl.LOCK_SH)
        if os.fstat(handle).st_nlink == 0:
            os.close(handle)
            return None
        return Segment(path, handle, mmap.mmap(handle, size))
    except BaseException:
        os.close(handle)
        raise


def at(memory: mmap.mmap, offset: int) -> core.uint8_p:
    """Return a pointer into the memory, to be cast; ``memory`` must outlive it."""
    return ffi.from_buffer("uint8_t[]", memory) + offset
