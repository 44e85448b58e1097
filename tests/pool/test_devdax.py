# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Beluga rejects what devdax would reject or silently round, with a clear one-line error. In a
made-up sysfs /dev/null is a devdax node, which is never mapped here. Real nodes: tests/hosts.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
from devdax import fake_devdax
from support.another_user import as_nobody
from support.refusals import refused

from beluga._ffi import ffi, lib
from beluga.errors import (
    DeviceBusyError,
    DeviceMissingError,
    DevicePermissionError,
    DeviceSpecError,
    DeviceTruncatedError,
)
from beluga.pool.device import Device, DeviceSpec, examine, open_device
from beluga.pool.layout import Layout, NewPoolSettings
from beluga.pool.mapping import Mapping, Member

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
NODE = "/dev/null"


def look(sysfs: Path, name: str = NODE) -> Device:
    return examine(DeviceSpec.parse(name), sysfs=sysfs)


def test_size_and_node_are_from_sysfs(tmp_path: Path) -> None:
    device = look(fake_devdax(tmp_path, NODE, size=254 * MIB))
    assert (device.kind, device.size, device.node) == ("devdax", 254 * MIB, 1)


def test_small_pages_leave_a_partial_stripe_unused(tmp_path: Path) -> None:
    sysfs = fake_devdax(tmp_path, NODE, size=255 * MIB, align=4 * KIB)
    assert look(sysfs).size == 254 * MIB


def test_the_specified_node_is_used(tmp_path: Path) -> None:
    assert look(fake_devdax(tmp_path, NODE), f"{NODE},link=cxl1,node=0").node == 0


def test_unknown_node_is_none(tmp_path: Path) -> None:
    sysfs = fake_devdax(tmp_path, NODE)
    (sysfs / "bus/dax/devices/dax0.0/numa_node").write_text("-1\n")
    assert look(sysfs).node is None


@pytest.mark.parametrize(
    ("slice_of", "word"),
    [
        ("254MiB+4MiB", "beyond"),
        ("1MiB+4MiB", "offset 0x100000 is not a multiple of 2 MiB"),
        ("4096+4MiB", "offset 0x1000 is not a multiple of 2 MiB"),
        ("2MiB+5MiB", "size 0x500000 is not a multiple of 2 MiB"),
        ("2MiB+2MiB", "at least 4 MiB"),
    ],
)
def test_slice_that_would_be_rounded_is_refused(tmp_path: Path, slice_of: str, word: str) -> None:
    with refused(DeviceSpecError, word):
        look(fake_devdax(tmp_path, NODE), f"{NODE}@{slice_of}")


@pytest.mark.parametrize(
    ("driver", "word"), [("kmem", "kernel"), (None, "no driver is bound to it")]
)
def test_node_of_another_driver_is_refused(tmp_path: Path, driver: str | None, word: str) -> None:
    with refused(DeviceBusyError, word, "daxctl reconfigure-device --mode=devdax dax0.0"):
        look(fake_devdax(tmp_path, NODE, driver=driver))


def test_huge_alignment_is_refused(tmp_path: Path) -> None:
    with refused(DeviceSpecError, "1 GiB", "--align=2M"):
        look(fake_devdax(tmp_path, NODE, size=GIB, align=GIB))


@pytest.mark.parametrize("size", [255 * MIB, 254 * MIB + 4 * KIB])
def test_a_size_that_is_not_a_multiple_of_the_alignment_is_rejected(
    tmp_path: Path, size: int
) -> None:
    with refused(DeviceSpecError, "not a multiple of its alignment of 2 MiB"):
        look(fake_devdax(tmp_path, NODE, size=size))


@pytest.mark.parametrize("size", [0, 2 * MIB])
def test_node_without_room_for_a_superblock_and_data_is_refused(tmp_path: Path, size: int) -> None:
    with refused(DeviceSpecError, "at least 4 MiB"):
        look(fake_devdax(tmp_path, NODE, size=size))


