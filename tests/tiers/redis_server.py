# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A redis-server from Debian on loopback, which can be stopped, killed and restarted."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
from pathlib import Path

import pytest
from support.blocks import eventually

ROOT = Path(__file__).resolve().parents[2]


def need_redis_server() -> None:
    """Skip the test if redis-server is missing and cannot be installed."""
    pytest.importorskip("redis", reason="redis is not installed")
    installer = ROOT / "scripts" / "dev/setup-packages"
    if (
        not shutil.which("redis-server")
        and subprocess.run([installer, "redis-server"], check=False).returncode
    ):
        pytest.skip("there is no redis-server, and it cannot be installed here")


class RedisServer:
    """A redis-server with its own port. It keeps nothing on disk."""

    def __init__(self, *options: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start it, empty. Returns when it responds."""
        self._process = subprocess.Popen(
            [
                shutil.which("redis-server") or "",
                *("--bind", "127.0.0.1", "--port", str(self.port)),
                *("--save", "", "--appendonly", "no", *self._options),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        assert eventually(self._answers, 60)

    def stop(self) -> None:
        """Stop it with SIGSTOP: connections stay open without responses."""
        assert self._process
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill it with SIGKILL, and wait until it has ended."""
        assert self._process
        self._process.kill()
        self._process.wait()

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as line:
                line.sendall(b"PING\r\n")
                return line.recv(5) == b"+PONG"
        except OSError:
            return False
