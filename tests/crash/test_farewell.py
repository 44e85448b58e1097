# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Clients of other hosts record their detachment where the next server reads it, with or without a
server: nothing of a session that has detached is quarantined.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import roles
from support.blocks import eventually, keys, states
from support.elsewhere import imitate
from support.role import Process

from beluga.errors import CallTimeoutError, NoServerError
from beluga.index import IndexClient, IndexServer
from beluga.pool import Pool
from beluga.rpc import Client, Server

LANES = 3


class ElsewherePool(Pool):
    """The pool as seen from another host: the server finds no locks and no pidfds of its users."""

    elsewhere: Path

    @property
    def runtime_dir(self) -> Path:
        return imitate(super().runtime_dir, self.elsewhere)


@pytest.fixture
def pool(paths: list[Path]) -> Iterator[Pool]:
    with Pool.create(paths, device_size=16 << 20, sparse=True, lane_count=LANES) as pool:
        yield pool


@pytest.fixture
def elsewhere(pool: Pool, paths: list[Path], tmp_path: Path) -> Iterator[Pool]:
    ElsewherePool.elsewhere = tmp_path / "elsewhere"
    with ElsewherePool.open(paths) as other:
        yield other


def settles(server: Server) -> bool:
    """Whether soon no session of an earlier server is suspect."""
    return eventually(lambda: server.stat().inherited_count == 0)


def test_clients_that_close_without_a_server_release_their_lanes(
    pool: Pool, elsewhere: Pool
) -> None:
    for _ in range(LANES + 1):
        with Server(pool):
            clients = [Client(elsewhere) for _ in range(LANES)]
        for client in clients:
            client.close()
    with Server(pool) as server:
        assert settles(server)


def test_a_client_that_lost_its_server_and_then_closes_leaves_no_lane_behind(
    pool: Pool, elsewhere: Pool
) -> None:
    with Server(pool):
        client = Client(elsewhere)
    with pytest.raises((CallTimeoutError, NoServerError)):
        client.ping(timeout_s=0.1)
    client.close()
    with Server(pool) as server:
        assert settles(server)
        assert server.stat().live_count == 0


def test_grants_of_a_detached_client_are_released(pool: Pool, elsewhere: Pool) -> None:
    with IndexServer(pool):
        client = Client(elsewhere)
        granted = IndexClient(client).reserve(keys([1, 2, 3]), length=2 << 20)
        assert states(granted) == ["GRANTED"] * 3
    client.close()
    with IndexServer(pool) as server:
        assert settles(server)
        assert server.index_stat().held_bytes == 0
        assert server.index_stat().grant_count == 0


def test_attempts_that_timed_out_leave_no_lane_behind(
    pool: Pool, elsewhere: Pool, paths: list[Path]
) -> None:
    server = Process(roles.serve, paths)
    server.signal(signal.SIGSTOP)
    assert server.stopped()
    for _ in range(LANES + 1):
        with pytest.raises(CallTimeoutError):
            Client(elsewhere, timeout_s=0.05)
    server.signal(signal.SIGCONT)
    with Client(elsewhere), Client(elsewhere), Client(elsewhere):
        pass  # all lanes
