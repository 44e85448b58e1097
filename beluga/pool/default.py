# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The default pool, which is used when no pool is named.

The first of these wins: ``BELUGA_POOL``; the devices that ``beluga mount`` remembered for this
user; the emulated pool in ``/dev/shm``, if it exists.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from beluga import config
from beluga.errors import NoDefaultPoolError
from beluga.pool.spec import DeviceSpec, SpecLike


def default_specs() -> list[DeviceSpec]:
    """Return the devices of the default pool. Raises NoDefaultPoolError."""
    if paths := config.pool_paths():
        return [DeviceSpec.parse(path) for path in paths]
    if specs := remembered():
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


def remembered() -> list[DeviceSpec]:
    """Return the devices of the last :func:`remember`, or nothing. Raises NoDefaultPoolError if the
    file is damaged.
    """
    try:
        found = json.loads(_file().read_text())
        return [DeviceSpec.parse(text) for text in found["devices"]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NoDefaultPoolError(f"{_file()}: {error}; remove it and mount again") from None


def remember(paths: Sequence[SpecLike]) -> None:
    """Make these devices the default pool of this user."""
    specs = [str(DeviceSpec.parse(path)) for path in paths]
    file = _file()
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = file.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps({"devices": specs}, indent=1) + "\n")
    draft.replace(file)


def forget() -> bool:
    """Forget the default pool. Returns whether there was one."""
    there = _file().exists()
    _file().unlink(missing_ok=True)
    return there


def _file() -> Path:
    return config.state_dir() / "default.json"
