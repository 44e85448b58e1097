# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Two machines with one host number: another boot id means an earlier boot only if no heartbeat
advances. Another machine has other lock files: here, another runtime directory.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from other_machine import Elsewhere, OtherMachine, beating, rewrite, serve_as, session_offset
from support import roles
from support.blocks import eventually, keys
from support.elsewhere import imitate
from support.forge import read, sealed, write
from support.role import Process

from beluga._ffi import ffi, lib
from beluga.errors import CallTimeoutError, HostClashError, ServerAliveError
from beluga.index import IndexClient, IndexServer
from beluga.pool import Pool
from beluga.rpc import Client, Server

OTHER = (1, 2)
NONCE = 77

# In a pool of hardware coherence a second machine is refused whatever its number is
# (test_second_host.py).
pytestmark = pytest.mark.parametrize("coherence", ["software"], indirect=True)


def test_a_second_server_is_rejected_while_the_first_is_alive(
    pool: Pool, elsewhere: Elsewhere
) -> None:
    with Server(pool) as first, Client(pool, host=5) as client:
        serve_as(pool, epoch=1, boot_id=OTHER)
        with elsewhere():
            second = Server(pool)
        with pytest.raises(HostClashError, match="--host N"):
            second.start()
        with pytest.raises(HostClashError, match="--host N"):
            second.watch(20.0, silent_s=30.0)
        second.stop()
        client.ping()
        assert first.failure is None
        assert client.stat().epoch == 1


def test_a_server_of_an_earlier_boot_is_replaced(pool: Pool, elsewhere: Elsewhere) -> None:
    first = Server(pool)
    first.start()
    first.stop()  # the heartbeat does not advance
    half = 1 * lib.BL_SERVER_STRIDE
    for copy in (0, lib.BL_LINE_SIZE):
        rewrite(pool, "bl_epoch_line", half + copy, 1, boot_id=OTHER, state=lib.BL_SERVER_SERVING)
    with elsewhere(), Server(pool) as second:
        assert second.stat().epoch == 2


def test_a_standby_replaces_a_server_of_an_earlier_boot_that_left_a_torn_heartbeat(
    pool: Pool, elsewhere: Elsewhere
) -> None:
    first = Server(pool)
    first.start()
    first.stop()
    half = 1 * lib.BL_SERVER_STRIDE
    for copy in (0, lib.BL_LINE_SIZE):
        rewrite(pool, "bl_epoch_line", half + copy, 1, boot_id=OTHER, state=lib.BL_SERVER_SERVING)
    with elsewhere():
        second = Server(pool)
    assert not second.watch(0.05, silent_s=30.0)  # one value shows nothing yet
    rewrite(pool, "bl_heartbeat_line", half + lib.BL_POLL_STRIDE, NONCE, count=0)
    assert second.watch(20.0, silent_s=0.1)
    second.stop()


def test_a_standby_that_observed_a_live_server_does_not_replace_it(pool: Pool) -> None:
    with Server(pool) as first:
        second = Server(pool)
        assert not second.watch(0.1, silent_s=30.0)
        with pytest.raises(ServerAliveError):
            second.start()
        second.stop()
        assert first.failure is None


def test_a_server_whose_epoch_has_another_owner_stops(pool: Pool) -> None:
    with Server(pool) as server:
        for copy in (0, lib.BL_LINE_SIZE):
            rewrite(pool, "bl_epoch_line", lib.BL_SERVER_STRIDE + copy, 1, nonce=NONCE)
        assert eventually(lambda: isinstance(server.failure, HostClashError))


def test_a_grant_of_another_machine_is_kept_while_its_client_has_a_heartbeat(
    pool: Pool, elsewhere: Elsewhere
) -> None:
    with IndexServer(pool) as first:
        real = pool.runtime_dir
        with elsewhere():
            imitate(real, pool.runtime_dir)
            client = Client(pool)
        IndexClient(client).reserve(keys([1]), length=1 << 20)
        lane = client.stat().lane
        rewrite(pool, "bl_session_line", session_offset(pool, lane, epoch=1), lane, boot_id=OTHER)
        first.stop()
    with IndexServer(pool) as second:
        time.sleep(1.0)  # twice the heartbeat timeout
        assert second.stat().inherited_count == 1
        assert second.index_stat().held_bytes >= 1 << 20
        with Client(pool, host=5) as other:
            assert other.stat().lane != lane
        client.close()  # the client reported its own end
        assert eventually(lambda: second.stat().inherited_count == 0)
        assert second.index_stat().held_bytes == 0


def test_a_session_of_an_earlier_boot_ends_when_its_heartbeat_stops(pool: Pool) -> None:
    with Server(pool) as first:
        assert OtherMachine(pool, host=0, boot_id=OTHER).attach(NONCE) == 0
        with beating(pool, 0, NONCE):
            first.stop()
            with Server(pool) as second:
                time.sleep(1.0)
                assert second.stat().inherited_count == 1
    with Server(pool) as third:
        assert eventually(lambda: third.stat().inherited_count == 0)


