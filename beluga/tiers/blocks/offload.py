# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The blocks that wait to be copied to the next lower tier, by weak references."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING

from beluga.tiers.blocks.handles import WeakBlock
from beluga.tiers.blocks.state import Key

if TYPE_CHECKING:
    from beluga.tiers.blocks.pool import BlockPool

BATCH = 16
"""Blocks that are offloaded in one copy."""

_Item = tuple[int, int, WeakBlock]


class OffloadQueue:
    """Blocks of one tier: higher priority first, then older first; each key once.

    A block that is evicted while it waits is dropped. So the queue holds no more live blocks than
    the tier has; dead ones are swept out when it has twice as many.
    """

    def __init__(self, source: BlockPool) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._items: list[_Item] = []
        self._keys: set[Key] = set()
        self._number = 0

    def __len__(self) -> int:
        return len(self._items)

    def put(self, blocks: Iterable[WeakBlock]) -> int:
        """Enter blocks, and return how many dead ones were swept out to make room."""
        with self._lock:
            for block in blocks:
                if block.key not in self._keys:
                    self._number += 1
                    self._keys.add(block.key)
                    heapq.heappush(self._items, (-block.priority, self._number, block))
            if len(self._items) <= 2 * self._source.total_blocks:
                return 0
            before = len(self._items)
            alive = self._source.contains([item[2].key for item in self._items])
            self._items = [item for item, lives in zip(self._items, alive, strict=True) if lives]
            self._keys = {item[2].key for item in self._items}
            heapq.heapify(self._items)
            return before - len(self._items)

    def take(self) -> list[WeakBlock]:
        """Take the next batch out."""
        with self._lock:
            count = min(len(self._items), BATCH)
            blocks = [heapq.heappop(self._items)[2] for _ in range(count)]
            self._keys.difference_update(block.key for block in blocks)
            return blocks

    def clear(self) -> None:
        """Forget all blocks."""
        with self._lock:
            self._items.clear()
            self._keys.clear()
