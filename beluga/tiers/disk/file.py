# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The file of a disk tier: its header, its lock, its owner, and the layout of index and data.

The first page is the header::

    0 magic 8 | 8 version 4, slot_count 4 | 16 id 8 | 24 size 8 | 32 data_offset 8
    40 stripe_count 8 | 48 owner's name 128 | 176 owner's pool 32 | 208 set 8
    216 disks of the set 8 | zeros
    508 CRC-32C of all between the magic and this | zeros | 4092 CRC-32C of all before it

The index follows (csrc/disk/entry.h), then the data at ``data_offset``, in stripes of 2 MiB. The
header is written once everything after it is ready, and again when the owner changes. A power
failure then may leave a mix of old and new sectors of 512 bytes; each version of the first sector
is whole and has its own checksum. (Files of earlier versions have no owner's pool and no set, but
zeros.) The disks of a server are a set with a random number, and each has their number. A disk that
comes from another set is formatted again: it may have missed removals. If a disk of a set is
missing at a start, the others leave the set and become a new one, because the missing disk will
miss removals. They keep their blocks, except those whose removal from the former set is pending. A
tier that is opened with another size keeps its index, and has more or fewer stripes than the header
states.

Beluga formats only an empty file, a device whose first MiB is zero, and the remains of its own
interrupted format. A format first writes the page with another magic, which marks it as incomplete.

A disk outlives pools: a pool in emulated or volatile memory is created again after each reboot. So
a disk belongs to an owner, by default the location of its pool, and a new pool at this location
takes it over. A disk of another owner is refused, because its server may only be down: blocks that
are removed meanwhile would come back with the disk. Keys include their namespace, so blocks of an
earlier pool are correct for a new one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import secrets
import stat
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from beluga._ffi import lib
from beluga.arguments import StrPath, path_of
from beluga.coherence import crc32c
from beluga.errors import TierError
from beluga.tiers.arena import Arena

if TYPE_CHECKING:
    from beluga.pool import Pool


NAME_SIZE = 128
"""The size of a name in a disk's header, in bytes."""
_SHOWN = 64  # characters of a longer name before its digest

_LOG = logging.getLogger(__name__)

PAGE = 4096
_STRIPE = 2 << 20
_ALIGN = 64 << 10  # the data is aligned to this
_MAGIC = b"BELUGADT"
_FORMATTING = b"BELUGADF"  # the magic of the header during a format
_BLANK = 1 << 20  # a device is formatted only if this many bytes at its start are zero
_VERSION = 1
_HEADER = struct.Struct(f"<8sIIQQQQ{NAME_SIZE}s32sQQ")
_SIZE_FIELD = 4  # of the header
_SECTOR = 512
_CRC = struct.Struct("<I")
_FILE = "blocks"
_DYING_S = 10.0  # longest wait for the lock of a dead process
_LOCK_AGAIN_S = 0.01
_CLAIM_S = 1.0  # longest wait for a device that another process still uses


@dataclass(frozen=True, slots=True)
class Owner:
    """An owner's name, and the id of its pool, which may change. Both are empty if the disk has no
    owner.
    """

    name: str = ""
    pool: str = ""

    def may_use(self, disk: Owner) -> bool:
        """Return whether a disk belongs to this owner, by its name or by its pool."""
        mine, its = ({owner.name, owner.pool} - {""} for owner in (self, disk))
        return not mine or not its or bool(mine & its)


def owner_of(pool: Pool, name: str = "") -> Owner:
    """Return the owner of a pool's disks. The default name is the pool's location, that of its
    first device, where the next pool will be created.
    """
    first = pool.devices[0]
    location = os.path.realpath(first.path) + (f"@{first.offset}" if first.offset else "")
    return Owner(_short(name or location), pool.id)


def _short(name: str) -> str:
    """Shorten a name to fit into a disk's header."""
    if len(name.encode(errors="replace")) <= NAME_SIZE:
        return name
    digest = hashlib.sha256(name.encode(errors="replace")).hexdigest()[:32]
    return f"{name[:_SHOWN].encode(errors='replace')[:_SHOWN].decode(errors='ignore')}...{digest}"


@dataclass(frozen=True, slots=True)
class DiskSet:
    """A set of disks: its number, how many disks it has, and the number of the set that these disks
    leave because another disk of it is missing.
    """

    number: int
    count: int
    former: int | None = None


@dataclass(frozen=True, slots=True)
class FileLayout:
    """The layout of the file."""

    id: int
    size: int
    slot_count: int
    data_offset: int
    stripe_count: int
    server: str
    pool: str = ""
    disk_set: int = 0
    disk_count: int = 0  # disks of the set; 0: from before they were counted

    @property
    def owner(self) -> Owner:
        """The owner of the file's blocks."""
        return Owner(self.server, self.pool)

    @property
    def index_size(self) -> int:
        """The size of the index in bytes. It starts at :data:`PAGE`."""
        return self.slot_count * int(lib.BL_STORE_ENTRY_SIZE)


