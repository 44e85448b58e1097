# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Devices: how users name them, files, devdax nodes, and the CPUs near them."""

import contextlib
import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from devdax import fake_devdax
from hypothesis import given
from hypothesis import strategies as st
from support.forks import as_nobody
from support.refusals import Refusal, refusals, refused

from beluga._ffi import ffi, lib
from beluga.errors import (
    DeviceBusyError,
    DeviceMismatchError,
    DeviceMissingError,
    DevicePermissionError,
    DeviceSpecError,
    DeviceTruncatedError,
)
from beluga.pool import parse_size, show_size
from beluga.pool.device import (
    Device,
    DeviceSpec,
    examine,
    near_cpus,
    open_device,
    parse_cpulist,
    refuse_twice,
    run_near,
)
from beluga.pool.layout import Layout, NewPoolSettings
from beluga.pool.mapping import Mapping, Member

# ---- How users name a device.


MIB = 1 << 20


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("0x200000", 2 * MIB),
        ("2M", 2 * MIB),
        ("2MiB", 2 * MIB),
        ("64 KiB", 65536),
        ("3G", 3 << 30),
        ("1TiB", 1 << 40),
        ("2m", 2 * MIB),
    ],
)
def test_sizes_are_parsed(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "x", "-4", "1.5G", "4Q", "0x", "4 4", "1MB"])
def test_an_invalid_size_is_rejected(text: str) -> None:
    with refused(DeviceSpecError, repr(text)):
        parse_size(text)


@given(st.integers(0, 1 << 50))
def test_formatted_sizes_are_approximate(size: int) -> None:
    number, unit = show_size(size).split()
    scale = {"bytes": 1, "KiB": 1 << 10, "MiB": MIB, "GiB": 1 << 30, "TiB": 1 << 40}[unit]
    assert abs(float(number) * scale - size) <= 0.06 * scale


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("/p", DeviceSpec(Path("/p"))),
        ("/p@0x200000+4MiB", DeviceSpec(Path("/p"), 2 * MIB, 4 * MIB)),
        ("/p@0+1G,link=cxl0,node=1", DeviceSpec(Path("/p"), 0, 1 << 30, "cxl0", 1)),
        ("/p,node=0", DeviceSpec(Path("/p"), node=0)),
        ("/odd@name/p", DeviceSpec(Path("/odd@name/p"))),
        ("/a,b", DeviceSpec(Path("/a,b"))),
    ],
)
def test_specifications_are_parsed_and_formatted(text: str, spec: DeviceSpec) -> None:
    assert DeviceSpec.parse(text) == spec
    assert DeviceSpec.parse(str(spec)) == spec


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("/p@4096+4MiB", "offset"),
        ("/p@2MiB+5000000", "size"),
        ("/p@2MiB+2MiB", "at least 4 MiB"),
        ("/p@2QiB+4MiB", "2QiB"),
        ("/p@2M", "PATH@OFFSET"),
        ("/p@foo", "PATH@OFFSET"),
        ("/p@", "PATH@OFFSET"),
        ("/p@2M+", "PATH@OFFSET"),
        ("/p@-2M+4M", "PATH@OFFSET"),
        ("/p@0+16M+2M", "PATH@OFFSET"),
        ("/p,node=left", "NUMA"),
        ("/p,colour=red", "colour"),
        ("", "path"),
    ],
)
def test_invalid_specifications_are_rejected(text: str, word: str) -> None:
    with refused(DeviceSpecError, word):
        DeviceSpec.parse(text)


# ---- Device files and their kinds.


def look_at(name: object, *, creating: bool = False) -> None:
    examine(DeviceSpec.parse(str(name)), creating=creating)


def new(name: object) -> None:
    look_at(name, creating=True)


@refusals(
    (look_at, DeviceMissingError, "directory"),
    (lambda at: look_at(at / "pipe"), DeviceMissingError, "devdax node or a file"),
    (lambda at: look_at(at / "none"), DeviceMissingError, "no such device"),
    (lambda at: new(at / "none/pool"), DeviceMissingError, "no directory"),
    (lambda at: new(at / "file/pool"), DeviceMissingError, "Not a directory"),
    (lambda at: new(f"{at}/none@4MiB+4MiB"), DeviceMissingError, "truncate -s 8388608"),
    (lambda at: look_at(f"{at}/file@4MiB+4MiB"), DeviceSpecError, "beyond", "6 MiB"),
)
def test_wrong_paths_are_refused(tmp_path: Path, refusal: Refusal) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()
    os.truncate(tmp_path / "file", 6 * MIB)
    refusal(tmp_path)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("", "", refused(DeviceMismatchError, "same memory")),
        ("@0+4MiB", "", refused(DeviceMismatchError, "same memory")),
        ("@0+4MiB", "@2MiB+4MiB", refused(DeviceMismatchError, "same memory")),
        ("@4MiB+4MiB", "@0+4MiB", contextlib.nullcontext()),
    ],
)
def test_overlap_is_refused(
    tmp_path: Path, first: str, second: str, expected: contextlib.AbstractContextManager[None]
) -> None:
    (tmp_path / "file").touch()
    os.truncate(tmp_path / "file", 16 * MIB)
    (tmp_path / "link").symlink_to(tmp_path / "file")
    names = (f"{tmp_path}/file{first}", f"{tmp_path}/link{second}")
    with expected:
        refuse_twice([examine(DeviceSpec.parse(name)) for name in names])


