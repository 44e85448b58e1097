# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A temporary redis-server on loopback, which keeps everything in memory."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

from beluga.errors import TierError

_START_S = 10.0


@contextmanager
def redis_server() -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """Start a server, and yield its port and its process.

    Raises ImportError without the Python package redis, FileNotFoundError without the server, and
    TierError if it does not answer.
    """
    import redis

    def answers(client: redis.Redis) -> bool:
        try:
            return bool(client.ping())
        except redis.ConnectionError:
            return False

    program = shutil.which("redis-server")
    if program is None:
        raise FileNotFoundError("there is no redis-server; on Debian: apt-get install redis-server")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    where = ["--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no"]
    with subprocess.Popen([program, *where], stdout=subprocess.DEVNULL) as server:
        try:
            with closing(redis.Redis("127.0.0.1", port)) as client:
                until = time.monotonic() + _START_S
                while not answers(client):
                    if time.monotonic() > until:
                        raise TierError("redis-server does not answer")
                    time.sleep(0.05)
            yield port, server
        finally:
            server.kill()
