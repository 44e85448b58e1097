# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Finds scratch folders whose process has ended; a folder in use is no leftover."""

from __future__ import annotations

import fcntl
from pathlib import Path

SHM = Path("/dev/shm")


def leftovers(name: str, pid: int | None = None) -> set[Path]:
    """Return the folders that ``scratch_folder(name, SHM)`` made, and that no process uses any
    more. ``pid`` leaves out those of other processes, which may end at any time.
    """
    mine = "*" if pid is None else f"{pid}-*"
    return {path for path in SHM.glob(f"beluga-{name}-{mine}") if not _in_use(path)}


def _in_use(folder: Path) -> bool:
    try:
        with (folder / "beluga-owner.lock").open("rb+") as owner:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:  # gone meanwhile, or not yet locked
        return not folder.exists() or (folder / "new").exists()
    return False
