# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Reading sysfs about a devdax node, to decide whether a pool may lie on it.

The kernel maps a node beyond its end and rounds offsets without an error, and then the process is
killed when it accesses the memory. It refuses private mappings and mappings that are not in units
of the node's alignment. So everything is checked here before anything is mapped, and a node with
unknown properties is refused.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from beluga.errors import DeviceBusyError, DeviceMissingError, DeviceSpecError, PoolError
from beluga.pool.spec import STRIPE_SIZE, show_size

_DIGITS = 19  # of the largest number that the kernel writes


@dataclass(frozen=True, slots=True)
class DaxNode:
    """A devdax node that a pool may lie on."""

    size: int  # bytes that can be mapped in stripes
    node: int | None  # the NUMA node, if known


def read_dax_node(path: Path, number: int, sysfs: Path) -> DaxNode:
    """Read sysfs about ``path``, a character device with device number ``number``.

    Raises DeviceMissingError if it is not a devdax node or sysfs does not describe it,
    DeviceBusyError if it has no driver or another one, and DeviceSpecError if its size or alignment
    is unsuitable.
    """
    entry = _entry(path, number, sysfs)
    _refuse_driver(path, entry)
    align, size = _number(path, entry / "align"), _number(path, entry / "size")
    if align <= 0 or STRIPE_SIZE % align:
        raise DeviceSpecError(
            f"{path} maps in units of {show_size(align)}; 2 MiB is needed: "
            f"'daxctl reconfigure-device --align=2M {entry.name}'"
        )
    if size % align:
        raise DeviceSpecError(
            f"{path} has {size} bytes, not a multiple of its alignment of {show_size(align)}: its "
            f"last bytes cannot be mapped; recreate it: 'daxctl create-device --size=...'"
        )
    if size < 2 * STRIPE_SIZE:
        raise DeviceSpecError(
            f"{path} has {show_size(size)}; a device needs at least 4 MiB (superblock and data)"
        )
    node = _read(entry / "numa_node")
    known = node is not None and node.isdecimal() and len(node) <= _DIGITS
    return DaxNode(size // STRIPE_SIZE * STRIPE_SIZE, int(node) if node and known else None)


def dax_nodes(sysfs: Path) -> dict[str, DaxNode | PoolError]:
    """Return every devdax node of this kernel by name; an error explains why it is unsuitable."""
    found: dict[str, DaxNode | PoolError] = {}
    for entry in sorted((sysfs / "bus/dax/devices").glob("*")):
        path = Path("/dev", entry.name)
        number = re.fullmatch(r"(\d{1,9}):(\d{1,9})", _read(entry / "dev") or "")
        try:
            if number is None:
                raise DeviceMissingError(f"{path}: {entry / 'dev'} has no device number")
            found[entry.name] = read_dax_node(
                path, os.makedev(int(number[1]), int(number[2])), sysfs
            )
        except PoolError as error:
            found[entry.name] = error
    return found


def _entry(path: Path, number: int, sysfs: Path) -> Path:
    devices = sysfs / "bus/dax/devices"
    wanted = f"{os.major(number)}:{os.minor(number)}"
    for entry in sorted(devices.glob("*")):
        if _read(entry / "dev") == wanted:
            return entry
    if not devices.is_dir():
        raise DeviceMissingError(
            f"{path} is a character device, but not a device-dax node of this kernel: "
            f"there is no {devices}; is sysfs mounted, and device_dax loaded?"
        )
    raise DeviceMissingError(f"{path} is a character device, but not a device-dax node")


def _refuse_driver(path: Path, entry: Path) -> None:
    driver = (entry / "driver").resolve().name if (entry / "driver").exists() else None
    if driver != "device_dax":
        state = (
            "the kernel uses it as its own memory"
            if driver == "kmem"
            else "no driver is bound to it"
        )
        raise DeviceBusyError(
            f"{path}: {state} (driver {driver or 'none'}); give it back with "
            f"'daxctl reconfigure-device --mode=devdax {entry.name}'"
        )


def _number(path: Path, attribute: Path) -> int:
    text = _read(attribute)
    if text is None or not text.isdecimal() or len(text) > _DIGITS:
        what = "cannot be read" if text is None else f"contains '{text[:20]}'"
        raise DeviceMissingError(
            f"{path}: {attribute} {what}; without it the device's bounds are unknown"
        )
    return int(text)


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None
