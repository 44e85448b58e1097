# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Sessions whose processes no server can prove alive or dead, like those of other hosts: a missing
heartbeat quarantines their space, but never frees it.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.blocks import eventually, keys, states

from beluga._ffi import lib
from beluga.index import IndexClient, IndexServer
from beluga.pool import Pool
from beluga.rpc import Client

# A client with another runtime directory: the server finds no lock and no pidfd of it. It reserves
# blocks, then executes each line: "hold S" holds the GIL for S seconds, "call" calls the server
# until it replies, "commit" commits the blocks.
ELSEWHERE = """
import sys, time
from pathlib import Path
from beluga.pool import Pool
from support.blocks import keys
from support.elsewhere import imitate
from support.roles import hold_interpreter
from beluga.errors import CallTimeoutError
from beluga.index import IndexClient
from beluga.rpc import Client

real = Pool.runtime_dir
Pool.runtime_dir = property(lambda pool: imitate(real.fget(pool), Path(sys.argv[1])))
with Pool.open(sys.argv[2:]) as pool, Client(pool) as client:
    grants = IndexClient(client).reserve(keys([1, 2]), length=1 << 20)
    print("reserved", flush=True)
    for line in sys.stdin:
        verb, *seconds = line.split()
        if verb == "hold":
            hold_interpreter(float(seconds[0]))
        while verb == "call":
            try:
                client.ping(timeout_s=2)
                break
            except CallTimeoutError:
                pass
        lost = IndexClient(client).commit(grants) if verb == "commit" else ""
        print(client.stat().reattach_count, lost, flush=True)
"""


@pytest.fixture
def pool(paths: list[Path]) -> Iterator[Pool]:
    with Pool.create(paths, device_size=64 << 20, sparse=True, max_blocks=64) as pool:
        yield pool


class Elsewhere:
    """The process, controlled line by line."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def request(self, line: str) -> str:
        assert self.process.stdin
        assert self.process.stdout
        if line:
            self.process.stdin.write(line + "\n")
        return self.process.stdout.readline().strip()


@contextmanager
def elsewhere(
    pool: Pool, paths: list[Path], directory: Path, heartbeat_lost_s: float
) -> Iterator[tuple[IndexServer, Elsewhere]]:
    """Yield a server, and a process whose life it cannot determine."""
    directory.mkdir()
    server = IndexServer(pool, heartbeat_lost_s=heartbeat_lost_s)
    server.start()
    process = subprocess.Popen(
        [sys.executable, "-c", ELSEWHERE, str(directory), *map(str, paths)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
        cwd=Path(__file__).resolve().parents[1],  # the tests' import root
    )
    try:
        client = Elsewhere(process)
        assert client.request("") == "reserved"
        yield server, client
    finally:
        process.kill()
        process.communicate()
        server.stop()


def test_a_silent_session_is_quarantined_until_its_next_heartbeat(
    pool: Pool, paths: list[Path], tmp_path: Path
) -> None:
    with elsewhere(pool, paths, tmp_path / "elsewhere", 3.0) as (server, client):
        assert (server.stat().live_count, server.stat().watched_count) == (1, 0)
        assert server.index_stat().grant_count == 2
        client.process.send_signal(signal.SIGSTOP)
        assert eventually(lambda: server.stat().live_count == 0, timeout_s=60)
        assert server.index_stat().grant_count == 0
        held = server.index_stat().held_bytes
        assert held >= 2 << 20
        time.sleep(1.0)  # space is not freed by the passing of time
        assert server.index_stat().held_bytes == held
        with Client(pool) as other:  # quarantined space is not granted
            again = IndexClient(other).reserve(keys([1, 2]), length=1 << 20)
            assert states(again) == ["GRANTED"] * 2
            assert server.index_stat().held_bytes == held
        client.process.send_signal(signal.SIGCONT)
        assert client.request("call") == "1"  # a new session, which abandoned the grants
        assert eventually(lambda: server.index_stat().held_bytes == 0)
        assert server.stat().live_count == 1


def test_a_client_with_an_abandoned_session_gets_an_error_at_once(
    pool: Pool, paths: list[Path], tmp_path: Path
) -> None:
    with elsewhere(pool, paths, tmp_path / "elsewhere", 0.5) as (server, client):
        client.process.send_signal(signal.SIGSTOP)
        assert eventually(lambda: server.stat().live_count == 0, timeout_s=60)
        client.process.send_signal(signal.SIGCONT)
        lost = -lib.BL_ERROR_NO_GRANT
        assert client.request("commit") == f"1 [{lost}, {lost}]"  # and no call has timed out
        assert server.stat().live_count == 1
        assert eventually(lambda: server.index_stat().held_bytes == 0)


def test_a_session_killed_on_another_host_stays_quarantined(
    pool: Pool, paths: list[Path], tmp_path: Path
) -> None:
    with elsewhere(pool, paths, tmp_path / "elsewhere", 0.5) as (server, client):
        client.process.kill()
        assert eventually(lambda: server.stat().live_count == 0, timeout_s=60)
        assert server.index_stat().held_bytes > 0
        time.sleep(1.0)
        assert server.index_stat().held_bytes > 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("heartbeat_lost_s", "hold_s"), [(3.0, 6.0), pytest.param(5.0, 60.0, marks=pytest.mark.slow)]
)
def test_a_process_that_holds_the_interpreter_keeps_its_session(
    pool: Pool, paths: list[Path], tmp_path: Path, heartbeat_lost_s: float, hold_s: float
) -> None:
    with elsewhere(pool, paths, tmp_path / "elsewhere", heartbeat_lost_s) as (server, client):
        assert client.request(f"hold {hold_s}") == "0"
        assert client.request("call") == "0"
        stat = server.stat()
        assert (stat.attach_count, stat.end_count) == (1, 0)
        assert server.index_stat().grant_count == 2
