# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A pool that is in use is neither destroyed nor formatted again."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import roles
from support.another_user import as_nobody
from support.role import Process

from beluga import Client, Pool, Server
from beluga.errors import DeviceBusyError

SIZE = 8 << 20


@pytest.fixture
def paths() -> Iterator[list[Path]]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="beluga-test-") as directory:
        yield [Path(directory) / name for name in "ab"]


def test_a_pool_in_use_is_neither_destroyed_nor_formatted(paths: list[Path]) -> None:
    with Pool.create(paths, device_size=SIZE, sparse=True) as pool, Server(pool):
        with pytest.raises(DeviceBusyError, match="stop its server") as caught:
            Pool.destroy(paths)
        assert "\n" not in str(caught.value)
        with pytest.raises(DeviceBusyError):
            Pool.create(paths, device_size=SIZE, sparse=True, force=True)
        with Client(pool) as client:
            assert client.call(0, b"still there") == b"still there"


def test_a_single_device_of_a_pool_in_use_is_not_formatted(paths: list[Path]) -> None:
    """The locks lie next to the pool's first device, which is not named here."""
    Pool.create(paths, device_size=SIZE, sparse=True).close()
    with Process(roles.serve, paths):
        with pytest.raises(DeviceBusyError, match="stop the server"):
            Pool.destroy(paths[1:], force=True)
        with pytest.raises(DeviceBusyError, match="stop the server"):
            Pool.create(paths[1:], device_size=SIZE, sparse=True, force=True)
        with Pool.open(paths) as pool, Client(pool) as client:
            client.ping()
    Pool.destroy(paths[1:], force=True)


def test_a_slice_is_not_in_use_because_of_another_one(shm: Path) -> None:
    size, file, first = SIZE, shm / "file", shm / "first"
    with file.open("wb") as made:
        made.truncate(2 * size)
    low, high = f"{file}@0+{size}", f"{file}@{size}+{size}"
    Pool.create([first, low], device_size=size, sparse=True).close()
    Pool.create([shm / "second", high], device_size=size, sparse=True).close()
    with Process(roles.serve, [first, Path(low)]):
        Pool.destroy([high], force=True)
        with pytest.raises(DeviceBusyError):
            Pool.destroy([low], force=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="another user takes root")
def test_a_user_without_access_to_the_locks_destroys_nothing(shm: Path) -> None:
    path = shm / "a"
    with Pool.create([path], device_size=SIZE, sparse=True) as pool, Server(pool):
        path.chmod(0o666)
        assert as_nobody(lambda: Pool.destroy([path])) == "DevicePermissionError"
        with Client(pool) as client:
            client.ping()
    Pool.open([path]).close()


def test_destroy_succeeds_once_the_pool_is_unused(paths: list[Path]) -> None:
    with Pool.create(paths, device_size=SIZE, sparse=True) as pool, Server(pool), Client(pool):
        pass
    Pool.destroy(paths)
    assert not any(path.exists() for path in paths)


def test_a_pool_reports_whether_it_is_in_use(paths: list[Path]) -> None:
    with Pool.create(paths, device_size=SIZE, sparse=True) as pool:
        pool.refuse_in_use()
        with Server(pool):
            with pytest.raises(DeviceBusyError, match="stop its server"):
                pool.refuse_in_use()
            with Client(pool):
                pass
        pool.refuse_in_use()
