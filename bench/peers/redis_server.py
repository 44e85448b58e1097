# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A temporary redis-server, or valkey-server, which keeps everything in memory."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from beluga.errors import TierError

if TYPE_CHECKING:
    import redis

_START_S = 10.0


def redis_program() -> str | None:
    """Return the path of the server, or None if neither is installed."""
    return shutil.which("redis-server") or shutil.which("valkey-server")


@contextmanager
def redis_server() -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """Start a server on loopback, and yield its port and its process.

    Raises ImportError without the Python package redis, FileNotFoundError without the server, and
    TierError if it does not answer.
    """
    import redis

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    endpoint = ["--bind", "127.0.0.1", "--port", str(port)]
    with _started(endpoint, redis.Redis("127.0.0.1", port)) as server:
        yield port, server


@contextmanager
def redis_at(path: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a server on a unix socket, and yield its process. Raises like :func:`redis_server`."""
    import redis

    endpoint = ["--port", "0", "--unixsocket", path]
    with _started(endpoint, redis.Redis(unix_socket_path=path)) as server:
        yield server


@contextmanager
def _started(endpoint: list[str], client: redis.Redis) -> Iterator[subprocess.Popen[bytes]]:
    import redis

    def answers() -> bool:
        try:
            return bool(client.ping())
        except redis.ConnectionError:
            return False

    program = redis_program()
    if program is None:
        raise FileNotFoundError("there is no redis-server; on Debian: apt-get install redis-server")
    command = [program, *endpoint, "--save", "", "--appendonly", "no"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server, closing(client):
        try:
            until = time.monotonic() + _START_S
            while not answers():
                if time.monotonic() > until:
                    raise TierError("redis-server does not answer")
                time.sleep(0.05)
            yield server
        finally:
            server.kill()
