# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The pins of LMCache's locks and lookups, by key. A key may have several.

LMCache does not always release its locks: an aborted request may leave pins behind. They are
released after PIN_S seconds, as LMCache does with its own memory.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING, NamedTuple

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
    """Pins of one connection. Thread-safe, but only one thread at a time may use the connection."""

    def __init__(self) -> None:
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

    def release(self, connection: Connection) -> None:
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

        if connection.attempt("unlocking", release) is None:
            with self._lock:
                self._unheld += [pin for pin in unheld if connection.has(pin.owner)]
