# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The ghosts of a pool: keys of recently evicted blocks.

A request for a ghost would have been a hit in a pool that is larger by the blocks evicted since.
"""

from __future__ import annotations

from collections import OrderedDict

from beluga.kvbm.state import Key


class Ghosts:
    """The ``limit`` most recently evicted keys."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._keys: OrderedDict[Key, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: Key) -> bool:
        return key in self._keys

    def add(self, key: Key) -> None:
        """Add an evicted key, and drop the oldest beyond the limit."""
        self._keys[key] = None
        self._keys.move_to_end(key)
        if len(self._keys) > self._limit:
            self._keys.popitem(last=False)

    def remove(self, key: Key) -> None:
        """Remove a key that was stored again."""
        self._keys.pop(key, None)
