# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Device files and their kinds; see test_devdax.py for devdax nodes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.another_user import as_nobody
from support.refusals import refused

from beluga.errors import (
    DeviceMismatchError,
    DeviceMissingError,
    DevicePermissionError,
    DeviceSpecError,
)
from beluga.pool.device import DeviceSpec, examine, open_device, refuse_twice

MIB = 1 << 20


def test_directory_is_refused(tmp_path: Path) -> None:
    with refused(DeviceMissingError, "directory"):
        examine(DeviceSpec.parse(tmp_path))


def test_socket_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with refused(DeviceMissingError, "devdax node or a file"):
        examine(DeviceSpec.parse(tmp_path / "pipe"))


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with refused(DeviceMissingError, "no such device"):
        examine(DeviceSpec.parse(tmp_path / "none"))


def test_file_in_a_missing_directory_is_refused(tmp_path: Path) -> None:
    with refused(DeviceMissingError, "no directory"):
        examine(DeviceSpec.parse(tmp_path / "none/pool"), creating=True)


def test_path_through_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with refused(DeviceMissingError, "Not a directory"):
        examine(DeviceSpec.parse(tmp_path / "file/pool"), creating=True)


def test_slice_of_a_missing_file_is_refused(tmp_path: Path) -> None:
    with refused(DeviceMissingError, "truncate -s 8388608"):
        examine(DeviceSpec.parse(f"{tmp_path}/none@4MiB+4MiB"), creating=True)


def test_slice_beyond_the_end_of_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    os.truncate(tmp_path / "file", 6 * MIB)
    with refused(DeviceSpecError, "beyond", "6 MiB"):
        examine(DeviceSpec.parse(f"{tmp_path}/file@4MiB+4MiB"))


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("", "", True),
        ("@0+4MiB", "", True),
        ("@0+4MiB", "@2MiB+4MiB", True),
        ("@4MiB+4MiB", "@0+4MiB", False),
    ],
)
def test_overlap_is_refused(tmp_path: Path, first: str, second: str, same: bool) -> None:
    (tmp_path / "file").touch()
    os.truncate(tmp_path / "file", 16 * MIB)
    (tmp_path / "link").symlink_to(tmp_path / "file")
    devices = [
        examine(DeviceSpec.parse(f"{tmp_path}/file{first}")),
        examine(DeviceSpec.parse(f"{tmp_path}/link{second}")),
    ]
    if same:
        with refused(DeviceMismatchError, "same memory"):
            refuse_twice(devices)
    else:
        refuse_twice(devices)


def test_file_without_permission_is_refused(shm: Path) -> None:
    file = shm / "pool"
    file.touch(mode=0o600)
    if os.geteuid() != 0:
        file.chmod(0)

    def open_it() -> None:
        with refused(DevicePermissionError, "chmod"):
            open_device(examine(DeviceSpec.parse(file)))

    assert as_nobody(open_it) == "done"
