# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The devices of a pool: how a user names them, devdax nodes, files, and the memory near a CPU."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from beluga._ffi import lib
from beluga.arguments import StrPath, path_of, short
from beluga.errors import (
    BadTypeError,
    DeviceBusyError,
    DeviceMismatchError,
    DeviceMissingError,
    DevicePermissionError,
    DeviceSpecError,
    PoolError,
)

STRIPE_SIZE: int = lib.BL_STRIPE_SIZE

SIZE_END = 1 << 63  # sizes are less; C and the kernel have signed ones

_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
_SIZE = re.compile(r"(0[xX][0-9a-fA-F]+|[0-9]+)\s*(?:([KMGT])(?:iB)?)?", re.IGNORECASE)
_SLICE = re.compile(r"(?P<path>.+)@(?P<offset>[0-9]\w*)\+(?P<size>\w+)")
_SLICE_MEANT = re.compile(r".+@[^/]*")  # else a file of that name would be made
_OPTION = re.compile(r"(?P<rest>.+),(?P<name>[a-z]+)=(?P<value>[^,]*)")


def parse_size(text: str | int) -> int:
    """Return the bytes of ``4096``, ``0x200000``, ``64MiB`` or ``2G``. Raises DeviceSpecError."""
    if isinstance(text, int):
        return text
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise DeviceSpecError(f"'{text}' is not a size; write 4096, 0x200000, 64MiB or 2G")
    digits = match[1] if match[1][:2] in ("0x", "0X") else match[1].lstrip("0") or "0"
    size = int(digits, 0) << _UNITS[(match[2] or "").upper()] if len(digits) < 32 else SIZE_END
    if size >= SIZE_END:
        raise DeviceSpecError(f"'{text}' is too large; give a size below 8388608T")
    return size


