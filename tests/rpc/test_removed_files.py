# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A server in any process stops once the file of one of its devices was removed, and ``beluga
doctor`` names the processes that keep the memory.
"""

from __future__ import annotations

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
from support.role import Process

import beluga.pool.runtime
import beluga.rpc.server
from beluga import IndexServer, KVCache, Pool
from beluga.errors import DeviceMissingError, NoServerError
from beluga.rpc import Server

Run = Callable[..., "subprocess.CompletedProcess[str]"]
KEY = b"k" * 16


@pytest.fixture(autouse=True)
def short_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beluga.rpc.server, "_FILES_LOOK_S", 0.01)


@pytest.fixture
def paths(shm: Path) -> list[Path]:
    paths = [shm / "a", shm / "b"]
    Pool.create(paths, device_size=16 << 20).close()
    return paths


def replaced(path: Path) -> None:
    """Create another pool in place of the file."""
    path.unlink()
    Pool.create([path], device_size=16 << 20).close()


@pytest.mark.parametrize("remove", [Path.unlink, replaced], ids=["removed", "replaced"])
@pytest.mark.parametrize("number", [0, 1])
def test_an_embedded_server_ends_once_a_file_is_removed(
    paths: list[Path], remove: Callable[[Path], object], number: int
) -> None:
    with (
        Pool.open(paths) as pool,
        IndexServer(pool) as server,
        KVCache(pool, namespace="a") as cache,
    ):
        assert cache.put([KEY], [b"x" * 1000]).stored == 1
        remove(paths[number])
        assert eventually(lambda: server.failure is not None)
        assert isinstance(server.failure, DeviceMissingError)
        assert str(paths[number]) in str(server.failure)

        def nobody_serves() -> bool:
            try:
                cache.lookup([KEY])
            except NoServerError:
                return True
            return False  # the failure is set before the loop has ended

        assert eventually(nobody_serves)


def test_serve_forever_raises_that_a_file_was_removed(paths: list[Path]) -> None:
    with Pool.open(paths) as pool:
        server = Server(pool)
        remover = threading.Timer(0.05, paths[0].unlink)
        remover.start()
        with pytest.raises(DeviceMissingError, match="removed while it was in use"):
            server.serve_forever()
        remover.join()


def test_a_server_continues_if_files_are_renamed_or_proc_is_hidden(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = threading.Semaphore(0)
    look = Pool.refuse_removed

    def counted(pool: Pool) -> None:
        look(pool)
        looked.release()

    monkeypatch.setattr(Pool, "refuse_removed", counted)
    with (
        Pool.open(paths) as pool,
        IndexServer(pool) as server,
        KVCache(pool, namespace="a") as cache,
    ):
        renamed = paths[0].rename(paths[0].with_name("c"))
        assert all(looked.acquire(timeout=60) for _ in range(3))
        monkeypatch.setattr(beluga.pool.runtime, "_MAPS", Path("/proc/self/hidden"))
        renamed.unlink()
        assert all(looked.acquire(timeout=60) for _ in range(3))
        assert server.failure is None
        assert cache.put([KEY], [b"x" * 1000]).stored == 1


def test_the_check_of_the_files_ends_with_the_server(paths: list[Path]) -> None:
    with Pool.open(paths) as pool:
        with IndexServer(pool) as server:
            pass
        paths[0].unlink()
        assert eventually(
            lambda: "beluga-files" not in {thread.name for thread in threading.enumerate()}
        )
        assert server.failure is None


def doctor(run: Run) -> str:
    shown = run("doctor", "--json")
    findings = json.loads(shown.stdout)
    return str(next(finding["text"] for finding in findings if finding["name"] == "stale-pools"))


def test_doctor_names_an_embedded_server_until_its_pool_is_closed(
    run: Run, paths: list[Path]
) -> None:
    served = Process(roles.serve_index, paths)
    try:
        assert f"process {served.pid} of {paths[1]}" not in doctor(run)
        paths[1].unlink()
        assert f"process {served.pid} of {paths[1]}" in doctor(run)
        served.end()
        assert f"process {served.pid}" not in doctor(run)
    finally:
        served.kill()


def test_serve_ends_with_a_line_and_doctor_names_it_before(run: Run, paths: list[Path]) -> None:
    pool = ("--pool", paths[0], "--pool", paths[1])
    started = json.loads(run("serve", *pool, "--detach", "--json").stdout)
    try:
        with Path(started["log"]).open() as log:
            os.kill(started["pid"], signal.SIGSTOP)
            for path in paths[0].parent.iterdir():  # as rm -rf does
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            assert f"process {started['pid']} of {paths[0]}" in doctor(run)
            os.kill(started["pid"], signal.SIGCONT)
            assert eventually(lambda: not Path(f"/proc/{started['pid']}/maps").exists())
            last = log.read().splitlines()[-1]
    finally:
        if Path(f"/proc/{started['pid']}").exists():
            os.kill(started["pid"], signal.SIGKILL)
    assert last.startswith(f"beluga: error: {paths[0]} was removed while it was in use")
