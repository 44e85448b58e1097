# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Processes that may die or stop at any time, forked from one that has imported everything. A fork
takes milliseconds, a new interpreter hundreds, so thousands of kills are affordable. Every wait is
bounded: :class:`StuckError` names the process and its order.
"""

import contextlib
import json
import os
import select
import signal
import socket
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from worker import Message, Talk

WAIT_S = 120.0
_running: set[int] = set()  # pids of members that have not ended
Body = Callable[[Talk, list[Path], Message], None]


class StuckError(AssertionError):
    """A process did not do in time what it had to do."""


class Member:
    """A forked process that runs ``body`` on the pool on ``paths``, and sends a first reply."""

    def __init__(self, body: Body, paths: list[Path], first: Message) -> None:
        self.name = body.__name__
        self._socket, theirs = socket.socketpair()
        self._read = b""
        self._number = 0  # number of its last order; the reply has the same number
        self.ended: int | None = None  # the signal or, negative, the exit status
        self.stopped = False
        self.counted = False  # the death at a crash point was counted
        self._signalled = False
        self.pid = os.fork()
        if self.pid == 0:
            self._socket.close()
            _running.clear()
            _live(body, paths, first, theirs)
        _running.add(self.pid)
        theirs.close()

    @property
    def fell(self) -> bool:
        """Whether it stopped or died at a crash point, not by our signal."""
        return not self._signalled and (self.stopped or self.ended == signal.SIGKILL)

    def send(self, message: Message) -> None:
        """Send an order; a dead process does not get it."""
        self._number += 1
        try:
            self._socket.sendall(json.dumps(message | {"number": self._number}).encode() + b"\n")
        except OSError:
            self.poll()

    def poll(self, timeout_s: float = 0.0) -> Message | None:
        """Return the reply to the last order, if any, and record whether the process has died or
        stopped.

        A stopped process may answer an earlier order: no caller waits for that any more.
        """
        open_still = self._socket.fileno() >= 0
        if (
            open_still
            and b"\n" not in self._read
            and select.select([self._socket], [], [], timeout_s)[0]
        ):
            with contextlib.suppress(OSError):  # the process died before it read the order
                self._read += self._socket.recv(1 << 20)
        self._wait_status()
        while b"\n" in self._read:
            line, _, self._read = self._read.partition(b"\n")
            answer: Message = json.loads(line)
            if "error" in answer:
                raise AssertionError(f"{self.name} {self.pid}: {answer['error']}")
            if answer.pop("number") == self._number:
                return answer
        return None

    def receive(self, timeout_s: float = WAIT_S) -> Message | None:
        """Wait for its reply. Returns None if the process died or stopped instead."""
        end = time.monotonic() + timeout_s
        while True:
            answer = self.poll(0.002)
            if answer is not None or self.ended is not None or self.stopped:
                return answer
            if time.monotonic() > end:
                raise StuckError(f"{self.name} {self.pid} did not answer in {timeout_s:.0f} s")

    def request(self, message: Message) -> Message:
        """Send an order and return the reply. Raises StuckError if the process dies."""
        self.send(message)
        answer = self.receive()
        if answer is None:
            raise StuckError(f"{self.name} {self.pid} died of {self.ended} after {message}")
        return answer

    def signal(self, number: signal.Signals) -> None:
        if self.ended is None:
            self._signalled = number != signal.SIGCONT
            self.counted = False
            os.kill(self.pid, number)
            self.stopped = False

    def kill(self) -> None:
        """Kill it, and wait until it has ended."""
        self.signal(signal.SIGKILL)
        self._await(lambda: self.ended is not None)
        self._socket.close()

    def halt(self) -> None:
        """Stop it, and wait until none of its threads runs."""
        self.signal(signal.SIGSTOP)
        self._await(lambda: self.stopped or self.ended is not None)

    def _await(self, happened: Callable[[], bool]) -> None:
        end = time.monotonic() + WAIT_S
        while not happened():
            self._wait_status()
            if time.monotonic() > end:
                raise StuckError(f"{self.name} {self.pid} outlives its signal")
            time.sleep(0.0002)

    def _wait_status(self) -> None:
        if self.ended is not None:
            return
        pid, status = os.waitpid(self.pid, os.WNOHANG | os.WUNTRACED)
        if pid == 0:
            return
        if os.WIFSTOPPED(status):
            self.stopped = True
        else:
            _running.discard(self.pid)
            self.ended = os.WTERMSIG(status) if os.WIFSIGNALED(status) else -os.WEXITSTATUS(status)


def kill_all() -> None:
    """Kill every member that has not ended, also a stopped one."""
    for pid in tuple(_running):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        _running.discard(pid)


def _live(body: Body, paths: list[Path], first: Message, theirs: socket.socket) -> None:
    """Run a forked process to its end; never returns."""
    stream = theirs.makefile("rw")
    number = 0

    def talk(answer: Message | None) -> Message:
        nonlocal number
        stream.write(json.dumps((answer or {}) | {"number": number}) + "\n")
        stream.flush()
        line = stream.readline()
        if not line:  # the harness has ended
            os._exit(0)
        message: Message = json.loads(line)
        number = message.pop("number")
        return message

    try:
        for ignored in (signal.SIGINT, signal.SIGHUP):
            signal.signal(ignored, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        body(talk, paths, first)
    except BaseException as error:  # the child must not return into the harness
        frame = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"
        stream.write(json.dumps({"error": text}) + "\n")
        stream.flush()
    finally:
        os._exit(0)
