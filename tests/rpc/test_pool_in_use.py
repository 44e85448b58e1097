# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A pool that is in use is neither destroyed nor formatted anew."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

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


def test_a_pool_is_destroyed_once_nobody_uses_it(paths: list[Path]) -> None:
    with Pool.create(paths, device_size=SIZE, sparse=True) as pool, Server(pool), Client(pool):
        pass
    Pool.destroy(paths)
    assert not any(path.exists() for path in paths)


def test_a_pool_says_whether_it_is_in_use(paths: list[Path]) -> None:
    with Pool.create(paths, device_size=SIZE, sparse=True) as pool:
        pool.refuse_in_use()
        with Server(pool):
            with pytest.raises(DeviceBusyError, match="stop its server"):
                pool.refuse_in_use()
            with Client(pool):
                pass
        pool.refuse_in_use()
