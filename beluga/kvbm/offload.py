# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A queue of weak references to the blocks that wait to be offloaded."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING

from beluga.choices import ENGINE_OFFLOADS
from beluga.kvbm.handles import WeakBlock
from beluga.kvbm.state import Key

if TYPE_CHECKING:
    from beluga.kvbm.pool import BlockPool

BATCH = 16
"""Blocks per copy."""

OFFLOAD_POLICIES = ENGINE_OFFLOADS
"""When blocks are offloaded: ``wait`` and ``drop`` when they are registered, ``watermark`` when the
device's usage is above its watermark. Only ``wait`` never evicts a block before the pool has it.
"""


class OffloadQueue:
    """Blocks of a device, oldest first, each key once.

    A block that is evicted while it waits is dropped. So the queue holds at most as many live
    blocks as the device has; dead ones are swept out when it holds twice as many.
    """

    def __init__(self, source: BlockPool) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._blocks: dict[Key, WeakBlock] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def put(self, blocks: Iterable[WeakBlock]) -> int:
        """Append blocks, and return how many obsolete ones were dropped to make room."""
        with self._lock:
            for block in blocks:
                self._blocks.setdefault(block.key, block)
            before = len(self._blocks)
            if before > 2 * self._source.total_blocks:
                alive = self._source.contains(self._blocks)
                self._blocks = dict(itertools.compress(self._blocks.items(), alive))
            return before - len(self._blocks)

    def take(self) -> list[WeakBlock]:
        """Remove and return the next batch."""
        with self._lock:
            keys = list(itertools.islice(self._blocks, BATCH))
            return [self._blocks.pop(key) for key in keys]

    def clear(self) -> None:
        """Drop all blocks."""
        with self._lock:
            self._blocks.clear()
