# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The subscription to one engine's publisher: applies ZMQ messages to the index."""

from __future__ import annotations

from collections.abc import Sequence

from beluga.errors import EventError
from beluga.router.prefix.events import Cleared, RouterEvent, Stored
from beluga.router.prefix.feed import Feed
from beluga.router.prefix.indexer import Indexer
from beluga.router.prefix.wire import (
    Batch,
    HashBlocks,
    WireDecoder,
    decode_frames,
    replay_request,
)
from beluga.router.worker import Worker


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
        ready = self.feed.offer(number, batch, batch.made_s)
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
        self._apply(self.feed.replayed(number, batch, batch.made_s))
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
                if _has_contents(event):
                    self.misfits += 1
                    self.misfit = str(error)


def _has_contents(event: RouterEvent) -> bool:
    """Return whether an event adds blocks to the index. Others, which remove blocks or report a
    further tier of existing ones, may arrive too late for blocks that are already gone.
    """
    return isinstance(event.data, Stored) and event.data.tokens_hashes is not None
