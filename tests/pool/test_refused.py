# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Wrong values and types are refused."""

from __future__ import annotations

import errno
import time
from pathlib import Path
from typing import Any

import pytest
from devdax import MIB, fake_devdax
from support.refusals import refused
from support.watched_core import WatchedCore

from beluga import Client, IndexServer, KVCache, Pool
from beluga._ffi import ffi
from beluga.errors import DeviceMismatchError, DeviceSpecError, NoRoomError, PoolError
from beluga.pool import create as creation
from beluga.pool import remove_default, stored_specs, storing_default
from beluga.pool.create import Limit
from beluga.pool.device import Device, DeviceSpec, examine
from beluga.pool.layout import Layout, NewPoolSettings
from beluga.rpc import nanoseconds

SIZE = 16 << 20


def test_a_device_smaller_than_a_pool_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(bytes(2 << 20))
    with pytest.raises(NoRoomError, match="at least 4 MiB"):
        Pool.create([path], force=True)


def test_prefault_allocates_no_space_in_sparse_files(shm: Path) -> None:
    with Pool.create([shm / "a"], device_size=SIZE, sparse=True) as pool:
        before = (shm / "a").stat().st_blocks
        pool.prefault()
        assert (shm / "a").stat().st_blocks == before


def test_a_file_that_cannot_be_removed_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Pool.create([tmp_path / "a"], device_size=SIZE, sparse=True).close()

    def refuse(self: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(PoolError):
        Pool.destroy([tmp_path / "a"])


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


GIB = 1 << 30
KIB = 1 << 10


def file_of(folder: Path, name: str, size: int) -> Device:
    """Return a device that is a file of that size; with none, it does not exist yet."""
    path = folder / name
    if size:
        with path.open("wb") as file:
            file.truncate(size)
    return examine(DeviceSpec(path), creating=True)


def slice_of(folder: Path, size: int) -> Device:
    path = folder / "sliced"
    with path.open("wb") as file:
        file.truncate(64 * MIB)
    return examine(DeviceSpec.parse(f"{path}@2M+{size}"))


def test_a_device_has_the_requested_size(tmp_path: Path) -> None:
    small = file_of(tmp_path, "small", 5 * MIB)
    for size in (4 * MIB, 6 * MIB):
        assert creation._choose_size([small], size) == size  # a file grows
    for wrong in (2 * MIB, 5 * MIB, 0):
        with refused(DeviceSpecError, "multiple of 2 MiB"):
            creation._choose_size([small], wrong)
    fixed = slice_of(tmp_path, 8 * MIB)
    assert creation._choose_size([fixed], 8 * MIB) == 8 * MIB
    with refused(NoRoomError, "8 MiB", "10 MiB"):
        creation._choose_size([fixed], 10 * MIB)


def test_a_device_has_its_own_size_in_stripes(tmp_path: Path) -> None:
    partial, new = file_of(tmp_path, "odd", 9 * MIB), file_of(tmp_path, "new", 0)
    assert creation._choose_size([partial, new], None) == 8 * MIB
    assert creation._choose_size([file_of(tmp_path, "least", 4 * MIB)], None) == 4 * MIB
    with refused(NoRoomError, "at least 4 MiB"):
        creation._choose_size([file_of(tmp_path, "less", 3 * MIB)], None)
    with refused(NoRoomError, "at least 4 MiB"):
        creation._choose_size([file_of(tmp_path, "byte", 1)], None)
    with refused(DeviceMismatchError, "different sizes"):
        creation._choose_size([partial, file_of(tmp_path, "other", 12 * MIB)], None)


@pytest.mark.parametrize(
    ("room", "devices", "size"),
    [
        (100 * GIB, 1, 4 * GIB),
        (100 * GIB, 2, 2 * GIB),
        (1 * GIB, 2, 256 * MIB),
        (14 * MIB, 1, 6 * MIB),
        (8 * MIB, 1, 4 * MIB),
        (8 * MIB - 2, 1, None),
        (8 * MIB, 2, None),
    ],
)
def test_new_files_share_half_the_room_up_to_4_gib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int, devices: int, size: int | None
) -> None:
    monkeypatch.setattr(creation, "room", lambda _: Limit("the test", room))
    new = [file_of(tmp_path, f"new{number}", 0) for number in range(devices)]
    if size is None:
        with refused(NoRoomError, "the test leaves"):
            creation._choose_size(new, None)
    else:
        assert creation._choose_size(new, None) == size


