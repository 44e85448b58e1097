# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Sessions: lanes are assigned and released; many sessions, forks, deaths; numbers out of range."""

import contextlib
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from other_machine import LANES
from support import role, roles
from support.blocks import eventually
from support.emulation import fewer
from support.forks import in_child, surviving_child
from support.role import Process

from beluga import IndexServer, KVCache
from beluga.errors import BadValueError, NoLaneError, NoServerError
from beluga.pool import Pool
from beluga.rpc import METHOD_USER, Client, Server

# ---- Sessions: lanes are assigned and released; many sessions, forks and deaths.


def liveness_locks(pool: Pool) -> int:
    return len(list(pool.runtime_dir.glob("alive-*")))


def test_without_a_server_a_client_gets_an_error_at_once(pool: Pool) -> None:
    start = time.monotonic()
    with pytest.raises(NoServerError, match="beluga serve"):
        Client(pool, timeout_s=60)
    assert time.monotonic() - start < 30
    assert liveness_locks(pool) == 0


def test_a_stopped_server_is_an_error_at_once(pool: Pool) -> None:
    with Server(pool):
        pass
    with pytest.raises(NoServerError):
        Client(pool, timeout_s=60)


def test_when_all_lanes_are_taken_the_next_client_is_refused(pool: Pool, server: Server) -> None:
    clients = [Client(pool) for _ in range(LANES)]
    assert {client.stat().lane for client in clients} == set(range(LANES))
    with pytest.raises(NoLaneError, match="lanes"):
        Client(pool)
    clients[1].close()
    with Client(pool) as heir:
        assert heir.stat().lane == 1
        assert heir.call(METHOD_USER, b"heir") == b"heir"


def test_closing_releases_the_lane_and_leaves_no_files(pool: Pool, server: Server) -> None:
    before = liveness_locks(pool)
    for _ in range(3 * LANES):
        with Client(pool) as client:
            assert client.call(METHOD_USER, b"x") == b"x"
    assert server.stat().live_count == 0
    assert server.stat().attach_count == server.stat().end_count == 3 * LANES
    assert liveness_locks(pool) == before


def test_threads_with_separate_clients_get_their_own_replies(pool: Pool, server: Server) -> None:
    def work(name: int) -> None:
        with Client(pool) as client:
            for number in range(300):
                request = f"thread {name} {number}".encode() * (1 + number % 3 * 40)
                assert client.call(METHOD_USER, request) == request

    with ThreadPoolExecutor(LANES) as threads:
        list(threads.map(work, range(LANES)))
    assert server.stat().call_count == LANES * 300


def test_threads_may_share_a_client(pool: Pool, server: Server) -> None:
    def work(first: int) -> None:
        for number in range(first, first + 200):
            assert client.call(METHOD_USER, b"%d" % number) == b"%d" % number

    with Client(pool) as client, ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(0, 4000, 1000)))


def test_processes_call_concurrently(pool: Pool, server: Server, paths: list[Path]) -> None:
    calls = fewer(2000)
    with Process(roles.call, paths) as first, Process(roles.call, paths) as second:
        for process in (first, second):
            process.send(f"call {calls}")
        assert first.receive() == second.receive() == str(calls)
        assert first.end() == second.end() == 0
    assert eventually(lambda: server.stat().live_count == 0)


def test_the_lane_of_a_killed_client_is_released(
    pool: Pool, server: Server, paths: list[Path]
) -> None:
    before = liveness_locks(pool)
    with Process(roles.call, paths) as process:
        assert process.request("call 10") == "10"
        assert server.stat().live_count == 1
        process.kill()
    assert eventually(lambda: server.stat().live_count == 0)
    assert eventually(
        lambda: liveness_locks(pool) == before
    )  # after the line: a successor checks for it


@pytest.mark.long
@pytest.mark.parametrize("coherence", ["hardware"], indirect=True)
def test_a_client_that_holds_the_interpreter_keeps_its_session(
    pool: Pool, server: Server, paths: list[Path]
) -> None:
    with Process(roles.call, paths) as process:
        assert process.request("hold 6") == "held"  # longer than the heartbeat timeout
        assert process.request("call 10") == "10"
        assert server.stat().attach_count == 1
        assert server.stat().end_count == 0


@pytest.mark.parametrize("coherence", ["hardware"], indirect=True)
def test_a_stopped_client_keeps_its_session(pool: Pool, server: Server, paths: list[Path]) -> None:
    with Process(roles.call, paths) as process:
        process.signal(signal.SIGSTOP)
        time.sleep(6)  # longer than the heartbeat timeout
        assert server.stat().end_count == 0
        process.signal(signal.SIGCONT)
        assert process.request("call 10") == "10"
        assert server.stat().attach_count == 1


