# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Processes that run out of file descriptors continue to serve, and later catch up."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import roles
from support.blocks import eventually
from support.role import Process, lines, reply

from beluga.errors import BelugaError
from beluga.pool import Pool
from beluga.rpc import Client, Server


class Shortage:
    """The descriptors that a process lacks: commands "starve N", which leaves N, and "feed"."""

    def __init__(self) -> None:
        self._taken: list[int] = []

    def lines(self) -> Iterator[str]:
        """Yield the test's lines, after their effect; replies to these two are the caller's."""
        for line in lines():
            word, _, number = line.partition(" ")
            if word == "starve":
                self._starve(int(number))
            elif word == "feed":
                self._feed()
            yield word

    def _starve(self, left: int) -> None:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, limit))
        try:
            while True:
                self._taken.append(os.dup(0))
        except OSError:
            for _ in range(left):
                os.close(self._taken.pop())

    def _feed(self) -> None:
        while self._taken:
            os.close(self._taken.pop())


def attempt(call: Callable[[], object]) -> None:
    try:
        call()
        reply("done")
    except (BelugaError, OSError) as error:
        reply(f"{type(error).__name__} {error}")


def serve(paths: list[str]) -> None:
    """Replies with its sessions, the inherited and the watched ones, and its CPU time in ms."""
    server = Server(Pool.open(paths))
    for word in Shortage().lines():
        if word == "start":
            attempt(server.start)
        else:
            stat = server.stat()
            used = int(1000 * time.process_time())
            reply(f"{stat.live_count} {stat.inherited_count} {stat.watched_count} {used}")


def call(paths: list[str]) -> None:
    pool, clients = Pool.open(paths), list[Client]()
    for word in Shortage().lines():
        if word == "attach":
            attempt(lambda: clients.append(Client(pool, timeout_s=5)))
        elif word == "ping":
            attempt(lambda: clients[-1].ping(timeout_s=5))
        else:
            reply("done")


def counts(server: Process, command: str = "stat") -> list[int]:
    return [int(number) for number in server.request(command).split()]


@pytest.fixture
def coherence() -> str:
    return "hardware"


@pytest.fixture
def server(pool: Pool, paths: list[Path]) -> Iterator[Process]:
    """A server that is not started yet."""
    with Process(serve, paths) as process:
        yield process


@pytest.mark.parametrize("left", [0, 1, 2, 3])
def test_a_server_without_descriptors_serves_and_detects_deaths_later(
    pool: Pool, paths: list[Path], server: Process, left: int
) -> None:
    assert server.request("start") == "done"
    server.request(f"starve {left}")
    with Client(pool) as client, Process(roles.call, paths) as other:
        assert counts(server)[0] == 2
        client.ping()
        other.kill()
        server.request("feed")
        assert eventually(lambda: counts(server)[0] == 1)
        client.ping()
        assert eventually(lambda: counts(server)[2] == 1)


def test_the_server_does_not_spin_on_clients_that_it_cannot_accept(
    pool: Pool, server: Process
) -> None:
    assert server.request("start") == "done"
    used = counts(server, "starve 0")[3]
    with Client(pool) as client:
        for _ in range(200):
            client.ping()
        assert counts(server)[3] - used < 5000  # the server responds again


def test_a_death_is_detected_while_others_wait_to_be_accepted(
    pool: Pool, paths: list[Path], server: Process
) -> None:
    assert server.request("start") == "done"
    with Process(roles.call, paths) as attached:
        assert counts(server)[2] == 1
        server.request("starve 0")
        with Client(pool):
            attached.kill()
            assert eventually(lambda: counts(server)[0] == 1)
            # Two descriptors are free now. If the other process's lock file takes one, its
            # connection takes the last, and none is left for its pidfd.
            server.request("feed")
            assert eventually(lambda: counts(server)[2] == 1)


@pytest.mark.parametrize("left", range(6))
def test_a_server_without_descriptors_raises_and_leaves_the_pool_unchanged(
    pool: Pool, server: Process, left: int
) -> None:
    server.request("starve 0")  # the reply has its counters, which are still 0
    server.request("feed")
    server.request(f"starve {left}")
    assert "Too many open files" in server.request("start")
    with Server(pool) as rightful:  # no epoch was taken
        assert rightful.stat().epoch == 1


def test_a_successor_detects_deaths_that_it_could_not_check_at_once(
    pool: Pool, paths: list[Path], server: Process
) -> None:
    with Process(roles.serve, paths) as first:
        clients = [Process(roles.call, paths) for _ in range(3)]
        first.kill()
        for client in clients:
            client.kill()
    server.request("starve 6")  # two descriptors are left for three sessions
    assert server.request("start") == "done"
    assert eventually(lambda: counts(server)[1] == 0)


def test_attach_fails_without_descriptors_and_succeeds_later(pool: Pool, paths: list[Path]) -> None:
    with Server(pool) as server:
        with Process(call, paths) as client:
            client.request("starve 0")
            assert "Too many open files" in client.request("attach")
            client.request("feed")
            client.request("starve 1")
            assert "Too many open files" in client.request("attach")
            assert server.stat().live_count == 0
            client.request("feed")
            assert client.request("attach") == "done"
            assert client.request("ping") == "done"
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
