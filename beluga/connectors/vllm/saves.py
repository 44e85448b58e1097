# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Saves concurrently with the engine, in the background.

Saving is best effort: if the queue or the pool is full or there is no server, a block is not saved.
Hints for blocks are given there, too. The engine keeps a request's blocks until
:meth:`Saves.ended` names it. It waits only when it takes blocks from a request that it preempts,
and then only for the piece that is being copied (256 KiB; without a link, for the batch).
"""

from __future__ import annotations

import functools
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from beluga.connectors.connection import Side
from beluga.connectors.vllm.parts import BlockPart
from beluga.connectors.vllm.steps import BlockRange, HintedBlocks, StoredCounts
from beluga.errors import TransferCancelledError
from beluga.index import BlockState

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from beluga.connectors.connection import Attachment, Connection
    from beluga.connectors.hints import RequestHint
    from beluga.connectors.vllm.counters import ConnectorCounters, LinkFigures
    from beluga.connectors.vllm.staging import BlockSource
    from beluga.kvcache import HintResult, Namespace, OpTicket, PutResult

BATCH_BLOCKS = 16  # blocks per call
HINTS_MAX = 1024  # waiting hints; more are skipped


class Saves:
    """Saves on the connection's background worker. ``source`` provides the engine's blocks as runs
    of bytes.
    """

    def __init__(  # noqa: PLR0913  the last two are keyword-only
        self,
        source: BlockSource,
        namespace: Namespace,
        connection: Connection,
        counters: ConnectorCounters,
        figures: LinkFigures,
        *,
        room: int,
        part: BlockPart | None = None,
    ) -> None:
        self._part = part or BlockPart(0, "")
        self._source, self.namespace = source, namespace
        self._connection, self._side = connection, Side(source.engine)
        self._counters, self._figures = counters, figures
        self._room = room  # free places in the queue, in blocks
        self._hint_count = 0  # waiting ones
        self._changed = threading.Condition()  # guards what follows
        self._running: dict[str, list[OpTicket[None]]] = {}  # ranges that are not done, by request
        self._known: set[str] = set()  # requests with an ordered save
        self._finished: set[str] = set()  # finished ones among them
        self._stored: dict[bytes, StoredCounts] = {}
        self._tickets: Counter[int] = Counter()  # of ranges that have ended
        self._copying = ""  # the request whose blocks are being read
        self._cancelling = 0  # cancellations that stop all copies

    def order(self, ranges: list[BlockRange]) -> None:
        """Queue the ranges, without the blocks that another rank stores. A range that does not fit
        is skipped. One without blocks only makes :meth:`ended` name its request.
        """
        if not ranges:
            return
        self._source.mark()
        started: list[tuple[BlockRange, OpTicket[None]]] = []
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
                ticket = self._connection.submit(functools.partial(self._save, own), urgent=False)
                self._running.setdefault(own.request, []).append(ticket)
                started.append((own, ticket))
        for own, ticket in started:
            ticket.then(functools.partial(self._done, own))

    def hint(self, hints: list[HintedBlocks]) -> None:
        """Queue hints for blocks of which this rank stores its part. What does not fit is
        skipped.
        """
        for hinted in hints:
            if self._hint_count >= HINTS_MAX:
                self._counters.add(hint_skipped_blocks=hinted.count)
                continue
            with self._changed:
                self._hint_count += 1
            self._connection.submit(functools.partial(self._hint, hinted), urgent=False)

    def cancel(self, requests: list[str]) -> None:
        """Stop saves whose blocks will be reused: drop queued ranges and wait for the running
        one.
        """
        with self._changed:
            for name in requests:
                for ticket in list(self._running.get(name, ())):
                    ticket.cancel()
            if self._copying not in requests:
                return
            self._cancelling += 1
            with self._connection.stopped(self._side):
                self._changed.wait_for(lambda: self._copying not in requests)
            self._cancelling -= 1
            self._changed.notify_all()

    def ended(self, finished: set[str]) -> set[str]:
        """Return the finished requests whose saves have ended. ``finished`` adds to the known
        ones.
        """
        with self._changed:
            self._finished |= finished & self._known
            ended = {name for name in self._finished if name not in self._running}
            self._finished -= ended
            self._known -= ended
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
        """Begin no more saves."""
        with self._changed:
            for ticket in [t for tickets in self._running.values() for t in tickets]:
                ticket.cancel()

    def _own(self, ordered: BlockRange) -> BlockRange:
        """Return the blocks of a range that this rank stores."""
        if self._part.copies == 1 or not ordered.block_ids:
            return ordered
        return ordered.subset(np.flatnonzero(self._part.stores(ordered.packed())))

    def _done(self, span: BlockRange, ticket: OpTicket[None]) -> None:
        """Account for a range that has ended, or was cancelled before it began."""
        with self._changed:
            self._room += len(span.block_ids)
            running = self._running[span.request]
            running.remove(ticket)
            if not running:
                del self._running[span.request]
            self._hand_back(span)
            if not ticket.began:
                self._counters.add(save_skipped_blocks=len(span.block_ids))

    def _hand_back(self, span: BlockRange) -> None:
        if span.ticket:
            self._tickets[span.ticket] += 1

    def _hint(self, hinted: HintedBlocks, _: OpTicket[None]) -> None:
        with self._changed:
            self._hint_count -= 1
        packed = hinted.packed()
        self._give(hinted.hint, packed[self._part.stores(packed)])

    def _save(self, span: BlockRange, ticket: OpTicket[None]) -> None:
        with self._changed:
            # No save begins while a cancellation stops all copies.
            self._changed.wait_for(lambda: not self._cancelling)
            self._copying = span.request
        try:
            self._put(span, ticket)
        finally:
            with self._changed:
                self._copying = ""
                self._changed.notify_all()

    def _put(self, span: BlockRange, ticket: OpTicket[None]) -> None:
        packed, names = span.packed(), span.named(self._part.number)
        for start in range(0, len(span.block_ids), BATCH_BLOCKS):
            if ticket.cancelled:
                self._counters.add(save_skipped_blocks=len(span.block_ids) - start)
                return
            part = slice(start, start + BATCH_BLOCKS)
            ids, digests = span.block_ids[part], packed[part]
            block_names = None if names is None else names[part]

            def put(attachment: Attachment) -> PutResult | None:
                cache = attachment.cache(self.namespace, self._side)
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
                failures = int(not ticket.cancelled)
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
            return hint.give(attachment.cache(self.namespace, self._side), digests)

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
