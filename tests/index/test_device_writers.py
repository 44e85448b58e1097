# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Writers that have devices: a file lock that is free does not prove that they are gone.

The kernel closes the files of a killed process one after another, so its lock may be free while its
device still writes. The clients here release their locks while they run, like such a process during
its exit.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import roles
from support.blocks import eventually, keys, states
from support.role import Process

from beluga.index import IndexClient, IndexServer
from beluga.pool import Pool
from beluga.rpc import Client, Server

# Two sessions: one without grants, and one that is in the middle of a put with a copy engine.
# Commands make them release their locks ("unlock"), or name their process by the number that
# another pid namespace has for it ("move").
WRITER = """
import fcntl, os, sys
import numpy as np
from beluga.kvcache import KVCache
from beluga.pool import Pool
from beluga.rpc import Client

def liveness_locks():
    for name in os.listdir("/proc/self/fd"):
        try:
            if "/alive-" in os.readlink(f"/proc/self/fd/{name}"):
                yield int(name)
        except FileNotFoundError:
            pass

class Device:
    name = "device"
    fault = None
    piece_size = 0

    def gather_write(self, plan):
        print("writing", flush=True)
        for line in sys.stdin:
            for lock in liveness_locks():
                if line == "unlock\\n":
                    fcntl.flock(lock, fcntl.LOCK_UN)
                elif os.fstat(lock).st_size:
                    os.pwrite(lock, (1).to_bytes(8, "little"), 0)
            print("done", flush=True)

    def close(self):
        pass

with Pool.open(sys.argv[1:]) as pool, Client(pool) as plain:
    with KVCache(pool, namespace="", engine=Device()) as cache:
        words = np.arange(1 << 16, dtype=np.uint64).reshape(1, -1)
        cache.put(np.array([[7, os.getpid()]], dtype=np.uint64), words)
"""


class Writer:
    """A process that runs WRITER; it is killed with the test."""

    def __init__(self, paths: list[Path]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WRITER, *map(str, paths)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def receive(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def request(self, what: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(what + "\n")
        assert self.receive() == "done"

    def zombie(self) -> None:
        """Kill a process, so that it stays a zombie: no process waits for it."""
        self.process.kill()
        os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def writer(paths: list[Path]) -> Iterator[Callable[[], Writer]]:
    """Return a function that starts a writer and waits until its device writes."""
    made: list[Writer] = []

    def start() -> Writer:
        made.append(Writer(paths))
        assert made[-1].receive() == "writing"
        return made[-1]

    yield start
    for one in made:
        one.end()


@pytest.fixture
def unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep servers of this process from getting pidfds: there is no socket to connect to."""
    monkeypatch.setattr("beluga.index.server.IndexServer.start", _start_unseen)


def _start_unseen(server: IndexServer) -> None:
    Server.start(server)
    for socket in server._pool.runtime_dir.glob("pidfds-*"):
        socket.unlink()


def test_a_free_lock_does_not_end_a_session_whose_device_may_write(
    server: IndexServer, index: IndexClient, writer: Callable[[], Writer]
) -> None:
    one = writer()
    assert server.stat().live_count == 3
    one.request("unlock")
    assert eventually(lambda: server.stat().live_count == 2)  # the session that has no device
    assert index.stat().grant_count == 1
    one.zombie()
    assert eventually(lambda: server.stat().live_count == 1)
    assert index.stat().grant_count == 0


@pytest.mark.usefixtures("unseen")
def test_the_lock_file_has_the_pid_for_servers_without_pidfds(
    server: IndexServer, index: IndexClient, writer: Callable[[], Writer]
) -> None:
    one = writer()
    assert server.stat().watched_count == 0
    one.request("unlock")
    assert eventually(lambda: server.stat().live_count == 2)
    assert index.stat().grant_count == 1
    one.zombie()
    assert eventually(lambda: server.stat().live_count == 1)
    assert index.stat().used_bytes == 0


def test_a_successor_reads_the_list_of_devices(
    pool: Pool, paths: list[Path], writer: Callable[[], Writer]
) -> None:
    with Process(roles.serve_index, paths) as first:
        one = writer()
        first.kill()
    one.request("unlock")
    with IndexServer(pool) as server, Client(pool) as client:
        index = IndexClient(client)
        assert eventually(lambda: server.stat().inherited_count == 1)
        assert index.stat().held_bytes > 0
        one.zombie()
        assert eventually(lambda: server.stat().inherited_count == 0)
        assert index.stat().held_bytes == 0


def test_a_client_that_dies_with_its_server_is_proven_gone_by_the_next(
    pool: Pool, paths: list[Path], writer: Callable[[], Writer]
) -> None:
    with Process(roles.serve_index, paths) as first:
        one = writer()
        first.signal(signal.SIGSTOP)  # the server cannot detect the death
        one.end()
        first.kill()
    with IndexServer(pool) as server, Client(pool) as client:
        assert eventually(lambda: server.stat().inherited_count == 0)
        assert states(IndexClient(client).reserve(keys([1]), length=1 << 20)) == ["GRANTED"]


def test_a_process_of_another_pid_namespace_stays_suspect(
    pool: Pool, paths: list[Path], writer: Callable[[], Writer]
) -> None:
    with Process(roles.serve_index, paths) as first:
        one, other = writer(), writer()
        first.kill()
    one.request("move")
    one.end()
    other.end()
    with IndexServer(pool) as server, Client(pool) as client:
        assert eventually(lambda: server.stat().inherited_count == 1)
        assert IndexClient(client).stat().held_bytes > 0


def test_a_closed_session_is_not_suspect(pool: Pool, paths: list[Path]) -> None:
    """Without a server, a process that releases its lock and continues has detached."""
    with Process(roles.serve_index, paths) as first, Process(roles.close_a_cache, paths) as client:
        assert client.request("put") == "1"
        first.kill()
        assert client.request("close") == "closed"
        with IndexServer(pool) as server:
            assert eventually(lambda: server.stat().inherited_count == 0)
