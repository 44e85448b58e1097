# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The feeds of an index: the events of one publisher, in order, with replays that fill gaps.

:class:`Subscription` applies the messages of an engine's publisher, :class:`PoolFeed` those of a
pool's server. :class:`ReplayBuffer` is the publisher's side: the events that it buffers.

A pool's block whose parent was never announced cannot be a hit. It waits in the feed, and is stored
when the parent is. So a router that connects late ends with the same blocks as one that was
connected from the beginning.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from beluga.errors import EventError, RouterError
from beluga.router.events import (
    Batch,
    Cleared,
    HashBlocks,
    PoolBatch,
    PoolEvent,
    Removed,
    RouterEvent,
    Stored,
    WireDecoder,
    decode_frames,
    decode_pool,
    replay_request,
)
from beluga.router.indexer import Indexer
from beluga.router.worker import Worker

T = TypeVar("T")

HELD_MAX = 1 << 14  # more than an engine buffers for a replay (vLLM's buffer_steps: 10,000)


@dataclasses.dataclass(slots=True)
class Ready(Generic[T]):
    """The items that may be applied now, in order. ``restarted`` means that they start from an
    empty cache.
    """

    items: list[T]
    restarted: bool = False


class Feed(Generic[T]):
    """The numbered items of one publisher, starting with number 0.

    An item after a gap is buffered, and ``wanted`` is the number from which a replay is needed.
    Items of the replay go to ``replayed``. When it ends, or no replay is possible, ``give_up``
    continues without the missing items. Without ``replay``, gaps are skipped at once. Live numbers
    increase, so one that does not means that the publisher has restarted; the others that have
    already passed repeat items of a replay. No clock decides, as another host's may be behind.
    """

    def __init__(self, *, replay: bool = True, held_max: int = HELD_MAX) -> None:
        self._replay, self._held_max = replay, held_max
        self._next = 0
        self._live = -1  # the last live number
        self._held: dict[int, T] = {}
        self.gaps = 0
        self.lost = 0  # items that no replay delivered
        self.repeated = 0
        self.restarts = 0

    @property
    def next_number(self) -> int:
        """The number of the next item to apply."""
        return self._next

    @property
    def wanted(self) -> int | None:
        """The number from which a replay is needed, or None if nothing is missing."""
        return self._next if self._held else None

    def offer(self, number: int, item: T) -> Ready[T]:
        """Add a published item. Returns the items that may be applied."""
        restarted = number <= self._live and number < self._next
        self._live = number
        if restarted:
            self.restarts += 1
            self._next, self._held = 0, {}
        elif number < self._next:
            self.repeated += 1
            return Ready([])
        if number > self._next and not self._held:
            self.gaps += 1
        self._held[number] = item
        ready = self._drain()
        if self._held and (not self._replay or len(self._held) > self._held_max):
            ready += self.give_up()
        return Ready(ready, restarted)

    def replayed(self, number: int, item: T) -> list[T]:
        """Add an item of a replay. Returns the items that may be applied."""
        if number >= self._next and len(self._held) <= self._held_max:
            self._held.setdefault(number, item)
        return self._drain()

    def replaced(self, number: int, item: T) -> list[T]:
        """Add an item of a replay that replaces all items up to its number. Returns the items that
        may be applied.
        """
        if number < self._next:
            return []
        self._held = {held: message for held, message in self._held.items() if held > number}
        self._next = number + 1
        return [item, *self._drain()]

    def give_up(self) -> list[T]:
        """Skip the gap before the buffered items, and return these."""
        ready: list[T] = []
        for number in sorted(self._held):
            self.lost += number - self._next
            self._next = number + 1
            ready.append(self._held[number])
        self._held = {}
        return ready

    def reset(self) -> None:
        """Restart at number 0, because the publisher has disconnected. If it returns without a
        restart, a replay of all its items is requested.
        """
        self._next, self._held, self._live = 0, {}, -1

    def _drain(self) -> list[T]:
        ready = []
        while self._next in self._held:
            ready.append(self._held.pop(self._next))
            self._next += 1
        return ready


RING = 10_000  # buffered events (vLLM's buffer_steps)


@dataclass(frozen=True)
class Replay(Generic[T]):
    """The events from a number on; ``missed`` earlier ones are no longer buffered."""

    events: list[T]
    missed: int


class ReplayBuffer(Generic[T]):
    """The last ``ring`` numbered items of a publisher, for a replay. Numbers increase by one. With
    ``size``, older items are dropped above ``size_max`` in all.
    """

    def __init__(
        self,
        *,
        first: int = 0,
        ring: int = RING,
        size: Callable[[T], int] = lambda _: 0,
        size_max: int = 0,
    ) -> None:
        if ring < 1:
            raise RouterError(f"a publisher must buffer at least one event, not {ring}")
        self._next, self._ring_max = first, ring
        self._ring: deque[T] = deque()
        self._size, self._size_max, self._sum = size, size_max, 0

    @property
    def next_number(self) -> int:
        """The number of the next item."""
        return self._next

    def add(self, item: T) -> int:
        """Append an item and return its number."""
        self._ring.append(item)
        self._next += 1
        self._sum += self._size(item)
        while len(self._ring) > self._ring_max or self._sum > self._size_max:
            self._sum -= self._size(self._ring.popleft())
        return self._next - 1

    def skip(self) -> None:
        """Use up a number and drop all earlier items: a subscriber that has only these detects a
        gap.
        """
        self._ring.clear()
        self._sum = 0
        self._next += 1

    def replay(self, first: int) -> Replay[T]:
        """Return all buffered items from number ``first`` on."""
        oldest = self._next - len(self._ring)
        retained = list(self._ring)[max(first - oldest, 0) :]
        return Replay(retained, max(oldest - max(first, 0), 0))


