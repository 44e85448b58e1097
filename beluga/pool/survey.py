# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Pools of this machine that are not open: what their devices hold, their files, and scratch
folders.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from beluga._ffi import ffi, lib
from beluga.arguments import StrPath, path_of
from beluga.errors import PoolError
from beluga.pool.device import Device, DeviceSpec, SpecLike, examine, open_device, refuse_twice
from beluga.pool.layout import MAGIC, Superblock, fault, read_first
from beluga.pool.runtime import runtime_path


@dataclass(frozen=True, slots=True)
class PoolFile:
    """A file that is a device of a pool."""

    path: Path
    pool_id: str | None  # None if its superblock is not valid
    size: int  # bytes of memory that the file occupies
    owner: int  # the user
    identity: tuple[int, int]  # the file system's number and the inode
    runtime_dir: Path | None  # for the first device of a valid pool; it may not exist
    device_count: int = 1  # of its pool, if its superblock is valid


def find_pools(folder: StrPath) -> tuple[list[list[PoolFile]], list[Path]]:
    """Return the pools whose files lie in ``folder`` or in a folder of it, and unreadable paths.

    The files of one pool are in one list.
    """
    folder = path_of("folder", folder)
    pools: dict[str, list[PoolFile]] = {}
    closed: list[Path] = []
    for path in _files(folder, closed):
        try:
            file = _look(path)
        except (OSError, PoolError):
            closed.append(path)
            continue
        if file is not None:
            pools.setdefault(file.pool_id or str(path), []).append(file)
    return list(pools.values()), closed


def _files(folder: Path, closed: list[Path], depth: int = 1) -> Iterator[Path]:
    try:
        paths = sorted(folder.iterdir())
    except OSError:
        closed.append(folder)
        return
    for path in paths:
        try:
            mode = path.lstat().st_mode
        except OSError:
            continue  # it was removed meanwhile
        if stat.S_ISREG(mode):
            yield path
        elif stat.S_ISDIR(mode) and depth > 0:
            yield from _files(path, closed, depth - 1)


def _look(path: Path) -> PoolFile | None:
    with path.open("rb") as file:
        if os.pread(file.fileno(), len(MAGIC), 0) != MAGIC:
            return None
        device, status = examine(DeviceSpec(path)), os.fstat(file.fileno())
        raw = read_first(device, file.fileno())
    size, owner = status.st_blocks * 512, status.st_uid
    identity = status.st_dev, status.st_ino
    if fault(raw) != lib.BL_SUPERBLOCK_GOOD:
        return PoolFile(path, None, size, owner, identity, None)
    superblock = Superblock.of(raw)
    first = superblock.device_index == 0
    runtime_dir = runtime_path(device, superblock.pool_id) if first else None
    count = superblock.geometry.device_count
    return PoolFile(path, superblock.pool_id, size, owner, identity, runtime_dir, count)


FAULTS = {
    lib.BL_SUPERBLOCK_EMPTY: "superblock-empty {}: no pool is on it",
    lib.BL_SUPERBLOCK_FOREIGN: "superblock-foreign {}: its first bytes are not Beluga's",
    lib.BL_SUPERBLOCK_VERSION: "superblock-version {}: it has another version of the pool format",
    lib.BL_SUPERBLOCK_DAMAGED: "superblock-damaged {}: its check value is wrong",
    lib.BL_SUPERBLOCK_FORMAT: "superblock-format {}: a Beluga with other structs made it",
    lib.BL_SUPERBLOCK_GEOMETRY: "superblock-geometry {}: its numbers contradict each other",
}


def survey(paths: Sequence[SpecLike]) -> list[str]:
    """Return one line for each finding about the superblocks of these devices: kind, device,
    meaning.

    Raises a PoolError for a path that is not a device or cannot be opened.
    """
    devices = [examine(DeviceSpec.parse(path)) for path in paths]
    refuse_twice(devices)
    findings: list[str] = []
    valid: list[tuple[Device, Superblock]] = []
    for device in devices:
        fd = open_device(device)
        try:
            raw = read_first(device, fd)
        finally:
            os.close(fd)
        verdict = fault(raw)
        if verdict != lib.BL_SUPERBLOCK_GOOD:
            findings.append(FAULTS[verdict].format(device))
            continue
        valid.append((device, Superblock.of(raw)))
        findings += _check_device(device, raw, valid[-1][1])
    return findings + list(_compare(valid, complete=len(valid) == len(devices)))


def _check_device(device: Device, raw: bytes, superblock: Superblock) -> Iterator[str]:
    c = ffi.cast("bl_superblock *", ffi.from_buffer(raw))
    if any(c.reserved) or c.reserved_tail or any(c.geometry.reserved):
        yield f"superblock-reserved {device}: a reserved field is used"
    size = superblock.geometry.device_size_of(superblock.device_index)
    if device.size < size:
        yield f"device-truncated {device}: {device.size} bytes, but its pool has {size} on it"


def _compare(valid: list[tuple[Device, Superblock]], *, complete: bool) -> Iterator[str]:
    """Compare the superblocks. With ``complete`` each device has a valid superblock, so an index
    that does not appear is missing from the pool.
    """
    if not valid:
        return
    reference, first = valid[0]
    by_index: dict[int, Device] = {}
    for device, superblock in valid:
        if superblock.pool_id != first.pool_id:
            pool = superblock.pool_id[:8]
            yield f"superblock-pool {device}: it belongs to pool {pool}, unlike {reference}"
        elif superblock.geometry != first.geometry:
            yield f"superblock-disagrees {device}: it has another geometry than {reference}"
        elif other := by_index.get(superblock.device_index):
            yield (
                f"superblock-twice {device}: device {superblock.device_index} of the pool, "
                f"as {other} is"
            )
        else:
            by_index[superblock.device_index] = device
    missing = [i for i in range(first.geometry.device_count) if i not in by_index]
    if complete and missing:
        yield f"device-missing {', '.join(map(str, missing))}: of {first.geometry.device_count}"


_OWNER = "beluga-owner.lock"


@contextlib.contextmanager
def scratch_folder(name: str, parent: StrPath) -> Iterator[Path]:
    """Make a folder ``beluga-NAME-PID-...``, and remove it at the end. Raises OSError."""
    parent = path_of("parent", parent)
    import tempfile  # slow to import

    _sweep(parent)
    folder = Path(tempfile.mkdtemp(prefix=f"beluga-{name}-{os.getpid()}-", dir=parent))
    owner = os.open(folder / "new", os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        fcntl.flock(owner, fcntl.LOCK_EX)
        (folder / "new").rename(folder / _OWNER)
        yield folder
    finally:
        _remove(folder)
        os.close(owner)


def _sweep(parent: Path) -> None:
    """Remove the folders of this user's processes that have ended."""
    for path in parent.glob(f"beluga-*/{_OWNER}"):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            owner = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
            stack.callback(os.close, owner)
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its owner is alive
            file, folder = os.fstat(owner), path.parent.lstat()
            if stat.S_ISDIR(folder.st_mode) and file.st_uid == folder.st_uid == os.getuid():
                _remove(path.parent)


def _remove(folder: Path) -> None:
    """Remove the folder, its lock file last: if this process is killed here, another process can
    remove the rest.
    """
    import shutil  # slow to import

    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != _OWNER:
                path.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
