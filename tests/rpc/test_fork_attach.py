# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A fork while another thread attaches: the child neither keeps the session alive nor ends it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import pytest

from beluga import Client, Pool
from beluga.rpc import METHOD_USER, Server

# This process forks once its session has a liveness lock that the server has not recorded yet. The
# child prints its descriptors of the lock, and ends on command; then the parent makes a call.
ATTACHES = """
import os, sys, threading
from beluga import Client, Pool
from beluga.errors import ForkedSessionError
reader, pool = int(sys.argv[1]), Pool.open(sys.argv[2:])
known = set(os.listdir(pool.runtime_dir))
made = []
thread = threading.Thread(target=lambda: made.append(Client(pool, timeout_s=60)))
thread.start()
while not any(name.startswith("alive-") for name in set(os.listdir(pool.runtime_dir)) - known):
    thread.join(0.001)
child = os.fork()
if child == 0:
    links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
             if os.path.islink(f"/proc/self/fd/{fd}")]
    held = [link for link in links if os.path.basename(link).startswith(("alive-", "new-"))]
    try:
        with pool.using():
            held.append("the pool")
    except ForkedSessionError:
        pass
    print("child", held, flush=True)
    os.read(reader, 1)
    sys.exit(0)  # with a normal exit of the interpreter
sys.stdin.readline()  # the server continues
thread.join()
print("attached", made[0].stat().reattach_count, flush=True)
_, status = os.waitpid(child, 0)
print("status", status, flush=True)
made[0].ping()
print("lives", made[0].stat().reattach_count, flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def paths(shm: Path) -> list[Path]:
    return [shm / "a"]


@contextmanager
def held_still(pool: Pool) -> Iterator[threading.Event]:
    """Let the pool's server answer no client until the event is set."""
    go, busy = threading.Event(), threading.Event()

    def handler(_: bytes) -> bytes:
        busy.set()
        go.wait(60)
        return b""

    server = Server(pool)
    server.handle(METHOD_USER, handler)
    with server, Client(pool, timeout_s=60) as client:
        caller = threading.Thread(target=client.call, args=(METHOD_USER,))
        caller.start()
        try:
            assert busy.wait(60)
            yield go
        finally:
            go.set()
            caller.join()


@contextmanager
def attaching(paths: list[Path]) -> Iterator[tuple[subprocess.Popen[str], BinaryIO]]:
    """Yield a process that attaches, and an object whose close() ends its child."""
    reader, writer = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", ATTACHES, str(reader), *map(str, paths)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
        pass_fds=[reader],
    )
    os.close(reader)
    try:
        with os.fdopen(writer, "wb") as ending:
            yield process, ending
    finally:
        process.kill()
        process.wait()


def receive(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def send(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")


def liveness_locks(pool: Pool) -> list[str]:
    """Return the liveness locks of sessions; the test's server and its client have one each."""
    return [path.name for path in pool.runtime_dir.glob("alive-*")]


def eventually_locks(pool: Pool, count: int) -> bool:
    deadline = time.monotonic() + 60
    while len(liveness_locks(pool)) != count and time.monotonic() < deadline:
        time.sleep(0.002)
    return len(liveness_locks(pool)) == count


@contextmanager
def attached(
    pool: Pool, paths: list[Path]
) -> Iterator[tuple[subprocess.Popen[str], BinaryIO, int]]:
    """Yield a process that has forked a child and then attached, an object whose close() ends the
    child, and the number of liveness locks before.
    """
    with held_still(pool) as go:
        before = len(liveness_locks(pool))
        with attaching(paths) as (process, ending):
            assert receive(process) == "child []"
            go.set()
            send(process)
            assert receive(process) == "attached 0"
            yield process, ending, before


def test_a_child_forked_during_attach_does_not_own_the_session(
    pool: Pool, paths: list[Path]
) -> None:
    with attached(pool, paths) as (process, ending, before):
        assert len(liveness_locks(pool)) == before + 1
        ending.close()
        assert receive(process) == "status 0"
        assert receive(process) == "lives 0"
        assert len(liveness_locks(pool)) == before + 1


def test_a_session_ends_with_its_process_although_a_child_survives(
    pool: Pool, paths: list[Path]
) -> None:
    with attached(pool, paths) as (process, ending, before):
        process.kill()
        process.wait()
        assert eventually_locks(pool, before)
        ending.write(b"x")  # writing to a pipe without a reader fails
        ending.flush()
