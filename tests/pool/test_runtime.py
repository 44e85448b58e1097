# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The runtime directory and the default pool."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.refusals import refused

from beluga.errors import DevicePermissionError, NoDefaultPoolError
from beluga.pool import Pool, SpecLike, remove_default, runtime, stored_specs, storing_default
from beluga.pool.device import Device, DeviceSpec
from beluga.pool.runtime import make_runtime_dir, runtime_path
from beluga.rpc import Client, Server

MIB = 1 << 20


@pytest.fixture
def pool(two: list[Path]) -> list[Path]:
    Pool.create(two, device_size=8 * MIB, sparse=True).close()
    return two


def test_the_directory_is_next_to_the_first_device(pool: list[Path], tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(pool[0])
    with Pool.open([pool[1], tmp_path / "link"]) as opened:
        assert opened.runtime_dir == pool[0].with_name("pool.0.run")
        assert opened.runtime_dir.is_dir()
        assert opened.runtime_dir.stat().st_mode & 0o7777 == 0o700


def test_a_file_and_the_slice_that_is_all_of_it_have_one_directory(pool: list[Path]) -> None:
    slices = [f"{path}@0+{8 * MIB}" for path in pool]
    with Pool.open(pool) as whole, Pool.open(slices) as sliced:
        assert whole.runtime_dir == sliced.runtime_dir
        with Server(sliced), Client(whole) as client:
            assert client.ping() > 0


def test_slices_of_one_file_have_directories_of_their_own(tmp_path: Path) -> None:
    slices = [f"{tmp_path / 'file'}@{offset}+{8 * MIB}" for offset in (0, 8 * MIB)]
    (tmp_path / "file").write_bytes(b"")
    os.truncate(tmp_path / "file", 16 * MIB)
    with (
        Pool.create(slices[:1], sparse=True) as first,
        Pool.create(slices[1:], sparse=True) as other,
    ):
        assert first.runtime_dir != other.runtime_dir


def test_directory_is_shared_with_the_group_of_the_file(pool: list[Path]) -> None:
    group = 1 if os.geteuid() == 0 else os.getegid()
    os.chown(pool[0], -1, group)
    pool[0].chmod(0o660)
    with Pool.open(pool) as opened:
        stat = opened.runtime_dir.stat()
    assert stat.st_gid == group
    assert stat.st_mode & 0o7777 == 0o2770


def test_another_object_at_the_path_is_rejected(pool: list[Path]) -> None:
    pool[0].with_name("pool.0.run").symlink_to("/tmp")
    with Pool.open(pool) as opened, refused(DevicePermissionError, "remove it"):
        _ = opened.runtime_dir


def test_directory_of_another_user_is_refused(pool: list[Path]) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make a directory of another user")
    folder = pool[0].with_name("pool.0.run")
    folder.mkdir()
    os.chown(folder, 12345, -1)
    with Pool.open(pool) as opened, refused(DevicePermissionError, "another user"):
        _ = opened.runtime_dir


def test_devdax_pools_have_a_directory_named_by_their_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(DeviceSpec(Path("/dev/null")), "devdax", 8 * MIB, True, ())
    monkeypatch.setattr("beluga.config.runtime_root", lambda: tmp_path / "run")
    path = make_runtime_dir(device, "ab12")
    assert path == runtime_path(device, "ab12") == tmp_path / "run/ab12"
    assert path.is_dir()
    assert [each.stat().st_mode & 0o7777 for each in (path.parent, path)] == [0o700, 0o700]
    assert make_runtime_dir(device, "ab12") == path


@pytest.mark.parametrize(("mode", "trusted"), [(0o755, True), (0o1777, False)])
def test_a_configured_directory_is_trusted_unless_world_writable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, trusted: bool
) -> None:
    """A directory that another user prepared for a pool is detected by its owner."""
    if os.geteuid() != 0:
        pytest.skip("only root can make a directory of another user")
    monkeypatch.setenv("BELUGA_RUNTIME_DIR", str(tmp_path))
    device = Device(DeviceSpec(Path("/dev/null")), "devdax", 8 * MIB, True, ())
    (tmp_path / "ab12").mkdir(mode=0o777)
    os.chown(tmp_path / "ab12", 12345, -1)
    tmp_path.chmod(mode)
    if trusted:
        assert make_runtime_dir(device, "ab12") == tmp_path / "ab12"
    else:
        with refused(DevicePermissionError, "another user"):
            make_runtime_dir(device, "ab12")


