# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A server starts and stops once, from any thread, and never during a call that uses it."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from support.blocks import eventually
from support.emulation import PATIENCE
from support.interrupts import Interrupts

import beluga.rpc.server
from beluga import Client, IndexServer, Pool
from beluga.errors import NoServerError, RpcError, ServerAliveError
from beluga.rpc import Server


@pytest.fixture
def pool(shm: Path) -> Pool:
    return Pool.create([shm / "a"], device_size=16 << 20, sparse=True, max_blocks=64)


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


def test_a_start_that_was_refused_may_be_tried_again(pool: Pool) -> None:
    late = Server(pool)
    with Server(pool), pytest.raises(ServerAliveError):
        late.start()
    late.start()
    Client(pool).ping()
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


CONCURRENT = """
import sys, threading
import beluga.rpc.server
from beluga import Client, IndexServer, Pool
from beluga.errors import BelugaError
for round in range(6):
    pool = Pool.create(sys.argv[1:], device_size=16 << 20, sparse=True, max_blocks=64, force=True)
    server = IndexServer(pool)
    calls = [server.stat, server.index_stat, lambda: server.handle(70, bytes), server.request_stop,
             lambda: server.watch(0.001, silent_s=1), lambda: Client(pool, timeout_s=0.2),
             server.start, pool.prefault, lambda: pool.geometry]
    over = threading.Event()
    def beside(call):
        while not over.is_set():
            try:
                call()
            except (BelugaError, ValueError):
                pass
    threads = [threading.Thread(target=beside, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    threading.Event().wait(0.03)
    (server.stop if round % 2 else pool.close)()
    over.set()
    for thread in threads:
        thread.join()
    server.stop()
    pool.close()
print("alive")
"""


def test_calls_during_a_stop_or_close_get_no_server_or_a_valid_one(shm: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", CONCURRENT, str(shm / "a")],
        capture_output=True,
        text=True,
        timeout=120 * PATIENCE,
        check=False,
    )
    assert (ended.returncode, ended.stdout.strip()) == (0, "alive"), ended.stderr[-3000:]
