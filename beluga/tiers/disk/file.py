# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The file of a disk tier: its header, its lock, and where in it the index and the data lie.

The first page is the header::

    0 magic 8 | 8 version 4, slot_count 4 | 16 id 8 | 24 size 8 | 32 data_offset 8
    40 stripe_count 8 | 48 owner's name 128 | 176 owner's pool 32 | zeros
    508 CRC-32C of all between the magic and this | zeros | 4092 CRC-32C of all before it

The index begins behind it (csrc/disk/entry.h), the data at ``data_offset``, in stripes of 2 MiB.
The header is written when everything behind it is ready, and again when the owner changes. A power
cut then may leave its sectors of 512 bytes of both versions, of which the first is whole, and has a
checksum of its own. (Files of earlier versions have no owner's pool, and zeros there.) A tier that
is opened with another size keeps its index, and has more or fewer stripes than the header says.

Nothing is formatted but an empty file, a device whose first MiB is zero, and what a format of ours
left half made. A format first writes the page with another magic, so that this is recognized.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import stat
import struct
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from beluga._ffi import lib
from beluga.coherence import crc32c
from beluga.errors import TierError
from beluga.tiers.arena import Arena
from beluga.tiers.disk.owner import NAME_SIZE, Owner

_LOG = logging.getLogger(__name__)

PAGE = 4096
_STRIPE = 2 << 20
_ALIGN = 64 << 10  # the data begin at a multiple of it
_MAGIC = b"BELUGADT"
_FORMATTING = b"BELUGADF"  # the magic of a header until the rest is ready
_BLANK = 1 << 20  # a device is formatted only if so many bytes at its start are zero
_VERSION = 1
_HEADER = struct.Struct(f"<8sIIQQQQ{NAME_SIZE}s32s")
_SECTOR = 512
_CRC = struct.Struct("<I")
_FILE = "blocks"
_DYING_S = 10.0  # how long a lock whose process is gone is waited for
_LOCK_AGAIN_S = 0.01
_CLAIM_S = 1.0  # how long a device that another one still uses is waited for


@dataclass(frozen=True, slots=True)
class FileLayout:
    """Where everything lies in the file."""

    id: int
    size: int
    slot_count: int
    data_offset: int
    stripe_count: int
    server: str
    pool: str = ""

    @property
    def owner(self) -> Owner:
        """Whose blocks the file has."""
        return Owner(self.server, self.pool)

    @property
    def index_size(self) -> int:
        """The bytes of the index, which begins at :data:`PAGE`."""
        return self.slot_count * int(lib.BL_STORE_ENTRY_SIZE)


def plan_layout(size: int, smallest_block: int, server: str, pool: str = "") -> FileLayout:
    """Lay out a new file of at most ``size`` bytes. Raises TierError if it is too small."""
    per_stripe = _slots_per_stripe(smallest_block)
    entry, group = int(lib.BL_STORE_ENTRY_SIZE), int(lib.BL_STORE_SECTOR_SLOTS)
    stripes = min(size // _STRIPE, (1 << 32) // per_stripe - group)
    while stripes > 0:
        slots = -(-stripes * per_stripe // group) * group
        data = -(-(PAGE + slots * entry) // _ALIGN) * _ALIGN
        if data + stripes * _STRIPE <= size:
            return FileLayout(secrets.randbits(64), size, slots, data, stripes, server, pool)
        stripes -= max(1, -(-(data + stripes * _STRIPE - size) // (_STRIPE + per_stripe * entry)))
    raise TierError(f"a disk tier of {size} bytes is too small; give it at least 4 MiB")


def _slots_per_stripe(smallest_block: int) -> int:
    return max(1, min(_STRIPE // PAGE, _STRIPE // max(1, smallest_block)))


def _header_of(layout: FileLayout, magic: bytes) -> bytes:
    head = _HEADER.pack(
        magic,
        _VERSION,
        layout.slot_count,
        layout.id,
        layout.size,
        layout.data_offset,
        layout.stripe_count,
        layout.server.encode(errors="replace")[:NAME_SIZE],
        layout.pool.encode()[:32],
    ).ljust(_SECTOR - _CRC.size, b"\0")
    head = (head + _first_crc(head)).ljust(PAGE - _CRC.size, b"\0")
    return head + _CRC.pack(crc32c(head))


def _first_crc(page: bytes) -> bytes:
    """Return the checksum of the first sector, which is the same with the magic of a format."""
    return _CRC.pack(crc32c(page[len(_MAGIC) : _SECTOR - _CRC.size]))


def _is_whole(page: bytes) -> bool:
    """Return whether a header is as it was written, or its first sector is."""
    own = page[_SECTOR - _CRC.size : _SECTOR]
    whole = page[-_CRC.size :] == _CRC.pack(crc32c(page[: -_CRC.size]))
    return whole or (own != bytes(_CRC.size) and own == _first_crc(page))


def _is_half_made(page: bytes) -> bool:
    """Return whether a format was interrupted here: the page has the magic of one, or a power cut
    has mixed its two versions, of which one magic or the other fits the checksum.
    """
    magic, (crc,) = page[: len(_MAGIC)], _CRC.unpack_from(page, PAGE - _CRC.size)
    rest = page[len(_MAGIC) : -_CRC.size]
    ready, half = (crc == crc32c(head + rest) for head in (_MAGIC, _FORMATTING))
    return half if magic == _MAGIC else magic == _FORMATTING and (ready or half)


class LockedFile:
    """The open and locked file of a tier, whose header can be read and written.

    Raises TierError: it is another process's, damaged, foreign, mounted, or of another version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd, self.direct = _open(path)
        self._claim = -1
        try:
            _lock(self.fd, path)
            self.is_device = stat.S_ISBLK(os.fstat(self.fd).st_mode)
            if self.is_device:
                self._claim = _claim(path)
        except OSError as error:
            self.close()
            raise TierError(f"{path}: {error.strerror}") from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file, which frees its lock."""
        os.close(self.fd)
        if self._claim >= 0:
            os.close(self._claim)

    def read_header(self) -> FileLayout | None:
        """Return what the header says; None if the file may be formatted. Raises OSError, and
        TierError for a file that is not ours.
        """
        page = Arena(0).take(_BLANK)
        length = os.preadv(self.fd, [page.data], 0)
        whole = page[:PAGE].tobytes()
        if (not page.any() if self.is_device else length == 0) or _is_half_made(whole):
            return None
        magic, version, slots, ident, had, data, stripes, *owner = _HEADER.unpack_from(whole)
        if magic != _MAGIC:
            raise TierError(
                f"{self.path} has data, and is not a disk tier; give another path, or {self._mend}"
            )
        if version != _VERSION:
            raise TierError(
                f"{self.path} has version {version} of the format, and this is Beluga with "
                f"version {_VERSION}; {self._mend}"
            )
        if not _is_whole(whole):
            raise TierError(f"the header of {self.path} is damaged; {self._mend}")
        layout = FileLayout(ident, had, slots, data, stripes, *map(_text, owner))
        if self._length() < layout.data_offset:
            raise TierError(f"{self.path} was cut short; {self._mend}")
        return layout

    @property
    def _mend(self) -> str:
        """Say how an operator makes a new tier where something else is."""
        if self.is_device:
            erase = f"dd if=/dev/zero of={self.path} bs=1M count=1"
            return f"erase its start to make a new one, which forgets its data ({erase})"
        return "remove it to make a new one, which forgets its blocks"

    def _length(self) -> int:
        return os.lseek(self.fd, 0, os.SEEK_END)

    def write_header(self, layout: FileLayout, magic: bytes = _MAGIC) -> None:
        """Write the header. Raises OSError."""
        page = Arena(0).take(PAGE)
        page[:] = np.frombuffer(_header_of(layout, magic), np.uint8)
        os.pwritev(self.fd, [page.data], 0)
        os.fsync(self.fd)


class TierFile(LockedFile):
    """The file of a tier with room for ``size`` bytes.

    Raises TierError as :class:`LockedFile` does, and if the file is another server's, or there is
    no room for it. A file of another size is made longer or shorter, and keeps the blocks that
    still lie in it. A file of a former pool of the same owner is taken over.
    """

    def __init__(self, path: Path, size: int, smallest_block: int, owner: Owner) -> None:
        path = _file_of(path)
        plan = partial(plan_layout, size, smallest_block, owner.name, owner.pool)
        if not path.exists():  # no file is made if there is no room for it
            _check_room(path.parent, plan().size)
        super().__init__(path)
        try:
            made = self.read_header()
            if made is None:
                self.layout = self._format(plan())
            else:
                _refuse_foreign(path, made.owner, owner)
                self.layout = self._fit(made, size, smallest_block)
                if owner not in (made.owner, Owner()):
                    self.write_header(replace(made, server=owner.name, pool=owner.pool))
                    _LOG.info("%s is now of server %s", path, owner.name)
        except OSError as error:
            self.close()
            raise TierError(f"{path}: {error.strerror}") from error
        except BaseException:
            self.close()
            raise

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

    def _check_device(self, end: int, size: int) -> None:
        if self.is_device and self._length() < end:
            raise TierError(
                f"{self.path} has {self._length()} bytes, not {size}; ask for at most that many"
            )

    def _fit(self, made: FileLayout, size: int, smallest_block: int) -> FileLayout:
        """Return the layout for this size of a file that was made with another one. The index stays
        as it is, and stripes come or go at the end: with them go the blocks that lie there, whose
        entries recovery refuses.
        """
        if size == made.size:
            layout = made
        else:
            stripes = (size - made.data_offset) // _STRIPE
            if stripes < 1:
                raise TierError(
                    f"{self.path} was made with {made.size} bytes, and its index takes "
                    f"{made.data_offset}; give at least {made.data_offset + _STRIPE} bytes, or "
                    f"{self._mend}"
                )
            layout = replace(made, size=size, stripe_count=stripes)
        end = layout.data_offset + layout.stripe_count * _STRIPE
        self._check_device(end, size)
        length = self._length()
        if not self.is_device and length != end:
            if length < end:
                _check_room(self.path, size, has=os.fstat(self.fd).st_blocks * 512)
            os.ftruncate(self.fd, end)
        if size > made.size and layout.slot_count < layout.stripe_count * _slots_per_stripe(
            smallest_block
        ):
            _LOG.warning(
                "%s has an index for %d blocks, as it was made with %d bytes; if that is too few "
                "for %d bytes, %s",
                *(self.path, layout.slot_count, made.size, size, self._mend),
            )
        return layout

    def _format(self, layout: FileLayout) -> FileLayout:
        """Make a new file: first what lies behind the header, then the header. Until then, the page
        says that this is a format of ours, so that an interrupted one is made anew.
        """
        end = layout.data_offset + layout.stripe_count * _STRIPE
        self._check_device(end, layout.size)
        if not self.is_device:
            _check_room(self.path, layout.size)
        self.write_header(layout, _FORMATTING)
        if self.is_device:
            zeros = Arena(0).take(1 << 20)
            for offset in range(PAGE, layout.data_offset, len(zeros)):
                part = zeros[: min(len(zeros), layout.data_offset - offset)]
                os.pwritev(self.fd, [part.data], offset)
        else:
            os.ftruncate(self.fd, PAGE)
            os.ftruncate(self.fd, end)
        os.fsync(self.fd)
        self.write_header(layout)
        if not self.is_device:
            folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(folder)  # so that the file's name outlives a power cut, too
            finally:
                os.close(folder)
        return layout


def check_owner(path: Path, owner: Owner) -> None:
    """Raise TierError if a disk has another owner, as far as that can be seen without its lock."""
    file = path / _FILE if path.is_dir() else path
    try:
        with file.open("rb") as opened:
            page = opened.read(PAGE)
    except OSError:
        return  # there is none yet, or opening it will say more
    if page[: len(_MAGIC)] == _MAGIC and len(page) == PAGE and _is_whole(page):
        *_, name, pool = _HEADER.unpack_from(page)
        _refuse_foreign(file, Owner(_text(name), _text(pool)), owner)


def _refuse_foreign(path: Path, has: Owner, wanted: Owner) -> None:
    if not wanted.may_use(has):
        raise TierError(
            f"{path} has the blocks of server {has.name or has.pool}; give another path, or give "
            f"it to the next server: beluga disk adopt {path}"
        )


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="replace")


def adopt_disk(path: Path) -> Owner:
    """Let the next server that opens a disk have it, and return whose it was. Its blocks stay.

    Raises TierError: a server uses it, or it is no disk tier.
    """
    if not path.exists():
        raise TierError(f"{path} does not exist; name the disk of a server (--disk)")
    file = path / _FILE if path.is_dir() else path
    if not file.exists():
        raise TierError(f"{path} is not a disk tier; name the disk of a server (--disk)")
    locked = LockedFile(file)
    try:
        layout = locked.read_header()
        if layout is None:
            raise TierError(f"{path} is empty; any server may have it")
        locked.write_header(replace(layout, server="", pool=""))
        return layout.owner
    except OSError as error:
        raise TierError(f"{file}: {error.strerror}") from error
    finally:
        locked.close()


def _check_room(path: Path, size: int, *, has: int = 0) -> None:
    """Raise TierError if the file system of a path has no room for a file of this size, which
    ``has`` so many bytes of it already.
    """
    room = os.statvfs(path)
    free = room.f_bavail * room.f_frsize
    if free + has < size:
        beside = f" beside the {has} that the tier has" if has else ""
        raise TierError(
            f"{path} has {free} bytes free{beside}, not {size}; ask for at most {free + has}, or "
            "give another path"
        )


def _file_of(path: Path) -> Path:
    """Return the file of a tier's path: a folder has one of its own, and is made if need be."""
    if path.exists() and not path.is_dir():
        if not (path.is_file() or path.is_block_device()):
            raise TierError(f"{path} is no folder, file or block device; give one of these")
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
        if error.errno == errno.EBUSY:
            raise _in_use(path) from error
        raise TierError(f"{path} cannot be opened: {error.strerror}") from error


def _in_use(path: Path) -> TierError:
    return TierError(
        f"{path} is in use by the system: mounted, swap, or a part of a RAID or an LVM group "
        "('lsblk' shows it); free it, or give another device"
    )


def _claim(path: Path) -> int:
    """Open a block device as its only user, so that nothing mounts it: its file descriptor. Raises
    TierError if something has. A process that was killed has its claim for a moment longer than its
    lock.
    """
    until = time.monotonic() + _CLAIM_S
    while True:
        try:
            return os.open(path, os.O_RDONLY | os.O_EXCL | os.O_CLOEXEC)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            if time.monotonic() > until:
                raise _in_use(path) from error
            time.sleep(_LOCK_AGAIN_S)


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
