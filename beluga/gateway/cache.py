# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The gateway's knowledge of caches: a request's hashes, and an index of the workers' blocks.

The index receives the KV events of the engines that announce them. It also remembers for a while
what was sent where: until events report it, or, if no engine announces events, for as long as
blocks are likely to stay. A policy that ignores caches causes none of this work.
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
from beluga.gateway.pool_listener import PoolListener
from beluga.router import (
    BlockHasher,
    Choice,
    HashBlocks,
    Indexer,
    Matches,
    Overlap,
    PredictiveIndexer,
    Query,
    WireDecoder,
    hash_blocks_by,
    in_space,
)

log = logging.getLogger(__name__)

# How long blocks that were sent to a worker count as held there: Dynamo's approximate mode, and its
# advice for predictions beside events (version 1.3).
UNANNOUNCED_S = 120.0
ANNOUNCED_S = 5.0
BLOCK_SIZE = 16  # tokens, until an engine tells its own; vLLM has 16 on GPUs
UNREAD_S = 60.0  # how long a problem stays after the last event that could not be read
SILENT_S = 5.0  # an engine that computes has announced its blocks after so long


class Cache:
    """Makes queries and finds their matches. It has an index only if one is ``wanted``."""

    def __init__(  # noqa: PLR0913  all named
        self,
        *,
        wanted: bool,
        block_size: int,
        announced: bool,
        is_adapter: Callable[[str], bool],
        space_of: Callable[[str | None], int | None],
        metrics: Metrics,
        pool_events: str = "",
    ) -> None:
        """``announced`` says that engines announce their blocks. ``is_adapter`` returns whether a
        model is a LoRA adapter, whose name is then part of its blocks' hashes. ``pool_events`` is
        where a pool's server announces its blocks, and ``space_of`` returns the space that has
        those of a model. Raises RouterError.
        """
        self._block_size = block_size or BLOCK_SIZE
        self._size_known = block_size > 0
        self._unread: dict[int, tuple[int, float]] = {}  # by worker: how many, and until when
        self._computing: dict[int, float] = {}  # since when silent workers have had prompts
        self.has_tokenizer = False
        self.template_problem = ""  # why conversations cannot be hashed as the engines do
        self._guessed = False  # whether a prompt was hashed by other tokens than the engines'
        self._pool_events = pool_events
        self._is_adapter = is_adapter
        self._space_of = space_of
        self._metrics = metrics
        self._listeners: dict[int, Listener] = {}
        self.index: PredictiveIndexer | None = None
        if wanted:
            ttl_s = ANNOUNCED_S if announced else UNANNOUNCED_S
            self.index = PredictiveIndexer(Indexer(), ttl_s=ttl_s)
            # this needs xxhash and raises now if it is missing
            BlockHasher(block_size=self._block_size).local([0] * self._block_size)
        self.pool: PoolListener | None = None
        self._open_pool()

    def _open_pool(self) -> None:
        """Follow the pool's events, if it announces any, by the current block size."""
        if self._pool_events and self.index is not None:
            self.pool = PoolListener(
                self.index.indexer, self._pool_events, block_size=self._block_size
            )

    def learn(self, size: int) -> HashBlocks | None:
        """Take the engines' block size, unless one was given or learned. Returns how to hash blocks
        of that size, or None if the router has another size.
        """
        if not self._size_known and size > 0:
            self._size_known = True
            if size != self._block_size:
                log.info("the engines have blocks of %d tokens", size)
                self._block_size = size
                if self.pool is not None:
                    self.pool.close()
                self._open_pool()
        return hash_blocks_by(_hasher(size, "", "")) if size == self._block_size else None

    def problems(self, engine: Engine) -> dict[str, str]:
        """Return what keeps the index from following an engine, by kind."""
        if self.index is None:
            return {}
        found = dict(engine.token_problems)
        if self.template_problem:
            found["template"] = self.template_problem
        if self._guessed and engine.spec.events and not self.has_tokenizer:
            found["tokenizer"] = (
                "prompts are hashed by their text, which its KV events do not name; give its "
                "model's directory by --tokenizer"
            )
        if engine.block_size and engine.block_size != self._block_size:
            found["block_size"] = (
                f"it has blocks of {engine.block_size} tokens, the router of {self._block_size}: "
                "all engines need the same --block-size, and the router that or none"
            )
        if text := self._silence(engine):
            found["events"] = text
        if text := self._apart(engine):
            found["pool"] = text
        return found

    def _apart(self, engine: Engine) -> str:
        """Return why the pool's blocks do not count for an engine, or ""."""
        if self.pool is None:
            return ""
        if text := self.pool.problem:
            return text
        if engine.space is None and engine.prompt_tokens and self.pool.feed.spaces.keys() - {0}:
            return (
                "it does not say which of the pool's blocks are its own "
                "(beluga_vllm_space_info in its /metrics), so none count for it"
            )
        return ""

    def _silence(self, engine: Engine) -> str:
        listener = self._listeners.get(engine.worker.worker_id)
        if listener is None:
            return (
                "no KV events are named for it (--kv-events), so what it holds is only guessed "
                "from the prompts that this router sends it"
            )
        number, now = engine.worker.worker_id, time.monotonic()
        before, until = self._unread.get(number, (0, 0.0))
        if listener.unread != before:
            until = now + UNREAD_S
            self._unread[number] = (listener.unread, until)
        if now < until:
            return f"{listener.unread} KV events could not be read; the last: {listener.error}"
        if listener.alone_since is not None:
            if now - listener.alone_since < SILENT_S:
                return ""
            return (
                f"nobody publishes KV events at {engine.spec.events}; the engine must bind there "
                "(--kv-events-config)"
            )
        if listener.heard or engine.prompt_tokens < self._block_size:
            self._computing.pop(number, None)
        elif now - self._computing.setdefault(number, now) > SILENT_S:
            return "it has computed prompts and announced no KV event"
        return ""

    def query_of(self, parsed: ParsedRequest) -> Query:
        """Return the query for a request. Its blocks are hashed only if there is an index."""
        if self.index is None:
            return Query(parsed.isl, self._block_size)
        self._guessed |= not parsed.exact and len(parsed.tokens) >= self._block_size
        adapter = (
            parsed.model if parsed.model is not None and self._is_adapter(parsed.model) else ""
        )
        started = time.perf_counter()
        hasher = _hasher(self._block_size, parsed.salt or "", adapter)
        local = hasher.local(parsed.tokens)
        hashed = time.perf_counter()
        sequence = hasher.sequence(local)
        self._metrics.part("block_hashing", hashed - started)
        self._metrics.part("seq_hashing", time.perf_counter() - hashed)
        space = self._space_of(parsed.model) if self.pool is not None else None
        in_pool = () if space is None else in_space(local, space)
        return Query(parsed.isl, self._block_size, local, sequence, pool_hashes=in_pool)

    def find_matches(self, query: Query) -> Matches:
        """Return what each worker holds of a request's leading blocks."""
        if self.index is None:
            return Matches()
        started = time.perf_counter()
        found = self.index.find_matches(query.hashes, time.monotonic())
        if query.pool_hashes:
            shared = self.index.indexer.find_matches(query.pool_hashes).shared
            held = {
                worker: Overlap(own.device, own.host, own.disk)
                for worker, own in found.held.items()
            }
            found = Matches(held, shared)
        self._metrics.part("indexer_find_matches", time.perf_counter() - started)
        return found

    def longest(self, query: Query) -> int:
        """Return the most leading blocks of a request that some worker holds."""
        found = self.find_matches(query)
        return max((found.of(worker).blocks for worker in found.held), default=found.shared)

    def routed(self, query: Query, choice: Choice) -> None:
        """Note that a request, and thus its blocks, goes to a worker."""
        if self.index is None:
            return
        try:
            self.index.routed(choice.worker, query.hashes, time.monotonic())
        except RouterError as error:  # the index has no space for more workers
            log.debug("%s", error)

    def joined(self, engine: Engine) -> None:
        """Subscribe to an engine that announces its blocks. Raises RouterError."""
        if self.index is None or engine.spec.events is None:
            return
        number = engine.worker.worker_id
        hasher = _hasher(self._block_size, "", "")
        decoder = WireDecoder(
            number,
            block_size=self._block_size,
            hash_blocks=hash_blocks_by(hasher),
            learn=self.learn,
        )
        self._listeners[number] = Listener(
            self.index.indexer, decoder, engine.spec.events, engine.spec.replay
        )

    def left(self, engine: Engine) -> None:
        """Forget what an engine held."""
        number = engine.worker.worker_id
        if (listener := self._listeners.pop(number, None)) is not None:
            listener.close()
        self._unread.pop(number, None)
        self._computing.pop(number, None)
        if self.index is not None:
            self.index.remove_worker(number)

    def scrape(self) -> None:
        """Update the metrics of KV events."""
        if self.index is not None:
            lost = sum(listener.lost for listener in self._listeners.values())
            unread = sum(listener.unread for listener in self._listeners.values())
            self._metrics.kv_events(self.index.indexer, lost=lost, unread=unread)
        if self.pool is not None:
            self._metrics.pool(self.pool.figures())

    def close(self) -> None:
        """Close all subscriptions."""
        if self.pool is not None:
            self.pool.close()
        for listener in self._listeners.values():
            listener.close()
        self._listeners.clear()


@lru_cache(maxsize=1024)
def _hasher(block_size: int, salt: str, adapter: str) -> BlockHasher:
    return BlockHasher(block_size=block_size, salt=salt, lora_name=adapter)
