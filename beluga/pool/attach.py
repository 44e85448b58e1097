# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Attaching: from the names of a pool's devices, in any order, to its mapping.

A device is identified by its superblock, never by its path, because two hosts may number the same
devices differently.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from beluga._ffi import lib
from beluga.errors import DeviceMismatchError, PoolError
from beluga.pool.device import SYSFS, Device, examine, open_device, refuse_twice
from beluga.pool.mapping import Mapping, Member
from beluga.pool.spec import DeviceSpec, SpecLike
from beluga.pool.superblock import read_first, validate


def attach(paths: Sequence[SpecLike], *, sysfs: Path = SYSFS) -> Mapping:
    """Map the pool on these devices. Raises a :class:`PoolError`."""
    specs = [DeviceSpec.parse(path) for path in paths]
    if not 1 <= len(specs) <= lib.BL_DEVICE_COUNT_MAX:
        raise PoolError(f"a pool has 1 to {lib.BL_DEVICE_COUNT_MAX} devices, not {len(specs)}")
    devices = [examine(spec, sysfs=sysfs) for spec in specs]
    refuse_twice(devices)
    return Mapping(_in_order([_member(device) for device in devices]))


def _member(device: Device) -> Member:
    fd = open_device(device)
    try:
        return Member(device, validate(device, read_first(device, fd)))
    finally:
        os.close(fd)


def _in_order(members: Sequence[Member]) -> list[Member]:
    """Sort members by device index. Raises DeviceMismatchError unless every index occurs once, on
    devices of one pool.
    """
    first = members[0].superblock
    places: dict[int, Member] = {}
    for member in members:
        superblock = member.superblock
        if superblock.pool_id != first.pool_id or superblock.geometry != first.geometry:
            raise DeviceMismatchError(
                f"{member.device} is of pool {superblock.pool_id[:8]}, {members[0].device} of pool "
                f"{first.pool_id[:8]}; name the devices of one pool"
            )
        if other := places.get(superblock.device_index):
            raise DeviceMismatchError(
                f"{member.device} and {other.device} are both device {superblock.device_index} of "
                f"pool {first.pool_id[:8]}; one is a copy: name each device once"
            )
        places[superblock.device_index] = member
    missing = [str(i) for i in range(first.geometry.device_count) if i not in places]
    if missing:
        apart = first.geometry.metadata_device and 0 not in places
        raise DeviceMismatchError(
            f"pool {first.pool_id[:8]} has {first.geometry.device_count} devices; "
            f"device {', '.join(missing)} (counted from 0) is not named"
            + "; device 0 is its metadata device"
            * apart
        )
    return [places[index] for index in sorted(places)]