def test_a_client_is_rejected_while_an_inherited_session_has_a_heartbeat(pool: Pool) -> None:
    with Server(pool) as first:
        assert OtherMachine(pool, host=3, boot_id=OTHER).attach(NONCE) == 0
        first.stop()
    with Server(pool) as second:
        with beating(pool, 0, NONCE), pytest.raises(HostClashError, match="--host N"):
            Client(pool, host=3)
        assert second.stat().inherited_count == 1
        with pytest.raises(HostClashError):  # such a short pause proves nothing
            Client(pool, host=3)
        time.sleep(0.6)
        with Client(pool, host=3) as client:
            client.ping()
        assert second.stat().inherited_count == 0


def test_a_rebooted_machine_waits_and_is_admitted(pool: Pool) -> None:
    with Server(pool) as first:
        assert OtherMachine(pool, host=3, boot_id=OTHER).attach(NONCE) == 0
        with beating(pool, 0, NONCE):
            first.stop()
    with (
        Server(pool) as second,
        Client(pool, host=3) as client,
    ):  # no server observed an advance of that heartbeat
        client.ping()
        assert second.stat().inherited_count == 0


def test_a_host_record_of_an_older_server_excludes_no_machine(pool: Pool) -> None:
    with Server(pool):
        assert OtherMachine(pool, host=3, boot_id=OTHER).attach(NONCE) == 0
    with Server(pool):
        pass
    # the lobby's line still belongs to the first machine
    with Server(pool), Client(pool, host=3) as client:
        client.ping()


def test_a_live_session_never_counts_as_one_of_an_earlier_boot(pool: Pool) -> None:
    with Server(pool, heartbeat_lost_s=0.1) as server, Client(pool, host=3) as client:
        time.sleep(0.3)
        assert OtherMachine(pool, host=3, boot_id=OTHER).attach(NONCE) == -lib.BL_ERROR_HOST_CLASH
        client.ping()
        assert client.stat().reattach_count == 0
        assert server.stat().end_count == 0


def test_a_session_of_this_server_never_counts_as_one_of_an_earlier_boot(pool: Pool) -> None:
    def state() -> int:
        line = ffi.from_buffer("bl_session_line *", read(pool, session_offset(pool, 0, 1)))
        return int(line.state)

    with Server(pool, heartbeat_lost_s=0.1):
        assert OtherMachine(pool, host=0, boot_id=OTHER).attach(NONCE) == 0  # no heartbeat
        assert eventually(lambda: state() != lib.BL_SESSION_LIVE)
        assert state() == lib.BL_SESSION_SUSPECT  # the other machine may still write


def test_a_rejected_machine_does_not_reserve_the_number(pool: Pool) -> None:
    with Server(pool), Client(pool, host=3) as client:
        assert OtherMachine(pool, host=3, boot_id=OTHER).attach(NONCE) == -lib.BL_ERROR_HOST_CLASH
        with Client(pool, host=3) as another:
            another.ping()
        client.ping()


def test_a_session_of_this_boot_without_a_lock_file_is_not_one_of_an_earlier_boot(
    pool: Pool,
) -> None:
    """Its process may be stopped in another mount namespace, and write later."""
    with Server(pool) as first:
        with Client(pool) as client:
            offset = session_offset(pool, client.stat().lane, epoch=1)
            line = ffi.from_buffer("bl_session_line *", read(pool, offset))
            own_boot = (line.boot_id[0], line.boot_id[1])
        for nonce in (NONCE, NONCE + 1):
            assert OtherMachine(pool, host=0, boot_id=own_boot).attach(nonce) == 0
        first.stop()
    rewrite(pool, "bl_session_line", session_offset(pool, 1, epoch=1), 1, boot_id=OTHER)
    with Server(pool) as second:
        assert eventually(
            lambda: second.stat().inherited_count == 1
        )  # the session of the earlier boot
        assert OtherMachine(pool, host=5, boot_id=OTHER).attach(NONCE + 2) == 0
        heartbeat = pool.geometry.lane_offset + 1 * pool.geometry.lane_stride
        last = (1 << 64) - 1
        rewrite(pool, "bl_heartbeat_line", heartbeat, NONCE + 2, count=last, nonce=NONCE + 2)
        assert eventually(lambda: second.stat().end_count == 2)  # all sessions were checked again
        assert second.stat().inherited_count == 1


def test_a_reply_to_another_machine_assigns_no_lane(pool: Pool, paths: list[Path]) -> None:
    """Two machines of one number have written requests of one sequence number, and the server has
    replied to the other one's.
    """
    with Process(roles.serve, paths) as server:
        server.signal(signal.SIGSTOP)
        assert server.stopped()
        line = ffi.from_buffer("bl_lobby_request *", read(pool, lib.BL_LOBBY_OFFSET))
        reply = ffi.new("bl_lobby_reply *", {"nonce": NONCE, "epoch": 1, "lane": 0})
        offset = lib.BL_LOBBY_OFFSET + (1 + 1) * lib.BL_POLL_STRIDE  # of the server's half
        write(pool, offset, sealed(bytes(ffi.buffer(reply)), line.sequence + 1, 0))
        with pytest.raises(CallTimeoutError):
            Client(pool, timeout_s=0.2)
