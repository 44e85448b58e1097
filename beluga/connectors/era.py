# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Clearing a cache that several processes share, at once and whatever is in it.

All names of blocks begin with the era: random bytes in a record in the pool, which every process
reads before each call. To clear is to remove the record. The next call makes another, and no name
from before is ever made again; the room of the old blocks is taken when it is needed. A record that
is lost (its own room was needed) clears, too: blocks are missed that could have been found, but
none is found that should not be.
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
    """The era of those who give the same ``namespace``. Used by several threads."""

    def __init__(self, namespace: Namespace) -> None:
        self._namespace = Namespace({"era of": namespace.digest})
        self._clears = self._cleared = 0  # asked for, and done: the pool may not be there

    def clear(self) -> None:
        """End it, with the next :meth:`now` at the latest."""
        self._clears += 1

    def now(self, attachment: Attachment) -> bytes:
        """The era that it is. Raises what a cache does, also while another process begins one."""
        cache, era, clears = attachment.cache(self._namespace), bytearray(SIZE), self._clears
        if clears != self._cleared:
            cache.remove(_RECORD)
            self._cleared = clears
        if not fetch(cache, _RECORD, [era]).hits:
            cache.put(_RECORD, [os.urandom(SIZE)])
            if not fetch(cache, _RECORD, [era]).hits:  # whichever came first is everybody's
                raise CacheError("another process is beginning an era in the pool")
        return bytes(era)
