# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Opening a pool: its devices in any order, and no others."""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path

import pytest
from refusal import refused

from beluga.errors import (
    DeviceForeignError,
    DeviceMismatchError,
    DeviceMissingError,
    DeviceTruncatedError,
    FormatError,
    PoolError,
    SuperblockDamagedError,
)
from beluga.pool import Pool

MIB = 1 << 20
SIZE = 8 * MIB


@pytest.fixture
def pool(two: list[Path]) -> list[Path]:
    """Devices of a pool, closed."""
    Pool.create(two, device_size=SIZE, sparse=True).close()
    return two


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def test_devices_may_be_given_in_any_order(shm: Path) -> None:
    paths = [shm / str(index) for index in range(3)]
    with Pool.create(paths, device_size=SIZE, sparse=True) as made:
        identity = made.id
    for order in itertools.permutations(paths):
        with Pool.open(order) as opened:
            assert opened.id == identity
            assert [device.path for device in opened.devices] == paths
            assert [device.index for device in opened.devices] == [0, 1, 2]


def test_renamed_devices_are_recognized_by_their_superblock(pool: list[Path]) -> None:
    spare = pool[0].with_name("spare")
    pool[0].rename(spare)
    pool[1].rename(pool[0])
    with Pool.open([pool[0], spare]) as opened:
        assert [device.path for device in opened.devices] == [spare, pool[0]]


def test_a_missing_device_is_reported(pool: list[Path]) -> None:
    with refused(DeviceMismatchError, "2 devices", "device 1 "):
        Pool.open(pool[:1])


def test_missing_file_is_refused(pool: list[Path]) -> None:
    pool[1].unlink()
    with refused(DeviceMissingError, str(pool[1])):
        Pool.open(pool)


def test_device_of_another_pool_is_refused(pool: list[Path], shm: Path) -> None:
    others = [shm / "other.0", shm / "other.1"]
    with Pool.create(others, device_size=SIZE, sparse=True) as other:
        identity = other.id
    with refused(DeviceMismatchError, identity[:8], str(others[1])):
        Pool.open([pool[0], others[1]])


def test_device_named_twice_is_refused(pool: list[Path]) -> None:
    with refused(DeviceMismatchError, "same memory"):
        Pool.open([pool[0], pool[0]])


def test_copy_of_a_device_is_refused(pool: list[Path]) -> None:
    copy = pool[0].with_name("copy")
    shutil.copy(pool[0], copy)
    with refused(DeviceMismatchError, "copy"):
        Pool.open([*pool, copy])


def test_truncated_file_is_refused(pool: list[Path]) -> None:
    os.truncate(pool[1], SIZE - 4096)
    with refused(DeviceTruncatedError, str(pool[1]), str(SIZE)):
        Pool.open(pool)


def test_file_truncated_into_its_superblock_is_refused(pool: list[Path]) -> None:
    os.truncate(pool[1], 100)
    with refused(SuperblockDamagedError, str(pool[1])):
        Pool.open(pool)


def test_empty_file_is_refused(pool: list[Path]) -> None:
    os.truncate(pool[1], 0)
    with refused(DeviceForeignError, str(pool[1]), "--create"):
        Pool.open(pool)


def test_foreign_file_is_refused(pool: list[Path]) -> None:
    overwrite(pool[0], 0, os.urandom(4096))
    with refused(DeviceForeignError, "something other"):
        Pool.open(pool)


def test_damaged_superblock_is_refused(pool: list[Path]) -> None:
    overwrite(pool[0], 64, b"\xff\xff")
    with refused(SuperblockDamagedError, str(pool[0])):
        Pool.open(pool)


def test_other_version_is_refused(pool: list[Path]) -> None:
    overwrite(pool[0], 8, (99).to_bytes(4, "little"))
    with refused(FormatError, "99"):
        Pool.open(pool)


def test_no_device_is_refused() -> None:
    with refused(PoolError, "1 to 64 devices"):
        Pool.open([])


def test_a_larger_file_is_used_up_to_the_device_size(pool: list[Path]) -> None:
    os.truncate(pool[0], 2 * SIZE)
    with Pool.open(pool) as opened:
        assert opened.devices[0].size == SIZE
