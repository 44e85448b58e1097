# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A pool has one server at a time; it is replaced after a stop or a death, and its clients
reconnect.
"""

import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from other_machine import rewrite, session_offset
from support import roles
from support.blocks import eventually, keys
from support.elsewhere import imitate
from support.forge import line_hash, read, write
from support.forks import in_child, surviving_child
from support.role import Process

from beluga._ffi import ffi, lib
from beluga.cli.trace import _headline
from beluga.errors import CallTimeoutError, NoServerError, RpcError, ServerAliveError
from beluga.exporter import Collector
from beluga.index import IndexClient, IndexServer, check_pool
from beluga.pool import Pool
from beluga.rpc import METHOD_USER, REASONS, Client, Server, read_trace


def serving(pool: Pool, salt: bytes) -> Server:
    server = Server(pool)
    server.handle(METHOD_USER, lambda request: salt + request)
    server.start()
    return server


def test_a_second_server_is_rejected_while_the_first_is_alive(pool: Pool) -> None:
    with Server(pool), pytest.raises(ServerAliveError, match="stop it first"):
        Server(pool).start()


def test_a_second_server_is_refused_in_another_process(pool: Pool, paths: list[Path]) -> None:
    with Server(pool) as server, pytest.raises(RuntimeError, match="ServerAliveError"):
        Process(roles.serve, paths)
    assert server.failure is None


def test_a_refused_server_can_start_when_the_first_has_stopped(pool: Pool) -> None:
    first, second = Server(pool), Server(pool)
    first.start()
    with pytest.raises(ServerAliveError):
        second.start()
    first.stop()
    second.start()
    with Client(pool) as client:
        assert client.stat().epoch == 2
    second.stop()


def test_each_server_has_the_next_epoch(pool: Pool) -> None:
    for epoch in range(1, 8):
        with Server(pool) as server:
            assert server.stat().epoch == epoch


def test_stopping_twice_succeeds_and_a_stopped_server_reports_it(pool: Pool) -> None:
    server = Server(pool)
    server.start()
    server.stop()
    server.stop()
    with pytest.raises(RpcError, match="stopped"):
        server.stat()


def test_a_client_follows_to_the_next_server(pool: Pool) -> None:
    server = serving(pool, b"1")
    with Client(pool) as client:
        for turn in range(2, 6):
            assert client.call(METHOD_USER, b"?") == b"%d?" % (turn - 1)
            server.stop()
            server = serving(pool, b"%d" % turn)
        assert client.call(METHOD_USER, b"?") == b"5?"
        assert client.stat().epoch == 5
        assert client.stat().reattach_count == 4
        assert server.stat().inherited_count == 0
    server.stop()


def test_a_call_waits_for_the_next_server(pool: Pool) -> None:
    server = serving(pool, b"1")
    answers: list[bytes] = []
    with Client(pool) as client:
        assert client.call(METHOD_USER, b"?") == b"1?"
        server.stop()
        thread = threading.Thread(target=lambda: answers.append(client.call(METHOD_USER, b"?")))
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        server = serving(pool, b"2")
        thread.join()
    server.stop()
    assert answers == [b"2?"]


def test_a_call_without_a_server_ends(pool: Pool) -> None:
    server = serving(pool, b"1")
    with Client(pool) as client:
        server.stop()
        for _ in range(2):
            with pytest.raises(NoServerError):
                client.call(METHOD_USER, b"?", timeout_s=0.1)
        server = serving(pool, b"2")
        assert client.call(METHOD_USER, b"?") == b"2?"
    server.stop()


def test_sessions_survive_kills_of_their_server(pool: Pool, paths: list[Path]) -> None:
    process = Process(roles.serve, paths)
    with Client(pool) as client:
        for turn in range(1, 4):
            assert client.call(METHOD_USER, b"?") == b"?"
            assert client.stat().epoch == turn
            process.kill()
            with pytest.raises(CallTimeoutError):
                client.call(METHOD_USER, b"?", timeout_s=0.1)
            process = Process(roles.serve, paths)
        assert client.call(METHOD_USER, b"?") == b"?"
    process.kill()


def test_lock_files_do_not_accumulate(pool: Pool, paths: list[Path]) -> None:
    counts = []
    for _ in range(4):
        process = Process(roles.serve, paths)
        with Client(pool) as client:
            client.call(METHOD_USER, b"?")
            process.kill()
        counts.append(len(list(pool.runtime_dir.iterdir())))
    assert counts[-1] <= counts[1] + 1


def test_a_forked_child_of_a_server_does_not_keep_the_pool(pool: Pool) -> None:
    server = serving(pool, b"1")
    with surviving_child():
        server.stop()
        with Server(pool):
            pass


def test_a_forked_child_of_a_server_holds_no_descriptors(pool: Pool) -> None:
    def held() -> set[tuple[str, str]]:
        links = list(Path("/proc/self/fd").iterdir())
        return {(link.name, str(link.readlink())) for link in links if link.is_symlink()}

    before = held()
    server = serving(pool, b"1")
    # The server itself opens the directory for a moment when it cleans it.
    files = {file for file in held() - before if file[1] != str(pool.runtime_dir)}
    assert {link.partition(":")[0] for _, link in files} >= {"socket", "anon_inode"}
    assert any(link.startswith(str(pool.runtime_dir)) for _, link in files)
    assert in_child(lambda: held() & files) == "set()"
    server.stop()


def test_serve_forever_ends_on_request(pool: Pool) -> None:
    server = Server(pool)
    server.handle(METHOD_USER, lambda request: request)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    with wait_for(pool) as client:
        assert client.call(METHOD_USER, b"x") == b"x"
    server.request_stop()
    thread.join(20)
    assert not thread.is_alive()
    server.stop()


def wait_for(pool: Pool) -> Client:
    while True:
        try:
            return Client(pool)
        except NoServerError:
            continue


def test_each_method_has_a_unique_number() -> None:
    """Methods are declared in several headers: of two with the same number one would replace the
    other.
    """
    names = [name for name in dir(lib) if re.fullmatch(r"BL_METHOD_[A-Z_]+", name)]
    numbers = {name: int(getattr(lib, name)) for name in names}
    assert len(names) > 20
    assert len(set(numbers.values())) == len(names), numbers
    assert all(n < lib.BL_METHOD_USER for name, n in numbers.items() if name != "BL_METHOD_USER")


# ---- Takeovers


# ---- The reason of a takeover is in the server's statistics, in the trace and in the metrics.


@pytest.fixture
def coherence(request: pytest.FixtureRequest) -> Any:
    """Hardware coherence admits no second machine, whatever its number is."""
    return getattr(request, "param", "software")


OTHER = (1, 2)
TURN_S = 60.0


def reason(server: Server) -> str:
    """Return the reason, after a check that all places show the same one."""
    takeover = server.stat().takeover
    trace = read_trace(server.pool.runtime_dir)
    assert trace.takeover == takeover
    assert str(takeover) in _headline(trace)
    return takeover.reason


def test_the_first_server_has_no_predecessor_and_the_next_a_stopped_one(pool: Pool) -> None:
    first = Server(pool)
    assert first.stat().takeover.reason == "none"
    with first:
        assert reason(first) == "first"
    with Server(pool) as second:
        assert reason(second) == "stopped"
        assert second.stat().takeover.epoch == 1


def test_a_server_replaces_a_killed_one(pool: Pool, paths: list[Path]) -> None:
    Process(roles.serve_index, paths).kill()
    with Server(pool) as server:
        assert reason(server) == "gone"
        assert str(server.stat().takeover) == (
            "the server of epoch 1 on host 0 ended without stopping cleanly"
        )


def test_a_standby_replaces_a_live_server_that_is_stalled(pool: Pool, paths: list[Path]) -> None:
    with Process(roles.serve_index, paths) as first:
        standby = Server(pool)
        first.signal(signal.SIGSTOP)
        while not standby.watch(TURN_S, silent_s=0.05):
            pass
        with standby:
            assert reason(standby) == "stuck"
            assert standby.stat().takeover.silent_s > 15 * 0.05
        first.kill()


def serve_as_other_host(pool: Pool) -> None:
    """Change the stopped server of epoch 1 to one of another host that was switched off."""
    half = 1 * lib.BL_SERVER_STRIDE
    for copy in (0, lib.BL_LINE_SIZE):
        rewrite(
            pool,
            "bl_epoch_line",
            half + copy,
            1,
            host=7,
            boot_id=OTHER,
            state=lib.BL_SERVER_SERVING,
        )


def test_a_standby_replaces_the_server_of_a_silent_host(pool: Pool, tmp_path: Path) -> None:
    Server(pool).__enter__().stop()
    serve_as_other_host(pool)
    imitate(pool.runtime_dir, tmp_path / "elsewhere")
    standby = Server(pool)
    while not standby.watch(TURN_S, silent_s=0.1):
        pass
    with standby:
        assert reason(standby) == "silent"
        assert standby.stat().takeover.silent_s > 0.1
        assert "host 7 stood still for" in str(standby.stat().takeover)


def test_a_server_replaces_one_declared_gone(pool: Pool) -> None:
    Server(pool).__enter__().stop()
    serve_as_other_host(pool)
    with Server(pool, declared_gone=True) as server:
        assert reason(server) == "declared"


def test_metrics_count_takeovers_by_reason_from_zero(pool: Pool, paths: list[Path]) -> None:
    server = IndexServer(pool)
    collector = Collector(server, pool)

    def taken() -> dict[str, float]:
        series = collector.collect()["beluga_takeovers_total"].series
        return {labels[0][1]: float(str(value)) for labels, value in series.items()}

    before = taken()
    assert set(before) == set(REASONS)  # a rate needs the zero before the first one
    Process(roles.serve_index, paths).kill()
    with server:
        after = taken()
    assert {name: after[name] - before[name] for name in REASONS} == {
        name: float(name == "gone") for name in REASONS
    }


# ---- A server dies between the stores of a session's line: its successor assigns the lane and
# the space only to clients that may have them.


def changed(line: bytes, **fields: int) -> bytes:
    """Return the whole line that the server was about to write."""
    struct = ffi.new("bl_session_line *")
    ffi.memmove(struct, line, len(line))
    for name, value in fields.items():
        setattr(struct, name, value)
    raw = bytes(ffi.buffer(struct))
    return raw[:60] + line_hash(raw[:60] + bytes(4), 0).to_bytes(4, "little")


def mixed(before: bytes, after: bytes, stores: set[int]) -> bytes:
    """Mix two lines: only these 8-byte stores of the new line are in memory."""
    return b"".join(
        (after if store in stores else before)[8 * store : 8 * store + 8] for store in range(8)
    )


@pytest.mark.parametrize("stores", [{3}, {7}], ids=["state", "check"])
@pytest.mark.parametrize("state", ["FREE", "SUSPECT"])
def test_a_session_whose_line_is_torn_keeps_its_grants(
    pool: Pool, state: str, stores: set[int]
) -> None:
    with IndexServer(pool) as first:
        client = Client(pool)
        IndexClient(client).reserve(keys([1]), length=1 << 20)
        first.stop()
    offset = session_offset(pool, 0, epoch=1)
    line = read(pool, offset)
    after = changed(line, state=getattr(lib, f"BL_SESSION_{state}"))
    write(pool, offset, mixed(line, after, stores))
    with IndexServer(pool) as second:
        assert second.stat().inherited_count == 1
        assert second.index_stat().held_bytes >= 1 << 20
        with Client(pool) as other:
            assert other.stat().lane == 1
        client.close()
        assert eventually(lambda: second.stat().inherited_count == 0)
        assert second.index_stat().held_bytes == 0


@pytest.mark.parametrize("byte", [8, 24, 28, 32, 60])
def test_a_damaged_line_keeps_the_lane_until_its_process_is_gone(pool: Pool, byte: int) -> None:
    with IndexServer(pool) as first:
        client = Client(pool)
        first.stop()
    offset = session_offset(pool, 0, epoch=1)
    line = bytearray(read(pool, offset))
    line[byte] ^= 1
    write(pool, offset, bytes(line))
    with IndexServer(pool) as second:
        assert second.stat().inherited_count == 1
        client.close()
        assert eventually(lambda: second.stat().inherited_count == 0)


@pytest.mark.parametrize("epoch", [0, 2, 1 << 40], ids=["none", "the successor's", "a late one"])
def test_a_line_with_a_damaged_epoch_is_of_an_earlier_session(pool: Pool, epoch: int) -> None:
    with IndexServer(pool) as first:
        client = Client(pool)
        IndexClient(client).reserve(keys([1]), length=1 << 20)
        first.stop()
    offset = session_offset(pool, 0, epoch=1)
    line = bytearray(read(pool, offset))
    line[32:40] = epoch.to_bytes(8, "little")
    write(pool, offset, bytes(line))
    with IndexServer(pool) as second:
        assert second.stat().inherited_count == 1
        assert not check_pool(pool).findings  # the line that it has written
        client.close()
        assert eventually(lambda: second.stat().inherited_count == 0)
        assert second.index_stat().held_bytes == 0


def test_a_client_without_a_reply_has_no_lane(pool: Pool) -> None:
    with IndexServer(pool) as first:
        client = Client(pool)
        given = read(pool, session_offset(pool, 0, epoch=1))
        client.close()
        free = read(pool, session_offset(pool, 0, epoch=1))
        assert free[:8] == bytes(8)  # not the name of a session
        first.stop()
    write(pool, session_offset(pool, 0, epoch=1), mixed(free, given, {1, 2, 3, 4, 7}))
    with IndexServer(pool) as second, Client(pool) as client:
        assert second.stat().inherited_count == 0
        assert client.stat().lane == 0
