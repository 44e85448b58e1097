# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Finds the pools in files below a folder by their superblocks, for any owner."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from beluga._ffi import lib
from beluga.errors import PoolError
from beluga.pool.device import examine
from beluga.pool.runtime import runtime_path
from beluga.pool.spec import DeviceSpec
from beluga.pool.superblock import MAGIC, Superblock, fault, read_first


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


def find_pools(folder: Path) -> tuple[list[list[PoolFile]], list[Path]]:
    """Return the pools whose files lie in ``folder`` or in a folder of it, and unreadable paths.

    The files of one pool are in one list.
    """
    pools: dict[str, list[PoolFile]] = {}
    closed: list[Path] = []
    for path in _files(folder, closed):
        try:
            found = _look(path)
        except (OSError, PoolError):
            closed.append(path)
            continue
        if found is not None:
            pools.setdefault(found.pool_id or str(path), []).append(found)
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
