# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Processes of one host with different runtime directories share no locks: the second one is
rejected, with the remedy to share one.
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
from support import roles
from support.another_user import NOBODY, as_nobody
from support.role import Process

from beluga.errors import DevicePermissionError, RuntimeDirError
from beluga.pool import Pool
from beluga.pool.runtime import make_runtime_dir
from beluga.rpc import Client, Server

GROUP = 54321


@pytest.fixture
def coherence() -> str:
    return "software"


@pytest.fixture
def paths(shm: Path) -> list[Path]:
    """Devices that another user may open: pytest removes others' access to its own folder whenever
    a second pytest starts.
    """
    return [shm / "a", shm / "b"]


@pytest.fixture
def another(monkeypatch: pytest.MonkeyPatch, shm: Path) -> Path:
    """Set a runtime directory for this process and for later children."""
    monkeypatch.setenv("BELUGA_RUNTIME_DIR", str(shm / "another"))
    return shm / "another"


def test_a_client_with_another_runtime_directory_is_refused(
    pool: Pool, paths: list[Path], request: pytest.FixtureRequest
) -> None:
    with Server(pool) as server:
        another = request.getfixturevalue("another")
        with Pool.open(paths) as other, pytest.raises(RuntimeDirError) as refused:
            Client(other)
        text = str(refused.value)
        assert "BELUGA_RUNTIME_DIR" in text
        assert str(another) in text
        assert "\n" not in text
        assert (server.stat().attach_count, server.stat().live_count) == (0, 0)


@pytest.mark.parametrize("host", [0, 3])
def test_a_server_with_another_runtime_directory_is_refused(
    pool: Pool, paths: list[Path], request: pytest.FixtureRequest, host: int
) -> None:
    with Server(pool) as server:
        request.getfixturevalue("another")
        with Pool.open(paths) as other:
            rival = Server(other, host=host)
            with pytest.raises(RuntimeDirError, match="BELUGA_RUNTIME_DIR"):
                rival.start()
            rival.stop()
        assert server.stat().epoch == 1


def test_a_stopped_server_excludes_a_second_one_in_another_directory(
    pool: Pool, paths: list[Path], request: pytest.FixtureRequest
) -> None:
    with Process(roles.serve, paths) as server:
        server.signal(signal.SIGSTOP)
        request.getfixturevalue("another")
        with Pool.open(paths) as other:
            rival = Server(other)
            with pytest.raises(RuntimeDirError):
                rival.start()
            rival.stop()
        server.signal(signal.SIGCONT)
        assert "epoch=1" in server.request("stat")


def test_a_standby_with_another_runtime_directory_is_refused_at_once(
    pool: Pool, paths: list[Path], request: pytest.FixtureRequest
) -> None:
    with Server(pool):
        request.getfixturevalue("another")
        with Pool.open(paths) as other:
            standby = Server(other)
            with pytest.raises(RuntimeDirError, match="BELUGA_RUNTIME_DIR"):
                standby.watch(0.1, silent_s=60)
            standby.stop()


def test_processes_that_name_one_directory_share_it(another: Path, paths: list[Path]) -> None:
    with (
        Pool.create(paths, device_size=8 << 20, sparse=True) as pool,
        Process(roles.serve, paths),
        Process(roles.call, paths),
        Client(pool) as client,
    ):
        client.ping()
        assert pool.runtime_dir == another / pool.id
        assert len(list(pool.runtime_dir.glob("alive-*"))) == 3


def test_a_stopped_server_is_replaced_from_another_directory(
    pool: Pool, paths: list[Path], request: pytest.FixtureRequest
) -> None:
    with Server(pool):
        pass
    request.getfixturevalue("another")
    with Pool.open(paths) as other, Server(other) as server, Client(other) as client:
        client.ping()
        assert server.stat().epoch == 2


def test_an_emptied_directory_needs_an_operators_declaration(pool: Pool, paths: list[Path]) -> None:
    with Process(roles.serve, paths) as server:
        server.kill()
    shutil.rmtree(pool.runtime_dir)
    server_of = Server(pool)
    with pytest.raises(RuntimeDirError, match="--declare-gone"):
        server_of.start()
    server_of.stop()
    with Server(pool, declared_gone=True), Client(pool) as client:
        client.ping()


def answered(paths: list[Path]) -> str:
    """Call the server as another user of the sharing group. Returns the result."""

    def call() -> None:
        with Pool.open(paths) as pool, Client(pool) as client:
            client.ping()

    return as_nobody(call, [GROUP])


def opened_to_the_group(paths: list[Path]) -> None:
    """Give the group access to the pool's files."""
    for path in paths:
        os.chown(path, -1, GROUP)
        path.chmod(0o660)


@pytest.mark.skipif(os.geteuid() != 0, reason="another user takes root")
def test_another_user_of_the_group_shares_the_named_directory(
    pool: Pool, paths: list[Path], another: Path
) -> None:
    opened_to_the_group(paths)
    another.mkdir()
    os.chown(another, -1, GROUP)
    another.chmod(0o2770)
    with Process(roles.serve, paths), Client(pool):
        assert answered(paths) == "done"


@pytest.mark.skipif(os.geteuid() != 0, reason="another user takes root")
def test_another_user_with_a_separate_directory_is_rejected(
    pool: Pool, paths: list[Path], shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened_to_the_group(paths)
    with Process(roles.serve, paths), Client(pool):
        own = shm / "own"
        own.mkdir()
        os.chown(own, NOBODY, NOBODY)
        monkeypatch.setenv("BELUGA_RUNTIME_DIR", str(own))
        assert answered(paths) == "RuntimeDirError"


def test_a_runtime_directory_of_another_user_in_a_shared_folder_is_rejected(
    pool: Pool, another: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder where any user may create directories, only the user's own one is used."""
    another.mkdir(mode=0o777)
    another.chmod(0o777)
    first = pool._mapping.members[0].device
    make_runtime_dir(first, pool.id)
    monkeypatch.setattr("os.geteuid", lambda: NOBODY)
    if os.getuid() == 0:
        os.chown(another / pool.id, 12345, -1)
        with pytest.raises(DevicePermissionError, match="belongs to another user"):
            make_runtime_dir(first, pool.id)
