# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The file of a disk tier: its header, its lock, and where in it the index and the data lie.

The first page is the header::

    0 magic 8 | 8 version 4, slot_count 4 | 16 id 8 | 24 size 8 | 32 data_offset 8
    40 stripe_count 8 | 48 server 128 | zeros | 4092 CRC-32C of all before it

The index begins behind it (csrc/store/entry.h), the data at ``data_offset``, in stripes of 2 MiB.
The header is written once, when everything behind it is ready, and never changes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import struct
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from beluga._ffi import lib
from beluga.errors import TierError
from beluga.primitives import crc32c
from beluga.tiers.arena import Arena

PAGE = 4096
_STRIPE = 2 << 20
_ALIGN = 64 << 10  # the data begin at a multiple of it
_MAGIC = b"BELUGADT"
_VERSION = 1
_HEADER = struct.Struct("<8sIIQQQQ128s")
_CRC = struct.Struct("<I")
_FILE = "blocks"
_DYING_S = 10.0  # how long a lock whose process is gone is waited for
_LOCK_AGAIN_S = 0.01


@dataclass(frozen=True, slots=True)
class Layout:
    """Where everything lies in the file."""

    id: int
    size: int
    slot_count: int
    data_offset: int
    stripe_count: int
    server: str

    @property
    def index_size(self) -> int:
        """The bytes of the index, which begins at :data:`PAGE`."""
        return self.slot_count * int(lib.BL_STORE_ENTRY_SIZE)


