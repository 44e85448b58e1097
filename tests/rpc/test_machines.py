# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Several machines at a pool: boot ids, host numbers, and what an operator declares. Another
machine has other lock files: here, another runtime directory.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from other_machine import Elsewhere, OtherMachine, beating, rewrite, serve_as, session_offset
from support import roles
from support.blocks import eventually, keys
from support.commands import captured
from support.elsewhere import imitate
from support.emulation import PATIENCE, long
from support.forge import LINE, read, sealed, write
from support.role import Process

from beluga._ffi import ffi, lib
from beluga.cli import serve
from beluga.errors import (
    CallTimeoutError,
    DeposedError,
    DeviceBusyError,
    HostClashError,
    SecondHostError,
    ServerAliveError,
    SessionAliveError,
)
from beluga.index import IndexClient, IndexServer
from beluga.pool import Pool
from beluga.rpc import Client, Server

# ---- Two machines with one host number: another boot id means an earlier boot only if no
# heartbeat advances. Another machine has other lock files: here, another runtime directory.


OTHER = (1, 2)
NONCE = 77


@pytest.fixture
def coherence(request: pytest.FixtureRequest) -> Any:
    """Hardware coherence admits no second machine, whatever its number is."""
    return getattr(request, "param", "software")


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
        own = rf"this process, {os.getpid()}, serves it: use its server, or call stop\(\)"
        with pytest.raises(ServerAliveError, match=own):
            second.start()
        assert repr(second).endswith(", not started>")
        second.stop()
        with pytest.raises(DeviceBusyError, match=f"the server {os.getpid()}.*'kill PID'"):
            pool.refuse_in_use()
        assert first.failure is None
        assert repr(first).endswith(", serving>")


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


# ---- Two machines are configured with one host number: the second one is refused.


def request_line(pool: Pool) -> bytes:
    """Return host 0's last lobby request."""
    return bytes(read(pool, lib.BL_LOBBY_OFFSET, LINE))


def test_a_client_is_refused_while_another_machine_has_its_number(pool: Pool) -> None:
    with Server(pool) as server:
        assert OtherMachine(pool, host=0, boot_id=(1, 2)).attach(nonce=77) == 0
        before = request_line(pool)
        with pytest.raises(HostClashError, match="--host N"):
            Client(pool, timeout_s=0.2)
        assert request_line(pool) == before  # only the other machine may write this line
        assert server.stat().attach_count == 1
        with Client(pool, host=1) as client:
            client.ping()


def test_another_machine_is_refused_while_a_client_has_its_number(pool: Pool) -> None:
    with Server(pool), Client(pool, host=3) as client:
        other = OtherMachine(pool, host=3, boot_id=(1, 2))
        assert other.attach(nonce=77) == -lib.BL_ERROR_HOST_CLASH
        client.ping()
        assert client.stat().reattach_count == 0


def test_a_number_is_free_again_when_its_machine_has_detached(pool: Pool) -> None:
    with Server(pool):
        with Client(pool):
            pass
        assert OtherMachine(pool, host=0, boot_id=(1, 2)).attach(nonce=77) == 0


# ---- A pool with a device of hardware coherence, one host's own memory, refuses every other
# host. A host with another boot id is another host; one with another number is reported.


BOOT_ID = "/proc/sys/kernel/random/boot_id"
MOUNT = f'mount --bind "$0" {BOOT_ID} && mount -t tmpfs none "$1" && shift && exec "$@"'
AS_ANOTHER = ("unshare", "--mount", "sh", "-c", MOUNT)
OURS = pytest.mark.parametrize(
    "coherence", [long("hardware"), ["software", "hardware"]], indirect=True, ids=str
)


@OURS
def test_a_client_of_another_machine_is_refused_by_the_server(pool: Pool) -> None:
    with Server(pool) as server:
        other = OtherMachine(pool, host=0, boot_id=(1, 2))
        assert other.attach(nonce=77) == -lib.BL_ERROR_SECOND_HOST
        other = OtherMachine(pool, host=5, boot_id=(1, 2))
        assert other.attach(nonce=78) == -lib.BL_ERROR_SECOND_HOST
        assert server.stat().attach_count == 0


@OURS
def test_a_client_under_another_host_number_is_refused(pool: Pool) -> None:
    with Server(pool, host=2), pytest.raises(SecondHostError, match="software"):
        Client(pool, host=1)
    with Server(pool, host=2), Client(pool, host=2) as client:
        client.ping()


def test_a_pool_with_software_coherence_may_have_many_hosts(pool: Pool) -> None:
    with Server(pool, host=2), Client(pool, host=1) as first, Client(pool, host=2) as second:
        first.ping()
        second.ping()
        assert OtherMachine(pool, host=5, boot_id=(1, 2)).attach(nonce=78) == 0


