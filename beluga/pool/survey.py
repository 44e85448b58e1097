# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The survey of a pool's superblocks: it reports all errors, not only the first one.

Opening a pool (``attach.py``) stops at the first error. Here each finding becomes a line, and
nothing is mapped.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from beluga._ffi import ffi, lib
from beluga.pool.device import Device, examine, open_device, refuse_twice
from beluga.pool.spec import DeviceSpec, SpecLike
from beluga.pool.superblock import Superblock, fault, read_first

FAULTS = {
    lib.BL_SUPERBLOCK_EMPTY: "superblock-empty {}: no pool is on it",
    lib.BL_SUPERBLOCK_FOREIGN: "superblock-foreign {}: its first bytes are not Beluga's",
    lib.BL_SUPERBLOCK_VERSION: "superblock-version {}: it has another version of the pool format",
    lib.BL_SUPERBLOCK_DAMAGED: "superblock-damaged {}: its check value is wrong",
    lib.BL_SUPERBLOCK_FORMAT: "superblock-format {}: a Beluga with other structs made it",
    lib.BL_SUPERBLOCK_GEOMETRY: "superblock-geometry {}: its numbers contradict each other",
}


def survey(paths: Sequence[SpecLike]) -> list[str]:
    """Return one line for each finding about the superblocks of these devices: kind, device,
    meaning.

    Raises a PoolError for a path that is not a device or cannot be opened.
    """
    devices = [examine(DeviceSpec.parse(path)) for path in paths]
    refuse_twice(devices)
    findings: list[str] = []
    valid: list[tuple[Device, Superblock]] = []
    for device in devices:
        fd = open_device(device)
        try:
            raw = read_first(device, fd)
        finally:
            os.close(fd)
        verdict = fault(raw)
        if verdict != lib.BL_SUPERBLOCK_GOOD:
            findings.append(FAULTS[verdict].format(device))
            continue
        valid.append((device, Superblock.of(raw)))
        findings += _check_one(device, raw, valid[-1][1])
    return findings + list(_compare(valid, complete=len(valid) == len(devices)))


def _check_one(device: Device, raw: bytes, superblock: Superblock) -> Iterator[str]:
    c = ffi.cast("bl_superblock *", ffi.from_buffer(raw))
    if any(c.reserved) or c.reserved_tail or any(c.geometry.reserved):
        yield f"superblock-reserved {device}: a reserved field is used"
    wanted = superblock.geometry.device_size_of(superblock.device_index)
    if device.size < wanted:
        yield f"device-truncated {device}: {device.size} bytes, but its pool has {wanted} on it"


def _compare(valid: list[tuple[Device, Superblock]], *, complete: bool) -> Iterator[str]:
    """Compare the superblocks. With ``complete`` each device has a valid superblock, so an index
    that does not appear is missing from the pool.
    """
    if not valid:
        return
    one, first = valid[0]
    places: dict[int, Device] = {}
    for device, superblock in valid:
        if superblock.pool_id != first.pool_id:
            pool = superblock.pool_id[:8]
            yield f"superblock-pool {device}: it belongs to pool {pool}, unlike {one}"
        elif superblock.geometry != first.geometry:
            yield f"superblock-disagrees {device}: it has another geometry than {one}"
        elif other := places.get(superblock.device_index):
            yield (
                f"superblock-twice {device}: device {superblock.device_index} of the pool, "
                f"as {other} is"
            )
        else:
            places[superblock.device_index] = device
    missing = [i for i in range(first.geometry.device_count) if i not in places]
    if complete and missing:
        yield f"device-missing {', '.join(map(str, missing))}: of {first.geometry.device_count}"
