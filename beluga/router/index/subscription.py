# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""One engine's publisher, as the index hears it: frames in, blocks in the index."""

from __future__ import annotations

from collections.abc import Sequence

from beluga.errors import EventError
from beluga.router.index.events import Cleared, RouterEvent
from beluga.router.index.feed import Feed
from beluga.router.index.indexer import Indexer
from beluga.router.index.wire import Batch, WireDecoder, decode_frames, replay_request
from beluga.router.worker import Worker


class Subscription:
    """Feeds an index from one endpoint.

    Whoever has the sockets calls ``received`` with what comes from SUB; sends ``wanted`` to the
    replay endpoint, if that is not None and no such request is out; and calls ``replayed`` with
    what comes from there until it says that this was the last, or else ``replay_failed``. Without a
    replay endpoint (``replay`` false) nothing is ever wanted. Nothing raises: what is wrong is
    counted.
    """

    def __init__(self, indexer: Indexer, decoder: WireDecoder, *, replay: bool) -> None:
        self._indexer, self._decoder = indexer, decoder
        self.feed: Feed[Batch] = Feed(replay=replay)
        self.unread = 0  # messages, and events in them, that are none
        self.failed = 0  # events that could not be applied
        self._ranks: set[Worker] = set()

    @property
    def wanted(self) -> list[bytes] | None:
        """Frames for the replay endpoint; None: nothing is missing."""
        first = self.feed.wanted
        return None if first is None else replay_request(first)

    def received(self, frames: Sequence[bytes]) -> None:
        """A published message."""
        read = self._read(frames)
        if read is None or read[1] is None:
            return
        number, batch = read[0], read[1]
        ready = self.feed.offer(number, batch, batch.made_s)
        if ready.restarted:
            self._apply_events([RouterEvent(worker, Cleared()) for worker in self._ranks])
        self._apply(ready.items)

    def replayed(self, frames: Sequence[bytes]) -> bool:
        """A message that was sent again. True: it was the last."""
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
        """Nobody sends again what is missing."""
        self._apply(self.feed.give_up())

    def _read(self, frames: Sequence[bytes]) -> tuple[int, Batch | None] | None:
        try:
            frame = decode_frames(frames)
            if frame.ends_replay:
                return frame.sequence, None
            return frame.sequence, self._decoder.batch(frame.payload)
        except EventError:
            self.unread += 1
            return None

    def _apply(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            self.unread += len(batch.failed)
            self._ranks.add(batch.worker)
            self._apply_events(batch.events)

    def _apply_events(self, events: Sequence[RouterEvent]) -> None:
        self.failed += self._indexer.apply_all(events)