def test_other_character_device_is_refused(tmp_path: Path) -> None:
    with refused(DeviceMissingError, "not a devdax node"):
        look(fake_devdax(tmp_path, "/dev/zero"))


def test_missing_sysfs_is_named(tmp_path: Path) -> None:
    with refused(DeviceMissingError, "not a devdax node", "is sysfs mounted"):
        look(tmp_path)


@pytest.mark.parametrize("attribute", ["size", "align"])
@pytest.mark.parametrize("text", [None, "many\n", "-2097152\n", "", "9" * 400])
def test_an_invalid_attribute_is_rejected(tmp_path: Path, attribute: str, text: str | None) -> None:
    sysfs = fake_devdax(tmp_path, NODE)
    file = sysfs / "bus/dax/devices/dax0.0" / attribute
    file.unlink()
    if text is not None:
        file.write_text(text)
    with refused(DeviceMissingError, str(file), "bounds are unknown"):
        look(sysfs)


def test_the_error_of_an_unbound_node_has_advice(tmp_path: Path) -> None:
    # A character device without a driver fails like an unbound devdax node, with ENXIO.
    try:
        os.mknod(tmp_path / "node", 0o600 | 0o020000, os.makedev(4095, 77))
        os.close(os.open(tmp_path / "node", os.O_RDWR))
    except PermissionError:
        pytest.skip("this user cannot make and open device nodes")
    except OSError:
        pass
    size = look(fake_devdax(tmp_path, NODE)).size
    spec = DeviceSpec(tmp_path / "node")
    with refused(DeviceBusyError, "daxctl"):
        open_device(Device(spec, "devdax", size, True, ("devdax", 0)))


def test_node_without_permission_is_refused(shm: Path, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make a device node that it then may not open")
    try:
        os.mknod(shm / "node", 0o600 | 0o020000, Path(NODE).stat().st_rdev)
    except PermissionError:
        pytest.skip("this user cannot make device nodes")
    device = look(fake_devdax(tmp_path, NODE), str(shm / "node"))

    def open_it() -> None:
        with refused(DevicePermissionError, "chmod"):
            open_device(device)

    assert as_nobody(open_it) == "done"


def test_no_device_is_mapped_beyond_its_end(tmp_path: Path) -> None:
    device = look(fake_devdax(tmp_path, NODE, size=16 * MIB))
    layout = Layout(1, 32 * MIB, NewPoolSettings())
    with refused(DeviceTruncatedError, "less than"):
        Mapping([Member(device, layout.superblock(0, "devdax"))])


@pytest.mark.parametrize(
    ("offset", "size"), [(0, 0), (0, MIB), (4096, 2 * MIB), (MIB, 2 * MIB), (0, 3 * MIB)]
)
def test_only_whole_stripes_are_mapped(shm: Path, offset: int, size: int) -> None:
    with (shm / "file").open("w+b") as file:
        file.truncate(8 * MIB)
        out = ffi.new("void **")
        assert lib.bl_device_map(file.fileno(), offset, size, out) == -errno.EINVAL


def test_mapping_is_shared_and_aligned(shm: Path) -> None:
    path = shm / "file"
    with path.open("w+b") as file:
        file.truncate(8 * MIB)
        out = ffi.new("void **")
        assert lib.bl_device_map(file.fileno(), 2 * MIB, 4 * MIB, out) == 0
    try:
        assert int(ffi.cast("uintptr_t", out[0])) % (2 * MIB) == 0
        (line,) = [
            line for line in Path("/proc/self/maps").read_text().splitlines() if str(path) in line
        ]
        assert line.split()[1] == "rw-s"
    finally:
        lib.bl_device_unmap(out[0], 4 * MIB)


def test_sysfs_of_a_node_that_vanished_is_refused(tmp_path: Path) -> None:
    sysfs = fake_devdax(tmp_path, NODE)
    shutil.rmtree(sysfs / "bus/dax/devices/dax0.0")
    with refused(DeviceMissingError, "not a devdax node"):
        look(sysfs)
