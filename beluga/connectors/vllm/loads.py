# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Loads a request's blocks with one get, before the forward that needs them or concurrently.

The scheduler's side has found and pinned the blocks, and its orders have their locations. A load
calls the server only for blocks that are no longer there.

Blocks that are not loaded are reported by their ids, and the engine computes them (its
``kv_load_failure_policy`` is set to "recompute"). With several groups of layers a block's id does
not show whose it is: then a request's load fails as a whole, and the engine computes all of it. A
block whose bytes are wrong is removed from the pool. Otherwise it would be found and fail again;
once it is removed, the right block is saved.
"""

from __future__ import annotations

import functools
import itertools
import operator
import threading
import time
from typing import TYPE_CHECKING

from beluga.connectors.connection import Side
from beluga.connectors.records import fetch
from beluga.connectors.vllm.identity import of_part
from beluga.connectors.vllm.steps import Loaded, add_loaded

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from beluga.connectors.connection import Attachment, Connection
    from beluga.connectors.vllm.counters import ConnectorCounters, LinkFigures
    from beluga.connectors.vllm.shards import Shard
    from beluga.connectors.vllm.staging import BlockSource
    from beluga.connectors.vllm.steps import BlockRange
    from beluga.kvcache import GetResult, Namespace, OpTicket


class Loads:
    """Loads before a forward on the caller's thread, and loads concurrent with forwards on the
    connection's worker. Keeps the results until they are reported.

    ``before`` and ``concurrent`` are the sources of each kind; None: all are of the other kind.
    ``part`` is the number of this rank's part of a block; ``shards`` are the parts of blocks of
    other engines that it reads, each with the number of its layout in the sources. With ``whole`` a
    request's load fails as a whole.
    """

    def __init__(  # noqa: PLR0913  the last five are keyword-only
        self,
        connection: Connection,
        namespace: Namespace,
        counters: ConnectorCounters,
        figures: LinkFigures,
        *,
        before: BlockSource | None,
        concurrent: BlockSource | None,
        part: int = 0,
        shards: Mapping[int, Shard] | None = None,
        whole: bool = False,
    ) -> None:
        self._part, self._shards = part, shards or {}
        self._namespace, self._connection = namespace, connection
        self._counters, self._figures = counters, figures
        self.before, self.concurrent = before, concurrent
        sources = [source for source in (before, concurrent) if source is not None]
        self._sides = {source: Side(source.engine) for source in sources}
        self._lock = threading.Lock()
        self._whole = whole
        self._failed: set[int] = set()
        self._failed_whole: set[str] = set()  # requests whose load has failed as a whole
        self._loaded: dict[str, Loaded] = {}
        self._running: list[tuple[str, OpTicket[None]]] = []  # by request, in their order

    def identified(self, namespace: Namespace) -> None:
        """Load from this namespace from now on."""
        self._namespace = namespace

    def load(self, ranges: list[BlockRange]) -> None:
        """Start the loads that run concurrently with the forward, and load the rest as far as
        possible. The ranges of a request follow one another. Running steps may still use the blocks
        of concurrent loads.
        """
        if self.concurrent is not None:
            chosen = [span for span in ranges if self.before is None or span.concurrent]
            if chosen:
                self.concurrent.mark()
            for of_request in _by_request(chosen):
                ticket = self._connection.submit(
                    functools.partial(self._load_all, self.concurrent, of_request), urgent=True
                )
                self._running.append((of_request[0].request, ticket))
        if self.before is not None:
            rest = [span for span in ranges if self.concurrent is None or not span.concurrent]
            for of_request in _by_request(rest):
                self._load_all(self.before, of_request)

    def loaded(self) -> dict[str, Loaded]:
        """Return the loads that have ended since the last call, successfully or not, by request."""
        with self._lock:
            loaded, self._loaded = self._loaded, {}
        return loaded

    def failed(self) -> set[int]:
        """Return the engine's blocks that were not loaded since the last call."""
        with self._lock:
            failed, self._failed = self._failed, set()
        return failed

    def arrived(self) -> set[str]:
        """Return the requests whose concurrent loads have ended since the last call. Call this
        before :meth:`failed`.
        """
        arrived, running = set(), []
        for name, ticket in self._running:
            if ticket.done():
                arrived.add(name)
            else:
                running.append((name, ticket))
        self._running = running
        return arrived

    def failed_whole(self, arrived: set[str]) -> set[str]:
        """Return those of the requests that have arrived whose load has failed as a whole."""
        with self._lock:
            failed_whole = self._failed_whole & arrived
            self._failed_whole -= failed_whole
        return failed_whole

    def close(self) -> None:
        """Begin no more loads."""
        for _, ticket in self._running:
            ticket.cancel()

    def _load_all(
        self, source: BlockSource, ranges: list[BlockRange], _: OpTicket[None] | None = None
    ) -> None:
        """Load the ranges of one request, up to the first that fails."""
        started = time.perf_counter()
        blocks, wanted = 0, sum(len(span.block_ids) for span in ranges)
        for index, span in enumerate(ranges if wanted else ()):
            hits = self._load(source, span)
            blocks += hits
            if hits < len(span.block_ids):
                self._leave(ranges[index + 1 :])
                break
        name = ranges[0].request
        with self._lock:
            if self._whole and (blocks < wanted or not wanted):
                self._failed_whole.add(name)
            add_loaded(self._loaded, name, Loaded(1, blocks, time.perf_counter() - started))

    def _leave(self, ranges: list[BlockRange]) -> None:
        """Record that the ranges after a failed one are not loaded."""
        if not self._whole:
            left = [block for span in ranges for block in span.block_ids]
            self._counters.add(load_failed_blocks=len(left))
            with self._lock:
                self._failed.update(left)

    def _load(self, source: BlockSource, span: BlockRange) -> int:
        """Load a range. Returns how many leading blocks of it the engine has now."""
        if not span.split:
            hits = self._get(source, span, self._namespace, self._part, span.group)
        else:
            hits = len(span.block_ids) if self._shards else 0
            for layout, shard in self._shards.items():
                if shard.split == span.split:
                    space = of_part(self._namespace, shard.name)
                    hits = min(hits, self._get(source, span, space, shard.number, layout))
        if not self._whole:
            with self._lock:
                self._failed.update(span.block_ids[hits:])
        return hits

    def _get(
        self, source: BlockSource, span: BlockRange, namespace: Namespace, part: int, layout: int
    ) -> int:
        """Load one part of the blocks of a range. Returns how many leading ones there are."""
        packed, records = span.packed(), span.located(part)

        def get(attachment: Attachment) -> GetResult:
            cache = attachment.cache(namespace, self._sides[source])
            with source.write(span.block_ids, layout) as run:
                return fetch(cache, packed, run, records=records)

        started = time.perf_counter()
        result = self._connection.attempt("loading blocks", get)
        hits = result.hits if result is not None else 0
        self._counters.add(
            loads=1,
            load_s=time.perf_counter() - started,
            load_blocks=hits,
            load_bytes=hits * source.layouts[layout].block_size,
            load_failed_blocks=len(span.block_ids) - hits,
            mismatches=result.mismatches if result is not None else 0,
            load_failures=int(result is None),
            loads_beside=int(source is self.concurrent),
        )
        self._figures.add()
        return hits


def _by_request(ranges: list[BlockRange]) -> Iterator[list[BlockRange]]:
    for _, several in itertools.groupby(ranges, key=operator.attrgetter("request")):
        yield list(several)
