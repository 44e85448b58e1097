# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Clients and servers around their calls into C: interrupts, forks, and closed resources."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import role
from support.blocks import eventually
from support.watched_core import WatchedCore

from beluga._ffi import lib
from beluga.errors import BadValueError, NoServerError, RpcError, ServerAliveError
from beluga.pool import Pool
from beluga.rpc import METHOD_USER, Client, Quota, Server


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> WatchedCore:
    core = WatchedCore()
    monkeypatch.setattr("beluga.rpc.client.lib", core)
    monkeypatch.setattr("beluga.rpc.server.lib", core)
    return core


@pytest.fixture
def coherence() -> str:
    return "hardware"


@pytest.fixture
def server(pool: Pool) -> Iterator[Server]:
    with Server(pool) as server:
        server.handle(METHOD_USER, lambda request: request)
        yield server


def in_child(work: Callable[[], object]) -> str:
    """Return the result or the exception of ``work`` in a forked child, within ten seconds."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10)
        try:
            os.write(write, str(work()).encode())
        except BaseException as error:  # a child must not return into pytest
            os.write(write, type(error).__name__.encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as stream:
        text = stream.read().decode()
    _, status = os.waitpid(child, 0)
    return text if status == 0 else f"died of {status}"


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
        with client.lock:
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
        with client.lock:  # held by a thread that the child does not have
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
