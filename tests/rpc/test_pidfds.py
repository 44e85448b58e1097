# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A pidfd proves that a session's process has ended, even if another one holds its lock file."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from support import roles
from support.blocks import eventually
from support.role import Process, reply

from beluga.errors import LobbyBusyError
from beluga.pool import Pool
from beluga.rpc import Client, Server


# A client whose child was forked without any hook: it holds a copy of the lock file's descriptor
# and survives the client.
def keep_the_lock(paths: list[str]) -> None:
    reply("ready")
    with Pool.open(paths) as pool, Client(pool):
        child = ctypes.CDLL(None).fork()
        if child == 0:
            time.sleep(600)
        reply(child)
        time.sleep(600)


@pytest.fixture
def coherence() -> str:
    return "hardware"


@pytest.fixture(autouse=True)
def kernel_with_pidfds() -> None:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:
        pytest.skip(f"this kernel gives no pidfd: {error}")


def new_pid_namespace() -> list[str]:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("a pid namespace takes root and unshare")
    command = ["unshare", "--pid", "--fork", "--kill-child"]
    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        pytest.skip("unshare --pid is not allowed here")
    return command


def test_a_killed_process_is_dead_although_its_child_holds_the_lock(
    pool: Pool, paths: list[Path]
) -> None:
    with Server(pool) as server:
        client = Process(keep_the_lock, paths)
        child = int(client.receive())
        try:
            assert (server.stat().live_count, server.stat().watched_count) == (1, 1)
            client.kill()
            assert eventually(lambda: server.stat().live_count == 0)
            assert server.stat().watched_count == 0
            os.kill(child, 0)  # the process lives, and the lock is held
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_detached_session_is_no_longer_watched(pool: Pool) -> None:
    with Server(pool) as server:
        for _ in range(5):
            with Client(pool), Client(pool):
                assert server.stat().watched_count == 2
            assert server.stat().watched_count == 0


def test_a_process_of_another_pid_namespace_is_watched(pool: Pool, paths: list[Path]) -> None:
    before = new_pid_namespace()
    with Server(pool) as server, Process(keep_the_lock, paths, prefix=before) as client:
        # a pid in its own namespace; here it is that of another process
        assert int(client.receive()) < 20
        assert server.stat().watched_count == 1
        client.kill()
        assert eventually(lambda: server.stat().live_count == 0)


def test_a_server_of_another_pid_namespace_watches(pool: Pool, paths: list[Path]) -> None:
    with (
        Process(roles.serve, paths, prefix=new_pid_namespace()) as server,
        Process(roles.call, paths) as client,
    ):

        def counts() -> list[str]:
            return re.findall(r"(?:live|watched)_count=(\d+)", server.request("stat"))

        assert counts() == ["1", "1"]
        client.kill()
        assert eventually(lambda: counts() == ["0", "0"])


def test_a_stopped_process_that_attaches_delays_others_only_briefly(
    pool: Pool, paths: list[Path]
) -> None:
    crash = {"BELUGA_CRASH": "request.locked:stop"}
    with Server(pool), Process(keep_the_lock, paths, environment=crash) as client:
        assert client.stopped()
        with pytest.raises(LobbyBusyError, match="attaching and does not finish"):
            Client(pool, timeout_s=0.3)
        client.signal(signal.SIGCONT)
        child = int(client.receive())
        with Client(pool) as other:
            other.ping()
        client.kill()
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize(
    "point", ["request.out", "request.answered", "attach.liveness_held", "request.shown"]
)
def test_a_process_that_dies_while_it_attaches_leaves_no_lane_behind(
    pool: Pool, paths: list[Path], point: str
) -> None:
    with Server(pool) as server:
        for _ in range(2):
            client = Process(keep_the_lock, paths, environment={"BELUGA_CRASH": point})
            assert client.died() == -signal.SIGKILL
        assert eventually(lambda: server.stat().live_count == 0)
        with Client(pool) as other:
            other.ping()
            assert eventually(lambda: server.stat().watched_count == 1)


def test_the_lane_of_a_dead_requester_is_released_after_a_stop(
    pool: Pool, paths: list[Path]
) -> None:
    with Process(roles.serve, paths) as server:
        server.signal(signal.SIGSTOP)
        client = Process(keep_the_lock, paths)
        time.sleep(1.0)  # a request is sent; if that is slower, the test covers less
        client.kill()
        server.signal(signal.SIGCONT)
        assert eventually(lambda: "live_count=0" in server.request("stat"))
        with Client(pool) as other:
            other.ping()
