# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The default pool, which is used when none is named."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from refusal import refused

from beluga.errors import NoDefaultPoolError
from beluga.pool import Pool, SpecLike, remove_default, runtime, stored_specs, storing_default

MIB = 1 << 20


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
