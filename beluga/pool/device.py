# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Examines and opens devices: a devdax node, a file, or a slice of either.

Everything is checked before anything is mapped, because an access beyond the end of a file or
devdax node raises SIGBUS (devdax.py).
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from beluga.errors import (
    DeviceBusyError,
    DeviceMismatchError,
    DeviceMissingError,
    DevicePermissionError,
    DeviceSpecError,
    PoolError,
)
from beluga.pool.devdax import read_dax_node
from beluga.pool.spec import DeviceSpec, show_size

SYSFS = Path("/sys")


@dataclass(frozen=True, slots=True)
class Device:
    """An examined device."""

    spec: DeviceSpec
    kind: Literal["file", "devdax"]
    size: int  # bytes from spec.offset on; 0 for a file that does not exist yet
    exists: bool
    identity: tuple[object, ...]  # two paths of one device have equal identities
    node: int | None = None  # the NUMA node, from the specification or sysfs

    @property
    def sliced(self) -> bool:
        return self.spec.size is not None

    def __str__(self) -> str:
        return str(self.spec)


def examine(spec: DeviceSpec, *, creating: bool = False, sysfs: Path = SYSFS) -> Device:
    """Examine the device of ``spec``; with ``creating``, a file need not exist yet.

    Raises DeviceMissingError, DevicePermissionError, DeviceBusyError, DeviceSpecError.
    """
    path = spec.path
    try:
        found = path.stat()
    except FileNotFoundError:
        if not creating:
            raise DeviceMissingError(f"{path}: no such device or file; check the path") from None
        return _examine_nothing(spec)
    except OSError as error:
        raise explain(error, path) from None
    if stat.S_ISREG(found.st_mode):
        room = _room(spec, found.st_size)
        return Device(spec, "file", room, True, file_identity(found), spec.node)
    if stat.S_ISCHR(found.st_mode):
        return _examine_devdax(spec, found.st_rdev, sysfs)
    what = "a directory; name a file in it" if stat.S_ISDIR(found.st_mode) else "no device-dax node"
    raise DeviceMissingError(f"{path} is {what}; a device is a devdax node or a file")


def file_identity(found: os.stat_result) -> tuple[object, ...]:
    """Return the identity of a file."""
    return "file", found.st_dev, found.st_ino


def _examine_nothing(spec: DeviceSpec) -> Device:
    """Describe a file that does not exist yet."""
    path = spec.path
    if spec.size is not None:
        end = spec.offset + spec.size
        raise DeviceMissingError(
            f"{path}: a slice of a file that does not exist; make it: truncate -s {end} {path}"
        )
    if not path.parent.is_dir():
        raise DeviceMissingError(f"{path}: there is no directory {path.parent}; make it first")
    return Device(spec, "file", 0, False, ("path", str(path.resolve())), spec.node)


def _room(spec: DeviceSpec, size: int) -> int:
    """Return how many of the ``size`` bytes ``spec`` may use."""
    if spec.size is None:
        return size
    if spec.offset + spec.size > size:
        raise DeviceSpecError(
            f"{spec}: ends beyond {spec.path}, which has {show_size(size)}; name a slice inside it"
        )
    return spec.size


def _examine_devdax(spec: DeviceSpec, number: int, sysfs: Path) -> Device:
    found = read_dax_node(spec.path, number, sysfs)
    node = spec.node if spec.node is not None else found.node
    return Device(spec, "devdax", _room(spec, found.size), True, ("devdax", number), node)


def open_device(device: Device) -> int:
    """Open the device for reading and writing. The caller closes the descriptor."""
    try:
        return os.open(device.spec.path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise explain(error, device.spec.path) from None


def explain(error: OSError, path: Path) -> PoolError:
    """Convert the error of a system call on ``path`` to a PoolError with a remedy."""
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return DevicePermissionError(
            f"{path}: {error.strerror}; this user needs to read and write it (chmod, or its group)"
        )
    if error.errno == errno.ENXIO:
        return DeviceBusyError(
            f"{path}: no driver is bound to it; 'daxctl reconfigure-device --mode=devdax "
            f"{path.name}'"
        )
    return DeviceMissingError(f"{path}: {error.strerror}; check the path")


def refuse_twice(devices: Sequence[Device]) -> None:
    """Raise DeviceMismatchError if two of ``devices`` share bytes."""
    for place, device in enumerate(devices):
        for other in devices[:place]:
            if device.identity == other.identity and _overlap(device, other):
                raise DeviceMismatchError(
                    f"{device} and {other} are the same memory; name each device once"
                )


def _overlap(one: Device, other: Device) -> bool:
    if not (one.sliced and other.sliced):
        return True
    low, high = sorted((one, other), key=lambda device: device.spec.offset)
    return low.spec.offset + low.size > high.spec.offset
