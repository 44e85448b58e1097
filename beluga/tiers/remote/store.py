# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""What the remote tier needs of a store of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

from beluga.errors import TierError

Contents: TypeAlias = "bytes | memoryview"


class RefusedError(TierError):
    """The store is alive and refuses: it is full, read-only, wants another password, or does not
    take an object of this size.
    """

    of_request = True


class ObjectStore(Protocol):
    """A store of named, immutable objects. Any thread may call any method, also at the same time.

    A call ends within about ``RemoteSettings.operation_s``, as far as the client library can ensure
    this. It raises RefusedError for an answer that a retry would not change, and any other
    exception if the store gives no answer.
    """

    @property
    def batch(self) -> int:
        """How many names one call of exists or delete should have."""

    @property
    def threads(self) -> int:
        """How many calls at once serve best, unless the settings say another number."""

    def get(self, name: str) -> Contents | None:
        """Return an object, or None if there is none."""

    def put(self, name: str, data: memoryview) -> None:
        """Store an object. Nobody sees a part of it; what has the name already is replaced."""

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Return which of the objects exist."""

    def delete(self, names: Sequence[str]) -> int:
        """Delete objects, and return how many there were."""

    def close(self) -> None:
        """Close all connections."""
