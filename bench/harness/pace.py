# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Pacing: devices that are slower than this machine's memory, as in
``device=22.5GB/s,latency=650ns``.

File devices share one memory controller, so interleaving has no effect. When paced, each direction
of each device has its own token clock (``drive.c``), as a link moves reads and writes at the same
time: an operation queues for its device's bandwidth, then waits for the latency. Only the
benchmarks do this; such rows have the memory "paced".
"""

from __future__ import annotations

import mmap
import re
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from beluga.errors import BadValueError
from beluga.pool import Pool

from .. import _limit
from .._limit import ffi

DIRECTIONS = ("read", "write")
"""The clocks of a device, in order."""

_UNITS = {"kB/s": 10**3, "MB/s": 10**6, "GB/s": 10**9, "ns": 1, "us": 1000, "ms": 10**6}
_PART = re.compile(r"(device|latency)=(\d+(?:\.\d+)?)([kMG]B/s|[num]s)")


@dataclass(frozen=True, slots=True)
class Pace:
    """The speed of each device in each direction."""

    bytes_per_s: int
    latency_ns: int = 0


def parse_pace(text: str) -> Pace:
    """Read ``device=RATE[,latency=TIME]``. Raises BadValueError."""
    values: dict[str, int] = {}
    for part in text.split(","):
        match = _PART.fullmatch(part)
        if match is None or ("/s" in match[3]) != (match[1] == "device"):
            break
        values[match[1]] = round(float(match[2]) * _UNITS[match[3]])
    else:
        if values.get("device", 0) > 0:
            return Pace(values["device"], values.get("latency", 0))
    raise BadValueError(f"no pace '{text}'; write it as device=22.5GB/s,latency=650ns")


def make_paces(path: Path, device_count: int, pace: Pace) -> None:
    """Make a file of token clocks, one per device and direction, that processes can share."""
    clocks = ffi.new("drive_pace[]", device_count * len(DIRECTIONS))
    for clock in clocks:
        clock.bytes_per_s, clock.latency_ns = pace.bytes_per_s, pace.latency_ns
    path.write_bytes(bytes(ffi.buffer(clocks)))


def device_at(pool: Pool, offset: int) -> int:
    """Return the device of an offset of data."""
    return int(pool.geometry.devices_of(np.array(offset, np.int64)))


@dataclass(frozen=True, slots=True)
class Paces:
    """The clocks of some offsets. ``pointers`` is for C, and ``clocks`` keeps them mapped."""

    pointers: _limit.CPointer[_limit.drive_pace]
    clocks: _limit.drive_pace


def shared_paces(pool: Pool, path: Path, verb: str, offsets: Iterable[int]) -> Paces:
    """Return the clocks for a "read" or "write" in a file made by :func:`make_paces`."""
    with path.open("r+b") as file:
        clocks = ffi.from_buffer("drive_pace[]", mmap.mmap(file.fileno(), 0))
    first = clocks + DIRECTIONS.index(verb)
    pointers = [first + len(DIRECTIONS) * device_at(pool, int(offset)) for offset in offsets]
    return Paces(ffi.new("drive_pace *[]", pointers), clocks)


@contextmanager
def paced(text: str | None, pool: Pool) -> Iterator[Path | None]:
    """Yield a file of clocks for the pool's devices, which is removed afterwards, or None without a
    pace.
    """
    if text is None:
        yield None
        return
    pace = parse_pace(text)
    with tempfile.TemporaryDirectory(prefix="beluga-pace-") as directory:
        path = Path(directory) / "clocks"
        make_paces(path, pool.geometry.device_count, pace)
        yield path
