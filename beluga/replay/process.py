# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Child processes of a replay, which report in lines of JSON on their stdout."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO, Any, cast

import msgspec

from beluga.child import command
from beluga.errors import ReplayError

_STOP_TIMEOUT_S = 10.0


def report(message: Mapping[str, object]) -> None:
    """In a child: tell the parent. One that has gone takes its children with it."""
    try:
        os.write(sys.stdout.fileno(), msgspec.json.encode(message) + b"\n")
    except BrokenPipeError:
        sys.exit(1)


class Process:
    """A child that runs a module of this package; ended by :meth:`stop`, at the latest.

    Ctrl-C is the parent's to answer, who ends its children: they start with it blocked.
    """

    def __init__(self, name: str, module: str, arguments: Sequence[str], stdin: int) -> None:
        self.name = name
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._child = subprocess.Popen(
                command(module, *arguments), stdin=stdin, stdout=subprocess.PIPE
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    @property
    def stdout(self) -> IO[bytes]:
        """Where its reports come from."""
        return cast("IO[bytes]", self._child.stdout)

    @property
    def pid(self) -> int:
        """Of the child."""
        return self._child.pid

    def next_report(self) -> dict[str, Any]:
        """What the child says next. Raises ReplayError if it failed, or died without a word."""
        line = self.stdout.readline()
        message: dict[str, Any] = msgspec.json.decode(line) if line.endswith(b"\n") else {}
        if "error" in message:
            raise ReplayError(f"{self.name}: {message['error']}")
        if not message:
            raise ReplayError(f"{self.name} ended before its work did: {self._how()}")
        return message

    def stop(self) -> None:
        """End the child: by the end of its stdin, or else by force."""
        if self._child.stdin is not None:
            self._child.stdin.close()
        else:
            self._child.terminate()
        try:
            self._child.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self.stdout.close()

    def _how(self) -> str:
        code = self._child.wait()
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
