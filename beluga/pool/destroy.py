# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The removal of a pool: its superblocks are wiped, and files that are devices are deleted."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence

from beluga._ffi import lib
from beluga.errors import DeviceForeignError, DeviceMismatchError
from beluga.pool.device import Device, examine, explain, open_device, refuse_twice
from beluga.pool.mapped import refuse_mapped
from beluga.pool.runtime import refuse_in_use, runtime_path
from beluga.pool.spec import STRIPE_SIZE, DeviceSpec, SpecLike
from beluga.pool.superblock import Superblock, fault, read_first, wipe_first


def destroy(paths: Sequence[SpecLike], *, force: bool = False) -> None:
    """See :meth:`beluga.pool.Pool.destroy`."""
    devices = [examine(DeviceSpec.parse(path)) for path in paths]
    refuse_twice(devices)
    runtime_paths, others = [], list[Device]()
    named: dict[str, list[Device]] = {}  # the devices by pool
    counts: dict[str, int] = {}
    damaged = 0  # devices that may be of any pool
    for device in devices:
        raw = _first(device)
        number = fault(raw)
        if number in (lib.BL_SUPERBLOCK_EMPTY, lib.BL_SUPERBLOCK_FOREIGN):
            raise DeviceForeignError(f"{device} holds no Beluga pool; nothing was destroyed")
        if number == lib.BL_SUPERBLOCK_GOOD:
            superblock = Superblock.of(raw)
            named.setdefault(superblock.pool_id, []).append(device)
            counts[superblock.pool_id] = superblock.geometry.device_count
            if superblock.device_index == 0:
                runtime_paths.append(runtime_path(device, superblock.pool_id))
            else:
                others.append(device)
        else:
            damaged += 1
    if not force:
        _refuse_partial(named, counts, damaged)
    for path in runtime_paths:
        refuse_in_use(path)
    for device in others:
        refuse_mapped(device)
    for device in devices:
        _wipe(device)
    for path in runtime_paths:
        shutil.rmtree(path, ignore_errors=True)


def _refuse_partial(
    named: Mapping[str, Sequence[Device]], counts: Mapping[str, int], damaged: int
) -> None:
    """Raise DeviceMismatchError if devices of a pool are missing in the list: they would remain."""
    missing = {pool: counts[pool] - len(devices) for pool, devices in named.items()}
    if sum(missing.values()) <= damaged:
        return
    pool = max(missing, key=lambda one: missing[one])
    raise DeviceMismatchError(
        f"the pool on {named[pool][0]} has {counts[pool]} devices, and {missing[pool]} of them are "
        "not named; name all of them, or destroy these alone with --force (Pool.destroy: "
        "force=True); nothing was destroyed"
    )


def _first(device: Device) -> bytes:
    fd = open_device(device)
    try:
        return read_first(device, fd)
    finally:
        os.close(fd)


def _wipe(device: Device) -> None:
    if device.size >= STRIPE_SIZE:  # A smaller file was truncated; it is only removed below.
        fd = open_device(device)
        try:
            wipe_first(device, fd)
        finally:
            os.close(fd)
    if device.kind == "file" and not device.sliced:
        try:
            device.spec.path.unlink()
        except OSError as error:
            raise explain(error, device.spec.path) from None
