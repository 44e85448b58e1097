# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Loads a request's blocks with one get, before the forward that needs them or on a thread.

The scheduler's side has found and pinned the blocks, and its orders have their locations. A load
calls the server only for blocks that are no longer there.

Blocks that are not loaded are reported by their ids, and the engine computes them (its
``kv_load_failure_policy`` is set to "recompute"). With several groups of layers a block's id does
not show whose it is: then a request's load fails as a whole, and the engine computes all of it. A
block whose bytes are wrong is removed from the pool. Otherwise it would be found and fail again;
once it is removed, the right block is saved.
"""

from __future__ import annotations

import itertools
import operator
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from beluga.connectors.records import fetch
from beluga.connectors.vllm.counters import LinkFigures
from beluga.connectors.vllm.identity import of_part
from beluga.connectors.vllm.steps import Loaded, add_loaded
from beluga.threads import Thread

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from beluga.connectors.connection import Attachment, Connection
    from beluga.connectors.vllm.counters import ConnectorCounters
    from beluga.connectors.vllm.shards import Shard
    from beluga.connectors.vllm.staging import BlockSource
    from beluga.connectors.vllm.steps import BlockRange
    from beluga.kvcache import GetResult, Namespace


class Loads:
    """Loads on the caller's thread, and keeps the results until they are reported. ``part`` is the
    number of this rank's part of a block; ``shards`` are the parts of blocks of other engines that
    it reads, each with the number of its layout in the source. With ``whole`` a request's load
    fails as a whole.
    """

    _concurrent = False

    def __init__(  # noqa: PLR0913  the last two are keyword-only
        self,
        source: BlockSource,
        namespace: Namespace,
        connection: Connection,
        counters: ConnectorCounters,
        *,
        part: int = 0,
        shards: Mapping[int, Shard] | None = None,
        whole: bool = False,
    ) -> None:
        self._part, self._shards = part, shards or {}
        self._source, self._namespace = source, namespace
        self._connection, self._counters = connection, counters
        self._figures = LinkFigures(connection, counters)
        self._lock = threading.Lock()
        self._whole = whole
        self._failed: set[int] = set()
        self._failed_whole: set[str] = set()  # requests whose load has failed as a whole
        self._loaded: dict[str, Loaded] = {}

    @property
    def sides(self) -> tuple[Loads, ...]:
        """The loads of each kind, which are these."""
        return (self,)

    def identified(self, namespace: Namespace) -> None:
        """Load from this namespace from now on."""
        self._namespace = namespace

    def load(self, ranges: list[BlockRange]) -> None:
        """Load the ranges as far as possible. Those of a request follow one another."""
        for of_request in _by_request(ranges):
            self._load_all(of_request)

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
        """Return the requests whose wait is over. Loads in the caller's thread never make one
        wait.
        """
        return set()

    def failed_whole(self, arrived: set[str]) -> set[str]:
        """Return those of the requests that have arrived whose load has failed as a whole."""
        with self._lock:
            failed_whole = self._failed_whole & arrived
            self._failed_whole -= failed_whole
        return failed_whole

    def close(self) -> None:
        """Do nothing: no thread runs."""

    def _load_all(self, ranges: list[BlockRange]) -> None:
        """Load the ranges of one request, up to the first that fails."""
        started = time.perf_counter()
        blocks, wanted = 0, sum(len(span.block_ids) for span in ranges)
        for index, span in enumerate(ranges if wanted else ()):
            hits = self._load(span)
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

    def _load(self, span: BlockRange) -> int:
        """Load a range. Returns how many leading blocks of it the engine has now."""
        if not span.split:
            hits = self._get(span, self._namespace, self._part, span.group)
        else:
            hits = len(span.block_ids) if self._shards else 0
            for layout, shard in self._shards.items():
                if shard.split == span.split:
                    space = of_part(self._namespace, shard.name)
                    hits = min(hits, self._get(span, space, shard.number, layout))
        if not self._whole:
            with self._lock:
                self._failed.update(span.block_ids[hits:])
        return hits

    def _get(self, span: BlockRange, namespace: Namespace, part: int, layout: int) -> int:
        """Load one part of the blocks of a range. Returns how many leading ones there are."""
        packed, records = span.packed(), span.located(part)

        def get(attachment: Attachment) -> GetResult:
            cache = attachment.cache(namespace, self._source.engine)
            with self._source.write(span.block_ids, layout) as run:
                return fetch(cache, packed, run, records=records)

        started = time.perf_counter()
        result = self._connection.attempt("loading blocks", get)
        hits = result.hits if result is not None else 0
        self._counters.add(
            loads=1,
            load_s=time.perf_counter() - started,
            load_blocks=hits,
            load_bytes=hits * self._source.layouts[layout].block_size,
            load_failed_blocks=len(span.block_ids) - hits,
            mismatches=result.mismatches if result is not None else 0,
            load_failures=int(result is None),
            loads_beside=int(self._concurrent),
        )
        self._figures.add()
        return hits


def _by_request(ranges: list[BlockRange]) -> Iterator[list[BlockRange]]:
    for _, several in itertools.groupby(ranges, key=operator.attrgetter("request")):
        yield list(several)


class AsyncLoads(Loads):
    """Loads on a thread. The engine runs other requests meanwhile and polls for completed loads."""

    _concurrent = True

    def __init__(  # noqa: PLR0913  the last two are keyword-only
        self,
        source: BlockSource,
        namespace: Namespace,
        connection: Connection,
        counters: ConnectorCounters,
        *,
        part: int = 0,
        shards: Mapping[int, Shard] | None = None,
        whole: bool = False,
    ) -> None:
        super().__init__(
            source, namespace, connection, counters, part=part, shards=shards, whole=whole
        )
        self._arrived: set[str] = set()
        self._queue: deque[list[BlockRange]] = deque()
        self._closing = False
        self._changed = threading.Condition()
        self._thread = Thread(target=self._keep, name="beluga-loads", daemon=True)
        self._thread.start()

    def load(self, ranges: list[BlockRange]) -> None:
        """Queue the ranges. Running steps may still use their blocks."""
        if not ranges:
            return
        self._source.mark()
        with self._changed:
            self._queue.extend(_by_request(ranges))
            self._changed.notify_all()

    def arrived(self) -> set[str]:
        """Return the requests whose loads have ended since the last call. Call this before
        :meth:`failed`.
        """
        with self._lock:
            arrived, self._arrived = self._arrived, set()
        return arrived

    def close(self) -> None:
        """Finish the current load and stop."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _keep(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing)
                if self._closing:
                    return
                ranges = self._queue.popleft()
            self._load_all(ranges)
            with self._lock:
                self._arrived.add(ranges[0].request)


