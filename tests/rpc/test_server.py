# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A pool has one server at a time; it is replaced after a stop or a death, and its clients
reconnect.
"""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
from support import roles
from support.forks import in_child, surviving_child
from support.role import Process

from beluga._ffi import lib
from beluga.errors import CallTimeoutError, NoServerError, RpcError, ServerAliveError
from beluga.pool import Pool
from beluga.rpc import METHOD_USER, Client, Server


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