class Subscription:
    """Feeds an index from one endpoint.

    The owner of the sockets calls ``received`` with each message from SUB. It sends ``wanted`` to
    the replay endpoint, if that is not None and no such request is pending, and calls ``replayed``
    with the replies until that returns True, or else ``replay_failed``. Without a replay endpoint
    (``replay`` false) ``wanted`` is always None. No method raises or logs: problems are counted,
    and the owner logs them.
    """

    def __init__(self, indexer: Indexer, decoder: WireDecoder, *, replay: bool) -> None:
        self._indexer, self._decoder = indexer, decoder
        self.feed: Feed[Batch] = Feed(replay=replay)
        self.unread = 0  # unreadable messages, and unreadable events in messages
        self.error = ""  # the last reason
        self.failed = 0  # events that could not be applied, fully or partly
        self.misfits = 0  # of them, events whose blocks the index now lacks
        self.misfit = ""  # the last reason of these
        self._ranks: set[Worker] = set()

    @property
    def ranks(self) -> int:
        """The number of data-parallel ranks that sent messages."""
        return len(self._ranks)

    @property
    def wanted(self) -> list[bytes] | None:
        """The frames for the replay endpoint, or None if nothing is missing."""
        first = self.feed.wanted
        return None if first is None else replay_request(first)

    def received(self, frames: Sequence[bytes]) -> None:
        """Process a published message."""
        read = self._read(frames)
        if read is None or read[1] is None:
            return
        number, batch = read[0], read[1]
        ready = self.feed.offer(number, batch)
        if ready.restarted:
            self._clear()
        self._apply(ready.items)

    def replayed(self, frames: Sequence[bytes]) -> bool:
        """Process a message of a replay. Returns True if it was the last."""
        read = self._read(frames)
        if read is None:
            return False
        number, batch = read
        if batch is None:
            self._apply(self.feed.give_up())
            return True
        self._apply(self.feed.replayed(number, batch))
        return False

    def replay_failed(self) -> None:
        """Continue without the missing messages, because no replay delivers them."""
        self._apply(self.feed.give_up())

    def gone(self) -> None:
        """Drop all blocks, because the publisher has disconnected: changes are no longer reported,
        and a restarted engine has an empty cache.
        """
        self._clear()
        self.feed.reset()

    def resize(self, block_size: int, hash_blocks: HashBlocks) -> None:
        """Set the router's new block size."""
        self._decoder.resize(block_size, hash_blocks)

    def _clear(self) -> None:
        self._apply_events([RouterEvent(worker, Cleared()) for worker in self._ranks])

    def _read(self, frames: Sequence[bytes]) -> tuple[int, Batch | None] | None:
        try:
            frame = decode_frames(frames)
            if frame.ends_replay:
                return frame.sequence, None
            return frame.sequence, self._decoder.batch(frame.payload)
        except EventError as error:
            self.unread += 1
            self.error = str(error)
            return None

    def _apply(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            self.unread += len(batch.failed)
            if batch.failed:
                self.error = str(batch.failed[-1])
            self._ranks.add(batch.worker)
            self._apply_events(batch.events)

    def _apply_events(self, events: Sequence[RouterEvent]) -> None:
        for event in events:
            try:
                self._indexer.apply(event)
            except EventError as error:
                self.failed += 1
                # Other events, which remove blocks or report a further tier of existing ones, may
                # arrive too late for blocks that are already gone.
                if isinstance(event.data, Stored) and event.data.tokens_hashes is not None:
                    self.misfits += 1
                    self.misfit = str(error)


def in_space(hashes: Iterable[int], space: int) -> list[int]:
    """Convert hashes to those of the index for the pool's blocks in a space."""
    return [value ^ space for value in hashes]


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
        self._pool = ""  # the id of the pool
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
            self._apply(self.feed.offer(number, batch).items)

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
        accept = self.feed.replaced if batch.whole else self.feed.replayed
        self._apply(accept(number, batch))
        return False

    def replay_failed(self) -> None:
        """Request a replay again later: without the missing messages the index would be wrong."""
        self._begun = False

    def blocks(self) -> dict[int, int]:
        """Return all blocks of the pool that were announced: their names and tokens hashes, each in
        its space, including those that wait for their parent.
        """
        contents = self._indexer.shared_names()
        for name, parent in self._waiting.items():
            contents[name] = self._children[parent][name]
        return contents

    def _read(self, frames: Sequence[bytes]) -> tuple[int, PoolBatch | None] | None:
        try:
            frame = decode_frames(frames)
            if frame.ends_replay:
                return frame.sequence, None
            batch = decode_pool(frame.payload)
            if batch.pool != self._pool:  # the pool was created again: its numbers begin anew
                self.feed.restarts += self._pool != ""
                self._pool, self._begun = batch.pool, False
                self.feed.reset()
            return frame.sequence, batch
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
            before, run, hashes = ready.pop()
            if not self._indexer.shared_stored(run, hashes, before):
                self._wait(before, run, hashes)
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
