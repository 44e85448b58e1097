# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Objects in Valkey or Redis: one string per object."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any
from urllib.parse import SplitResult

from beluga.errors import TierError
from beluga.tiers.arena import Arena
from beluga.tiers.remote.store import Contents, RefusedError, RemoteSettings

_HEAD_BYTES = 4096


class ValkeyStore:
    """A store in Valkey or Redis. Each worker thread has its own connection."""

    batch = 512

    @property
    def threads(self) -> int:
        """One per CPU, from 2 to 8. A reply costs CPU time rather than waiting, so more threads
        than CPUs only contend for the GIL: on two CPUs, two threads load objects of 768 KiB 1.7
        times as fast as eight.
        """
        return min(8, max(2, len(os.sched_getaffinity(0))))

    def __init__(self, url: SplitResult, settings: RemoteSettings) -> None:
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError as error:
            raise TierError(f"{url.scheme}:// needs redis: pip install beluga-kv[tiers]") from error
        self._redis = redis
        self._limit = settings.object_bytes
        self._arena = Arena()
        secure = url.scheme in ("rediss", "valkeys")
        try:
            self._client = redis.Redis.from_url(
                url._replace(scheme="rediss" if secure else "redis").geturl(),
                protocol=2,
                socket_timeout=settings.attempt_s,
                socket_connect_timeout=settings.attempt_s,
                retry=Retry(NoBackoff(), 0),  # the tier does the retries
            )
            self._client.connection_pool.make_connection()  # raises an error for invalid options
            if url.path.strip("/") and not url.path.strip("/").isdecimal():
                raise ValueError("its database is not a number")
        except (ValueError, TypeError) as error:
            shown = f"{url.scheme}://{url.hostname or ''}"
            raise TierError(
                f"redis rejects {shown}: {error}; give {url.scheme}://HOST:PORT/DATABASE"
            ) from error

    def get(self, name: str) -> Contents | None:
        """Return an object, or None. An empty string counts as None, because GETRANGE does not
        distinguish them.
        """
        pool = self._client.connection_pool
        connection = pool.get_connection()
        try:
            connection.send_command("GETRANGE", name, 0, self._limit)
            # The client library would copy a large reply three times.
            contents = _read_string(connection._sock, self._limit + 1, self._arena)
        except RefusedError as error:  # the reply has been read
            if str(error).startswith("WRONGTYPE"):
                return b""  # not a block: the next save replaces the key
            raise
        except BaseException:
            connection.disconnect()
            raise
        finally:
            pool.release(connection)
        return contents

    def put(self, name: str, data: memoryview) -> None:
        """Store an object."""
        self._execute("SET", name, data)

    def create(self, name: str, data: memoryview) -> None:
        """Store an object unless there is one of that name."""
        self._execute("SET", name, data, "NX")

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Return which of the objects exist, with one request."""
        try:
            pipeline = self._client.pipeline(transaction=False)
            for name in names:
                pipeline.execute_command("EXISTS", name)
            return [bool(count) for count in pipeline.execute()]
        except self._redis.ResponseError as error:
            raise RefusedError(str(error)) from error

    def delete(self, names: Sequence[str]) -> int:
        """Delete objects. Returns how many there were."""
        return int(self._execute("UNLINK", *names))

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    def _execute(self, *command: str | int | memoryview) -> Any:
        try:
            return self._client.execute_command(*command)
        except self._redis.ResponseError as error:
            raise RefusedError(str(error)) from error


def _read_string(line: socket.socket, limit: int, arena: Arena) -> memoryview | None:
    """Read the reply to one request for a string: ``$LENGTH``, the bytes, and the end of a line. An
    empty string is None. The bytes are in the arena's memory, because the page faults of new memory
    take longer than the read.
    """
    head = line.recv(_HEAD_BYTES)
    while (end := head.find(b"\r\n")) < 0:
        more = line.recv(_HEAD_BYTES)
        if not more or len(head) > _HEAD_BYTES:
            raise ConnectionError("truncated reply")
        head += more
    if head[:1] == b"-":
        raise RefusedError(head[1:end].decode(errors="replace"))
    if head[:1] != b"$" or end > 20 or not head[1:end].isdigit():
        raise ConnectionError("the reply is not a string")
    size = int(head[1:end])
    if size > limit:
        raise ConnectionError(f"the reply has {size} bytes, which is more than requested")
    data = memoryview(arena.take(size + 2).data)
    have = len(head) - end - 2
    if have > size + 2:
        raise ConnectionError("there is more than one reply")
    data[:have] = head[end + 2 :]
    while have < size + 2:
        received = line.recv_into(data[have:])
        if not received:
            raise ConnectionError("truncated reply")
        have += received
    if bytes(data[size:]) != b"\r\n":
        raise ConnectionError("the reply's length does not match its header")
    return data[:size] or None
