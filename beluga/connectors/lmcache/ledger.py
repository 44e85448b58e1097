# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""An L2 adapter's bookkeeping: stored objects, and pending deletions.

LMCache's quotas count calls of its listeners. The pool evicts without them, so the ledger is
compared with the pool whenever it has doubled: evicted objects are then reported as deleted to
LMCache, and the ledger's size is bounded by the pool's content.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import Any

CHECK_MIN = 4096  # objects, before the first comparison
OWED_MAX = 1 << 16  # keys


class Ledger:
    """Objects that this adapter stored, with their sizes in bytes. For one thread only."""

    def __init__(self) -> None:
        self._sizes: dict[Any, int] = {}
        self._check_at = CHECK_MIN

    def __contains__(self, key: object) -> bool:
        return key in self._sizes

    @property
    def grown(self) -> bool:
        """Whether it has doubled since the last :meth:`checked`."""
        return len(self._sizes) >= self._check_at

    def __iter__(self) -> Iterator[Any]:
        return iter(self._sizes)

    def add(self, keys: Iterable[Any], sizes: Iterable[int]) -> None:
        """Add stored objects."""
        self._sizes.update(zip(keys, sizes, strict=True))

    def take(self, keys: Iterable[Any]) -> list[int]:
        """Remove objects. Returns the size of each, or 0 for objects of other adapters."""
        return [self._sizes.pop(key, 0) for key in keys]

    def checked(self) -> None:
        """Record that all objects of the ledger were found to exist."""
        self._check_at = max(CHECK_MIN, 2 * len(self._sizes))


class Owed:
    """Pending deletions. Thread-safe.

    It has keys, and models that have too many pending keys, of which all objects are removed
    instead.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keys: dict[Any, None] = {}
        self._models: set[str] = set()

    def __contains__(self, key: Any) -> bool:
        with self._lock:
            return key in self._keys or key.model_name in self._models

    def __bool__(self) -> bool:
        with self._lock:
            return bool(self._keys or self._models)

    def add(self, keys: Iterable[Any]) -> None:
        """Add requested deletions."""
        with self._lock:
            self._keys.update(dict.fromkeys(keys))
            if len(self._keys) > OWED_MAX:
                self._models |= {key.model_name for key in self._keys}
                self._keys.clear()

    def all(self) -> tuple[list[Any], list[str]]:
        """Return the keys and the models."""
        with self._lock:
            return list(self._keys), list(self._models)

    def done(self, keys: Iterable[Any], models: Iterable[str]) -> None:
        """Remove completed deletions."""
        with self._lock:
            for key in keys:
                self._keys.pop(key, None)
            self._models -= set(models)
