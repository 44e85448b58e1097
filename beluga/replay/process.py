# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The child processes of a replay, which report in lines of JSON on their stdout."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, Any, cast

import msgspec

from beluga.child import start
from beluga.errors import ReplayError

_STOP_TIMEOUT_S = 10.0


class ProcessKilledError(ReplayError):
    """A process of the replay was ended by a signal."""


def report(message: Mapping[str, object]) -> None:
    """Report to the parent. If the parent has ended, the child exits, too."""
    try:
        os.write(sys.stdout.fileno(), msgspec.json.encode(message) + b"\n")
    except BrokenPipeError:
        sys.exit(1)


class Process:
    """A child process that runs a module of this package, until :meth:`stop` at the latest.

    The parent handles Ctrl-C and ends its children.
    """

    def __init__(self, name: str, module: str, arguments: Sequence[str], stdin: int) -> None:
        self.name = name
        self._sending = threading.Lock()
        self._child = start(module, *arguments, stdin=stdin, stdout=subprocess.PIPE)

    @property
    def stdout(self) -> IO[bytes]:
        """The child's stdout, from which its reports come."""
        return cast("IO[bytes]", self._child.stdout)

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._child.pid

    def next_report(self) -> dict[str, Any]:
        """Return the child's next report. Raises ReplayError if it failed or died without a
        report.
        """
        line = self.stdout.readline()
        message: dict[str, Any] = msgspec.json.decode(line) if line.endswith(b"\n") else {}
        if "error" in message:
            raise ReplayError(f"{self.name}: {message['error']}")
        if not message:
            code = self._child.wait()
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
            kind = ProcessKilledError if code < 0 else ReplayError
            raise kind(f"{self.name} ended before its work was done: {how}")
        return message

    def send(self, message: object) -> None:
        """Write a line of JSON to the child's stdin, unless the child has ended."""
        with self._sending, suppress(OSError, ValueError):
            stdin = cast("IO[bytes]", self._child.stdin)
            stdin.write(msgspec.json.encode(message) + b"\n")
            stdin.flush()

    def stop(self) -> None:
        """End the child by closing its stdin, or else by signals."""
        if self._child.stdin is not None:
            with suppress(OSError):  # unread output has no reader any more
                self._child.stdin.close()
        else:
            self._child.terminate()
        try:
            self._child.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self.stdout.close()
