# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The runtime directory: the lock files and sockets that the processes of one host share for a
pool.

All of them must find the same directory, whatever paths they use for the devices, and no other user
may write to it. So it lies beside the first device's file and has the file's group. For devdax
nodes it lies in a directory of this host and its name is the pool's id. ``BELUGA_RUNTIME_DIR`` sets
a directory for all pools, for users and containers that would otherwise use different ones; its
group may use it. A process with a different directory than the pool's server is rejected
(``csrc/liveness/runtime.h``).
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
from pathlib import Path

from beluga import config
from beluga.errors import BootIdError, DeviceBusyError, DevicePermissionError
from beluga.pool.device import Device, explain
from beluga.pool.spec import DeviceSpec

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MAPS = Path("/proc/self/maps")


def runtime_path(first: Device, pool_id: str) -> Path:
    """Return the directory's path, which may not exist. ``first`` is the pool's first device."""
    if first.kind == "devdax" or config.configured_runtime_root() is not None:
        return config.runtime_root() / pool_id
    return runtime_beside(first.spec)


def runtime_beside(first: DeviceSpec) -> Path:
    """Return the directory beside a file, which need not exist any more."""
    file = first.real_path
    place = f"@{first.offset:#x}" if first.offset else ""
    return file.with_name(f"{file.name}{place}.run")


def make_runtime_dir(first: Device, pool_id: str) -> Path:
    """Return the directory and make it if necessary. Raises DevicePermissionError."""
    path = runtime_path(first, pool_id)
    device = first.spec.path.stat()
    model = device if stat.S_ISREG(device.st_mode) else None
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if config.configured_runtime_root() is not None:
            model = path.parent.stat()
        elif first.kind == "devdax":
            _refuse_prepared(path.parent, device.st_uid)
        path.mkdir(mode=0o700)
        if model is not None and model.st_mode & stat.S_IWGRP:
            os.chown(path, -1, model.st_gid)
            path.chmod(0o2770)
    except FileExistsError:
        _refuse_other_owner(path, device.st_uid)
    except OSError as error:
        raise explain(error, path) from None
    return path


def boot_id_error(doing: str) -> BootIdError | None:
    """Return the error of a sandbox that hides the boot id, or None. A server and a session need
    the id: it shows that two processes run on one host.
    """
    try:
        if len(_BOOT_ID.read_text().strip()) == 36:  # 16 bytes in hex and four dashes
            return None
        why = "it has no id"
    except OSError as error:
        why = str(error.strerror)
    return BootIdError(
        f"{doing}: {_BOOT_ID} cannot be read ({why}); show it in this container or sandbox"
    )


def mapped_and_removed(inode: int, name: str) -> bool:
    """Return whether this process maps a deleted file of this inode and name; a renamed file is not
    deleted. Where /proc is hidden, the file counts as not deleted.
    """
    line = re.compile(rf" {inode} +.*/{re.escape(name)} \(deleted\)$", re.MULTILINE)
    try:
        return line.search(_MAPS.read_text(errors="replace")) is not None
    except OSError:
        return False


def refuse_in_use(path: Path) -> None:
    """Raise DeviceBusyError if a process of this host serves the pool or has a session with it, and
    DevicePermissionError if this user cannot determine that.

    ``path`` is the pool's runtime directory. Each such process holds a liveness lock on a file
    there (``csrc/liveness/lock.h``). Processes of other hosts cannot be seen.
    """
    for lock in _locks(path):
        try:
            with lock.open("r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DeviceBusyError(
                f"processes use this pool ({lock} is locked); stop its server and clients"
            ) from None
        except FileNotFoundError:
            pass  # the process has just ended
        except OSError as error:
            raise explain(error, lock) from None


def _locks(path: Path) -> list[Path]:
    """Return the liveness locks in a runtime directory. Raises DevicePermissionError if this user
    may not list it, because then it is unknown whether the pool is in use.
    """
    try:
        return [lock for lock in path.iterdir() if lock.name.startswith("alive-")]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise explain(error, path) from None


def _refuse_prepared(parent: Path, owner: int) -> None:
    """Raise DevicePermissionError for a directory that another user created in a world-writable
    place, such as ``/tmp/beluga-1000``: that user could replace the directories in it.
    """
    anybodys = parent.parent.stat().st_mode & stat.S_IWOTH
    if anybodys and parent.lstat().st_uid not in (os.geteuid(), owner, 0):
        raise DevicePermissionError(f"{parent} belongs to another user; remove it")


def _refuse_other_owner(path: Path, owner: int) -> None:
    """Raise DevicePermissionError for a directory of another user."""
    found, parent = path.lstat(), path.parent.stat()
    trusted = [os.geteuid(), owner, 0]
    if config.configured_runtime_root() is not None and not parent.st_mode & stat.S_IWOTH:
        trusted.append(found.st_uid)  # a user who may write to the parent directory is trusted
    if not stat.S_ISDIR(found.st_mode) or found.st_uid not in trusted:
        raise DevicePermissionError(f"{path} belongs to another user; remove it")
    if not os.access(path, os.W_OK | os.X_OK):
        raise DevicePermissionError(f"{path}: this user may not write there; join its group")
