# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The era: it clears a cache that several processes share, at once and with any content.

The names of all blocks begin with the era, which is a random number in a record in the pool. Every
process reads it before each call. Removing the record clears the cache, and the next call makes a
new record. An eviction of the record clears the cache, too: then blocks are missed that exist, but
no block is found that should not be.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from beluga.connectors.fetch import fetch
from beluga.errors import CacheError
from beluga.kvcache import Namespace, hash_keys

if TYPE_CHECKING:
    from beluga.connectors.connection import Attachment

SIZE = 16
_RECORD = hash_keys(["era"])


class Era:
    """The era of all users of the same ``namespace``. Several threads may use it."""

    def __init__(self, namespace: Namespace) -> None:
        self._namespace = Namespace({"era of": namespace.digest})
        self._clears = self._cleared = 0  # clears requested and done; the pool may be unavailable

    def clear(self) -> None:
        """End the era, at the next :meth:`now` at the latest."""
        self._clears += 1

    def now(self, attachment: Attachment) -> bytes:
        """Return the current era. Raises what a cache raises, and CacheError while another process
        begins an era.
        """
        cache, era, clears = attachment.cache(self._namespace), bytearray(SIZE), self._clears
        if clears != self._cleared:
            cache.remove(_RECORD)
            self._cleared = clears
        if not fetch(cache, _RECORD, [era]).hits:
            cache.put(_RECORD, [os.urandom(SIZE)])
            # the first record that was written counts for all
            if not fetch(cache, _RECORD, [era]).hits:
                raise CacheError("another process is beginning an era in the pool")
        return bytes(era)
