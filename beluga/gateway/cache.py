# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""What is known of caches: a request's hashes, and an index of who holds which blocks.

The index hears the KV events of the engines that announce them, and remembers for a while what was
sent where: for a moment until events tell of it, or, where no engine announces any, for as long as
blocks are likely to stay. A policy that is blind to caches costs none of this.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import lru_cache

from beluga.errors import RouterError
from beluga.gateway.engine import Engine
from beluga.gateway.listener import Listener
from beluga.gateway.metrics import Metrics
from beluga.gateway.parsed_request import ParsedRequest
from beluga.router import (
    BlockHasher,
    Choice,
    Indexer,
    Matches,
    PredictiveIndexer,
    Query,
    WireDecoder,
    hash_blocks_by,
)

log = logging.getLogger(__name__)

# How long what was sent somewhere counts as held there: Dynamo's approximate mode, and its advice
# for predictions beside events (the reference's 1.3).
UNANNOUNCED_S = 120.0
ANNOUNCED_S = 5.0


class Cache:
    """Queries and their matches; an index only if it is ``wanted``."""

    def __init__(
        self,
        *,
        wanted: bool,
        block_size: int,
        announced: bool,
        is_adapter: Callable[[str], bool],
        metrics: Metrics,
    ) -> None:
        """``announced``: engines tell of their blocks. ``is_adapter``: whether a model is a LoRA
        adapter, which its blocks' hashes then name. Raises RouterError."""
        self._block_size = block_size
        self._is_adapter = is_adapter
        self._metrics = metrics
        self._listeners: dict[int, Listener] = {}
        self.index: PredictiveIndexer | None = None
        if wanted:
            ttl_s = ANNOUNCED_S if announced else UNANNOUNCED_S
            self.index = PredictiveIndexer(Indexer(), ttl_s=ttl_s)
            BlockHasher(block_size=block_size).local([0] * block_size)  # needs xxhash: say so now

    def query_of(self, ask: ParsedRequest) -> Query:
        """A request as policies see it; its blocks are hashed only for an index."""
        if self.index is None:
            return Query(ask.isl, self._block_size)
        adapter = ask.model if ask.model is not None and self._is_adapter(ask.model) else ""
        started = time.perf_counter()
        hasher = _hasher(self._block_size, ask.salt or "", adapter)
        local = hasher.local(ask.tokens)
        hashed = time.perf_counter()
        sequence = hasher.sequence(local)
        self._metrics.part("block_hashing", hashed - started)
        self._metrics.part("seq_hashing", time.perf_counter() - hashed)
        return Query(ask.isl, self._block_size, local, sequence)

    def find_matches(self, query: Query) -> Matches:
        """What each worker holds of a request's leading blocks."""
        if self.index is None:
            return Matches()
        started = time.perf_counter()
        found = self.index.find_matches(query.hashes, time.monotonic())
        self._metrics.part("indexer_find_matches", time.perf_counter() - started)
        return found

    def longest(self, query: Query) -> int:
        """Leading blocks of a request that are held where most of them are."""
        found = self.find_matches(query)
        return max((found.of(worker).blocks for worker in found.held), default=found.shared)

    def routed(self, query: Query, choice: Choice) -> None:
        """A request goes there, and with it its blocks."""
        if self.index is None:
            return
        try:
            self.index.routed(choice.worker, query.hashes, time.monotonic())
        except RouterError as error:  # more workers than the index has places for
            log.debug("%s", error)

    def joined(self, engine: Engine) -> None:
        """Listen to an engine that announces its blocks. Raises RouterError."""
        if self.index is None or engine.spec.events is None:
            return
        number = engine.worker.worker_id
        hasher = _hasher(self._block_size, "", "")
        decoder = WireDecoder(
            number, block_size=self._block_size, hash_blocks=hash_blocks_by(hasher)
        )
        self._listeners[number] = Listener(
            self.index.indexer, decoder, engine.spec.events, engine.spec.replay
        )

    def left(self, engine: Engine) -> None:
        """Forget what an engine held."""
        number = engine.worker.worker_id
        if (listener := self._listeners.pop(number, None)) is not None:
            listener.close()
        if self.index is not None:
            self.index.remove_worker(number)

    def scrape(self) -> None:
        """Bring the counts of events up to date."""
        if self.index is not None:
            lost = sum(listener.lost for listener in self._listeners.values())
            self._metrics.kv_events(self.index.indexer, lost)

    def close(self) -> None:
        """Listen no longer."""
        for listener in self._listeners.values():
            listener.close()
        self._listeners.clear()


@lru_cache(maxsize=1024)
def _hasher(block_size: int, salt: str, adapter: str) -> BlockHasher:
    return BlockHasher(block_size=block_size, salt=salt, lora_name=adapter)
