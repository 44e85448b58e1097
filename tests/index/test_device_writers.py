# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Pools on devices: a file lock that is free does not prove that a writer is gone, and a metadata
device that hardware keeps coherent serves data under software coherence.
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
from support.blocks import eventually, held, keys, put, states
from support.role import Process

from beluga.index import IndexClient, IndexServer, check_pool, repair_pool
from beluga.pool import STRIPE_SIZE, Pool
from beluga.rpc import Client, Server
from beluga.verify import verify_pool

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

MIB = 1 << 20


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
    for started in made:
        started.end()


def _start_unseen(server: IndexServer) -> None:
    Server.start(server)
    for socket in server._pool.runtime_dir.glob("pidfds-*"):
        socket.unlink()


@pytest.fixture(params=["pidfd", "lock file"])
def pidfds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether servers of this process get pidfds; otherwise there is no socket to connect to, and
    the lock file has the pid.
    """
    if request.param == "lock file":
        monkeypatch.setattr("beluga.index.server.IndexServer.start", _start_unseen)
    return bool(request.param == "pidfd")


def test_a_free_lock_does_not_end_a_session_whose_device_may_write(
    pidfds: bool, server: IndexServer, index: IndexClient, writer: Callable[[], Writer]
) -> None:
    process = writer()
    assert server.stat().live_count == 3
    assert pidfds or server.stat().watched_count == 0
    process.request("unlock")
    assert eventually(lambda: server.stat().live_count == 2)  # the session that has no device
    assert index.stat().grant_count == 1
    process.zombie()
    assert eventually(lambda: server.stat().live_count == 1)
    assert (index.stat().grant_count, index.stat().used_bytes) == (0, 0)


def test_a_successor_reads_the_list_of_devices(
    pool: Pool, paths: list[Path], writer: Callable[[], Writer]
) -> None:
    with Process(roles.serve_index, paths) as first:
        process = writer()
        first.kill()
    process.request("unlock")
    with IndexServer(pool) as server, Client(pool) as client:
        index = IndexClient(client)
        assert eventually(lambda: server.stat().inherited_count == 1)
        assert index.stat().held_bytes > 0
        process.zombie()
        assert eventually(lambda: server.stat().inherited_count == 0)
        assert index.stat().held_bytes == 0


def test_a_client_that_dies_with_its_server_is_proven_gone_by_the_next(
    pool: Pool, paths: list[Path], writer: Callable[[], Writer]
) -> None:
    with Process(roles.serve_index, paths) as first:
        process = writer()
        first.signal(signal.SIGSTOP)  # the server cannot detect the death
        process.end()
        first.kill()
    with IndexServer(pool) as server, Client(pool) as client:
        assert eventually(lambda: server.stat().inherited_count == 0)
        assert states(IndexClient(client).reserve(keys([1]), length=1 << 20)) == ["GRANTED"]


def test_a_process_of_another_pid_namespace_stays_suspect(
    pool: Pool, paths: list[Path], writer: Callable[[], Writer]
) -> None:
    with Process(roles.serve_index, paths) as first:
        process, other = writer(), writer()
        first.kill()
    process.request("move")
    process.end()
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


@pytest.fixture
def metadata_paths(shm: Path) -> list[Path]:
    """The devices, the metadata device in the middle."""
    return [shm / "a", shm / "metadata", shm / "b"]


@pytest.fixture
def metadata_pool(metadata_paths: list[Path]) -> Iterator[Pool]:
    with Pool.create(
        [metadata_paths[0], metadata_paths[2]],
        device_size=32 * MIB,
        coherence="software",
        metadata=metadata_paths[1],
        metadata_coherence="hardware",
        sparse=True,
        max_blocks=256,
    ) as metadata_pool:
        yield metadata_pool


def test_hosts_share_the_pool(metadata_pool: Pool) -> None:
    with (
        IndexServer(metadata_pool, host=2),
        Client(metadata_pool, host=1) as client,
        Client(metadata_pool, host=3) as other,
    ):
        put(IndexClient(client), range(10))
        assert held(IndexClient(other), range(12)) == set(range(10))
        IndexClient(other).remove(keys(range(4)))
        assert held(IndexClient(client), range(12)) == set(range(4, 10))


def test_blocks_survive_a_kill_and_a_restart(
    metadata_pool: Pool, metadata_paths: list[Path]
) -> None:
    with Process(roles.serve_index, metadata_paths) as first, Client(metadata_pool) as client:
        index = IndexClient(client)
        put(index, range(20))
        index.remove(keys(range(5)))
        first.kill()
        with Process(roles.serve_index, metadata_paths) as second:
            assert held(index, range(20)) == set(range(5, 20))
            put(index, range(30, 40))
            assert second.end() == 0
        with IndexServer(metadata_pool):
            assert held(index, range(40)) == {*range(5, 20), *range(30, 40)}
    report = check_pool(metadata_pool, payload=True)
    assert (report.finding_count, report.block_count) == (0, 25)


def test_all_space_of_the_data_devices_is_for_blocks(metadata_pool: Pool) -> None:
    with IndexServer(metadata_pool) as server, Client(metadata_pool) as client:
        put(IndexClient(client), range(40))
        cells = server.space_map(15)
        tables, used = cells["table_count"].sum(axis=1), cells["used_bytes"].sum(axis=1)
        own = metadata_pool.devices[0].stripe_count - 1
        assert tables.tolist() == [own, 0, 0]
        assert cells["stripe_count"].sum(axis=1).tolist() == [own, 15, 15]
        assert used[0] == 0
        assert min(used[1:]) > 0
        assert server.index_stat().used_bytes == used.sum()


def test_damage_on_the_metadata_device_is_found_and_dropped(metadata_pool: Pool) -> None:
    with IndexServer(metadata_pool), Client(metadata_pool) as client:
        put(IndexClient(client), range(6))
    report = check_pool(metadata_pool)
    line = metadata_pool.geometry.table_offset
    line += (report.half * metadata_pool.geometry.block_count_max + 2) * 64
    with metadata_pool.devices[0].path.open("r+b") as file:
        file.seek(STRIPE_SIZE + line + 8)
        file.write(b"\xff" * 8)
    assert check_pool(metadata_pool).finding_count > 0
    acts, after = repair_pool(metadata_pool)
    assert acts
    assert (after.finding_count, after.block_count) == (0, 5)


def test_the_metadata_device_is_verified_too(metadata_pool: Pool) -> None:
    report = verify_pool(metadata_pool, seconds=0.2)
    assert {finding.device for finding in report.findings} == {0, 1, 2}
    assert report.good
    with IndexServer(metadata_pool), Client(metadata_pool) as client:
        put(IndexClient(client), range(3))  # nothing of the pool was overwritten
    assert check_pool(metadata_pool).finding_count == 0
