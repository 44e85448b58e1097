# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The runtime directory of a pool, also of one whose devices are missing, and this user's default
pool.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from beluga import config
from beluga.arguments import StrPath, path_of
from beluga.errors import (
    BootIdError,
    DeviceBusyError,
    DevicePermissionError,
    NoDefaultPoolError,
    PoolError,
)
from beluga.pool.device import Device, DeviceSpec, SpecLike, explain

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_HELD = Path("/proc/locks")
_MAPS = Path("/proc/self/maps")


def runtime_path(first: Device, pool_id: str) -> Path:
    """Return the directory's path, which may not exist. ``first`` is the pool's first device."""
    if first.kind == "devdax" or config.configured_runtime_root() is not None:
        return config.runtime_root() / pool_id
    return runtime_dir_of_file(first.spec)


def runtime_dir_of_file(first: DeviceSpec) -> Path:
    """Return the directory beside a file, which need not exist any more."""
    file = first.real_path
    suffix = f"@{first.offset:#x}" if first.offset else ""
    return file.with_name(f"{file.name}{suffix}.run")


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
        cause = "it has no id"
    except OSError as error:
        cause = str(error.strerror)
    return BootIdError(
        f"{doing}: {_BOOT_ID} cannot be read ({cause}); show it in this container or sandbox"
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


def refuse_in_use(path: StrPath) -> None:
    """Raise DeviceBusyError if a process of this host serves the pool or has a session with it, and
    DevicePermissionError if this user cannot determine that.

    ``path`` is the pool's runtime directory. Each such process holds a liveness lock on a file
    there (``csrc/liveness/lock.h``). Processes of other hosts cannot be seen.
    """
    path = path_of("path", path)
    for lock in _locks(path):
        try:
            with lock.open("r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DeviceBusyError(
                f"processes use this pool ({_shown(path) or f'{lock} is locked'}); stop its server "
                "('beluga stop', or 'kill PID') and clients"
            ) from None
        except FileNotFoundError:
            pass  # the process has just ended
        except OSError as error:
            raise explain(error, lock) from None


def users_of(path: Path) -> dict[int, bool]:
    """Return the pids of this host's processes that use the pool of a runtime directory, each with
    whether it is a server. A process of another pid namespace is left out.
    """
    servers: dict[str, bool] = {}  # by the inode of the lock
    pids: dict[int, bool] = {}
    try:
        for lock in _locks(path):
            serves = lock.with_name(lock.name.replace("alive", "pidfds", 1)).exists()
            servers[str(lock.stat().st_ino)] = serves
        held = _HELD.read_text().splitlines()
    except (OSError, DevicePermissionError):
        return {}
    for _, kind, *_, pid, file, _, _ in (line.split() for line in held if "->" not in line):
        inode = file.rpartition(":")[2]
        if kind == "FLOCK" and inode in servers and int(pid) > 0:
            pids[int(pid)] = pids.get(int(pid), False) or servers[inode]
    return pids


def server_stop(path: Path) -> str:
    """Return which process serves the pool of a runtime directory, and how it is stopped."""
    pid = next((pid for pid, serves in users_of(path).items() if serves), None)
    if pid is None:
        return ""
    if pid == os.getpid():
        return f" (this process, {pid}, serves it: use its server, or call stop() of that object)"
    return f" (process {pid}; 'beluga stop', or 'kill {pid}')"


def _shown(path: Path) -> str:
    return ", ".join(
        f"the server {pid}" if serves else f"process {pid}"
        for pid, serves in sorted(users_of(path).items())
    )


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
    status, parent = path.lstat(), path.parent.stat()
    trusted = [os.geteuid(), owner, 0]
    if config.configured_runtime_root() is not None and not parent.st_mode & stat.S_IWOTH:
        trusted.append(status.st_uid)  # a user who may write to the parent directory is trusted
    if not stat.S_ISDIR(status.st_mode) or status.st_uid not in trusted:
        raise DevicePermissionError(f"{path} belongs to another user; remove it")
    if not os.access(path, os.W_OK | os.X_OK):
        raise DevicePermissionError(f"{path}: this user may not write there; join its group")


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
    named = paths or config.pool_paths() or stored_specs() or emulated_paths()
    specs = [DeviceSpec.parse(path) for path in named]
    if config.configured_runtime_root() is None:
        return [runtime_dir_of_file(spec) for spec in specs]
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


def default_specs() -> list[DeviceSpec]:
    """Return the devices of the default pool. Raises NoDefaultPoolError."""
    if paths := config.pool_paths():
        return [DeviceSpec.parse(path) for path in paths]
    if specs := stored_specs():
        refuse_missing(specs)
        return specs
    paths = emulated_paths()
    if all(Path(path).exists() for path in paths):
        return [DeviceSpec.parse(path) for path in paths]
    raise NoDefaultPoolError(
        "no pool is mounted; name one (--pool PATH), or make one: beluga mount --create PATH..."
    )


def emulated_paths() -> list[str]:
    """Return the two files of this user's emulated pool, which ``beluga mount`` makes without a
    path.
    """
    directory = f"/dev/shm/beluga-{os.getuid()}"  # noqa: S108  mode 0700, made by mount
    return [f"{directory}/pool.{index}" for index in range(2)]


def stored_specs() -> list[DeviceSpec]:
    """Return the devices of the last :func:`storing_default`, or nothing. Raises NoDefaultPoolError
    if the file is damaged.
    """
    try:
        content = json.loads(_file().read_text())
        return [DeviceSpec.parse(text) for text in content["devices"]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NoDefaultPoolError(
            f"{_file()} is damaged ({error}); remove it and mount again"
        ) from None


def refuse_missing(specs: Sequence[DeviceSpec]) -> None:
    """Raise NoDefaultPoolError if a device of the mounted pool no longer exists."""
    missing = next((spec.path for spec in specs if not spec.path.exists()), None)
    if missing is None:
        return
    booted = _boot_time()
    cause = "it was removed"
    if booted > _file().stat().st_mtime:
        cause = f"this machine has rebooted ({datetime.fromtimestamp(booted):%F %R})"
        if str(missing).startswith("/dev/shm/"):  # noqa: S108  only a name
            cause += ", which empties /dev/shm"
    names = " ".join(map(str, specs))
    raise NoDefaultPoolError(
        f"device {missing} of the mounted pool is missing: {cause}; create the pool again "
        f"(beluga mount --create {names}), or unmount it (beluga umount)"
    )


def _boot_time() -> float:
    """Return when this machine was started, in seconds of the epoch; 0.0 if that is unknown."""
    try:
        lines = Path("/proc/stat").read_text().splitlines()
    except OSError:
        return 0.0
    return next((float(line.split()[1]) for line in lines if line.startswith("btime ")), 0.0)


@contextmanager
def storing_default(paths: Sequence[SpecLike]) -> Iterator[None]:
    """Make these devices the default pool of this user when the block ends without an error.

    An unwritable state directory raises NoDefaultPoolError before the block begins.
    """
    specs = [str(DeviceSpec.parse(path)) for path in paths]
    file = _file()
    draft = file.with_suffix(f".{os.getpid()}")
    try:
        try:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            draft.write_text(json.dumps({"devices": specs}, indent=1) + "\n")
        except OSError as error:
            raise NoDefaultPoolError(
                f"{error.filename or draft}: {error.strerror}; the mounted pool is stored "
                "there: set HOME or XDG_STATE_HOME, or use 'beluga pool create' and --pool PATH"
            ) from None
        yield
        draft.replace(file)
    finally:
        with suppress(OSError):
            draft.unlink()


def remove_default() -> bool:
    """Remove the stored default pool. Returns whether there was one."""
    mounted = _file().exists()
    _file().unlink(missing_ok=True)
    return mounted


def _file() -> Path:
    return config.state_dir() / "default.json"