def plan_layout(size: int, smallest_block: int, server: str) -> Layout:
    """Lay out a new file of at most ``size`` bytes. Raises TierError if it is too small."""
    per_stripe = max(1, min(_STRIPE // PAGE, _STRIPE // max(1, smallest_block)))
    entry, group = int(lib.BL_STORE_ENTRY_SIZE), int(lib.BL_STORE_SECTOR_SLOTS)
    stripes = min(size // _STRIPE, (1 << 32) // per_stripe - group)
    while stripes > 0:
        slots = -(-stripes * per_stripe // group) * group
        data = -(-(PAGE + slots * entry) // _ALIGN) * _ALIGN
        if data + stripes * _STRIPE <= size:
            return Layout(secrets.randbits(64), size, slots, data, stripes, server)
        stripes -= max(1, -(-(data + stripes * _STRIPE - size) // (_STRIPE + per_stripe * entry)))
    raise TierError(f"a disk tier of {size} bytes is too small; give it at least 4 MiB")


def _header_of(layout: Layout) -> bytes:
    head = _HEADER.pack(
        _MAGIC,
        _VERSION,
        layout.slot_count,
        layout.id,
        layout.size,
        layout.data_offset,
        layout.stripe_count,
        layout.server.encode()[:128],
    ).ljust(PAGE - _CRC.size, b"\0")
    return head + _CRC.pack(crc32c(head))


class TierFile:
    """The open and locked file of a tier.

    Raises TierError: it is another process's, damaged, foreign, or of another version, size or
    server; or there is no room for it.
    """

    def __init__(self, path: Path, size: int, smallest_block: int, server: str) -> None:
        self.path = _file_of(path)
        self.fd, self.direct = _open(self.path)
        try:
            _lock(self.fd, self.path)
            self.is_device = stat.S_ISBLK(os.fstat(self.fd).st_mode)
            self.layout = self._read_header(size, server) or self._format(
                plan_layout(size, smallest_block, server)
            )
        except OSError as error:
            os.close(self.fd)
            raise TierError(f"{self.path}: {error.strerror}") from error
        except BaseException:
            os.close(self.fd)
            raise

    def close(self) -> None:
        """Close the file, which frees its lock."""
        os.close(self.fd)

    def vanished(self) -> bool:
        """Return whether the path no longer leads to this file."""
        try:
            there, here = self.path.stat(), os.fstat(self.fd)
        except OSError:
            return True
        return (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino)

    def index_ranges(self) -> list[tuple[int, int]]:
        """Return the ranges of the index that may have entries, as offsets in the file."""
        end = PAGE + self.layout.index_size
        if self.is_device:
            return [(PAGE, end)]
        ranges, at = [], PAGE
        while at < end:
            try:
                first = os.lseek(self.fd, at, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:  # nothing but a hole
                    break
                return [(PAGE, end)]  # this file system does not say where its holes are
            at = os.lseek(self.fd, first, os.SEEK_HOLE)
            first, last = first // PAGE * PAGE, min(-(-at // PAGE) * PAGE, end)
            if first < end:
                ranges.append((max(first, PAGE), last))
        return ranges

    def _read_header(self, size: int, server: str) -> Layout | None:
        """Return what the header says; None for a file that was never formatted."""
        page = Arena(0).take(PAGE)
        if os.preadv(self.fd, [page.data], 0) < PAGE or not page.any():
            return None
        whole = page.tobytes()
        magic, version, slots, ident, had, data, stripes, owner = _HEADER.unpack_from(whole)
        mend = "remove it to make a new one, which forgets its blocks"
        if magic != _MAGIC:
            raise TierError(f"{self.path} is not a disk tier; give another path, or {mend}")
        if version != _VERSION:
            raise TierError(
                f"{self.path} has version {version} of the format, and this is Beluga with "
                f"version {_VERSION}; {mend}"
            )
        if _CRC.unpack_from(whole, PAGE - _CRC.size)[0] != crc32c(whole[: -_CRC.size]):
            raise TierError(f"the header of {self.path} is damaged; {mend}")
        if had != size:
            raise TierError(
                f"{self.path} was made with {had} bytes, not {size}; ask for that, or {mend}"
            )
        owner = owner.rstrip(b"\0").decode(errors="replace")
        if server and owner and owner != server:
            raise TierError(
                f"{self.path} has the blocks of server {owner}; give another path, or {mend}"
            )
        layout = Layout(ident, had, slots, data, stripes, owner)
        if self._length() < layout.data_offset:
            raise TierError(f"{self.path} was cut short; {mend}")
        return layout

    def _length(self) -> int:
        return os.lseek(self.fd, 0, os.SEEK_END)

    def _format(self, layout: Layout) -> Layout:
        """Make a new file: first what lies behind the header, then the header."""
        end = layout.data_offset + layout.stripe_count * _STRIPE
        if self.is_device:
            if self._length() < end:
                raise TierError(
                    f"{self.path} has {self._length()} bytes, not {layout.size}; ask for less"
                )
            zeros = Arena(0).take(1 << 20)
            for offset in range(PAGE, layout.data_offset, len(zeros)):
                part = zeros[: min(len(zeros), layout.data_offset - offset)]
                os.pwritev(self.fd, [part.data], offset)
        else:
            room = os.fstatvfs(self.fd)
            if room.f_bavail * room.f_frsize < layout.size:
                raise TierError(
                    f"{self.path.parent} has {room.f_bavail * room.f_frsize} bytes free, not "
                    f"{layout.size}; ask for less, or give another path"
                )
            os.ftruncate(self.fd, end)
        os.fsync(self.fd)
        page = Arena(0).take(PAGE)
        page[:] = np.frombuffer(_header_of(layout), np.uint8)
        os.pwritev(self.fd, [page.data], 0)
        os.fsync(self.fd)
        if not self.is_device:
            folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(folder)  # so that the file's name outlives a power cut, too
            finally:
                os.close(folder)
        return layout


def _file_of(path: Path) -> Path:
    """Return the file of a tier's path: a folder has one of its own, and is made if need be."""
    if path.exists() and not path.is_dir():
        return path
    try:
        path.mkdir(exist_ok=True)
    except OSError as error:
        raise TierError(f"{path} cannot be made: {error.strerror}") from error
    return path / _FILE


def _open(path: Path) -> tuple[int, bool]:
    """Open a file for direct I/O, or without where its file system has none (tmpfs)."""
    flags = os.O_RDWR | os.O_CLOEXEC | (0 if path.is_block_device() else os.O_CREAT)
    try:
        with contextlib.suppress(OSError):
            return os.open(path, flags | os.O_DIRECT, 0o600), True
        return os.open(path, flags, 0o600), False
    except OSError as error:
        raise TierError(f"{path} cannot be opened: {error.strerror}") from error


def _lock(fd: int, path: Path) -> None:
    """Lock the file. A process that was killed keeps its lock until the kernel has ended the
    requests that it had under way, so that none of them is executed after this returns.
    """
    until = time.monotonic() + _DYING_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(fd)
            if (holder and Path(f"/proc/{holder}").exists()) or time.monotonic() > until:
                by = f"process {holder}" if holder else "another process"
                raise TierError(
                    f"{path} is in use by {by}; give each server a path of its own"
                ) from None
            time.sleep(_LOCK_AGAIN_S)
        else:
            return


def _holder(fd: int) -> int:
    """Return the process of this host that has the lock, as far as the kernel tells; or 0."""
    where = os.fstat(fd)
    device = f"{os.major(where.st_dev):02x}:{os.minor(where.st_dev):02x}:{where.st_ino}"
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()
            if "FLOCK" in words and device in words:
                return int(words[words.index("WRITE") + 1]) if "WRITE" in words else 0
    return 0
