# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Replica sync: routers of one model tell each other what they sent to which worker, so that each
accounts for all requests.

This is Dynamo's replica sync (off by default in Dynamo, too): routers report requests that were
added, prefilled and freed, but not the growth of answers. A batch has at most BATCH_EVENTS and
waits at most BATCH_S; the caller that has the clock calls ``flush``. Requests of a router that died
expire after PHANTOM_S.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Literal

from beluga.errors import NoWorkersError, RouterError
from beluga.router.load.tracker import LoadTracker
from beluga.router.policy import Query
from beluga.router.worker import Overlap, Worker

BATCH_EVENTS = 256
BATCH_S = 0.001
PHANTOM_S = 300.0


@dataclasses.dataclass(frozen=True, slots=True)
class SyncEvent:
    """A step in a request's life. All fields but the first two are only for "add"."""

    kind: Literal["add", "prefilled", "free"]
    request: str
    worker: tuple[int, int] = (0, 0)
    isl: int = 0
    cached: int = 0  # blocks
    stride: int = 0  # tokens in a block
    sequence: Sequence[int] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class _Batch:
    router: str
    events: list[SyncEvent]


class ReplicaSync:
    """One router's end: it applies the others' events to its tracker and sends its own through
    ``send``.
    """

    def __init__(
        self, router: str, tracker: LoadTracker, stride: int, send: Callable[[bytes], None]
    ) -> None:
        """``router`` is a unique name; ``stride`` is the block size that all routers must share."""
        self._router = router
        self._tracker = tracker
        self._stride = stride
        self._send = send
        self._batch: list[SyncEvent] = []
        self._begun = 0.0
        self.dropped = 0  # events with another block size or for an unknown worker

    def tell_add(
        self, request: str, worker: Worker, query: Query, overlap: Overlap, now: float
    ) -> None:
        event = SyncEvent(
            "add",
            request,
            (worker.worker_id, worker.dp_rank),
            query.isl,
            overlap.blocks,
            self._stride,
            tuple(query.sequence),
        )
        self._tell(event, now)

    def tell_prefilled(self, request: str, now: float) -> None:
        self._tell(SyncEvent("prefilled", request), now)

    def tell_free(self, request: str, now: float) -> None:
        self._tell(SyncEvent("free", request), now)

    def flush(self, now: float) -> float | None:
        """Send the batch if it is due. Returns when the next one is due, or None if there is
        none.
        """
        if not self._batch:
            return None
        due = self._begun + BATCH_S
        if now < due and len(self._batch) < BATCH_EVENTS:
            return due
        self._send_batch()
        return None

    def hear(self, message: bytes, now: float) -> None:
        """Apply another router's batch. A router's own batch that comes back is ignored.

        Raises RouterError if the message cannot be read.
        """
        import msgspec

        try:
            batch = msgspec.msgpack.decode(message, type=_Batch)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise RouterError(f"another router's events cannot be read: {error}") from None
        if batch.router != self._router:
            for event in batch.events:
                self._apply(batch.router, event, now)

    def _apply(self, router: str, event: SyncEvent, now: float) -> None:
        name: Hashable = (router, event.request)
        if event.kind == "free":
            self._tracker.free(name, now)
        elif event.kind == "prefilled":
            self._tracker.prefill_done(name, now)
        elif event.stride != self._stride:
            self.dropped += 1
        else:
            query = Query(event.isl, event.stride, sequence=event.sequence)
            try:
                self._tracker.add(
                    name,
                    Worker(*event.worker),
                    query,
                    Overlap(device=event.cached),
                    now=now,
                    expires=now + PHANTOM_S,
                )
            # the worker is not known (yet), or the event came twice
            except (NoWorkersError, ValueError):
                self.dropped += 1

    def _tell(self, event: SyncEvent, now: float) -> None:
        if not self._batch:
            self._begun = now
        self._batch.append(event)
        if len(self._batch) >= BATCH_EVENTS:
            self._send_batch()

    def _send_batch(self) -> None:
        import msgspec

        self._send(msgspec.msgpack.encode(_Batch(self._router, self._batch)))
        self._batch = []
