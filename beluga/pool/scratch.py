# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Temporary folders for the pools of one process. They are removed even if the process is killed.

A process that is killed cannot remove its folder. It holds a lock on a file in the folder, which
the kernel releases when the process ends. The next process that makes such a folder removes every
folder whose lock is free. The file gets its name only once its lock is held, so an incomplete
folder is never removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

_OWNER = "beluga-owner.lock"


@contextlib.contextmanager
def scratch_folder(name: str, parent: Path) -> Iterator[Path]:
    """Make a folder ``beluga-NAME-PID-...``, and remove it at the end. Raises OSError."""
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
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != _OWNER:
                path.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
