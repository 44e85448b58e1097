# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Clients and servers around their calls into C: starts, ends, interrupts, forks and a standby."""

import contextlib
import gc
import itertools
import logging
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from support import role
from support.blocks import eventually
from support.forks import in_child
from support.interrupts import Interrupts
from support.watched_core import WatchedCore

import beluga.rpc.server
from beluga import IndexServer
from beluga._ffi import lib
from beluga.errors import (
    BadValueError,
    BelugaError,
    NoServerError,
    PoolError,
    RpcError,
    ServerAliveError,
)
from beluga.pool import Pool
from beluga.rpc import METHOD_USER, Client, Quota, Server
from beluga.rpc.server import stand_by

# ---- Clients and servers around their calls into C: interrupts, forks, and closed resources.


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> WatchedCore:
    core = WatchedCore()
    monkeypatch.setattr("beluga.rpc.client.lib", core)
    monkeypatch.setattr("beluga.rpc.server.lib", core)
    return core


@pytest.fixture
def coherence() -> str:
    return "hardware"


def interrupt() -> None:
    raise KeyboardInterrupt


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


# ---- Clients.


def test_an_interrupted_attach_leaves_no_session(
    pool: Pool, server: Server, core: WatchedCore
) -> None:
    core.after["bl_session_open"] = interrupt
    with pytest.raises(KeyboardInterrupt):
        Client(pool)
    assert server.stat().attach_count == 1
    assert eventually(lambda: server.stat().live_count == 0)


def test_an_unreferenced_client_returns_its_lane(pool: Pool, server: Server) -> None:
    client = Client(pool)
    assert server.stat().live_count == 1
    del client
    gc.collect()
    assert eventually(lambda: server.stat().live_count == 0)