def plan_layout(size: int, smallest_block: int, server: str, pool: str = "") -> FileLayout:
    """Compute the layout of a new file of at most ``size`` bytes. Raises TierError if it is too
    small.
    """
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
        layout.disk_set,
        layout.disk_count,
    ).ljust(_SECTOR - _CRC.size, b"\0")
    head = (head + _first_crc(head)).ljust(PAGE - _CRC.size, b"\0")
    return head + _CRC.pack(crc32c(head))


def _first_crc(page: bytes) -> bytes:
    """Return the checksum of the first sector. It does not depend on the magic."""
    return _CRC.pack(crc32c(page[len(_MAGIC) : _SECTOR - _CRC.size]))


def _is_whole(page: bytes) -> bool:
    """Return whether a header, or at least its first sector, is intact."""
    own = page[_SECTOR - _CRC.size : _SECTOR]
    whole = page[-_CRC.size :] == _CRC.pack(crc32c(page[: -_CRC.size]))
    return whole or (own != bytes(_CRC.size) and own == _first_crc(page))


def _is_half_made(page: bytes) -> bool:
    """Return whether a format was interrupted here: the page has the magic of a format, or a power
    failure has mixed its two versions, and the checksum matches with one magic or the other.
    """
    magic, (crc,) = page[: len(_MAGIC)], _CRC.unpack_from(page, PAGE - _CRC.size)
    body = page[len(_MAGIC) : -_CRC.size]
    ready, half = (crc == crc32c(head + body) for head in (_MAGIC, _FORMATTING))
    return half if magic == _MAGIC else magic == _FORMATTING and (ready or half)


