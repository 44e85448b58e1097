# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A nats-server from Debian with JetStream, on loopback, which can be killed and restarted."""

from pathlib import Path

from beluga_bench.vllm.port import HOST, free_port
from support.packages import LoopbackServer, program


class NatsServer(LoopbackServer):
    """A nats-server with its own port and directory."""

    def __init__(self, directory: Path, *options: str, jetstream: bool = True) -> None:
        self._file = (directory / "log").open("w")
        port = free_port()
        where = (f"--addr={HOST}", f"--port={port}", f"--store_dir={directory / 'data'}")
        words = [program("nats-server"), *(["--js"] if jetstream else []), *options, *where]
        super().__init__(words, port, (b"", b"INFO"), self._file)

    @property
    def url(self) -> str:
        return f"nats://{HOST}:{self.port}"

    def end(self) -> None:
        self.kill()
        self._file.close()
