# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A pool's files while processes use it: its locks, its runtime directory, and removed devices."""

import json
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from support import roles
from support.blocks import eventually
from support.forks import NOBODY, as_nobody
from support.role import Process

import beluga.pool.runtime
import beluga.rpc.server
from beluga import IndexServer, KVCache
from beluga.errors import (
    DeviceBusyError,
    DeviceMissingError,
    DevicePermissionError,
    NoServerError,
    RuntimeDirError,
)
from beluga.pool import Pool
from beluga.pool.runtime import make_runtime_dir
from beluga.rpc import Client, Server

# ---- Processes of one host with different runtime directories share no locks: the second one is
# rejected, with the remedy to share one.


GROUP = 54321


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
        assert answered(paths) == "None"


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


# ---- A server in any process stops once the file of one of its devices was removed, and
# ``beluga doctor`` names the processes that keep the memory.


Run = Callable[..., "subprocess.CompletedProcess[str]"]
KEY = b"k" * 16


@pytest.fixture(autouse=True)
def short_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beluga.rpc.server, "_FILES_LOOK_S", 0.01)


@pytest.fixture
def made_paths(shm: Path) -> list[Path]:
    made_paths = [shm / "a", shm / "b"]
    Pool.create(made_paths, device_size=16 << 20).close()
    return made_paths


def replaced(path: Path) -> None:
    """Create another pool in place of the file."""
    path.unlink()
    Pool.create([path], device_size=16 << 20).close()


@pytest.mark.parametrize("remove", [Path.unlink, replaced], ids=["removed", "replaced"])
@pytest.mark.parametrize("number", [0, 1])
def test_an_embedded_server_ends_once_a_file_is_removed(
    made_paths: list[Path], remove: Callable[[Path], object], number: int
) -> None:
    with (
        Pool.open(made_paths) as pool,
        IndexServer(pool) as server,
        KVCache(pool, namespace="a") as cache,
    ):
        assert cache.put([KEY], [b"x" * 1000]).stored == 1
        remove(made_paths[number])
        assert eventually(lambda: server.failure is not None)
        assert isinstance(server.failure, DeviceMissingError)
        assert str(made_paths[number]) in str(server.failure)

        def nobody_serves() -> bool:
            try:
                cache.lookup([KEY])
            except NoServerError:
                return True
            return False  # the failure is set before the loop has ended

        assert eventually(nobody_serves)


def test_serve_forever_raises_that_a_file_was_removed(made_paths: list[Path]) -> None:
    with Pool.open(made_paths) as pool:
        server = Server(pool)
        remover = threading.Timer(0.05, made_paths[0].unlink)
        remover.start()
        with pytest.raises(DeviceMissingError, match="removed while it was in use"):
            server.serve_forever()
        remover.join()


def test_a_server_continues_if_files_are_renamed_or_proc_is_hidden(
    made_paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = threading.Semaphore(0)
    look = Pool.refuse_removed

    def counted(pool: Pool) -> None:
        look(pool)
        looked.release()

    monkeypatch.setattr(Pool, "refuse_removed", counted)
    with (
        Pool.open(made_paths) as pool,
        IndexServer(pool) as server,
        KVCache(pool, namespace="a") as cache,
    ):
        renamed = made_paths[0].rename(made_paths[0].with_name("c"))
        assert all(looked.acquire(timeout=60) for _ in range(3))
        monkeypatch.setattr(beluga.pool.runtime, "_MAPS", Path("/proc/self/hidden"))
        renamed.unlink()
        assert all(looked.acquire(timeout=60) for _ in range(3))
        assert server.failure is None
        assert cache.put([KEY], [b"x" * 1000]).stored == 1


def test_the_check_of_the_files_ends_with_the_server(made_paths: list[Path]) -> None:
    with Pool.open(made_paths) as pool:
        with IndexServer(pool) as server:
            pass
        made_paths[0].unlink()
        assert eventually(
            lambda: "beluga-files" not in {thread.name for thread in threading.enumerate()}
        )
        assert server.failure is None


def doctor(run: Run) -> str:
    shown = run("doctor", "--json")
    findings = json.loads(shown.stdout)
    return str(next(finding["text"] for finding in findings if finding["name"] == "stale-pools"))


def test_doctor_names_an_embedded_server_until_its_pool_is_closed(
    run: Run, made_paths: list[Path]
) -> None:
    served = Process(roles.serve_index, made_paths)
    try:
        assert f"process {served.pid} of {made_paths[1]}" not in doctor(run)
        made_paths[1].unlink()
        assert f"process {served.pid} of {made_paths[1]}" in doctor(run)
        served.end()
        assert f"process {served.pid}" not in doctor(run)
    finally:
        served.kill()


def test_serve_ends_with_a_line_and_doctor_names_it_before(
    run: Run, made_paths: list[Path]
) -> None:
    pool = ("--pool", made_paths[0], "--pool", made_paths[1])
    started = json.loads(run("serve", *pool, "--detach", "--json").stdout)
    try:
        with Path(started["log"]).open() as log:
            os.kill(started["pid"], signal.SIGSTOP)
            for path in made_paths[0].parent.iterdir():  # as rm -rf does
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            assert f"process {started['pid']} of {made_paths[0]}" in doctor(run)
            os.kill(started["pid"], signal.SIGCONT)
            assert eventually(lambda: not Path(f"/proc/{started['pid']}/maps").exists())
            last = log.read().splitlines()[-1]
    finally:
        if Path(f"/proc/{started['pid']}").exists():
            os.kill(started["pid"], signal.SIGKILL)
    assert last.startswith(f"beluga: error: {made_paths[0]} was removed while it was in use")


# ---- A pool that is in use is neither destroyed nor formatted again.


SIZE = 8 << 20


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
