# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The runtime directory of a pool whose devices cannot be opened: their files were removed, cut
short, or given to another user. Its server may still run, and has to be found.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from beluga import config
from beluga.pool.default import emulated_paths, remembered
from beluga.pool.runtime import runtime_beside
from beluga.pool.spec import DeviceSpec, SpecLike


def runtime_dirs_of_gone(paths: Sequence[SpecLike] | None) -> list[Path]:
    """Return the directories of this user that may be a pool's with one of these devices, or the
    default pool's. The one beside a file is certainly the file's.
    """
    found = paths or config.pool_paths() or remembered() or emulated_paths()
    specs = [DeviceSpec.parse(path) for path in found]
    if config.told_runtime_root() is None:
        return [beside for spec in specs if (beside := runtime_beside(spec)).is_dir()]
    return [
        directory
        for directory in _children(config.runtime_root())
        if any(_is_mapped(spec.path, directory / "serve.pid") for spec in specs)
    ]


def _children(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except OSError:
        return []


def _is_mapped(device: Path, lock: Path) -> bool:
    """Return whether the process whose number is in the file has the device in its memory."""
    try:
        maps = Path(f"/proc/{int(lock.read_text())}/maps").read_text(errors="replace")
    except (OSError, ValueError):
        return False
    name = str(device.absolute())
    return any(line.removesuffix(" (deleted)").endswith(f" {name}") for line in maps.splitlines())
