# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Processes that run out of file descriptors continue to serve, and later catch up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support import forked, roles
from support.blocks import eventually
from support.role import Process

from beluga.pool import Pool
from beluga.rpc import Client, Server

# A process that executes commands of its standard input: "starve N" leaves N descriptors, "feed"
# restores the limit; a server prints its sessions, the inherited and the watched ones, and its CPU
# time in milliseconds.
STARVES = """
import os, resource, sys, time
from beluga.errors import BelugaError
from beluga.pool import Pool
from beluga.rpc import Client, Server

taken = []

def starve(left):
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    try:
        while True:
            taken.append(os.dup(0))
    except OSError:
        for _ in range(left):
            os.close(taken.pop())

def feed():
    while taken:
        os.close(taken.pop())

def lines():
    for line in sys.stdin:
        word, _, number = line.strip().partition(" ")
        if word == "starve":
            starve(int(number))
        elif word == "feed":
            feed()
        yield word

def answer(*what):
    print(*what, flush=True)

def trial(act):
    try:
        return act()
    except (BelugaError, OSError) as error:
        answer(type(error).__name__, error)

pool = Pool.open(sys.argv[2:])
"""
SERVES = (
    STARVES
    + """
server = Server(pool)
answer("ready")
for word in lines():
    if word == "start":
        trial(lambda: (server.start(), answer("started")))
    else:
        stat = server.stat()
        used = int(1000 * time.process_time())
        answer(stat.live_count, stat.inherited_count, stat.watched_count, used)
"""
)
CALLS = (
    STARVES
    + """
clients = []
answer("ready")
for word in lines():
    if word == "attach":
        trial(lambda: (clients.append(Client(pool, timeout_s=5)), answer("attached")))
    elif word == "ping":
        trial(lambda: (clients[-1].ping(timeout_s=5), answer("answered")))
    else:
        answer("done")
"""
)


class Starving:
    """A process that runs one of the programs above."""

    def __init__(self, source: str, paths: list[Path]) -> None:
        self._process = forked.start(source, "-", *paths)
        assert self._receive() == "ready"

    def request(self, what: str) -> str:
        assert self._process.stdin
        self._process.stdin.write(what + "\n")
        return self._receive()

    def counts(self, what: str = "stat") -> list[int]:
        return [int(number) for number in self.request(what).split()]

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _receive(self) -> str:
        assert self._process.stdout
        return self._process.stdout.readline().strip()


@pytest.fixture
def coherence() -> str:
    return "hardware"


@pytest.fixture
def server(pool: Pool, paths: list[Path]) -> Iterator[Starving]:
    """A server that is not started yet."""
    process = Starving(SERVES, paths)
    yield process
    process.end()


@pytest.mark.parametrize("left", [0, 1, 2, 3])
def test_a_server_without_descriptors_serves_and_detects_deaths_later(
    pool: Pool, paths: list[Path], server: Starving, left: int
) -> None:
    assert server.request("start") == "started"
    server.request(f"starve {left}")
    with Client(pool) as client, Process(roles.call, paths) as other:
        assert server.counts()[0] == 2
        client.ping()
        other.kill()
        server.request("feed")
        assert eventually(lambda: server.counts()[0] == 1)
        client.ping()
        assert eventually(lambda: server.counts()[2] == 1)


def test_the_server_does_not_spin_on_clients_that_it_cannot_accept(
    pool: Pool, server: Starving
) -> None:
    assert server.request("start") == "started"
    used = server.counts("starve 0")[3]
    with Client(pool) as client:
        for _ in range(200):
            client.ping()
        assert server.counts()[3] - used < 5000  # the server responds again


def test_a_death_is_detected_while_others_wait_to_be_accepted(
    pool: Pool, paths: list[Path], server: Starving
) -> None:
    assert server.request("start") == "started"
    with Process(roles.call, paths) as attached:
        assert server.counts()[2] == 1
        server.request("starve 0")
        with Client(pool):
            attached.kill()
            assert eventually(lambda: server.counts()[0] == 1)
            # Two descriptors are free now. If the other process's lock file takes one, its
            # connection takes the last, and none is left for its pidfd.
            server.request("feed")
            assert eventually(lambda: server.counts()[2] == 1)


@pytest.mark.parametrize("left", range(6))
def test_a_server_without_descriptors_raises_and_leaves_the_pool_unchanged(
    pool: Pool, server: Starving, left: int
) -> None:
    server.request("starve 0")  # the reply has its counters, which are still 0
    server.request("feed")
    server.request(f"starve {left}")
    assert "Too many open files" in server.request("start")
    with Server(pool) as rightful:  # no epoch was taken
        assert rightful.stat().epoch == 1


def test_a_successor_detects_deaths_that_it_could_not_check_at_once(
    pool: Pool, paths: list[Path], server: Starving
) -> None:
    with Process(roles.serve, paths) as first:
        clients = [Process(roles.call, paths) for _ in range(3)]
        first.kill()
        for client in clients:
            client.kill()
    server.request("starve 6")  # two descriptors are left for three sessions
    assert server.request("start") == "started"
    assert eventually(lambda: server.counts()[1] == 0)


def test_attach_fails_without_descriptors_and_succeeds_later(pool: Pool, paths: list[Path]) -> None:
    with Server(pool) as server:
        client = Starving(CALLS, paths)
        try:
            client.request("starve 0")
            assert "Too many open files" in client.request("attach")
            client.request("feed")
            client.request("starve 1")
            assert "Too many open files" in client.request("attach")
            assert server.stat().live_count == 0
            client.request("feed")
            assert client.request("attach") == "attached"
            assert client.request("ping") == "answered"
        finally:
            client.end()
        assert eventually(lambda: server.stat().live_count == 0)


def test_a_standby_checks_again_without_more_descriptors(pool: Pool, paths: list[Path]) -> None:
    server = Process(roles.serve, paths)
    standby = Server(pool)
    counts = []
    for _ in range(2):
        assert not standby.watch(0.1, silent_s=60.0)
        counts.append(len(list(Path("/proc/self/fd").iterdir())))
    assert counts[0] == counts[1]
    standby.stop()
    server.kill()
