# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The messages of a server to its service manager (``NOTIFY_SOCKET``, ``WATCHDOG_USEC``)."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import stuck_server

from beluga.errors import CallTimeoutError
from beluga.pool import Pool
from beluga.rpc import METHOD_USER, Client

Start = Callable[..., "subprocess.Popen[str]"]
WAIT_S = 60.0


class NotifySocket:
    """The datagrams that reach a socket."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))

    def next(self, timeout_s: float = WAIT_S) -> str:
        """Return the next one; "" if none comes in time."""
        self._socket.settimeout(timeout_s)
        try:
            return self._socket.recv(4096).decode()
        except TimeoutError:
            return ""

    def until(self, words: str) -> list[str]:
        """Return the datagrams up to the one that has these words."""
        end, datagrams = time.monotonic() + WAIT_S, [""]
        while words not in datagrams[-1]:
            assert time.monotonic() < end, f"{words} is not among {datagrams}"
            datagrams.append(self.next(1.0))
        return datagrams

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def notified(tmp_path: Path) -> Iterator[NotifySocket]:
    notified = NotifySocket(tmp_path / "notify")
    yield notified
    notified.close()


@pytest.fixture
def launch(pool: list[str], notified: NotifySocket, tmp_path: Path) -> Iterator[Start]:
    """Start ``beluga serve`` on the pool, or a program of the tests, as a manager would."""
    launched = []

    def launch(*options: str, program: str = "", **watchdog: str) -> subprocess.Popen[str]:
        serve = ["-c", "from beluga.cli.main import main; main()", "serve", *pool, *options]
        words = [program, *pool[1::2]] if program else serve
        child = subprocess.Popen(
            [sys.executable, *words],
            env=os.environ | watchdog | {"NOTIFY_SOCKET": str(tmp_path / "notify")},
            text=True,
        )
        launched.append(child)
        return child

    yield launch
    for child in launched:
        child.kill()
        child.wait(timeout=WAIT_S)


def test_a_server_notifies_its_manager_of_ready_alive_and_stopping(
    launch: Start, notified: NotifySocket
) -> None:
    server = launch(WATCHDOG_USEC="200000")
    assert notified.next() == f"READY=1\nMAINPID={server.pid}\nSTATUS=serving, epoch 1"
    assert [notified.next() for _ in range(3)] == ["WATCHDOG=1"] * 3
    server.send_signal(signal.SIGTERM)
    assert set(notified.until("STOPPING=1")[1:-1]) <= {"WATCHDOG=1"}
    assert server.wait(timeout=WAIT_S) == 0


def test_a_standby_is_ready_after_its_first_check_of_the_server(
    launch: Start, server: subprocess.Popen[str], notified: NotifySocket
) -> None:
    standby = launch("--standby", WATCHDOG_USEC="1000000")
    assert notified.next() == f"READY=1\nMAINPID={standby.pid}\nSTATUS=standing by"
    assert [notified.next() for _ in range(2)] == ["WATCHDOG=1"] * 2
    server.kill()
    ready = f"READY=1\nMAINPID={standby.pid}\nSTATUS=serving, epoch 2"
    assert notified.until("READY=1")[-1] == ready
    standby.send_signal(signal.SIGTERM)
    assert notified.until("STOPPING=1")


def test_a_standby_that_finds_no_server_is_ready_when_it_serves(
    launch: Start, notified: NotifySocket
) -> None:
    launch("--standby", "--watch")
    assert notified.next().endswith("STATUS=serving, epoch 1")


def test_a_watchdog_for_another_process_is_not_notified(
    launch: Start, notified: NotifySocket
) -> None:
    server = launch(WATCHDOG_USEC="50000", WATCHDOG_PID="1")
    assert notified.next().startswith("READY=1")
    assert notified.next(1.0) == ""
    server.send_signal(signal.SIGTERM)
    assert notified.next().startswith("STOPPING=1")


def test_a_server_with_a_hanging_poll_loop_is_not_reported_alive(
    launch: Start, pool: list[str], notified: NotifySocket, tmp_path: Path
) -> None:
    stuck = tmp_path / "stuck"
    stuck.touch()
    launch(program=stuck_server.__file__, WATCHDOG_USEC="100000")
    try:
        notified.until("WATCHDOG=1")
        with Pool.open(pool[1::2]) as opened, Client(opened, timeout_s=WAIT_S) as client:
            with pytest.raises(CallTimeoutError):
                client.call(METHOD_USER, str(stuck).encode(), timeout_s=0.3)
            for _ in range(20):  # earlier messages
                notified.next(0.1)
            assert notified.next(1.0) == "", "its main thread does not hang"
            stuck.unlink()
            assert notified.next() == "WATCHDOG=1"
    finally:
        stuck.unlink(missing_ok=True)
