# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Programs of Debian packages. A missing one is installed if the tests run as root; otherwise the
test is skipped.
"""

import shutil
import socket
import subprocess
from collections.abc import Sequence
from typing import IO

import pytest
from beluga_bench.vllm.port import HOST
from support.blocks import eventually
from support.shown import ROOT


def program(name: str, package: str = "") -> str:
    """Return the path of a program; without a package, that has the same name."""
    if not shutil.which(name):
        subprocess.run([ROOT / "scripts/dev/setup-packages", package or name], check=False)
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"there is no {name}, and it cannot be installed here")
    return path


class LoopbackServer:
    """A server that can be killed and restarted. It is ready once it answers ``hello`` as given."""

    def __init__(
        self, command: Sequence[object], port: int, hello: tuple[bytes, bytes],
        log: int | IO[str] = subprocess.DEVNULL,
    ) -> None:  # fmt: skip
        self.port, self._hello, self._log = port, hello, log
        self._command = list(map(str, command))
        self.start()

    def start(self) -> None:
        """Start it with the data that it has kept. Returns when it answers."""
        self.process = subprocess.Popen(self._command, stdout=self._log, stderr=self._log)
        assert eventually(self._answers, 60)

    def kill(self) -> None:
        """Kill it with SIGKILL, and wait until it has ended."""
        self.process.kill()
        self.process.wait()

    def _answers(self) -> bool:
        sent, expected = self._hello
        try:
            with socket.create_connection((HOST, self.port), timeout=1) as line:
                line.sendall(sent)
                return line.recv(len(expected)) == expected
        except OSError:
            return False