class LockedFile:
    """The open and locked file of a tier.

    Raises TierError if the file is in use, damaged, foreign, mounted, or of another version.
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
        """Close the file, which releases its lock."""
        os.close(self.fd)
        if self._claim >= 0:
            os.close(self._claim)

    def read_header(self) -> FileLayout | None:
        """Return the header, or None if the file may be formatted. Raises OSError, and TierError
        for a file that does not belong to Beluga.
        """
        page = Arena(0).take(_BLANK)
        length = os.preadv(self.fd, [page.data], 0)
        whole = page[:PAGE].tobytes()
        if (not page.any() if self.is_device else length == 0) or _is_half_made(whole):
            return None
        fields = _HEADER.unpack_from(whole)
        magic, version, slots, ident, had, data, stripes, *owner, disk_set, disk_count = fields
        if magic != _MAGIC:
            raise _foreign(self.path, self._mend if self.is_device else "")
        if version != _VERSION:
            raise TierError(
                f"{self.path} has format version {version}, but this Beluga has version "
                f"{_VERSION}; {self._mend}"
            )
        if not _is_whole(whole):
            raise TierError(f"the header of {self.path} is damaged; {self._mend}")
        name, pool = map(_text, owner)
        where = slots, data, stripes
        layout = FileLayout(ident, had, *where, name, pool, disk_set, disk_count)
        if self._length() < layout.data_offset:
            raise TierError(f"{self.path} is truncated; {self._mend}")
        return layout

    @property
    def _mend(self) -> str:
        """How an operator replaces the contents by a new tier."""
        if self.is_device:
            erase = f"dd if=/dev/zero of={self.path} bs=1M count=1"
            return f"erase its start to make a new tier, which deletes its data ({erase})"
        return "remove it to make a new tier, which deletes its blocks"

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

    Raises TierError as :class:`LockedFile` does, and if the file belongs to another server or there
    is no room for it. A file of another size is extended or truncated, and keeps the blocks that
    still fit. A file of an earlier pool of the same owner is taken over. A file of another set than
    ``disk_set`` is formatted again; None accepts any. One of its former set stays in that set until
    :meth:`join`.
    """

    def __init__(
        self,
        path: Path,
        size: int,
        smallest_block: int,
        owner: Owner,
        disk_set: DiskSet | None = None,
    ) -> None:
        path = _file_of(path)
        plan = partial(plan_layout, size, smallest_block, owner.name, owner.pool)
        if not path.exists():  # do not create a file if there is no room for it
            _check_room(path.parent, plan().size)
        super().__init__(path)
        try:
            made = self.read_header()
            if made is not None:
                _refuse_foreign(path, made.owner, owner)
            if made is not None and not _accepts(disk_set, made.disk_set):
                _LOG.warning("%s was in another set of disks; its blocks are dropped", path)
                made = None
            if made is None:
                chosen = disk_set or DiskSet(new_set(), 1)
                self._made = replace(plan(), disk_set=chosen.number, disk_count=chosen.count)
                self.layout = self._format(self._made)
            else:
                self.layout, self._made = self._fit(made, size, smallest_block), made
                if owner not in (made.owner, Owner()):
                    self._made = replace(made, server=owner.name, pool=owner.pool)
                    self.write_header(self._made)
                    _LOG.info("%s now belongs to the server %s", path, owner.name)
                if disk_set is not None and disk_set.number == made.disk_set:
                    self.join(disk_set)
        except OSError as error:
            self.close()
            raise TierError(f"{path}: {error.strerror}") from error
        except BaseException:
            self.close()
            raise

    def join(self, disk_set: DiskSet) -> None:
        """Write into the header that the file is in this set. Raises OSError."""
        made = replace(self._made, disk_set=disk_set.number, disk_count=disk_set.count)
        if made != self._made:
            self.write_header(made)
            self._made = made

    def leaves(self, disk_set: DiskSet) -> bool:
        """Return whether the file is still in the former set of ``disk_set``."""
        return self._made.disk_set == disk_set.former

    def vanished(self) -> bool:
        """Return whether the path no longer refers to this file."""
        try:
            at_path, opened = self.path.stat(), os.fstat(self.fd)
        except OSError:
            return True
        return (at_path.st_dev, at_path.st_ino) != (opened.st_dev, opened.st_ino)

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
                return [(PAGE, end)]  # this file system does not report holes
            at = os.lseek(self.fd, first, os.SEEK_HOLE)
            first, last = first // PAGE * PAGE, min(-(-at // PAGE) * PAGE, end)
            if first < end:
                ranges.append((max(first, PAGE), last))
        return ranges

    def _fit(self, made: FileLayout, size: int, smallest_block: int) -> FileLayout:
        """Return the layout of a file for a size other than the one it was made with. The index
        stays unchanged, and stripes are added or removed at the end. Recovery then rejects the
        entries of blocks in removed stripes.
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
        length = self._length()
        if self.is_device:
            _check_device(self.path, length, end, size)
        elif length != end:
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
        """Create a new file: first everything after the header, then the header. Until then the
        page has the magic of a format, so that an interrupted format is repeated.
        """
        end = layout.data_offset + layout.stripe_count * _STRIPE
        if self.is_device:
            _check_device(self.path, self._length(), end, layout.size)
        else:
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
                os.fsync(folder)  # makes the file's name survive a power failure
            finally:
                os.close(folder)
        return layout


def new_set() -> int:
    """Return a number for a set of disks; never 0, which files of earlier versions have."""
    return secrets.randbits(64) | 1


def _accepts(disk_set: DiskSet | None, number: int) -> bool:
    """Return whether a disk of the set of this number keeps its blocks in ``disk_set``."""
    return disk_set is None or number in (disk_set.number, disk_set.former)


def set_of(paths: Sequence[Path]) -> DiskSet:
    """Return the set of disks: that of the first one that has a header, or a new one; and a new one
    if a disk of that set is missing.
    """
    sets = [fields[-2:] for fields in map(_visible, paths) if fields is not None]
    if not sets:
        return DiskSet(new_set(), len(paths))
    number = int(sets[0][0])
    counts = [int(count) for disk_set, count in sets if disk_set == number]
    if len(counts) < max(counts):
        return DiskSet(new_set(), len(paths), former=number)
    return DiskSet(number, len(paths))


def check_owner(path: Path, owner: Owner) -> None:
    """Raise TierError if a disk has another owner, as far as this is visible without its lock."""
    header = _visible(path)
    if header is not None:
        *_, name, pool, _, _ = header
        file = path / _FILE if path.is_dir() else path
        _refuse_foreign(file, Owner(_text(name), _text(pool)), owner)


def _visible(path: Path) -> tuple[Any, ...] | None:
    """Return the fields of a header as far as it is visible without the file's lock, or None."""
    file = path / _FILE if path.is_dir() else path
    try:
        with file.open("rb") as opened:
            page = opened.read(PAGE)
    except OSError:
        return None  # the file does not exist yet, or opening it reports the error
    whole = page[: len(_MAGIC)] == _MAGIC and len(page) == PAGE and _is_whole(page)
    return _HEADER.unpack_from(page) if whole else None


def _refuse_foreign(path: Path, has: Owner, wanted: Owner) -> None:
    if not wanted.may_use(has):
        raise TierError(
            f"{path} has the blocks of the server {has.name or has.pool}; give another path, or "
            f"release it for the next server: beluga disk adopt {path}"
        )


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="replace")


def adopt_disk(path: StrPath) -> Owner:
    """Release a disk to the next server that opens it, and return its former owner. Its blocks
    stay.

    Raises TierError if a server uses it, or if it is not a disk tier.
    """
    file = file_of_tier(path)
    locked = LockedFile(file)
    try:
        layout = locked.read_header()
        if layout is None:
            raise TierError(f"{path} is empty and needs no release; give it to any server")
        locked.write_header(replace(layout, server="", pool=""))
        return layout.owner
    except OSError as error:
        raise TierError(f"{file}: {error.strerror}") from error
    finally:
        locked.close()


