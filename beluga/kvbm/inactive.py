# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The inactive blocks of a pool, which are registered but unused, in their order of eviction.

The next block to evict is the *leaf* with the lowest tick. A leaf has no inactive children, so the
end of a chain is evicted before its beginning. For example, after chains A-B-C and A-D were
returned in the order C, B, D, A, the order of eviction is C, B, D, A; had A been returned first, it
would still be the last.

The children of a key are counted whether or not a block of that key is inactive, so blocks may be
returned before or after their parents. A heap holds an entry for each leaf; stale entries are
dropped when they reach the top.
"""

from __future__ import annotations

import heapq

from beluga.kvbm.state import Block, Key

_Entry = tuple[int, Block]
_SLACK = 64


class Inactive:
    """Blocks in their order of eviction. Guarded by the pool's lock."""

    def __init__(self) -> None:
        self._keep_unsaved = False
        self._blocks: dict[Key, Block] = {}
        self._children: dict[Key, int] = {}
        self._leaves: list[_Entry] = []
        self._tick = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: Block) -> bool:
        return self._blocks.get(block.key) is block

    def keep_unsaved(self, keep: bool) -> None:
        """Set whether only blocks that the lower tier has may be evicted."""
        self._keep_unsaved = keep
        for block in self._blocks.values():
            self.offer(block)

    def add(self, block: Block) -> None:
        """Add a block that has just lost its last user. If it was only held and not used, it keeps
        its place in the order.
        """
        if not block.tick:
            self._tick += 1
            block.tick = self._tick
        self._blocks[block.key] = block
        if block.parent is not None:
            self._children[block.parent] = self._children.get(block.parent, 0) + 1
        self.offer(block)

    def remove(self, block: Block) -> None:
        """Remove a block that has a user again or is evicted."""
        del self._blocks[block.key]
        parent = block.parent
        if parent is None:
            return
        left = self._children[parent] - 1
        if left:
            self._children[parent] = left
            return
        del self._children[parent]
        above = self._blocks.get(parent)
        if above is not None:
            self.offer(above)

    def offer(self, block: Block) -> None:
        """Add a block to the heap if it is an evictable leaf, for example after it was saved."""
        if self._is_candidate(block):
            if len(self._leaves) > 2 * len(self._blocks) + _SLACK:
                self._leaves = [entry for entry in set(self._leaves) if self._is_current(entry)]
                heapq.heapify(self._leaves)
            heapq.heappush(self._leaves, (block.tick, block))

    def evict(self) -> Block | None:
        """Remove and return the next block to evict, or None if none may be evicted."""
        entry = self._pop()
        if entry is not None:
            block = entry[1]
        elif self._blocks and not self._keep_unsaved:
            # Parents that form a cycle have no leaf.
            block = min(self._blocks.values(), key=_order)
        else:
            return None
        self.remove(block)
        return block

    def coldest(self, count: int) -> list[Block]:
        """Return the blocks with the lowest ticks that the lower tier does not have."""
        unsaved = (block for block in self._blocks.values() if not block.saved)
        return heapq.nsmallest(count, unsaved, key=_order)

    def _pop(self) -> _Entry | None:
        leaves = self._leaves
        while leaves:
            entry = heapq.heappop(leaves)
            if self._is_current(entry):
                return entry
        return None

    def _is_current(self, entry: _Entry) -> bool:
        block = entry[1]
        return block.tick == entry[0] and block in self and self._is_candidate(block)

    def _is_candidate(self, block: Block) -> bool:
        return block.key not in self._children and (block.saved or not self._keep_unsaved)


def _order(block: Block) -> int:
    return block.tick
