# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The default pool, which is used when no pool is specified.

The first of these wins: ``BELUGA_POOL``; the devices that ``beluga mount`` stored for this user;
the emulated pool in ``/dev/shm``, if it exists.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from beluga import config
from beluga.errors import NoDefaultPoolError
from beluga.pool.spec import DeviceSpec, SpecLike


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
        found = json.loads(_file().read_text())
        return [DeviceSpec.parse(text) for text in found["devices"]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NoDefaultPoolError(
            f"{_file()} is damaged ({error}); remove it and mount again"
        ) from None


def refuse_missing(specs: Sequence[DeviceSpec]) -> None:
    """Raise NoDefaultPoolError if a device of the mounted pool no longer exists."""
    gone = next((spec.path for spec in specs if not spec.path.exists()), None)
    if gone is None:
        return
    booted = _boot_time()
    cause = "it was removed"
    if booted > _file().stat().st_mtime:
        cause = f"this machine has rebooted ({datetime.fromtimestamp(booted):%F %R})"
        if str(gone).startswith("/dev/shm/"):  # noqa: S108  only a name
            cause += ", which empties /dev/shm"
    names = " ".join(map(str, specs))
    raise NoDefaultPoolError(
        f"device {gone} of the mounted pool is missing: {cause}; create the pool again "
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
    there = _file().exists()
    _file().unlink(missing_ok=True)
    return there


def _file() -> Path:
    return config.state_dir() / "default.json"