def test_file_without_permission_is_refused(shm: Path) -> None:
    file = shm / "pool"
    file.touch(mode=0o600)
    if os.geteuid() != 0:
        file.chmod(0)

    def open_it() -> None:
        with refused(DevicePermissionError, "chmod"):
            open_device(examine(DeviceSpec.parse(file)))

    assert as_nobody(open_it) == "None"


# ---- Beluga rejects what devdax would reject or silently round, with a clear one-line error. In
# a made-up sysfs /dev/null is a devdax node, which is never mapped here. Real nodes:
# tests/hosts.


KIB, GIB = 1 << 10, 1 << 30
NODE = "/dev/null"


def look(sysfs: Path, name: str = NODE) -> Device:
    return examine(DeviceSpec.parse(name), sysfs=sysfs)


def look_dax(at: Path, name: str = NODE, **attributes: Any) -> Device:
    return look(fake_devdax(at, NODE, **attributes), name)


def test_size_and_node_are_from_sysfs(tmp_path: Path) -> None:
    device = look_dax(tmp_path, size=254 * MIB)
    assert (device.kind, device.size, device.node) == ("devdax", 254 * MIB, 1)
    assert look(tmp_path, f"{NODE},link=cxl1,node=0").node == 0
    (tmp_path / "bus/dax/devices/dax0.0/numa_node").write_text("-1\n")
    assert look(tmp_path).node is None


def test_small_pages_leave_a_partial_stripe_unused(tmp_path: Path) -> None:
    assert look_dax(tmp_path, size=255 * MIB, align=4 * KIB).size == 254 * MIB


RECONFIGURE = "daxctl reconfigure-device --mode=devdax dax0.0"
UNEVEN = "not a multiple of its alignment of 2 MiB"


@refusals(
    (lambda at: look_dax(at, f"{NODE}@254MiB+4MiB"), DeviceSpecError, "beyond"),
    (lambda at: look_dax(at, driver="kmem"), DeviceBusyError, "kernel", RECONFIGURE),
    (
        lambda at: look_dax(at, driver=None),
        DeviceBusyError,
        "no driver is bound to it",
        RECONFIGURE,
    ),
    (lambda at: look_dax(at, size=GIB, align=GIB), DeviceSpecError, "1 GiB", "--align=2M"),
    (lambda at: look_dax(at, align=0), DeviceSpecError, "2 MiB is needed"),
    (lambda at: look_dax(at, size=255 * MIB), DeviceSpecError, UNEVEN),
    (lambda at: look_dax(at, size=254 * MIB + 4 * KIB), DeviceSpecError, UNEVEN),
    (lambda at: look_dax(at, size=0), DeviceSpecError, "at least 4 MiB"),
    (lambda at: look_dax(at, size=2 * MIB), DeviceSpecError, "at least 4 MiB"),
    (lambda at: look(fake_devdax(at, "/dev/zero")), DeviceMissingError, "not a devdax node"),
    (look, DeviceMissingError, "not a devdax node", "is sysfs mounted"),
)
def test_wrong_nodes_are_refused(tmp_path: Path, refusal: Refusal) -> None:
    refusal(tmp_path)


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

    assert as_nobody(open_it) == "None"


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


# ---- CPUs near a pool's devices.


def make_node(root: Path, node: int, cpulist: str) -> None:
    (root / f"node{node}").mkdir()
    (root / f"node{node}" / "cpulist").write_text(cpulist + "\n")


def test_cpulist_has_ranges_and_single_numbers() -> None:
    assert parse_cpulist("0-2,7,9-9\n") == {0, 1, 2, 7, 9}
    assert parse_cpulist("\n") == set()


def test_local_cpus_are_those_of_all_specified_nodes(tmp_path: Path) -> None:
    make_node(tmp_path, 0, "0-1")
    make_node(tmp_path, 2, "4")
    assert near_cpus({0, 2}, root=tmp_path) == {0, 1, 4}
    assert near_cpus({5}, root=tmp_path) == set()


def test_run_near_pins_only_the_calling_thread(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    cpu = min(before)
    make_node(tmp_path, 0, str(cpu))
    seen: list[set[int]] = []

    def work() -> None:
        assert run_near({0}, root=tmp_path) == {cpu}
        seen.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [{cpu}]
    assert os.sched_getaffinity(0) == before


def test_run_near_does_nothing_without_a_known_node(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    assert run_near(set(), root=tmp_path) == set()
    assert os.sched_getaffinity(0) == before
