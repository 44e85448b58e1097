# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A pidfd proves that a session's process has ended, even if another one holds its lock file."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import roles
from support.blocks import eventually
from support.emulation import PATIENCE
from support.role import Process

from beluga.errors import LobbyBusyError
from beluga.pool import Pool
from beluga.rpc import Client, Server

# A client whose child was forked without any hook: it holds a copy of the lock file's descriptor
# and survives the client.
KEEPS_THE_LOCK = """
import ctypes, sys, time
from beluga.pool import Pool
from beluga.rpc import Client
with Pool.open(sys.argv[1:]) as pool, Client(pool) as client:
    child = ctypes.CDLL(None).fork()
    if child == 0:
        time.sleep(600)
    print(child, flush=True)
    time.sleep(600)
"""

# A server that prints the number of its sessions and of the processes that it watches.
COUNTS = """
import sys
from beluga.pool import Pool
from beluga.rpc import Server
with Pool.open(sys.argv[1:]) as pool, Server(pool) as server:
    print("ready", flush=True)
    for _ in sys.stdin:
        stat = server.stat()
        print(stat.live_count, stat.watched_count, flush=True)
"""


@pytest.fixture
def coherence() -> str:
    return "hardware"


@pytest.fixture(autouse=True)
def kernel_with_pidfds() -> None:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:
        pytest.skip(f"this kernel gives no pidfd: {error}")


def start(source: str, paths: list[Path], *before: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*before, sys.executable, "-c", source, *map(str, paths)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    return process.stdout.readline().strip()


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
        client = start(KEEPS_THE_LOCK, paths)
        child = int(line(client))
        try:
            assert (server.stat().live_count, server.stat().watched_count) == (1, 1)
            client.kill()
            client.wait(timeout=60 * PATIENCE)
            assert eventually(lambda: server.stat().live_count == 0)
            assert server.stat().watched_count == 0
            os.kill(child, 0)  # the process lives, and the lock is held
        finally:
            os.kill(child, signal.SIGKILL)
            client.communicate()


def test_a_detached_session_is_no_longer_watched(pool: Pool) -> None:
    with Server(pool) as server:
        for _ in range(5):
            with Client(pool), Client(pool):
                assert server.stat().watched_count == 2
            assert server.stat().watched_count == 0


def test_a_process_of_another_pid_namespace_is_watched(pool: Pool, paths: list[Path]) -> None:
    before = new_pid_namespace()
    with Server(pool) as server:
        client = start(KEEPS_THE_LOCK, paths, *before)
        # a pid in its own namespace; here it is that of another process
        assert int(line(client)) < 20
        assert server.stat().watched_count == 1
        client.kill()
        client.communicate(timeout=60 * PATIENCE)
        assert eventually(lambda: server.stat().live_count == 0)


def test_a_server_of_another_pid_namespace_watches(pool: Pool, paths: list[Path]) -> None:
    server = start(COUNTS, paths, *new_pid_namespace())
    try:
        assert line(server) == "ready"
        with Process(roles.call, paths) as client:

            def counts() -> str:
                assert server.stdin
                server.stdin.write("\n")
                return line(server)

            assert counts() == "1 1"
            client.kill()
            assert eventually(lambda: counts() == "0 0")
    finally:
        server.kill()
        server.communicate(timeout=60 * PATIENCE)


def test_a_stopped_process_that_attaches_delays_others_only_briefly(
    pool: Pool, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BELUGA_CRASH", "request.locked:stop")
    with Server(pool):
        client = start(KEEPS_THE_LOCK, paths)
        _, status = os.waitpid(client.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        with pytest.raises(LobbyBusyError, match="attaching and does not finish"):
            Client(pool, timeout_s=0.3)
        client.send_signal(signal.SIGCONT)
        child = int(line(client))
        with Client(pool) as other:
            other.ping()
        client.kill()
        os.kill(child, signal.SIGKILL)
        client.communicate()


@pytest.mark.parametrize(
    "point", ["request.out", "request.answered", "attach.liveness_held", "request.shown"]
)
def test_a_process_that_dies_while_it_attaches_leaves_no_lane_behind(
    pool: Pool, paths: list[Path], monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    monkeypatch.setenv("BELUGA_CRASH", point)
    with Server(pool) as server:
        for _ in range(2):
            client = start(KEEPS_THE_LOCK, paths)
            assert client.wait(timeout=60 * PATIENCE) == -signal.SIGKILL
            client.communicate()
        assert eventually(lambda: server.stat().live_count == 0)
        with Client(pool) as other:
            other.ping()
            assert eventually(lambda: server.stat().watched_count == 1)


def test_the_lane_of_a_dead_requester_is_released_after_a_stop(
    pool: Pool, paths: list[Path]
) -> None:
    with Process(roles.serve, paths) as server:
        server.signal(signal.SIGSTOP)
        client = start(KEEPS_THE_LOCK, paths)
        time.sleep(1.0)  # a request is sent; if that is slower, the test covers less
        client.kill()
        client.communicate()
        server.signal(signal.SIGCONT)
        assert eventually(lambda: "live_count=0" in server.request("stat"))
        with Client(pool) as other:
            other.ping()
