# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Runs in a guest: starts processes there, and forwards their lines over a serial port. Orders are
lines of JSON: ``{"start": NAME, "main": "MODULE:FUNCTION", "arguments": [...]}``, ``{"to": NAME,
"line": TEXT}``, ``{"end": NAME}`` (no more lines), ``{"terminate": NAME}``. Reports: ``{"of": NAME,
"line": TEXT}`` for every line of output, ``{"of": NAME, "exit": STATUS}``.

An emulated CPU needs ten seconds to import what Beluga's commands need. So that is done once, here,
and every process is a fork of this one, which has no threads and no pool.
"""

import gc
import json
import os
import selectors
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

# Imported before any process is forked: the commands that tests/hosts/run.py runs, and the worker.
COMMANDS = ("app", "output", "doctor", "pool", "serve", "stat")
IMPORTED = (*(f"beluga.cli.{name}" for name in COMMANDS), "rich.progress", "worker")


class Child:
    """A forked process."""

    def __init__(self, pid: int, stdin: int, stdout: int) -> None:
        self.pid, self.stdin, self.stdout = pid, stdin, stdout
        self.unread = b""


class Agent:
    def __init__(self, line: str) -> None:
        self._line = os.open(line, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
        self._unread = b""
        self._children: dict[str, Child] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._line, selectors.EVENT_READ)

    def run(self) -> Callable[[], object]:
        """Execute orders. Returns only in a new process, with the function to run."""
        self._send(of="agent", line="ready")
        while True:
            for key, _ in self._selector.select():
                if key.fd != self._line:
                    self._carry(key.data)
                    continue
                *lines, self._unread = (self._unread + os.read(self._line, 4096)).split(b"\n")
                for line in lines:
                    main = self._obey(json.loads(line))
                    if main is not None:
                        return main

    def _send(self, **message: object) -> None:
        text = json.dumps(message).encode() + b"\n"
        while text:
            text = text[os.write(self._line, text) :]

    def _obey(self, message: dict[str, Any]) -> Callable[[], object] | None:
        if "start" in message:
            return self._start(message["start"], message["main"], message["arguments"])
        if "to" in message:
            os.write(self._children[message["to"]].stdin, message["line"].encode() + b"\n")
        elif "end" in message:
            os.close(self._children[message["end"]].stdin)
        elif "terminate" in message:
            os.kill(self._children[message["terminate"]].pid, signal.SIGTERM)
        return None

    def _start(self, name: str, main: str, arguments: list[str]) -> Callable[[], object] | None:
        stdin, to_child = os.pipe()
        from_child, stdout = os.pipe()
        pid = os.fork()
        if pid == 0:
            for target, source in enumerate((stdin, stdout, stdout)):
                os.dup2(source, target)
            os.closerange(3, 256)
            module, _, function = main.partition(":")
            sys.argv = [name, *arguments]
            entry: Callable[[], object] = getattr(import_module(module), function)
            return entry
        os.close(stdin)
        os.close(stdout)
        self._children[name] = Child(pid, to_child, from_child)
        self._selector.register(from_child, selectors.EVENT_READ, name)
        return None

    def _carry(self, name: str) -> None:
        child = self._children[name]
        piece = os.read(child.stdout, 4096)
        *lines, child.unread = (child.unread + piece).split(b"\n")
        for line in lines:
            self._send(of=name, line=line.decode(errors="replace"))
        if not piece:
            self._selector.unregister(child.stdout)
            _, status = os.waitpid(child.pid, 0)
            self._send(of=name, exit=os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1])]  # where tests keep what they share
    for module in IMPORTED:
        import_module(module)
    gc.freeze()  # keeps memory shared with the children
    sys.exit(Agent(sys.argv[1]).run()())
