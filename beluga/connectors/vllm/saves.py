# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Saves concurrently with the engine: a queue, and a low-priority thread that stores the queued
blocks.

Saving is best effort: if the queue or the pool is full or there is no server, a block is not saved.
Hints for blocks are given on that thread, too. The engine keeps a request's blocks until
:meth:`Saves.ended` names it. It waits only when it takes blocks from a request that it preempts,
and then only for the piece that is being copied (256 KiB; without a link, for the batch).
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, deque
from typing import TYPE_CHECKING

import numpy as np

from beluga.connectors.vllm.counters import LinkFigures
from beluga.connectors.vllm.parts import BlockPart
from beluga.connectors.vllm.steps import BlockRange, HintedBlocks, StoredCounts
from beluga.errors import TransferCancelledError
from beluga.index import BlockState
from beluga.threads import Thread

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from beluga.connectors.connection import Attachment, Connection
    from beluga.connectors.hints import RequestHint
    from beluga.connectors.vllm.counters import ConnectorCounters
    from beluga.connectors.vllm.staging import BlockSource
    from beluga.kvcache import HintResult, Namespace, PutResult

BATCH_BLOCKS = 16  # blocks per call
HINTS_MAX = 1024  # waiting hints; more are skipped
NICENESS = 10  # the engine's threads get about ten times the CPU share


