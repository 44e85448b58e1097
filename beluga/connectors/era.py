# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The era: clears a cache that several processes share, at once and whatever its content.

The names of all blocks start with the era, which is a random number in a record in the pool. Every
process reads it before each call, and pins it until its session ends, so that no pinned block
becomes unreachable. Removing the record ends the era, and the next call starts a new one. A put
that started before the end uses the old era in its names, so its blocks are never found. An
eviction of the record while no session has it ends the era, too: existing blocks then miss, but no
block is found that should not be.

An ended era must not return, although a lower tier may still have the record: the tier may have
been down, or refuse deletes. So a second record marks the era as ended. It has its own name, is
never removed, and is offloaded to the same tiers. It is looked up whenever an era is read for the
first time.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING

from beluga.connectors import records
from beluga.errors import CacheError
from beluga.kvcache import Namespace, hash_keys

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from beluga.connectors.connection import Attachment

SIZE = 16
_RECORD = hash_keys(["era"])
_ATTEMPTS = 4  # each but the first follows an era that another process has ended meanwhile


class Era:
    """The era of all users of one ``namespace``. Thread-safe."""

    def __init__(self, namespace: Namespace) -> None:
        self._namespace = Namespace({"era of": namespace.digest})
        self._lock = threading.Lock()
        self._clears = self._cleared = 0  # clears requested and done; the pool may be unavailable
        self._began: bytes | None = None  # an era that had not ended when it was first read

    @property
    def pending(self) -> bool:
        """Whether a requested clear is not done yet."""
        return self._clears != self._cleared

    def clear(self) -> None:
        """End the era, at the latest at the next :meth:`now`."""
        with self._lock:
            self._clears += 1

    def now(self, attachment: Attachment) -> bytes:
        """Return the current era. Raises the errors of a cache, and CacheError while another
        process starts an era or the current era is uncertain.
        """
        if self.pending:
            with self._lock:  # only one thread ends it, once
                self._end(attachment)
        era = records.read(attachment, self._namespace, _RECORD, SIZE) or self._begin(attachment)
        for _ in range(_ATTEMPTS):
            if era == self._began:
                return era
            if records.read(attachment, self._namespace, _end_of(era), SIZE) is None:
                self._began = era
                return era
            # A lower tier returned the record of an ended era. Write the new one at once, because
            # the tier may keep the old one forever.
            records.remove(attachment, self._namespace, _RECORD)
            era = self._begin(attachment)
        raise CacheError("eras of this cache end faster than they start; clear it less often")

    def _begin(self, attachment: Attachment) -> bytes:
        return records.write(attachment, self._namespace, _RECORD, os.urandom(SIZE))

    def _end(self, attachment: Attachment) -> None:
        clears = self._clears
        if clears == self._cleared:
            return
        era = records.read(attachment, self._namespace, _RECORD, SIZE)
        if era is not None:
            with contextlib.suppress(CacheError):  # a full pool still removes
                records.write(attachment, self._namespace, _end_of(era), era)
            records.remove(attachment, self._namespace, _RECORD)
        self._began = None
        self._cleared = clears


def _end_of(era: bytes) -> NDArray[np.uint8]:
    return hash_keys([b"end of " + era])
