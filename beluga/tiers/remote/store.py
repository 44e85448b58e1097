# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The interface of a store of bytes, below the remote tier, and the limits of its use."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
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

    A store may also have ``create(name, data)``, which stores an object unless there is one of that
    name. Without it, two servers that open a new store at the same moment may number it twice; the
    one whose number was replaced uses the store from its next start on.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteSettings:
    """Timeouts, retries and concurrency of a remote tier."""

    operation_s: float = 1.0
    """Timeout of one operation on one object, including its retries, in seconds."""
    load_s: float = 2.0
    """Timeout of one call of load, contains or remove, whatever its size, in seconds."""
    save_s: float = 10.0
    """Timeout of one call of save, in seconds."""
    threads: int | None = None
    """The number of concurrent operations. None: the store's default, which is 8 or, for Valkey and
    Redis, at most the number of CPUs. Saves use at most half of them.
    """
    abandoned: int = 16
    """The number of threads that may hang in a client library, in addition to the working ones."""
    retries: int = 2
    """The number of retries of a failed operation, within operation_s."""
    backoff_s: float = 0.02
    """The mean pause before the first retry, in seconds; it doubles with each retry."""
    failures: int = 3
    """The number of failures in a row that open the breaker."""
    open_s: float = 0.5
    """The time from opening the breaker to the first trial, in seconds; it doubles with each
    failure.
    """
    open_limit_s: float = 15.0
    """The longest time between two trials, in seconds."""
    block_bytes: int = 256 << 20
    """The largest payload that is saved or loaded, in bytes."""

    def __post_init__(self) -> None:
        """Raise TierError for a limit that is out of range."""
        for each in fields(self):
            value = getattr(self, each.name)
            if value is None and each.name == "threads":
                continue
            is_count = each.type != "float"
            minimum = _MINIMA.get(each.name, 1 if is_count else 0)
            kinds = int if is_count else (int, float)
            if isinstance(value, bool) or not isinstance(value, kinds) or not value >= minimum:
                raise TierError(
                    f"the remote tier's {each.name} is {value!r}; give it {minimum} or more"
                )
            if each.type == "float" and not 0 < value < math.inf:
                raise TierError(
                    f"the remote tier's {each.name} is {value}; give it a positive time"
                )

    @property
    def attempt_s(self) -> float:
        """The timeout for the client library, in seconds. The margin lets the library report before
        its thread is abandoned, and leaves time for a retry after a connection that failed at once.
        """
        return 0.8 * self.operation_s

    @property
    def object_bytes(self) -> int:
        """The largest object that is read: a block with its header, in bytes."""
        return self.block_bytes + 64


_MINIMA = {"threads": 2, "retries": 0, "abandoned": 0}
