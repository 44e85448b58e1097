# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Finds scratch folders whose process has ended, and not those in use."""

import fcntl
from pathlib import Path

SHM = Path("/dev/shm")


def leftovers(name: str, pid: int | None = None) -> set[Path]:
    """Return the unused folders that ``scratch_folder(name, SHM)`` has made. ``pid`` excludes those
    of other processes, which may end at any time.
    """
    pattern = "*" if pid is None else f"{pid}-*"
    return {path for path in SHM.glob(f"beluga-{name}-{pattern}") if not _in_use(path)}


def _in_use(folder: Path) -> bool:
    try:
        with (folder / "beluga-owner.lock").open("rb+") as owner:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:  # removed meanwhile, or not locked yet
        return not folder.exists() or (folder / "new").exists()
    return False
