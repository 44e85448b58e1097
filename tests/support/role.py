# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A function of a test file that runs in a process of its own, which the test can kill or stop.

    def reader(path: str) -> None:
        with Pool.open([path]) as pool:
            for line in role.lines():
                role.reply(pool.size)

    def test_a_pool_has_a_size(path: Path) -> None:
        with Process(reader, path) as child:
            assert child.request("size") == "4194304"

Arguments are what JSON has, and paths, which arrive as text. ``run`` waits for a function's end and
returns what it printed.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from support import forked
from support.emulation import PATIENCE

from beluga.errors import BelugaError

_TESTS = Path(__file__).resolve().parents[1]
_PROGRAM = f"""
import sys
sys.path.insert(0, {str(_TESTS)!r})
from support import role
role.main()
"""


# ---- In the child.


def lines() -> Iterator[str]:
    """Print "ready", then yield the lines of the test until it closes the input."""
    reply("ready")
    for line in sys.stdin:
        yield line.rstrip("\n")


def reply(text: object) -> None:
    print(text, flush=True)


def main() -> None:
    """Call ``FOLDER MODULE FUNCTION ARGUMENTS`` of the command line. An error of Beluga is printed
    as one line, which the test receives in place of "ready"; the exit status is then 1.
    """
    folder, module, name, arguments = sys.argv[1:]
    sys.path[1:1] = [folder, str(_TESTS.parent)]
    try:
        getattr(importlib.import_module(module), name)(*json.loads(arguments))
    except BelugaError as error:
        reply(f"{type(error).__name__}: {error}")
        sys.exit(1)


# ---- In the test.


def _arguments(function: Callable[..., None], arguments: Sequence[object]) -> list[str]:
    file = Path(function.__code__.co_filename)
    module = function.__module__
    folder = file.parents[module.count(".")]
    return [str(folder), module, function.__name__, json.dumps(arguments, default=str)]


def run(
    function: Callable[..., None], *arguments: object, timeout_s: float = 60, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a function in a new interpreter until it ends; ``options`` are those of ``subprocess``.

    The streams are captured. The status is not checked.
    """
    return subprocess.run(
        [sys.executable, "-c", _PROGRAM, *_arguments(function, arguments)],
        check=False,
        **{"capture_output": True, "text": True, **options},
        timeout=timeout_s * PATIENCE,
    )


class Process:
    """A function in a process of its own. Its end kills it, if it still runs.

    By default it is a copy of a process that has imported the libraries (``forked``). ``prefix`` is
    a command that starts the interpreter, ``environment`` has variables that the child has in
    addition; both make it a new interpreter. ``RuntimeError`` if the function ends before "ready".
    """

    def __init__(
        self,
        function: Callable[..., None],
        *arguments: object,
        prefix: Sequence[object] = (),
        environment: dict[str, str] | None = None,
    ) -> None:
        words = _arguments(function, arguments)
        if prefix or environment:
            self._process: subprocess.Popen[str] = subprocess.Popen(
                [*map(str, prefix), sys.executable, "-c", _PROGRAM, *words],
                env={**os.environ, **(environment or {})},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                bufsize=1,
            )
        else:
            self._process = forked.start(_PROGRAM, *words)
        greeting = self.receive()
        if greeting != "ready":
            self.kill()
            raise RuntimeError(f"{function.__name__}: {greeting}")

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, line: str) -> None:
        assert self._process.stdin
        self._process.stdin.write(line + "\n")

    def receive(self, timeout_s: float | None = None) -> str:
        """Return the next line that it prints; "" if it has ended, or after the timeout.

        Lines that it printed at once are read at once: with a timeout, the second one may come only
        with the next.
        """
        assert self._process.stdout
        if (
            timeout_s is not None
            and not select.select([self._process.stdout], [], [], timeout_s)[0]
        ):
            return ""
        return self._process.stdout.readline().rstrip("\n")

    def request(self, line: str) -> str:
        self.send(line)
        return self.receive()

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def died(self) -> int:
        """Wait until it has killed itself at a crash point. Returns the negative signal number."""
        status = self._process.wait(timeout=60 * PATIENCE)
        self._close()
        return status

    def stopped(self) -> bool:
        """Wait until it has stopped itself at a crash point. Returns False if it died instead."""
        while self._process.poll() is None:
            with contextlib.suppress(FileNotFoundError):
                if Path(f"/proc/{self.pid}/stat").read_text().rpartition(") ")[2][0] == "T":
                    return True
            time.sleep(0.005)
        return False

    def kill(self) -> None:
        """Kill it, and wait until it has ended."""
        self._process.kill()
        self._close()

    def end(self) -> int:
        """Close its input, and wait for its end. Returns its exit status."""
        assert self._process.stdin
        self._process.stdin.close()
        status = self._process.wait(timeout=60 * PATIENCE)
        self._close()
        return status

    def _close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            if stream:
                stream.close()
        self._process.wait(timeout=60 * PATIENCE)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._close()