def file_of_tier(path: StrPath) -> Path:
    """Return the file of an existing disk tier. Raises TierError if there is none."""
    path = path_of("path", path)
    if not path.exists():
        raise TierError(f"{path} does not exist; name the disk of a server (--disk)")
    file = path / _FILE if path.is_dir() else path
    if not file.exists():
        raise TierError(f"{path} is not a disk tier; name the disk of a server (--disk)")
    if not (file.is_file() or file.is_block_device()):
        raise TierError(f"{path} is not a folder, file or block device; give one of these")
    refuse_foreign(file)
    return file


def refuse_foreign(path: Path) -> None:
    """Raise TierError if a disk tier's path has a file with other data, such as a pool's device."""
    file = path / _FILE if path.is_dir() else path
    if not file.is_file():
        return
    try:
        with file.open("rb") as opened:
            whole = opened.read(PAGE)
    except OSError as error:
        raise TierError(f"{file} cannot be read: {error.strerror}; give another path") from error
    known = whole.startswith(_MAGIC) or _is_half_made(whole.ljust(PAGE, b"\0"))
    if whole and not known:
        raise _foreign(file)


def _foreign(path: Path, mend: str = "") -> TierError:
    """Return the error for other data. It does not advise to remove a file, which may be a device
    of a pool.
    """
    remedy = f"give another path, or {mend}" if mend else "give another path"
    return TierError(f"{path} has data, but is not a disk tier; {remedy}")


def check_room(path: Path, size: int) -> None:
    """Raise TierError if a disk tier's path has no room for a file of this size. A file that needs
    no more room than before is accepted, even if the disk has become full.
    """
    file = path / _FILE if path.is_dir() or not path.exists() else path
    if not file.exists():
        _check_room(file.parent if file.parent.exists() else file.parent.parent, size)
        return
    end = size // _STRIPE * _STRIPE  # the tier's own end is not known before it is open
    try:
        with file.open("rb") as opened:
            length = opened.seek(0, os.SEEK_END)
        if file.is_block_device():
            _check_device(file, length, end, size)
        elif length < end:
            header = _visible(path)
            if header is None or header[_SIZE_FIELD] < size:
                _check_room(file, size, has=file.stat().st_blocks * 512)
    except OSError as error:
        raise TierError(f"{file}: {error.strerror}") from error


def _check_device(path: Path, length: int, end: int, size: int) -> None:
    """Raise TierError if a tier of ``size`` bytes ends behind a device of ``length`` bytes."""
    if length < end:
        raise TierError(
            f"{path} has {length} bytes, but {size} were requested; give at most its size"
        )


def _check_room(path: Path, size: int, *, has: int = 0) -> None:
    """Raise TierError if the path's file system has no room for a file of this size. ``has`` is the
    part of it that already exists.
    """
    room = os.statvfs(path)
    free = room.f_bavail * room.f_frsize
    if free + has < size:
        existing = f" beside the {has} that the tier has" if has else ""
        raise TierError(
            f"{path} has {free} bytes free{existing}, but {size} are needed; give at most "
            f"{free + has} bytes, or another path"
        )


def _file_of(path: Path) -> Path:
    """Return the file of a tier's path. A folder has its own file, and is created if necessary."""
    if path.exists() and not path.is_dir():
        if not (path.is_file() or path.is_block_device()):
            raise TierError(f"{path} is not a folder, file or block device; give one of these")
        return path
    try:
        path.mkdir(exist_ok=True)
    except OSError as error:
        raise TierError(f"{path} cannot be created: {error.strerror}") from error
    return path / _FILE


def _open(path: Path) -> tuple[int, bool]:
    """Open a file for direct I/O, or without where its file system does not support that
    (tmpfs).
    """
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
    """Open a block device exclusively, so that it cannot be mounted, and return the file
    descriptor. Raises TierError if it is in use. The kernel releases the claim of a killed process
    a moment later than its lock.
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
    """Lock the file. The kernel releases the lock of a killed process only after its requests have
    ended, so none of them is executed after this returns.
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
                    f"{path} is in use by {by}; give each server its own path"
                ) from None
            time.sleep(_LOCK_AGAIN_S)
        else:
            return


def _holder(fd: int) -> int:
    """Return the process of this host that has the lock, if the kernel reports it, or 0."""
    where = os.fstat(fd)
    device = f"{os.major(where.st_dev):02x}:{os.minor(where.st_dev):02x}:{where.st_ino}"
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()
            if "FLOCK" in words and device in words:
                return int(words[words.index("WRITE") + 1]) if "WRITE" in words else 0
    return 0