def test_memory_that_runs_out_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = WatchedCore()
    core.fails["bl_device_populate"] = -errno.ENOMEM
    core.before["bl_device_populate"] = lambda: time.sleep(0.005)
    monkeypatch.setattr(creation, "lib", core)
    monkeypatch.setattr(creation, "_PIECE", 64 * KIB)
    with refused(NoRoomError, "memory ran out"):
        creation.create([tmp_path / "a"], NewPoolSettings(device_size=8 * MIB))
    # pieces that are still queued are not tried
    assert core.names().count("bl_device_populate") < 128
    assert not (tmp_path / "a").exists()


def test_every_byte_of_every_file_is_filled_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = WatchedCore()
    monkeypatch.setattr(creation, "lib", core)
    monkeypatch.setattr(creation, "_PIECE", 3 * MIB)
    calls: list[tuple[int, int]] = []
    paths = [tmp_path / "a", tmp_path / "b"]
    creation.create(
        paths, NewPoolSettings(device_size=8 * MIB), progress=lambda *figures: calls.append(figures)
    )
    filled = sorted(
        (int(ffi.cast("uintptr_t", given[0])), given[1])
        for name, given in core.calls
        if name == "bl_device_populate"
    )
    assert sorted(size for _, size in filled) == sorted([3 * MIB, 3 * MIB, 2 * MIB] * 2)
    for half in (filled[:3], filled[3:]):
        assert [at - half[0][0] for at, _ in half] == [0, 3 * MIB, 6 * MIB]
    assert [path.stat().st_blocks * 512 for path in paths] == [8 * MIB] * 2
    assert calls[-1] == (16 * MIB, 16 * MIB)


@pytest.mark.parametrize(
    ("size", "lanes", "slots", "bulk", "blocks"),
    [
        (6 * MIB, 12, 64, 32 * KIB, 1024),
        (126 * MIB, 12, 64, 32 * KIB, 1024),
        (128 * MIB, 32, 64, 32 * KIB, 1024),
        (510 * MIB, 32, 64, 32 * KIB, 2040),
        (512 * MIB, 32, 256, 64 * KIB, 2048),
        (4 * GIB - 2 * MIB, 32, 256, 64 * KIB, 16376),
        (4 * GIB, 64, 256, 64 * KIB, 16384),
    ],
)
def test_tables_grow_with_the_pool(
    size: int, lanes: int, slots: int, bulk: int, blocks: int
) -> None:
    geometry = Layout(1, size, NewPoolSettings()).superblock(0, "file").geometry
    assert (geometry.lane_count, geometry.slot_count, geometry.bulk_size) == (lanes, slots, bulk)
    assert geometry.block_count_max == blocks
    assert geometry == Layout(1, size, NewPoolSettings()).superblock(0, "devdax").geometry


@pytest.mark.parametrize("size", [6 * MIB, 16 * MIB, 64 * MIB, 126 * MIB])
def test_the_lanes_of_a_small_pool_take_no_stripe_from_its_blocks(size: int) -> None:
    def stripes(lanes: int | None) -> int:
        layout = Layout(1, size, NewPoolSettings(lane_count=lanes))
        return layout.superblock(0, "file").geometry.stripe_count

    assert stripes(None) == stripes(1)


def test_a_node_without_an_alignment_is_refused(tmp_path: Path) -> None:
    sysfs = fake_devdax(tmp_path, "/dev/zero", align=0)
    with refused(DeviceSpecError, "2 MiB is needed"):
        examine(DeviceSpec(Path("/dev/zero")), sysfs=sysfs)


def test_the_default_pool_is_stored_in_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "not" / "yet"
    monkeypatch.setenv("XDG_STATE_HOME", str(state))
    for name in ("a", "b"):  # the second one has the first one's path
        with storing_default([tmp_path / name]):
            pass
        assert stored_specs() == [DeviceSpec(tmp_path / name)]
    folders = [path for path in state.rglob("*") if path.is_dir()]
    assert [path.stat().st_mode & 0o777 for path in folders] == [0o700]
    assert [path.name for path in folders[0].iterdir()] == ["default.json"]
    assert (remove_default(), remove_default()) == (True, False)
