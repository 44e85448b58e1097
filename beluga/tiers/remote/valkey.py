# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Objects in Valkey or Redis: one string per object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import SplitResult

from beluga.errors import TierError

from .settings import RemoteSettings
from .store import Contents, RefusedError

_READ_BYTES = 1 << 20  # the client's 32 KiB would be a system call for each


class ValkeyStore:
    """A store in Valkey or Redis. Each thread that works has a connection of its own."""

    batch = 512

    def __init__(self, url: SplitResult, settings: RemoteSettings) -> None:
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError as error:
            raise TierError(f"{url.scheme}:// needs redis: pip install beluga-kv[tiers]") from error
        self._redis = redis
        self._limit = settings.object_bytes
        secure = url.scheme in ("rediss", "valkeys")
        try:
            self._client = redis.Redis.from_url(
                url._replace(scheme="rediss" if secure else "redis").geturl(),
                protocol=2,
                socket_timeout=settings.attempt_s,
                socket_connect_timeout=settings.attempt_s,
                socket_read_size=_READ_BYTES,
                retry=Retry(NoBackoff(), 0),  # the tier tries again itself
            )
            self._client.connection_pool.make_connection()  # which finds wrong options
        except (ValueError, TypeError) as error:
            raise TierError(
                f"{url.scheme}://{url.hostname} is refused by redis: {error}"
            ) from error

    def get(self, name: str) -> Contents | None:
        """Return an object, or None. An empty string counts as none, for GETRANGE cannot tell."""
        found: bytes = self._ask("GETRANGE", name, 0, self._limit)
        return found or None

    def put(self, name: str, data: memoryview) -> None:
        """Store an object."""
        self._ask("SET", name, data)

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Return which of the objects exist, by one exchange."""
        try:
            pipeline = self._client.pipeline(transaction=False)
            for name in names:
                pipeline.execute_command("EXISTS", name)
            return [bool(found) for found in pipeline.execute()]
        except self._redis.ResponseError as error:
            raise RefusedError(str(error)) from error

    def delete(self, names: Sequence[str]) -> int:
        """Delete objects, and return how many there were."""
        return int(self._ask("UNLINK", *names))

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    def _ask(self, *command: str | int | memoryview) -> Any:
        try:
            return self._client.execute_command(*command)
        except self._redis.ResponseError as error:
            raise RefusedError(str(error)) from error
