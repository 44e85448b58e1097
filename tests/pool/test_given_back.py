# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A closed pool releases all its descriptors and mappings."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from devdax import MIB, fake_devdax
from support.refusals import refused
from support.watched_core import WatchedCore

from beluga.errors import BelugaError, DeviceSpecError, NoRoomError, PoolExistsError
from beluga.pool import Pool, emulated_paths, survey
from beluga.pool import create as creation
from beluga.pool.layout import NewPoolSettings

SIZE = 16 * MIB


def open_files() -> set[Path]:
    return set(Path("/proc/self/fd").iterdir())


@pytest.fixture
def paths(shm: Path) -> list[Path]:
    paths = [shm / "a", shm / "b"]
    Pool.create(paths, device_size=SIZE, sparse=True).close()
    return paths


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> WatchedCore:
    core = WatchedCore()
    for module in ("create", "layout", "mapping", "pool"):
        monkeypatch.setattr(f"beluga.pool.{module}.lib", core)
    return core


@pytest.mark.parametrize(
    "act",
    [
        lambda paths: Pool.open(paths).close(),
        survey,
        lambda paths: Pool.create(paths, sparse=True, force=True).close(),
        lambda paths: Pool.create(paths, sparse=True),
        lambda paths: Pool.create([f"{paths[0]}@0+8MiB"]).close(),
        lambda paths: Pool.create([paths[0].with_name("c")], device_size=SIZE).close(),
        Pool.destroy,
    ],
    ids=["open", "survey", "force", "refused", "slice", "new", "destroy"],
)
def test_no_descriptor_stays_open(paths: list[Path], act: Callable[[list[Path]], object]) -> None:
    before = open_files()
    with contextlib.suppress(PoolExistsError):
        act(paths)
    assert open_files() == before


def test_memory_is_unmapped_once_when_no_longer_used(paths: list[Path], core: WatchedCore) -> None:
    pool = Pool.open(paths)
    with pool.using():
        core.calls.clear()
        pool.close()
        pool.close()
        assert core.names() == []
    pool.close()
    assert core.names() == ["bl_pool_close", "bl_device_unmap", "bl_device_unmap"]
    with pytest.raises(ValueError, match="closed"):
        pool.using()


@pytest.mark.parametrize(
    ("code", "kind"), [(errno.ENOMEM, NoRoomError), (errno.EAGAIN, BlockingIOError)]
)
def test_a_device_that_cannot_be_mapped_leaves_nothing_mapped(
    paths: list[Path], core: WatchedCore, code: int, kind: type[Exception]
) -> None:
    maps: list[int] = []
    real = core.bl_device_map

    def second_fails(*arguments: Any) -> int:
        maps.append(0)
        return -code if len(maps) == 2 else int(real(*arguments))

    core.bl_device_map = second_fails  # type: ignore[attr-defined]
    before = open_files()
    with pytest.raises(kind):
        Pool.open(paths)
    assert core.names().count("bl_device_unmap") == 1
    assert open_files() == before


def test_a_pool_that_cannot_be_opened_leaves_nothing_mapped(
    paths: list[Path], core: WatchedCore
) -> None:
    core.fails["bl_pool_open"] = -errno.ENOMEM
    with pytest.raises((OSError, MemoryError, BelugaError)):
        Pool.open(paths)
    assert core.names().count("bl_device_unmap") == 2
    assert "bl_pool_close" not in core.names()


class User:
    """A thread or object that uses a pool."""

    def __init__(self, name: str, ended: list[str]) -> None:
        self.name, self.ended = name, ended
        self.fails = False

    def end(self) -> None:
        if self.fails:
            raise KeyboardInterrupt
        self.ended.append(self.name)


def test_users_of_a_pool_end_before_it_in_reverse_order(
    paths: list[Path], core: WatchedCore
) -> None:
    pool = Pool.open(paths)
    ended: list[str] = []
    users = [User(name, ended) for name in "abc"]
    for user in users:
        pool.before_close(user.end)
    users[2].fails = True
    with pytest.raises(KeyboardInterrupt):
        pool.close()
    assert "bl_pool_close" not in core.names()
    users[2].fails = False
    del users[1], user
    pool.close()
    assert ended == ["c", "a"]  # the one in between was collected
    assert core.names()[-3:] == ["bl_pool_close", "bl_device_unmap", "bl_device_unmap"]
    with pytest.raises(ValueError, match="closed"):
        pool.before_close(users[0].end)
    with pytest.raises(ValueError, match="closed"):
        _ = pool.handle


def test_only_allocated_pools_are_prefaulted(paths: list[Path], core: WatchedCore) -> None:
    with Pool.open(paths) as sparse:
        sparse.prefault()
    assert "bl_pool_prefault" not in core.names()
    with Pool.create([paths[0].with_name("c")], device_size=SIZE) as pool:
        pool.prefault()
        assert core.last("bl_pool_prefault") == (pool.handle, 0, pool.geometry.size)


def test_hosts_of_a_shared_device_require_numbers(paths: list[Path], tmp_path: Path) -> None:
    with Pool.open(paths) as files:
        assert (files.host_number(None), files.host_number(3)) == (0, 3)
    sysfs = fake_devdax(tmp_path, "/dev/zero", size=SIZE)
    with Pool(creation.create(["/dev/zero"], NewPoolSettings(), sysfs=sysfs)) as shared:
        assert shared.host_number(0) == 0
        with refused(DeviceSpecError, "--host N"):
            shared.host_number(None)
        assert [device.node for device in shared.devices] == [1]


def test_a_node_needs_no_free_space_but_a_following_file_does(
    shm: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    demanded: list[int] = []
    monkeypatch.setattr(creation, "require_room", lambda size, _: demanded.append(size))
    sysfs = fake_devdax(tmp_path, "/dev/zero", size=SIZE)
    paths = ["/dev/zero", shm / "a", shm / "b"]
    creation.create(paths, NewPoolSettings(device_size=SIZE), sysfs=sysfs).close()
    assert demanded == [2 * SIZE]


def test_other_pools_in_a_file_are_found_wherever_they_lie(shm: Path) -> None:
    file = shm / "file"
    file.touch()
    os.truncate(file, 16 * SIZE)
    slices = [f"{file}@{at * SIZE}+{SIZE}" for at in (15, 7, 1)]
    for number, text in enumerate(slices):
        Pool.create([text], sparse=True).close()
        with refused(PoolExistsError, f"slice at {(15, 7, 1)[number] * SIZE:#x}"):
            Pool.create([file], sparse=True)
    for text in slices[:0:-1]:
        Pool.destroy([text])
    with refused(PoolExistsError, f"slice at {15 * SIZE:#x}"):
        Pool.create([f"{file}@{2 * MIB}+{16 * SIZE - 2 * MIB}"], sparse=True)
    Pool.create([f"{file}@0+{15 * SIZE}"], sparse=True).close()


def test_a_pool_without_settings_has_the_defaults(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings_made: list[NewPoolSettings] = []

    def create(names: list[Path], settings: NewPoolSettings, **_: object) -> Any:
        settings_made.append(settings)
        return creation.create(names, NewPoolSettings(sparse=True, force=True))

    monkeypatch.setattr("beluga.pool.pool.create", create)
    with Pool.create(paths) as pool:
        assert pool.geometry.interleaved
    assert settings_made == [NewPoolSettings()]
    assert not (settings_made[0].sparse or settings_made[0].force)


def test_the_emulated_pool_has_two_files_of_its_user() -> None:
    folder = Path(f"/dev/shm/beluga-{os.getuid()}")
    assert emulated_paths() == [str(folder / "pool.0"), str(folder / "pool.1")]