@pytest.mark.parametrize("coherence", ["hardware"], indirect=True)
def test_a_client_that_sleeps_past_its_deadline_gets_a_reply_that_arrived(
    pool: Pool, paths: list[Path]
) -> None:
    requested, gate = threading.Event(), threading.Event()

    def wait(request: bytes) -> bytes:
        requested.set()
        gate.wait(60)
        return request

    with Server(pool) as server, Process(roles.call, paths) as process:
        server.handle(METHOD_USER, wait)
        process.send("call 1")
        assert requested.wait(60)
        time.sleep(0.1)  # the server now alternates between sleeping and polling
        process.signal(signal.SIGSTOP)
        assert process.stopped()
        gate.set()
        time.sleep(5.5)  # longer than its timeout
        process.signal(signal.SIGCONT)
        assert process.receive(60) == "1"
        assert server.stat().attach_count == 1


def test_a_forked_child_is_rejected_and_its_parent_continues(pool: Pool, server: Server) -> None:
    with Client(pool) as client:
        assert client.call(METHOD_USER, b"before") == b"before"
        assert in_child(lambda: str(client.call(METHOD_USER, b"x"))) == "ForkedSessionError"
        assert client.call(METHOD_USER, b"after") == b"after"
        assert server.stat().attach_count == 1


def test_a_forked_child_may_close_its_inherited_session(pool: Pool, server: Server) -> None:
    def close() -> str:
        client.close()
        server.stop()
        pool.close()
        return "closed"

    with Client(pool) as client:
        assert in_child(close) == "closed"
        assert client.call(METHOD_USER, b"after") == b"after"


def test_a_forked_child_attaches_with_its_own_session(
    pool: Pool, server: Server, paths: list[Path]
) -> None:
    def attach() -> str:
        with Pool.open(paths) as own_pool, Client(own_pool) as client:
            return client.call(METHOD_USER, b"a session of my own").decode()

    with Client(pool) as client:
        assert in_child(attach) == "a session of my own"
        assert client.call(METHOD_USER, b"after") == b"after"
    assert server.stat().attach_count == 2


def test_a_surviving_child_does_not_keep_its_parents_session(pool: Pool, server: Server) -> None:
    with contextlib.ExitStack() as stack:
        with Client(pool):
            stack.enter_context(surviving_child())
        assert eventually(lambda: server.stat().live_count == 0)


def call_at_exit(paths: list[str]) -> None:
    called = threading.Event()
    client = Client(Pool.open(paths))

    def call() -> None:
        while client.call(METHOD_USER, bytes(4096)):
            called.set()

    threading.Thread(target=call, daemon=True).start()
    called.wait()


def test_an_interpreter_may_exit_while_a_daemon_thread_calls(
    pool: Pool, server: Server, paths: list[Path]
) -> None:
    for _ in range(3):
        assert role.run(call_at_exit, paths).returncode == 0
    assert eventually(lambda: server.stat().live_count == 0)


# ---- Host numbers and times out of range: one line states the valid range, before the pool is
# touched.


HOSTS: tuple[Any, ...] = (1 << 20, 64, -1, 1 << 64, True, False, 1.0, "1")
TIMES = (-1.0, float("nan"), float("inf"), 1e12)


@pytest.mark.parametrize("host", HOSTS)
def test_an_invalid_host_number_is_rejected(pool: Pool, host: Any) -> None:
    with Server(pool):
        for kind in (Client, Server, IndexServer):
            with pytest.raises(BadValueError, match=r"from 0 to 63; .* is not"):
                kind(pool, host=host)
        with pytest.raises(BadValueError, match=r"from 0 to 63; .* is not"):
            KVCache(pool, namespace="hosts", host=host)


def test_the_last_host_number_is_accepted(pool: Pool) -> None:
    assert pool.host_number(63) == 63
    assert pool.host_number(None) == 0


@pytest.mark.parametrize("seconds", TIMES)
def test_an_invalid_time_is_rejected(pool: Pool, seconds: float) -> None:
    with IndexServer(pool) as server, Client(pool) as client:
        calls = (
            lambda: Client(pool, timeout_s=seconds),
            lambda: client.call(0, timeout_s=seconds),
            lambda: client.ping(timeout_s=seconds),
            lambda: KVCache(pool, namespace="times", timeout_s=seconds),
            lambda: KVCache(client, namespace="times", timeout_s=seconds),
            lambda: Server(pool, heartbeat_lost_s=seconds),
            lambda: server.watch(seconds, silent_s=1),
            lambda: server.watch(0, silent_s=seconds),
        )
        for call in calls:
            with pytest.raises(BadValueError, match="seconds"):
                call()
        client.ping()
