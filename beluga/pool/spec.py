# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Device specifications, as users write them: ``PATH[@OFFSET+SIZE][,link=NAME][,node=N]``.

This module parses the text; :mod:`beluga.pool.device` checks whether the device exists.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from beluga._ffi import lib
from beluga.arguments import short
from beluga.errors import BadTypeError, DeviceSpecError

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
            whole, rest = divmod(size, scale)
            return f"{size / scale:.1f} {unit}" if rest else f"{whole} {unit}"
    return f"{size} bytes"


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """A specified device: a whole one, or the ``size`` bytes from ``offset`` on."""

    path: Path
    offset: int = 0
    size: int | None = None
    link: str | None = None  # the adapter that connects it
    node: int | None = None  # the NUMA node near that adapter

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
        whole = rest = os.fspath(text)
        options: dict[str, str] = {}
        while (match := _OPTION.fullmatch(rest)) is not None:
            rest = match["rest"]
            options[match["name"]] = match["value"]
        if unknown := set(options) - {"link", "node"}:
            raise DeviceSpecError(f"{whole}: no option '{unknown.pop()}'; there are link and node")
        node = options.get("node")
        if node is not None and not node.isdecimal():
            raise DeviceSpecError(f"{whole}: node={node} is not the number of a NUMA node")
        offset, size = 0, None
        if (match := _SLICE.fullmatch(rest)) is not None:
            rest = match["path"]
            offset, size = parse_size(match["offset"]), parse_size(match["size"])
            _validate_slice(whole, offset, size)
        elif _SLICE_MEANT.fullmatch(rest):
            raise DeviceSpecError(f"{whole}: a slice is PATH@OFFSET+SIZE, such as PATH@2M+16M")
        if not rest or "\0" in rest:
            raise DeviceSpecError("a device needs a path: PATH or PATH@OFFSET+SIZE")
        path = Path(rest).absolute()
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


_ONE = (str, bytes, os.PathLike)


def listed(paths: SpecLike | Sequence[SpecLike]) -> list[SpecLike]:
    """Return the devices as a list; a single device need not be in a list."""
    return list(paths) if isinstance(paths, Iterable) and not isinstance(paths, _ONE) else [paths]


def _validate_slice(text: str, offset: int, size: int) -> None:
    for name, value in (("offset", offset), ("size", size)):
        if value % STRIPE_SIZE:
            raise DeviceSpecError(
                f"{text}: {name} {value:#x} is not a multiple of 2 MiB (0x200000)"
            )
    if size < 2 * STRIPE_SIZE:
        raise DeviceSpecError(f"{text}: a slice needs at least 4 MiB (superblock and data)")