class AnotherMachine:
    """Runs commands with another boot id and without the pool's lock files."""

    def __init__(self, pool: Pool, tmp_path: Path) -> None:
        boot_id = tmp_path / "boot_id"
        boot_id.write_text("01234567-89ab-cdef-0123-456789abcdef\n")
        self._as_another = [*AS_ANOTHER, str(boot_id), str(pool.runtime_dir)]
        self._pool = [word for device in pool.devices for word in ("--pool", str(device.path))]

    def possible(self) -> bool:
        try:
            return self._run("true").returncode == 0
        except OSError:
            return False

    def beluga(self, *words: str) -> tuple[int, str]:
        """Run the command. Returns its exit status and its last line."""
        ended = self._run(sys.executable, "-m", "beluga.cli.main", *words, *self._pool)
        return ended.returncode, (ended.stderr.splitlines() or [""])[-1]

    def _run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return captured([*self._as_another, *command], timeout=120 * PATIENCE)


@OURS
def test_commands_of_another_machine_are_refused(pool: Pool, tmp_path: Path) -> None:
    another = AnotherMachine(pool, tmp_path)
    if not another.possible():
        pytest.skip("this user cannot mount another boot id (unshare --mount)")
    with Server(pool):
        requested = (("ping", "--timeout", "1"), ("ping", "--host", "1"), ("serve",))
        for words in (*requested, ("serve", "--host", "1")):
            status, line = another.beluga(*words)
            assert (status, "another host has this pool" in line) == (1, True), line


# ---- An operator's declaration that others are gone applies to sessions without a heartbeat.


def test_a_server_with_a_moving_heartbeat_is_not_gone(pool: Pool, elsewhere: Elsewhere) -> None:
    with Server(pool, host=1) as first:
        serve_as(pool, epoch=1, boot_id=OTHER)
        with elsewhere(), pytest.raises(ServerAliveError):
            Server(pool, host=2, declared_gone=True).start()
        with Client(pool, host=1) as client:
            client.ping()
        assert first.failure is None


def test_a_session_with_a_moving_heartbeat_is_not_gone(pool: Pool) -> None:
    with Server(pool) as first:
        assert OtherMachine(pool, host=3, boot_id=OTHER).attach(NONCE) == 0
        first.stop()
    with beating(pool, 0, NONCE), pytest.raises(SessionAliveError, match="heartbeat moves"):
        Server(pool, declared_gone=True)
    word = Server(pool, declared_gone=True)
    with beating(pool, 0, NONCE), pytest.raises(SessionAliveError):  # nor when it is used
        assert eventually(lambda: word.watch(0.1, silent_s=1))
        word.start()
    word.stop()


def test_listed_processes_are_declared_gone(pool: Pool) -> None:
    with IndexServer(pool) as first:
        assert OtherMachine(pool, host=3, boot_id=OTHER).attach(NONCE) == 0
        first.stop()
    with IndexServer(pool) as second:
        assert second.stat().inherited_count == 1
    with IndexServer(pool, declared_gone=True) as third:
        assert eventually(lambda: third.stat().inherited_count == 0)


def test_a_process_that_started_later_is_not_declared_gone(pool: Pool) -> None:
    word = IndexServer(pool, declared_gone=True)
    with IndexServer(pool) as first:
        assert OtherMachine(pool, host=3, boot_id=OTHER).attach(NONCE) == 0
        first.stop()
    with word:
        assert word.stat().inherited_count == 1


def test_a_process_that_is_proven_alive_here_is_not_gone(pool: Pool) -> None:
    with IndexServer(pool) as first:
        client = Client(pool)
        IndexClient(client).reserve(keys([1]), length=1 << 20)
        first.stop()
    with IndexServer(pool, declared_gone=True) as second:
        assert second.stat().inherited_count == 1
        assert second.index_stat().held_bytes >= 1 << 20
        client.close()
        assert eventually(lambda: second.index_stat().held_bytes == 0)


def test_the_command_prints_the_declaration_once(
    pool: Pool, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[bool] = []

    class Deposed:
        def __init__(self, *_: object, declared_gone: bool, **__: object) -> None:
            messages.append(declared_gone)

    def run(*_: object, **__: object) -> None:
        if len(messages) < 3:
            raise DeposedError("another server has taken this pool over")

    monkeypatch.setattr("beluga.index.IndexServer", Deposed)
    monkeypatch.setattr(serve, "serve_until_stopped", run)
    endpoint = serve.admin_endpoint()
    paths_of = [str(path) for path in paths]
    serve.serve(paths_of, declare_gone=True, standby=True, watch=True, endpoint=endpoint)
    assert messages == [True, False, False]