def test_at_exit_a_session_that_a_thread_uses_is_left_alone(
    pool: Pool, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("beluga.rpc.client.EXIT_WAIT_S", 0.01)
    with Client(pool) as client:
        with client._held.lock:
            client._end()  # as the interpreter does
        assert client.call(METHOD_USER, b"on") == b"on"


def test_a_pool_that_closes_ends_its_clients(pool: Pool, server: Server, paths: list[Path]) -> None:
    own_pool = Pool.open(paths)
    client = Client(own_pool)
    assert server.stat().live_count == 1
    own_pool.close()
    with pytest.raises(RpcError, match="closed"):
        client.ping()
    assert eventually(lambda: server.stat().live_count == 0)


def test_a_ping_needs_a_server(pool: Pool) -> None:
    with Server(pool):
        client = Client(pool)
        client.ping()
    with pytest.raises(RpcError):  # no server, or none in time
        client.ping(timeout_s=0.05)
    client.close()


def test_clients_wait_for_the_configured_time(
    pool: Pool, server: Server, core: WatchedCore
) -> None:
    with Client(pool) as client:
        assert core.last("bl_session_open")[3] == 5_000_000_000
        client.ping()
        assert core.last("bl_session_call_bytes")[-1] == 5_000_000_000
    with Client(pool, timeout_s=0.5) as client:
        assert core.last("bl_session_open")[3] == 500_000_000
        client.ping()
        assert core.last("bl_session_call_bytes")[-1] == 500_000_000
        client.ping(timeout_s=1.5)
        assert core.last("bl_session_call_bytes")[-1] == 1_500_000_000
        client.timeout_s = 0.25
        client.ping()
        assert core.last("bl_session_call_bytes")[-1] == 250_000_000
        with pytest.raises(BadValueError, match="is out of range; give 0"):
            client.timeout_s = -1
        assert client.timeout_s == 0.25


def test_a_child_does_not_wait_for_a_call_of_its_parent(
    pool: Pool, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("beluga.rpc.client.EXIT_WAIT_S", 60.0)
    with Client(pool) as client:
        with client._held.lock:  # held by a thread that the child does not have
            closed, ended = in_child(client.close), in_child(client._end)
        assert (closed, ended) == ("None", "None")
        assert client.call(METHOD_USER, b"on") == b"on"


def test_a_closed_client_may_be_inherited(pool: Pool, server: Server) -> None:
    with Client(pool) as client:
        pass
    assert in_child(client.close) == "None"
    assert in_child(lambda: in_child(client.close)) == "None"


# ---- Servers.


def test_servers_watch_and_wait_for_the_configured_time(pool: Pool, core: WatchedCore) -> None:
    server = Server(pool)
    assert core.last("bl_server_heartbeat_lost")[1] == 5_000_000_000
    assert server.watch(0.25, silent_s=1.5)
    assert core.last("bl_server_watch")[1:] == (1_500_000_000, 250_000_000)
    server.stop()
    Server(pool, heartbeat_lost_s=0.5).stop()
    assert core.last("bl_server_heartbeat_lost")[1] == 500_000_000


def test_a_server_declares_no_session_gone_by_default(pool: Pool, core: WatchedCore) -> None:
    Server(pool).stop()
    assert "bl_server_declare_gone" not in core.names()
    Server(pool, declared_gone=True).stop()
    assert "bl_server_declare_gone" in core.names()


def test_a_server_that_fails_to_map_its_lock_word_leaves_nothing(
    pool: Pool, core: WatchedCore
) -> None:
    core.fails["bl_server_declare_gone"] = -lib.BL_ERROR_SERVER_ALIVE
    before = open_files()
    with pytest.raises(
        ServerAliveError
    ) as refused:  # the exception keeps the server's objects alive
        Server(pool, declared_gone=True)
    assert core.names().count("bl_server_destroy") == 1
    assert open_files() == before
    pool.close()  # stops the pool's servers
    assert core.names().count("bl_server_destroy") == 1
    del refused


def test_a_stopping_server_rejects_new_calls_and_waits_for_running_ones(
    pool: Pool, core: WatchedCore
) -> None:
    server = Server(pool)
    inside, go = threading.Event(), threading.Event()

    def describe() -> None:
        inside.set()
        assert go.wait(30)

    core.before["bl_server_describe"] = describe
    epochs: list[int] = []
    caller = threading.Thread(target=lambda: epochs.append(server.stat().epoch))
    caller.start()
    assert inside.wait(30)
    stops = threading.Thread(target=server.stop)
    stops.start()

    def refused() -> bool:
        try:
            server.request_stop()
        except RpcError:
            return True
        return False

    assert eventually(refused)
    assert "bl_server_destroy" not in core.names()
    go.set()
    caller.join(30)
    stops.join(30)
    assert not stops.is_alive()
    assert epochs == [0]
    assert "bl_server_describe" in core.names()
    assert core.names()[-1] == "bl_server_destroy"


def test_a_server_is_destroyed_after_its_thread_has_ended(pool: Pool, core: WatchedCore) -> None:
    core.after["bl_server_run"] = lambda: time.sleep(0.05)
    with Server(pool):
        pass
    assert core.names()[-2:] == ["bl_server_run", "bl_server_destroy"]


def test_serve_forever_cannot_be_stopped_by_its_own_handler(pool: Pool) -> None:
    server = Server(pool)
    messages: list[str] = []

    def handler(_: bytes) -> bytes:
        with pytest.raises(RpcError, match="inside a handler"):
            server.stop()
        messages.append("refused")
        server.request_stop()
        return b""

    def call_until_refused() -> None:
        while not messages:
            try:
                with Client(pool) as client:
                    client.call(METHOD_USER)
            except (NoServerError, RpcError):
                time.sleep(0.005)

    server.handle(METHOD_USER, handler)
    caller = threading.Thread(target=call_until_refused)
    caller.start()
    server.serve_forever()
    caller.join(30)
    assert messages == ["refused"]
    server.stop()


def test_a_refused_server_has_stopped(pool: Pool, server: Server) -> None:
    second = Server(pool)
    with pytest.raises(ServerAliveError), second:
        pass
    with pytest.raises(RpcError, match="stopped"):
        second.stat()


def test_the_serving_thread_is_pinned_near_the_memory(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[str] = []
    monkeypatch.setattr(Pool, "run_near", lambda _: moved.append(threading.current_thread().name))
    with Server(pool):
        assert eventually(lambda: moved == ["beluga-server"])
    server = Server(pool)
    thread = threading.Thread(target=server.serve_forever, name="mine")
    thread.start()
    assert eventually(lambda: moved == ["beluga-server", "mine"])
    server.stop()
    thread.join(30)


def test_a_child_has_no_server(pool: Pool, server: Server) -> None:
    assert in_child(server.stat) == "RpcError"
    assert in_child(server.start) == "RpcError"
    assert in_child(server.stop) == "None"
    with Client(pool) as client:
        assert client.call(METHOD_USER, b"on") == b"on"


def test_a_child_does_not_wait_for_a_stop_of_its_parent(pool: Pool, core: WatchedCore) -> None:
    ending, go = threading.Event(), threading.Event()

    def destroy() -> None:
        ending.set()
        assert go.wait(30)

    core.before["bl_server_destroy"] = destroy
    server = Server(pool)
    stops = threading.Thread(target=server.stop)
    stops.start()
    assert ending.wait(30)
    result = in_child(server.stop)
    go.set()
    stops.join(30)
    assert result == "None"


def test_an_error_of_a_handler_is_logged_and_not_raised_through_c(
    pool: Pool, server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    unraised: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", unraised.append)
    server.handle(METHOD_USER + 1, lambda _: b"" + b"a"[5:6][0].to_bytes(1, "big"))
    with Client(pool) as client, pytest.raises(RpcError):
        client.call(METHOD_USER + 1)
    assert "IndexError" in caplog.text
    assert unraised == []


def serve_at_exit(paths: list[str]) -> None:
    Server(Pool.open(paths)).start()


def test_an_interpreter_may_exit_while_it_serves(pool: Pool, paths: list[Path]) -> None:
    assert role.run(serve_at_exit, paths).returncode == 0
    with Server(pool) as server:
        assert server.stat().epoch == 2


@pytest.mark.parametrize("name", ["grants", "pins", "bytes", "calls_per_s"])
def test_a_quota_has_as_many_bits_as_its_field(name: str) -> None:
    limit = (1 << (64 if name == "bytes" else 32)) - 1
    assert getattr(Quota(**{name: limit}), name) == limit
    assert getattr(Quota(), name) == 0
    for wrong in (limit + 1, -1):
        with pytest.raises(ValueError, match=f"{name} is .* must be from 0 to"):
            Quota(**{name: wrong})


# ---- A server starts and stops once, from any thread, and never during a call that uses it.


def names(pool: Pool) -> list[str]:
    return sorted(path.name for path in pool.runtime_dir.iterdir())


@pytest.mark.parametrize("kind", [Server, IndexServer])
def test_a_second_start_is_rejected_and_changes_nothing(pool: Pool, kind: type[Server]) -> None:
    with kind(pool) as server, Client(pool) as client:
        before = names(pool)
        for again in (server.start, server.serve_forever):
            with pytest.raises(RpcError, match="was started already"):
                again()
        with pytest.raises(ServerAliveError), kind(pool):
            pass
        assert names(pool) == before
        client.ping()
        assert client.stat().reattach_count == 0
    with pytest.raises(RpcError, match="make a new one"):
        server.start()
    # the successor finds the farewell of its predecessor, and needs no other proof
    with kind(pool):
        Client(pool).ping()
    pool.close()


def test_a_start_that_fails_after_the_takeover_releases_the_pool(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoThread(beluga.rpc.server.Thread):
        def start(self) -> None:
            if self.name == "beluga-server":
                raise RuntimeError("can't start new thread")
            super().start()

    server = Server(pool)
    with monkeypatch.context() as patch:
        patch.setattr(beluga.rpc.server, "Thread", NoThread)
        with pytest.raises(RuntimeError, match="new thread"):
            server.start()
    del server  # nothing writes to the pool any longer
    with Server(pool), Client(pool) as client:
        client.ping()
    pool.close()


def answers(pool: Pool) -> bool:
    try:
        Client(pool).ping()
    except NoServerError:
        return False
    return True


@pytest.mark.parametrize("kind", [Server, IndexServer])
def test_a_pool_that_closes_ends_its_servers(pool: Pool, kind: type[Server]) -> None:
    idle, server = kind(pool), kind(pool)
    failures: list[BaseException] = []

    def serve() -> None:
        try:
            server.serve_forever()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    assert eventually(lambda: answers(pool))
    pool.close()
    thread.join()
    assert failures == []
    for each in (idle, server):
        for call in (each.stat, each.request_stop, each.start):
            with pytest.raises(RpcError):
                call()
        with pytest.raises(RpcError):
            each.watch(0, silent_s=1)
        each.stop()
    with pytest.raises(ValueError, match="closed"):
        kind(pool)
    with pytest.raises(ValueError, match="closed"):
        Client(pool)


def test_a_server_cannot_be_stopped_by_its_own_handler(pool: Pool) -> None:
    server = Server(pool)
    messages: list[str] = []

    def handler(_: bytes) -> bytes:
        with pytest.raises(RpcError, match="inside a handler"):
            server.stop()
        messages.append("refused")
        return b"on"

    server.handle(64, handler)
    server.start()
    assert Client(pool).call(64) == b"on"
    assert messages == ["refused"]
    pool.close()


def test_an_interrupted_start_leaves_no_thread_in_a_closing_pool(shm: Path) -> None:
    """A serving thread without an owner would access unmapped memory."""
    before = threading.active_count()
    for point in itertools.count(1):
        paths = [shm / f"{point}"]
        with Pool.create(paths, device_size=8 << 20, sparse=True, max_blocks=64) as pool:
            server = Server(pool)
            try:
                with Interrupts({point}, called=True) as interrupts:
                    server.start()
            except (KeyboardInterrupt, RuntimeError):
                pass  # the standard library raises RuntimeError for an interrupt at some points
        if interrupts.count < point:
            break
    assert point > 10
    until = time.monotonic() + 60
    while sum(thread.is_alive() for thread in threading.enumerate()) > before:
        assert time.monotonic() < until
        time.sleep(0.001)


def stop_during_calls(path: str, by_the_server: bool) -> None:
    pool = Pool.create([path], device_size=16 << 20, sparse=True, max_blocks=64, force=True)
    server = IndexServer(pool)
    calls: list[Callable[[], object]] = [
        *(server.stat, server.index_stat, server.start, server.request_stop, pool.prefault),
        lambda: server.handle(70, bytes),
        lambda: server.watch(0.001, silent_s=1),
        lambda: Client(pool, timeout_s=0.2),
        lambda: pool.geometry,
    ]
    over = threading.Event()

    def repeat(call: Callable[[], object]) -> None:
        while not over.is_set():
            with contextlib.suppress(BelugaError, ValueError):
                call()

    threads = [threading.Thread(target=repeat, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    time.sleep(0.03)
    (server.stop if by_the_server else pool.close)()
    over.set()
    for thread in threads:
        thread.join()
    server.stop()
    pool.close()


def test_calls_during_a_stop_or_close_get_no_server_or_a_valid_one(shm: Path) -> None:
    for number in range(6):
        ended = role.run(stop_during_calls, shm / "a", bool(number % 2))
        assert ended.returncode == 0, ended.stderr[-3000:]


# ---- A server that stands by; the test controls when it starts.


class FakeServer:
    """The part of a server that :func:`stand_by` uses."""

    def __init__(
        self, *, watches: list[bool] | None = None, starts: list[Exception] | None = None
    ) -> None:
        self.watches = watches or [True]
        self.starts = starts or []
        self.started = 0
        self.watched: list[tuple[float, float]] = []

    def watch(self, timeout_s: float, *, silent_s: float) -> bool:
        self.watched.append((timeout_s, silent_s))
        return self.watches.pop(0) if len(self.watches) > 1 else self.watches[0]

    def start(self) -> None:
        if self.starts:
            raise self.starts.pop(0)
        self.started += 1


def waits(server: FakeServer, **options: Any) -> bool:
    return stand_by(cast("Server", server), threading.Event(), **options)


def test_a_server_starts_when_it_is_due() -> None:
    server = FakeServer(watches=[False, False, True])
    assert waits(server, silent_s=7.0)
    assert server.started == 1
    assert len(server.watched) == 3
    assert {silent for _, silent in server.watched} == {7.0}


def test_a_stop_before_the_start_prevents_the_start() -> None:
    server, called = FakeServer(), threading.Event()
    called.set()
    assert not stand_by(cast("Server", server), called)
    assert (server.started, server.watched) == (0, [])


def test_a_rejected_takeover_is_logged_once_and_retried(caplog: pytest.LogCaptureFixture) -> None:
    waited: list[float | None] = []
    reasons: list[str] = []

    class RecordedEvent(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waited.append(timeout)
            return False

    server = FakeServer(starts=[ServerAliveError("it lives"), ServerAliveError("it lives")])
    with caplog.at_level(logging.WARNING):
        assert stand_by(cast("Server", server), RecordedEvent(), waits=reasons.append)
    assert (server.started, len(server.watched), len(waited)) == (1, 3, 2)
    assert reasons == ["it lives"] * 2
    assert [record.getMessage() for record in caplog.records] == [
        "the takeover failed, will retry: it lives"
    ]


def test_other_errors_are_raised() -> None:
    with pytest.raises(PoolError, match="no pool"):
        waits(FakeServer(starts=[PoolError("no pool")]))
