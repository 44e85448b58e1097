# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The blocks that wait to be copied to the pool, by weak references."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING

from beluga.kvbm.handles import WeakBlock
from beluga.kvbm.state import Key

if TYPE_CHECKING:
    from beluga.kvbm.pool import BlockPool

BATCH = 16
"""Blocks that are offloaded in one copy."""

OFFLOAD_POLICIES = ("wait", "drop", "watermark")
"""When blocks are offloaded: ``wait`` and ``drop`` when they are registered, ``watermark`` when the
device is so full. Only ``wait`` evicts no block before the pool has it.
"""


class OffloadQueue:
    """Blocks of a device, the oldest first; each key once.

    A block that is evicted while it waits is dropped. So the queue holds no more live blocks than
    the device has; dead ones are swept out when it has twice as many.
    """

    def __init__(self, source: BlockPool) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._blocks: dict[Key, WeakBlock] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def put(self, blocks: Iterable[WeakBlock]) -> int:
        """Enter blocks, and return how many dead ones were swept out to make room."""
        with self._lock:
            for block in blocks:
                self._blocks.setdefault(block.key, block)
            before = len(self._blocks)
            if before > 2 * self._source.total_blocks:
                alive = self._source.contains(self._blocks)
                self._blocks = dict(itertools.compress(self._blocks.items(), alive))
            return before - len(self._blocks)

    def take(self) -> list[WeakBlock]:
        """Take the next batch out."""
        with self._lock:
            keys = list(itertools.islice(self._blocks, BATCH))
            return [self._blocks.pop(key) for key in keys]

    def clear(self) -> None:
        """Forget all blocks."""
        with self._lock:
            self._blocks.clear()