def test_a_directory_prepared_by_another_user_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner of a directory in /tmp with a predictable name could replace our files."""
    if os.geteuid() != 0:
        pytest.skip("only root can make a directory of another user")
    root = tmp_path / "beluga-1000"
    root.mkdir(mode=0o777)
    os.chown(root, 12345, -1)
    monkeypatch.setattr("beluga.config.runtime_root", lambda: root)
    device = Device(DeviceSpec(Path("/dev/null")), "devdax", 8 * MIB, True, ())
    assert make_runtime_dir(device, "ab12").is_dir(), "tmp_path is ours alone"
    tmp_path.chmod(0o1777)
    with refused(DevicePermissionError, "beluga-1000 belongs to another user"):
        make_runtime_dir(device, "cd34")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user without a mounted pool."""
    monkeypatch.delenv("BELUGA_POOL", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(runtime, "emulated_paths", lambda: [str(tmp_path / "emulated")])
    return tmp_path


def make(*paths: Path) -> str:
    with Pool.create(paths, device_size=8 * MIB, sparse=True) as pool:
        return pool.id


def remember(paths: Sequence[SpecLike]) -> None:
    with storing_default(paths):
        pass


def mounted() -> str:
    with Pool.mount() as pool:
        return pool.id


def test_without_a_mounted_pool_the_error_names_the_command() -> None:
    with refused(NoDefaultPoolError, "beluga mount --create", "--pool"):
        Pool.mount()


def test_the_stored_pool_is_mounted(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    identity = make(home / "a", home / "b")
    monkeypatch.chdir(home)
    remember(["b,link=cxl0", "a"])
    monkeypatch.chdir("/")
    assert mounted() == identity
    assert [spec.link for spec in stored_specs()] == ["cxl0", None]
    assert (home / "state/beluga").stat().st_mode & 0o777 == 0o700


def test_the_environment_has_priority_over_the_stored_pool(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(home / "a")
    remember([home / "a"])
    identity = make(home / "b", home / "c")
    monkeypatch.setenv("BELUGA_POOL", f"{home / 'b'}:{home / 'c'}")
    assert mounted() == identity


def test_emulated_pool_is_the_last_resort(home: Path) -> None:
    identity = make(home / "emulated")
    assert mounted() == identity
    other = make(home / "a")
    remember([home / "a"])
    assert mounted() == other


def test_a_removed_default_pool_is_not_mounted(home: Path) -> None:
    make(home / "a")
    remember([home / "a"])
    assert remove_default()
    assert not remove_default()
    assert stored_specs() == []


def test_a_damaged_default_record_is_rejected(home: Path) -> None:
    remember([home / "a"])
    (home / "state/beluga/default.json").write_text("{")
    with refused(NoDefaultPoolError, "default.json", "mount again"):
        Pool.mount()


def test_without_a_state_variable_the_record_is_in_the_home_folder(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(home))
    remember([home / "a"])
    state = home / ".local/state/beluga"
    assert list(state.iterdir()) == [state / "default.json"]


def test_a_failed_block_stores_no_default_pool(home: Path) -> None:
    make(home / "a")
    remember([home / "a"])
    with pytest.raises(KeyError), storing_default([home / "b"]):
        raise KeyError
    assert [spec.path for spec in stored_specs()] == [home / "a"]
    assert [path.name for path in (home / "state/beluga").iterdir()] == ["default.json"]


def test_a_read_only_home_is_rejected_first(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "file"))
    messages = "file/beluga: Not a directory", "set HOME or XDG_STATE_HOME"
    with refused(NoDefaultPoolError, *messages), storing_default([home / "a"]):
        pytest.fail("the work began")


def test_a_removed_pool_and_a_reboot_have_different_errors(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember([home / "a"])
    with refused(NoDefaultPoolError, "was removed", f"beluga mount --create {home}/a", "umount"):
        Pool.mount()
    os.utime(home / "state/beluga/default.json", (0, 0))
    with refused(NoDefaultPoolError, "rebooted (20"):
        Pool.mount()
    monkeypatch.setattr(runtime, "_boot_time", lambda: time.time() - 60)
    remember(["/dev/shm/beluga-nobody/gone"])
    os.utime(home / "state/beluga/default.json", (0, 0))
    with refused(NoDefaultPoolError, "which empties /dev/shm"):
        Pool.mount()
