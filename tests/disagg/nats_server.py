# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A nats-server from Debian with JetStream, on loopback, which can be killed and restarted."""

import shutil
import socket
import subprocess
from pathlib import Path

import pytest
from support.blocks import eventually

ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def need_nats_server() -> None:
    """Skip the test if nats-server is missing and cannot be installed."""
    installer = ROOT / "scripts" / "dev/setup-packages"
    if (
        not shutil.which("nats-server")
        and subprocess.run([installer, "nats-server"], check=False).returncode
    ):
        pytest.skip("there is no nats-server, and it cannot be installed here")


class NatsServer:
    """A nats-server with its own port and directory."""

    def __init__(self, directory: Path, *options: str, jetstream: bool = True) -> None:
        self.port = free_port()
        self._options = (*(("--js",) if jetstream else ()), *options)
        self._directory = directory
        self._log = (directory / "log").open("w")
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Serve the directory's content. Returns when the server answers."""
        self._process = subprocess.Popen(
            [
                shutil.which("nats-server") or "",
                *self._options,
                "--addr=127.0.0.1",
                f"--port={self.port}",
                f"--store_dir={self._directory / 'data'}",
            ],
            stdout=self._log,
            stderr=self._log,
        )
        assert eventually(self._is_ready, 60)

    def kill(self) -> None:
        """Kill it with SIGKILL, and wait until it has ended."""
        assert self._process
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        self.kill()
        self._log.close()

    def _is_ready(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as line:
                return line.recv(4) == b"INFO"
        except OSError:
            return False
