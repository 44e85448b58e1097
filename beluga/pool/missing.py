# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The runtime directory of a pool whose devices cannot be opened: their files were removed,
truncated, or given to another user. Its server may still be running, and commands must find it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from beluga import config
from beluga.errors import DeviceBusyError, PoolError
from beluga.pool.default import emulated_paths, stored_specs
from beluga.pool.runtime import refuse_in_use, runtime_beside
from beluga.pool.spec import DeviceSpec, SpecLike

_LOCKS = ("serve.pid", "standby.pid")  # of servers in the background


def runtime_dir_of_missing(paths: Sequence[SpecLike] | None) -> Path | None:
    """Return the directory in which processes of a pool with one of these devices, or of the
    default pool, hold locks. None if this user can see no such process.
    """
    return next((directory for directory in _candidates(paths) if _is_used(directory)), None)


def _candidates(paths: Sequence[SpecLike] | None) -> list[Path]:
    """Return the directories that may belong to the pool. A directory next to a file belongs to the
    file.
    """
    found = paths or config.pool_paths() or stored_specs() or emulated_paths()
    specs = [DeviceSpec.parse(path) for path in found]
    if config.configured_runtime_root() is None:
        return [runtime_beside(spec) for spec in specs]
    return [
        directory
        for directory in _children(config.runtime_root())
        if any(_is_mapped(spec.path, directory / name) for spec in specs for name in _LOCKS)
    ]


def _is_used(directory: Path) -> bool:
    try:
        refuse_in_use(directory)
    except DeviceBusyError:
        return True
    except PoolError:  # of another user
        pass
    return False


def _children(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except OSError:
        return []


def _is_mapped(device: Path, lock: Path) -> bool:
    """Return whether the process whose pid is in the file has the device mapped."""
    try:
        maps = Path(f"/proc/{int(lock.read_text())}/maps").read_text(errors="replace")
    except (OSError, ValueError):
        return False
    name = str(device.absolute())
    return any(line.removesuffix(" (deleted)").endswith(f" {name}") for line in maps.splitlines())
