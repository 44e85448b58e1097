# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""What LMCache's adapter and plugin have besides their calls: pins, and the bookkeeping of stored
objects.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Hashable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from beluga.connectors.lmcache import objects

if TYPE_CHECKING:
    from beluga.connectors.connection import Attachment, Connection
    from beluga.connectors.lmcache.objects import Hit
    from beluga.index import Grant

PIN_S = 300.0  # LMCache's ``pin_timeout_sec``


class _Pin(NamedTuple):
    owner: Attachment  # the pins end with the session
    grant: Grant
    since_s: float


class ConnectionPins:
    """The pins of LMCache's locks and lookups on one connection, by key. A key may have several.
    Thread-safe.

    LMCache does not always release its locks: an aborted request may leave pins behind. They are
    released after PIN_S seconds, as LMCache does with its own memory.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        # In the order of each key's newest pin.
        self._pins: collections.OrderedDict[Hashable, list[_Pin]] = collections.OrderedDict()
        self._unheld: list[_Pin] = []  # to be released

    def __len__(self) -> int:
        with self._lock:
            return sum(map(len, self._pins.values()))

    def hold(self, key: Hashable, owner: Attachment, hit: Hit) -> None:
        """Record the pin of a hit, if it has one."""
        if not hit.pinned:
            return
        with self._lock:
            self._pins.setdefault(key, []).append(_Pin(owner, hit.grant, time.monotonic()))
            self._pins.move_to_end(key)

    def drop(self, keys: Iterable[Hashable]) -> int:
        """Remove one pin of each key, for :meth:`release`. Returns how many keys had one."""
        count = 0
        with self._lock:
            for key in keys:
                pins = self._pins.get(key)
                if not pins:
                    continue
                self._unheld.append(pins.pop(0))
                count += 1
                if not pins:
                    del self._pins[key]
        return count

    def release(self) -> None:
        """Release dropped and expired pins. After a failure the next call retries, unless the
        session has ended.
        """
        with self._lock:
            oldest_s = time.monotonic() - PIN_S
            while self._pins:
                key, pins = next(iter(self._pins.items()))
                if pins[-1].since_s > oldest_s:
                    break
                self._unheld += self._pins.pop(key)
            unheld, self._unheld = self._unheld, []
        if not unheld:
            return

        def release(attachment: Attachment) -> bool:
            objects.release(attachment, [pin.grant for pin in unheld if pin.owner is attachment])
            return True

        if self._connection.attempt("unlocking", release) is None:
            with self._lock:
                self._unheld += [pin for pin in unheld if self._connection.has(pin.owner)]


CHECK_MIN = 4096  # objects, before the first comparison
OWED_MAX = 1 << 16  # keys


class Ledger:
    """Objects that this adapter stored, with their sizes in bytes. One thread changes it; any
    thread may read it.

    LMCache's quotas count calls of its listeners. The pool evicts without them, so the ledger is
    compared with the pool whenever it has doubled: evicted objects are then reported as deleted to
    LMCache, and the ledger's size is bounded by the pool's content.
    """

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
        return iter(list(self._sizes))  # a copy, made in one step

    def size_of(self, key: object) -> int:
        """Return an object's size, or 0 if the ledger does not have it any more."""
        return self._sizes.get(key, 0)

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