def show_size(size: int) -> str:
    """Format ``size`` bytes for display; a whole number of a unit is exact."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        scale = 1 << _UNITS[unit[0]]
        if size >= scale:
            whole, remainder = divmod(size, scale)
            return f"{size / scale:.1f} {unit}" if remainder else f"{whole} {unit}"
    return f"{size} bytes"


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """A specified device: a whole one, or the ``size`` bytes from ``offset`` on."""

    path: Path
    offset: int = 0
    size: int | None = None
    link: str | None = None  # the adapter that connects it
    node: int | None = None  # the NUMA node near that adapter

    def __post_init__(self) -> None:
        """Accept a path as text. Raises BadTypeError."""
        object.__setattr__(self, "path", path_of("path", self.path))

    @property
    def real_path(self) -> Path:
        """The path without symbolic links. Circular links are not resolved: ``Path.resolve`` raises
        for them up to Python 3.12.
        """
        return Path(os.path.realpath(self.path))

    @classmethod
    def parse(cls, text: SpecLike) -> DeviceSpec:
        """Parse a specification. Raises DeviceSpecError."""
        if isinstance(text, DeviceSpec):
            return text
        if not isinstance(text, str | os.PathLike):
            raise BadTypeError(
                f"a device is {short(text)}; give a path, as text or a Path, or a DeviceSpec"
            )
        whole = remainder = os.fspath(text)
        options: dict[str, str] = {}
        while (match := _OPTION.fullmatch(remainder)) is not None:
            remainder = match["rest"]
            options[match["name"]] = match["value"]
        if unknown := set(options) - {"link", "node"}:
            raise DeviceSpecError(f"{whole}: no option '{unknown.pop()}'; there are link and node")
        node = options.get("node")
        if node is not None and not node.isdecimal():
            raise DeviceSpecError(f"{whole}: node={node} is not the number of a NUMA node")
        offset, size = 0, None
        if (match := _SLICE.fullmatch(remainder)) is not None:
            remainder = match["path"]
            offset, size = parse_size(match["offset"]), parse_size(match["size"])
            _validate_slice(whole, offset, size)
        elif _SLICE_MEANT.fullmatch(remainder):
            raise DeviceSpecError(f"{whole}: a slice is PATH@OFFSET+SIZE, such as PATH@2M+16M")
        if not remainder or "\0" in remainder:
            raise DeviceSpecError("a device needs a path: PATH or PATH@OFFSET+SIZE")
        path = Path(remainder).absolute()
        return cls(path, offset, size, options.get("link"), None if node is None else int(node))

    def __str__(self) -> str:
        text = str(self.path)
        if self.size is not None:
            text += f"@{self.offset:#x}+{self.size:#x}"
        if self.link is not None:
            text += f",link={self.link}"
        if self.node is not None:
            text += f",node={self.node}"
        return text


SpecLike: TypeAlias = "str | os.PathLike[str] | DeviceSpec"


_PATH_TYPES = (str, bytes, os.PathLike)


def listed(paths: SpecLike | Sequence[SpecLike]) -> list[SpecLike]:
    """Return the devices as a list; a single device need not be in a list."""
    return (
        list(paths)
        if isinstance(paths, Iterable) and not isinstance(paths, _PATH_TYPES)
        else [paths]
    )


def _validate_slice(text: str, offset: int, size: int) -> None:
    for name, value in (("offset", offset), ("size", size)):
        if value % STRIPE_SIZE:
            raise DeviceSpecError(
                f"{text}: {name} {value:#x} is not a multiple of 2 MiB (0x200000)"
            )
    if size < 2 * STRIPE_SIZE:
        raise DeviceSpecError(f"{text}: a slice needs at least 4 MiB (superblock and data)")


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


def examine(spec: DeviceSpec, *, creating: bool = False, sysfs: StrPath = SYSFS) -> Device:
    """Examine the device of ``spec``; with ``creating``, a file need not exist yet.

    Raises DeviceMissingError, DevicePermissionError, DeviceBusyError, DeviceSpecError.
    """
    sysfs = path_of("sysfs", sysfs)
    path = spec.path
    try:
        status = path.stat()
    except FileNotFoundError:
        if not creating:
            raise DeviceMissingError(f"{path}: no such device or file; check the path") from None
        return _examine_nothing(spec)
    except OSError as error:
        raise explain(error, path) from None
    if stat.S_ISREG(status.st_mode):
        room = _room(spec, status.st_size)
        return Device(spec, "file", room, True, file_identity(status), spec.node)
    if stat.S_ISCHR(status.st_mode):
        return _examine_devdax(spec, status.st_rdev, sysfs)
    what = (
        "a directory; name a file in it" if stat.S_ISDIR(status.st_mode) else "no device-dax node"
    )
    raise DeviceMissingError(f"{path} is {what}; a device is a devdax node or a file")


def file_identity(status: os.stat_result) -> tuple[object, ...]:
    """Return the identity of a file."""
    return "file", status.st_dev, status.st_ino


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
    dax_node = read_dax_node(spec.path, number, sysfs)
    node = spec.node if spec.node is not None else dax_node.node
    return Device(spec, "devdax", _room(spec, dax_node.size), True, ("devdax", number), node)


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
    for number, device in enumerate(devices):
        for other in devices[:number]:
            if device.identity == other.identity and _overlap(device, other):
                raise DeviceMismatchError(
                    f"{device} and {other} are the same memory; name each device once"
                )


def _overlap(device: Device, other: Device) -> bool:
    if not (device.sliced and other.sliced):
        return True
    low, high = sorted((device, other), key=lambda device: device.spec.offset)
    return low.spec.offset + low.size > high.spec.offset


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
    valid = node is not None and node.isdecimal() and len(node) <= _DIGITS
    return DaxNode(size // STRIPE_SIZE * STRIPE_SIZE, int(node) if node and valid else None)


def dax_nodes(sysfs: StrPath) -> dict[str, DaxNode | PoolError]:
    """Return every devdax node of this kernel by name; an error explains why it is unsuitable."""
    sysfs = path_of("sysfs", sysfs)
    nodes: dict[str, DaxNode | PoolError] = {}
    for entry in sorted((sysfs / "bus/dax/devices").glob("*")):
        path = Path("/dev", entry.name)
        number = re.fullmatch(r"(\d{1,9}):(\d{1,9})", _read(entry / "dev") or "")
        try:
            if number is None:
                raise DeviceMissingError(f"{path}: {entry / 'dev'} has no device number")
            nodes[entry.name] = read_dax_node(
                path, os.makedev(int(number[1]), int(number[2])), sysfs
            )
        except PoolError as error:
            nodes[entry.name] = error
    return nodes


def _entry(path: Path, number: int, sysfs: Path) -> Path:
    devices = sysfs / "bus/dax/devices"
    device_number = f"{os.major(number)}:{os.minor(number)}"
    for entry in sorted(devices.glob("*")):
        if _read(entry / "dev") == device_number:
            return entry
    if not devices.is_dir():
        raise DeviceMissingError(
            f"{path} is a character device, but not a devdax node of this kernel: "
            f"there is no {devices}; is sysfs mounted, and device_dax loaded?"
        )
    raise DeviceMissingError(
        f"{path} is a character device, but not a devdax node; name a devdax node or a file"
    )


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


NODES = Path("/sys/devices/system/node")


def parse_cpulist(text: str) -> set[int]:
    """Return the numbers in the kernel's list format, such as ``0-3,8``."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def near_cpus(nodes: set[int], *, root: Path = NODES) -> set[int]:
    """Return the CPUs of NUMA ``nodes``. The set is empty if the kernel does not list them."""
    cpus: set[int] = set()
    for node in nodes:
        path = root / f"node{node}" / "cpulist"
        if path.exists():
            cpus |= parse_cpulist(path.read_text())
    return cpus


def run_near(nodes: set[int], *, root: Path = NODES) -> set[int]:
    """Pin the calling thread to the CPUs of ``nodes`` that it may use, and return those CPUs.

    Without such CPUs (no node is known, or a container excludes them) its affinity is unchanged.
    """
    cpus = near_cpus(nodes, root=root) & os.sched_getaffinity(0)
    if cpus:
        os.sched_setaffinity(0, cpus)
    return cpus
