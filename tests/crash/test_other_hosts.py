# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Sessions of other hosts, whose processes no server can prove alive or dead: how they end, and
that missing heartbeats quarantine their space but never free it.
"""

import contextlib
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support import roles
from support.blocks import eventually, keys, states
from support.elsewhere import imitate
from support.role import Process, lines, reply
from support.roles import hold_interpreter

from beluga._ffi import lib
from beluga.errors import CallTimeoutError, NoServerError
from beluga.index import IndexClient, IndexServer
from beluga.pool import Pool
from beluga.rpc import Client, Server

# ---- Sessions whose processes no server can prove alive or dead, like those of other hosts: a
# missing heartbeat quarantines their space, but never frees it.


def reserve_elsewhere(folder: str, paths: list[str]) -> None:
    """A client with another runtime directory: the server finds no lock and no pidfd of it. It
    reserves blocks, then executes each line: "hold S" holds the GIL for S seconds, "call" calls the
    server until it replies, "commit" commits the blocks.
    """
    real = Pool.runtime_dir
    Pool.runtime_dir = property(  # type: ignore[assignment, misc]
        lambda pool: imitate(real.fget(pool), Path(folder))  # type: ignore[attr-defined]
    )
    with Pool.open(paths) as pool, Client(pool) as client:
        grants = IndexClient(client).reserve(keys([1, 2]), length=1 << 20)
        for line in lines():
            verb, _, seconds = line.partition(" ")
            if verb == "hold":
                hold_interpreter(float(seconds))
            while verb == "call":
                with contextlib.suppress(CallTimeoutError):
                    client.ping(timeout_s=2)
                    break
            lost = IndexClient(client).commit(grants) if verb == "commit" else ""
            reply(f"{client.stat().reattach_count} {lost}".rstrip())


@pytest.fixture
def pool(paths: list[Path]) -> Iterator[Pool]:
    with Pool.create(paths, device_size=64 << 20, sparse=True, max_blocks=64) as pool:
        yield pool


@contextmanager
def served_elsewhere(
    pool: Pool, paths: list[Path], directory: Path, heartbeat_lost_s: float
) -> Iterator[tuple[IndexServer, Process]]:
    """Yield a server, and a process whose life it cannot determine."""
    directory.mkdir()
    with (
        IndexServer(pool, heartbeat_lost_s=heartbeat_lost_s) as server,
        Process(reserve_elsewhere, directory, paths) as client,
    ):
        yield server, client


def test_a_silent_session_is_quarantined_until_its_next_heartbeat(
    pool: Pool, paths: list[Path], tmp_path: Path
) -> None:
    with served_elsewhere(pool, paths, tmp_path / "elsewhere", 3.0) as (server, client):
        assert (server.stat().live_count, server.stat().watched_count) == (1, 0)
        assert server.index_stat().grant_count == 2
        client.signal(signal.SIGSTOP)
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
        client.signal(signal.SIGCONT)
        assert client.request("call") == "1"  # a new session, which abandoned the grants
        assert eventually(lambda: server.index_stat().held_bytes == 0)
        assert server.stat().live_count == 1


def test_a_client_with_an_abandoned_session_gets_an_error_at_once(
    pool: Pool, paths: list[Path], tmp_path: Path
) -> None:
    with served_elsewhere(pool, paths, tmp_path / "elsewhere", 0.5) as (server, client):
        client.signal(signal.SIGSTOP)
        assert eventually(lambda: server.stat().live_count == 0, timeout_s=60)
        client.signal(signal.SIGCONT)
        lost = -lib.BL_ERROR_NO_GRANT
        assert client.request("commit") == f"1 [{lost}, {lost}]"  # and no call has timed out
        assert server.stat().live_count == 1
        assert eventually(lambda: server.index_stat().held_bytes == 0)


def test_a_session_killed_on_another_host_stays_quarantined(
    pool: Pool, paths: list[Path], tmp_path: Path
) -> None:
    with served_elsewhere(pool, paths, tmp_path / "elsewhere", 0.5) as (server, client):
        client.kill()
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
    with served_elsewhere(pool, paths, tmp_path / "elsewhere", heartbeat_lost_s) as (
        server,
        client,
    ):
        assert client.request(f"hold {hold_s}") == "0"
        assert client.request("call") == "0"
        stat = server.stat()
        assert (stat.attach_count, stat.end_count) == (1, 0)
        assert server.index_stat().grant_count == 2


# ---- Clients of other hosts record their detachment where the next server reads it, with or
# without a server: nothing of a session that has detached is quarantined.


LANES = 3


class ElsewherePool(Pool):
    """The pool as seen from another host: the server finds no locks and no pidfds of its users."""

    elsewhere: Path

    @property
    def runtime_dir(self) -> Path:
        return imitate(super().runtime_dir, self.elsewhere)


@pytest.fixture
def few_lanes(paths: list[Path]) -> Iterator[Pool]:
    with Pool.create(paths, device_size=16 << 20, sparse=True, lane_count=LANES) as few_lanes:
        yield few_lanes


@pytest.fixture
def elsewhere(few_lanes: Pool, paths: list[Path], tmp_path: Path) -> Iterator[Pool]:
    ElsewherePool.elsewhere = tmp_path / "elsewhere"
    with ElsewherePool.open(paths) as other:
        yield other


def settles(server: Server) -> bool:
    """Whether soon no session of an earlier server is suspect."""
    return eventually(lambda: server.stat().inherited_count == 0)


def test_clients_that_close_without_a_server_release_their_lanes(
    few_lanes: Pool, elsewhere: Pool
) -> None:
    for _ in range(LANES + 1):
        with Server(few_lanes):
            clients = [Client(elsewhere) for _ in range(LANES)]
        for client in clients:
            client.close()
    with Server(few_lanes) as server:
        assert settles(server)


def test_a_client_that_lost_its_server_and_then_closes_leaves_no_lane_behind(
    few_lanes: Pool, elsewhere: Pool
) -> None:
    with Server(few_lanes):
        client = Client(elsewhere)
    with pytest.raises((CallTimeoutError, NoServerError)):
        client.ping(timeout_s=0.1)
    client.close()
    with Server(few_lanes) as server:
        assert settles(server)
        assert server.stat().live_count == 0


def test_grants_of_a_detached_client_are_released(few_lanes: Pool, elsewhere: Pool) -> None:
    with IndexServer(few_lanes):
        client = Client(elsewhere)
        granted = IndexClient(client).reserve(keys([1, 2, 3]), length=2 << 20)
        assert states(granted) == ["GRANTED"] * 3
    client.close()
    with IndexServer(few_lanes) as server:
        assert settles(server)
        assert server.index_stat().held_bytes == 0
        assert server.index_stat().grant_count == 0


def test_attempts_that_timed_out_leave_no_lane_behind(
    few_lanes: Pool, elsewhere: Pool, paths: list[Path]
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