class Saves:
    """The queue and its thread. ``source`` provides the engine's blocks as runs of bytes."""

    def __init__(  # noqa: PLR0913  the last two are keyword-only
        self,
        source: BlockSource,
        namespace: Namespace,
        connection: Connection,
        counters: ConnectorCounters,
        *,
        room: int,
        part: BlockPart | None = None,
    ) -> None:
        self._part = part or BlockPart(0, "")
        self._source, self.namespace = source, namespace
        self._connection, self._counters = connection, counters
        self._figures = LinkFigures(connection, counters)
        self._room = room  # free places in the queue, in blocks
        self._queue: deque[BlockRange] = deque()
        self._hints: deque[HintedBlocks] = deque()
        self._waiting: Counter[str] = Counter()  # ranges of each request that are not done
        self._known: set[str] = set()  # requests with an ordered save
        self._finished: set[str] = set()  # finished ones among them
        self._stored: dict[bytes, StoredCounts] = {}
        self._tickets: Counter[int] = Counter()  # of ranges that have ended
        self._copying = ""  # the request whose blocks are being read
        self._cancelled: set[str] = set()  # requests whose saves stop after this batch
        self._closing = False
        self._changed = threading.Condition()
        self._thread = Thread(target=self._keep, name="beluga-saves", daemon=True)
        self._thread.start()

    def order(self, ranges: list[BlockRange]) -> None:
        """Queue the ranges, without the blocks that another rank stores. A range that does not fit
        is skipped. One without blocks only makes :meth:`ended` name its request.
        """
        if not ranges:
            return
        self._source.mark()
        with self._changed:
            for ordered in ranges:
                self._known.add(ordered.request)
                own = self._own(ordered)
                if not own.block_ids:
                    self._hand_back(own)
                    continue
                if self._room < len(own.block_ids):
                    self._counters.add(save_skipped_blocks=len(own.block_ids))
                    self._hand_back(own)
                    continue
                self._room -= len(own.block_ids)
                self._waiting[own.request] += 1
                self._queue.append(own)
            self._changed.notify_all()

    def hint(self, hints: list[HintedBlocks]) -> None:
        """Queue hints for blocks of which this rank stores its part. What does not fit is
        skipped.
        """
        if not hints:
            return
        with self._changed:
            for hinted in hints:
                if len(self._hints) < HINTS_MAX:
                    self._hints.append(hinted)
                else:
                    self._counters.add(hint_skipped_blocks=hinted.count)
            self._changed.notify_all()

    def cancel(self, requests: list[str]) -> None:
        """Stop saves whose blocks will be reused: drop queued ranges and wait for the running
        one.
        """
        names = set(requests)
        with self._changed:
            remaining = deque(span for span in self._queue if span.request not in names)
            for span in self._queue:
                if span.request in names:
                    self._done(span, skipped=len(span.block_ids))
            self._queue = remaining
            if self._copying not in names:
                return
            self._cancelled |= names
            with self._connection.stopped():
                self._changed.wait_for(lambda: self._copying not in names)
            self._cancelled -= names
            self._changed.notify_all()

    def ended(self, finished: set[str]) -> set[str]:
        """Return the finished requests whose saves have ended. ``finished`` adds to the known
        ones.
        """
        with self._changed:
            self._finished |= finished & self._known
            ended = {name for name in self._finished if not self._waiting[name]}
            self._finished -= ended
            self._known -= ended
            for name in ended:
                del self._waiting[name]
        return ended

    def stored(self) -> dict[bytes, StoredCounts]:
        """Return the blocks that these saves stored in the pool since the last call."""
        with self._changed:
            stored, self._stored = self._stored, {}
        return stored

    def tickets(self) -> Counter[int]:
        """Return the tickets of saves that have ended since the last call, successfully or not."""
        with self._changed:
            ended, self._tickets = self._tickets, Counter()
        return ended

    def close(self) -> None:
        """Finish the current batch and stop."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _own(self, ordered: BlockRange) -> BlockRange:
        """Return the blocks of a range that this rank stores."""
        if self._part.copies == 1 or not ordered.block_ids:
            return ordered
        return ordered.subset(np.flatnonzero(self._part.stores(ordered.packed())))

    def _done(self, span: BlockRange, *, skipped: int = 0) -> None:
        self._room += len(span.block_ids)
        self._waiting[span.request] -= 1
        self._hand_back(span)
        if skipped:
            self._counters.add(save_skipped_blocks=skipped)

    def _hand_back(self, span: BlockRange) -> None:
        if span.ticket:
            self._tickets[span.ticket] += 1

    def _keep(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while True:
            with self._changed:
                # No save begins while a cancellation stops all copies.
                self._changed.wait_for(
                    lambda: self._hints or (self._queue and not self._cancelled) or self._closing
                )
                if self._closing:
                    return
                hinted = self._hints.popleft() if self._hints else None
                if hinted is None:
                    span = self._queue.popleft()
                    self._copying = span.request
            if hinted is not None:
                packed = hinted.packed()
                self._give(hinted.hint, packed[self._part.stores(packed)])
                continue
            try:
                self._save(span)
            finally:
                with self._changed:
                    self._copying = ""
                    self._done(span)
                    self._changed.notify_all()

    def _save(self, span: BlockRange) -> None:
        packed, names = span.packed(), span.named(self._part.number)
        for start in range(0, len(span.block_ids), BATCH_BLOCKS):
            if span.request in self._cancelled:
                self._counters.add(save_skipped_blocks=len(span.block_ids) - start)
                return
            part = slice(start, start + BATCH_BLOCKS)
            ids, digests = span.block_ids[part], packed[part]
            block_names = None if names is None else names[part]

            def put(attachment: Attachment) -> PutResult | None:
                cache = attachment.cache(self.namespace, self._source.engine)
                run = self._source.read(ids, span.group)  # noqa: B023  called here and now
                try:
                    return cache.put(digests, run, names=block_names)  # noqa: B023
                except TransferCancelledError:
                    return None

            started, cpu_started = time.perf_counter(), time.thread_time()
            result = self._connection.attempt("saving blocks", put)
            self._counters.add(
                save_s=time.perf_counter() - started, save_cpu_s=time.thread_time() - cpu_started
            )
            self._figures.add()
            if result is None:
                failures = int(span.request not in self._cancelled)
                skipped = len(span.block_ids) - start
                self._counters.add(save_failures=failures, save_skipped_blocks=skipped)
                return
            self._account(digests.tobytes(), len(ids), result, span.group)
            if span.hint is not None:
                new = np.array([state == BlockState.GRANTED for state in result.states], bool)
                self._give(span.hint.for_own(), digests[new])
                self._give(span.hint.for_hits(), digests[~new])

    def _give(self, hint: RequestHint | None, digests: NDArray[np.uint8]) -> None:
        """Give a hint to blocks, if there is one."""
        if hint is None or not len(digests):
            return

        def give(attachment: Attachment) -> HintResult:
            return hint.give(attachment.cache(self.namespace, self._source.engine), digests)

        result = self._connection.attempt("giving hints", give)
        if result is None:
            self._counters.add(hint_skipped_blocks=len(digests))
        else:
            self._counters.add(hinted_blocks=result.given, hint_refused_blocks=result.refused)

    def _account(self, digests: bytes, count: int, result: PutResult, group: int) -> None:
        size, layout = len(digests) // count, self._source.layouts[group]
        states = result.stored if layout.states else 0
        self._counters.add(
            save_blocks=result.stored,
            save_bytes=result.stored * layout.block_size,
            save_states=states,
            save_state_bytes=states * layout.block_size,
            save_present_blocks=result.present,
            save_skipped_blocks=result.pending + result.refused,
        )
        with self._changed:
            for index, state in enumerate(result.states):
                if state in (BlockState.GRANTED, BlockState.HIT):
                    new = int(state == BlockState.GRANTED)
                    self._stored[digests[index * size : (index + 1) * size]] = StoredCounts(1, new)
