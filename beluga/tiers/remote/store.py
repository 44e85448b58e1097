# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The interface of a store of bytes, below the remote tier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

from beluga.errors import TierError

Contents: TypeAlias = "bytes | memoryview"


class RefusedError(TierError):
    """The store is alive but rejects the request: it is full, read-only, requires another password,
    or does not take an object of this size.
    """

    of_request = True


class ObjectStore(Protocol):
    """A store of named, immutable objects. Thread-safe.

    A call ends within about ``RemoteSettings.operation_s``, as far as the client library can ensure
    this. It raises RefusedError for a reply that a retry would not change, and any other exception
    if the store does not reply.
    """

    @property
    def batch(self) -> int:
        """The preferred number of names per call of exists or delete."""

    @property
    def threads(self) -> int:
        """The default number of concurrent calls."""

    def get(self, name: str) -> Contents | None:
        """Return an object, or None if there is none."""

    def put(self, name: str, data: memoryview) -> None:
        """Store an object atomically, replacing any object of that name."""

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Return which of the objects exist."""

    def delete(self, names: Sequence[str]) -> int:
        """Delete objects. Returns how many there were."""

    def close(self) -> None:
        """Close all connections."""
