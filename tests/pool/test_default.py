# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The default pool, which is used when none is named."""

from __future__ import annotations

from pathlib import Path

import pytest
from refusal import refused

from beluga.errors import NoDefaultPoolError
from beluga.pool import Pool, default, forget, remember, remembered

MIB = 1 << 20


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user who has mounted nothing."""
    monkeypatch.delenv("BELUGA_POOL", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(default, "emulated_paths", lambda: [str(tmp_path / "emulated")])
    return tmp_path


def make(*paths: Path) -> str:
    with Pool.create(paths, device_size=8 * MIB, sparse=True) as pool:
        return pool.id


def mounted() -> str:
    with Pool.mount() as pool:
        return pool.id


def test_nothing_mounted_is_refused_with_what_to_run() -> None:
    with refused(NoDefaultPoolError, "beluga mount --create", "--pool"):
        Pool.mount()


def test_remembered_pool_is_mounted(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    identity = make(home / "a", home / "b")
    monkeypatch.chdir(home)
    remember(["b,link=cxl0", "a"])
    monkeypatch.chdir("/")
    assert mounted() == identity
    assert [spec.link for spec in remembered()] == ["cxl0", None]
    assert (home / "state/beluga").stat().st_mode & 0o777 == 0o700


def test_environment_goes_before_what_is_remembered(
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


def test_forgotten_pool_is_not_mounted(home: Path) -> None:
    make(home / "a")
    remember([home / "a"])
    assert forget()
    assert not forget()
    assert remembered() == []


def test_damaged_memory_is_refused(home: Path) -> None:
    remember([home / "a"])
    (home / "state/beluga/default.json").write_text("{")
    with refused(NoDefaultPoolError, "default.json", "mount again"):
        Pool.mount()


def test_memory_of_a_user_without_a_state_variable_lies_at_home(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(home))
    remember([home / "a"])
    state = home / ".local/state/beluga"
    assert list(state.iterdir()) == [state / "default.json"]