class SplitLoads:
    """Loads before a forward and loads concurrent with forwards, according to the orders. Each kind
    has its own session, so that a forward never waits for the others.
    """

    def __init__(self, before: Loads, concurrent: AsyncLoads) -> None:
        self.sides = self._before, self._concurrent = before, concurrent

    def identified(self, namespace: Namespace) -> None:
        """Load from this namespace from now on."""
        for side in self.sides:
            side.identified(namespace)

    def load(self, ranges: list[BlockRange]) -> None:
        """Start the loads that run concurrently with the forward, and load the rest."""
        self._concurrent.load([span for span in ranges if span.concurrent])
        self._before.load([span for span in ranges if not span.concurrent])

    def loaded(self) -> dict[str, Loaded]:
        """Return the loads that have ended since the last call, by request."""
        return self._before.loaded() | self._concurrent.loaded()

    def failed(self) -> set[int]:
        """Return the engine's blocks that were not loaded since the last call."""
        return self._before.failed() | self._concurrent.failed()

    def arrived(self) -> set[str]:
        """Return the requests whose wait is over."""
        return self._concurrent.arrived()

    def failed_whole(self, arrived: set[str]) -> set[str]:
        """Return those of the requests that have arrived whose load has failed as a whole."""
        return self._concurrent.failed_whole(arrived)

    def close(self) -> None:
        """Finish the current load and stop."""
        for side in self.sides:
            side.close()
