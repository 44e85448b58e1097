# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A value of a wrong type is a TypeError that names the required type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from beluga import Client, IndexServer, KVCache, Pool
from beluga.rpc import nanoseconds

WRONG: Any = 3


@pytest.mark.parametrize("paths", [WRONG, [WRONG], None, b"/dev/shm/a"])
def test_a_device_must_be_a_path(paths: Any) -> None:
    with pytest.raises(
        TypeError, match=r"a device is .*; give a path, as text or a Path, or a DeviceSpec"
    ):
        Pool.open(paths)


@pytest.mark.parametrize(
    "name", ["device_size", "max_blocks", "block_bytes", "lane_count", "slot_count", "bulk_size"]
)
@pytest.mark.parametrize("value", ["16M", 1.5, True])
def test_sizes_of_a_pool_must_be_integers(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"{name} is a whole number, not "):
        Pool.create(tmp_path / "a", **{name: value})
    assert not (tmp_path / "a").exists()


def test_a_time_must_be_a_number() -> None:
    wrong: Any = "a"
    with pytest.raises(TypeError, match="a time must be a number of seconds, not 'a'"):
        nanoseconds(wrong)


def test_a_session_requires_a_pool() -> None:
    wrong: Any = "foo"
    with pytest.raises(TypeError, match="a session needs a Pool, not 'foo'"):
        KVCache(wrong, namespace="n")
    with pytest.raises(TypeError, match="not 'foo'"):
        Client(wrong)
    with pytest.raises(TypeError, match="a server needs a Pool, not 'foo'"):
        IndexServer(wrong)
