# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The events of a pool's server, which keep the index up to date with the pool's blocks.

A block whose parent was never announced cannot be a hit. It waits here, and is stored when the
parent is. So a router that connects late ends with the same blocks as one that was connected from
the beginning.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from beluga.errors import EventError
from beluga.router.prefix.events import Cleared, Removed, Stored
from beluga.router.prefix.feed import Feed
from beluga.router.prefix.indexer import Indexer
from beluga.router.prefix.wire import (
    PoolBatch,
    PoolEvent,
    decode_frames,
    decode_pool,
    replay_request,
)


def in_space(hashes: Iterable[int], space: int) -> list[int]:
    """Convert hashes to those of the index for the pool's blocks in a space."""
    return [one ^ space for one in hashes]


class PoolFeed:
    """Feeds an index from the endpoints of one pool's server.

    The owner of the sockets calls ``received`` with each message from SUB. It sends ``wanted`` to
    the replay endpoint, if that is not None and no such request is pending, and calls ``replayed``
    with the replies until that returns True, or else ``replay_failed``. A feed without any message
    requests everything. No method raises; problems are counted.

    Blocks with a size other than ``block_size`` tokens are ignored. Blocks of several spaces
    (models) are separate: the index has hashes of blocks and of tokens that include the space
    (:func:`in_space`).
    """

    def __init__(self, indexer: Indexer, *, block_size: int) -> None:
        self._indexer, self._block_size = indexer, block_size
        self._begun = False
        self.feed: Feed[PoolBatch] = Feed()
        self.unread = 0  # unreadable messages, and unreadable events in messages
        self.other_sizes = 0  # blocks with another number of tokens
        self.spaces: dict[int, int] = {}  # number of blocks in each space
        self.received_s: float | None = None  # time.monotonic() of the last message
        self._waiting: dict[int, int] = {}  # blocks without their parent, and that parent
        self._children: dict[int, dict[int, int]] = {}  # parent -> its waiting blocks, contents
        indexer.follows_pool = True
        indexer.clear_shared()

    @property
    def wanted(self) -> list[bytes] | None:
        """The frames for the replay endpoint, or None if nothing is missing."""
        return None if self.up_to_date else replay_request(self.feed.next_number)

    @property
    def waiting(self) -> int:
        """The number of blocks that wait for their parent."""
        return len(self._waiting)

    @property
    def up_to_date(self) -> bool:
        """Whether no announced message is missing."""
        return self._begun and self.feed.wanted is None

    def received(self, frames: Sequence[bytes]) -> None:
        """Process a published message."""
        read = self._read(frames)
        if read is not None and (batch := read[1]) is not None:
            number = read[0]
            self._apply(self.feed.offer(number, batch, batch.made_s).items)

    def replayed(self, frames: Sequence[bytes]) -> bool:
        """Process a message of a replay. Returns True if it was the last."""
        read = self._read(frames)
        if read is None:
            return False
        number, batch = read
        if batch is None:
            self._begun = True
            self._apply(self.feed.give_up())
            return True
        taken = self.feed.replaced if batch.whole else self.feed.replayed
        self._apply(taken(number, batch, batch.made_s))
        return False

    def replay_failed(self) -> None:
        """Request a replay again later: without the missing messages the index would be wrong."""
        self._begun = False

    def blocks(self) -> dict[int, int]:
        """Return all blocks of the pool that were announced: their names and tokens hashes, each in
        its space, including those that wait for their parent.
        """
        found = self._indexer.shared_names()
        for name, parent in self._waiting.items():
            found[name] = self._children[parent][name]
        return found

    def _read(self, frames: Sequence[bytes]) -> tuple[int, PoolBatch | None] | None:
        try:
            frame = decode_frames(frames)
            if frame.ends_replay:
                return frame.sequence, None
            return frame.sequence, decode_pool(frame.payload)
        except EventError:
            self.unread += 1
            return None
        finally:
            self.received_s = time.monotonic()

    def _apply(self, batches: Sequence[PoolBatch]) -> None:
        for batch in batches:
            self.unread += batch.unread
            for event in batch.events:
                self._apply_event(event)

    def _apply_event(self, event: PoolEvent) -> None:
        data = event.data
        if isinstance(data, Cleared):
            self._indexer.clear_shared()
            self._waiting.clear()
            self._children.clear()
            self.spaces.clear()
        elif isinstance(data, Removed):
            self._count(event.space, -len(data.block_hashes))
            self._remove(in_space(data.block_hashes, event.space))
        elif event.block_size != self._block_size:
            self.other_sizes += len(data.block_hashes)
        else:
            self._store(data, event.space)

    def _store(self, data: Stored, space: int) -> None:
        self._count(space, len(data.block_hashes))
        names = in_space(data.block_hashes, space)
        contents = in_space(data.tokens_hashes or (), space)
        parent = None if data.parent_hash is None else data.parent_hash ^ space
        ready = [(parent, names, contents)]
        while ready:
            before, run, found = ready.pop()
            if not self._indexer.shared_stored(run, found, before):
                self._wait(before, run, found)
                continue
            for name in run:
                for child, local in self._children.pop(name, {}).items():
                    del self._waiting[child]
                    ready.append((name, [child], [local]))

    def _count(self, space: int, blocks: int) -> None:
        blocks += self.spaces.pop(space, 0)
        if blocks > 0:
            self.spaces[space] = blocks

    def _wait(self, parent: int | None, names: Sequence[int], contents: Sequence[int]) -> None:
        for name, local in zip(names, contents, strict=True):
            if parent is not None and name not in self._waiting:
                self._waiting[name] = parent
                self._children.setdefault(parent, {})[name] = local
            parent = name

    def _remove(self, names: Sequence[int]) -> None:
        held = []
        for name in names:
            parent = self._waiting.pop(name, None)
            if parent is None:
                held.append(name)
                continue
            self._children[parent].pop(name)
            if not self._children[parent]:
                del self._children[parent]
        if held:
            self._indexer.shared_removed(held)
