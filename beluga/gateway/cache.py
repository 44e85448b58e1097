# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The gateway's view of the workers' caches: a request's hashes, and an index of the workers'
blocks.

The index receives the KV events of the engines that publish them. It also remembers for a while
which requests were sent to which worker: until events arrive or, if no engine publishes events, for
as long as blocks are likely to stay. A policy that ignores caches needs none of this.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import lru_cache

from beluga.errors import RouterError
from beluga.gateway.engine import Engine
from beluga.gateway.kv_events import Following, Listener, PoolListener
from beluga.gateway.metrics import Metrics
from beluga.gateway.parsed_request import ParsedRequest
from beluga.listening import Token
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
    Worker,
    hash_blocks_by,
    in_space,
)

log = logging.getLogger(__name__)

# How long blocks sent to a worker count as cached there: Dynamo's approximate mode, and its
# recommendation for predictions combined with events (version 1.3).
UNANNOUNCED_S = 120.0
ANNOUNCED_S = 5.0
BLOCK_SIZE = 16  # tokens, until an engine reports its size; vLLM has 16 on GPUs
HASHED_TOKENS_MAX = 1 << 20
"""The largest number of tokens of a prompt that are hashed; few models accept as many. Only the
beginning of a longer prompt is looked up.
"""
_SALT_SIZE_MAX = 256  # characters; the hasher of a longer salt is not cached
SILENT_S = 5.0  # an engine that computes publishes its blocks within this time


class Cache:
    """Creates queries and finds their matches. It has an index only if ``wanted`` is true."""

    def __init__(  # noqa: PLR0913  keyword-only
        self,
        *,
        wanted: bool,
        hashed: bool = False,
        block_size: int,
        announced: bool,
        is_adapter: Callable[[str], bool],
        space_of: Callable[[str | None], int | None],
        metrics: Metrics,
        pool_events: str = "",
        pool_events_token: Token | None = None,
        needs_events: bool = True,
        ranks: int = Indexer.WORKERS,
    ) -> None:
        """``hashed``: prompts are hashed without an index, too. ``announced``: the engines publish
        KV events. ``is_adapter`` returns whether a model is a LoRA adapter, whose name is then part
        of its blocks' hashes. ``pool_events`` are the endpoints of a pool's server, and
        ``space_of`` returns the space of a model's blocks there. ``needs_events``: an engine
        without KV events is a problem. ``ranks`` is the limit of all engines' ranks. Raises
        RouterError.
        """
        if block_size > (limit := BlockHasher.BLOCK_SIZE_MAX):
            raise RouterError(
                f"block_size is {block_size}, but must be at most {limit}; give the engines' own "
                "--block-size, or 0"
            )
        self._block_size = block_size or BLOCK_SIZE
        self._size_known = block_size > 0
        self._hashed = wanted or hashed
        self._needs_events = needs_events
        self._ranks = ranks
        self._no_room: set[int] = set()  # workers whose prompts do not fit into the index
        self.template_problem = ""  # why conversations cannot be hashed like the engines do
        self._pool_events, self._pool_events_token = pool_events, pool_events_token
        self._is_adapter = is_adapter
        self._space_of = space_of
        self._metrics = metrics
        self._followed: dict[int, Following] = {}
        self._hash_blocks = hash_blocks_by(_hasher(self._block_size, "", ""))
        self.index: PredictiveIndexer | None = None
        if wanted:
            ttl_s = ANNOUNCED_S if announced else UNANNOUNCED_S
            self.index = PredictiveIndexer(Indexer(workers=ranks), ttl_s=ttl_s)
        self.pool: PoolListener | None = None
        self._open_pool()

    def _open_pool(self) -> None:
        """Subscribe to the pool's events, if there are any, for the current block size."""
        if self._pool_events and self.index is not None:
            self.pool = PoolListener(
                self.index.indexer,
                self._pool_events,
                block_size=self._block_size,
                token=self._pool_events_token,
            )

    def learn(self, size: int) -> HashBlocks | None:
        """Adopt the engines' block size, unless one was given or adopted before. Returns a function
        that hashes blocks of that size, or None if the router has another size.
        """
        if not self._size_known and 0 < size <= BlockHasher.BLOCK_SIZE_MAX:
            self._size_known = True
            if size != self._block_size:
                log.info("the engines have blocks of %d tokens", size)
                self._resize(size)
        return self._hash_blocks if size == self._block_size else None

    def _resize(self, size: int) -> None:
        self._block_size = size
        self._hash_blocks = hash_blocks_by(_hasher(size, "", ""))
        for followed in self._followed.values():
            followed.resize(size, self._hash_blocks)
        if self.pool is not None:
            self.pool.close()
        self._open_pool()

    def follows(self, engine: Engine) -> bool:
        """Return whether the index follows the KV events of an engine, or those of the pool."""
        return self.index is not None and (bool(engine.spec.feeds) or self.pool is not None)

    def problems(self, engine: Engine) -> dict[str, str]:
        """Return, by kind, why the index cannot follow an engine."""
        if self.index is None:
            return {}
        problems = dict(engine.token_problems)
        if self.template_problem:
            problems["template"] = self.template_problem
        if engine.block_size and engine.block_size != self._block_size:
            problems["block_size"] = (
                f"it has blocks of {engine.block_size} tokens, but the router has "
                f"{self._block_size}; give all engines and the router the same --block-size, or "
                "the router none"
            )
        if text := self._silence(engine):
            problems["events"] = text
        if text := self._apart(engine):
            problems["pool"] = text
        return problems

    def _apart(self, engine: Engine) -> str:
        """Return why the pool's blocks do not count for an engine, or ""."""
        if self.pool is None:
            return ""
        if text := self.pool.problem:
            return text
        if engine.space is None and engine.prompt_tokens and self.pool.feed.spaces.keys() - {0}:
            return (
                "it does not report which of the pool's blocks are its own "
                "(beluga_vllm_space_info in its /metrics), so none count for it"
            )
        return ""

    def _silence(self, engine: Engine) -> str:
        number = engine.worker.worker_id
        if (followed := self._followed.get(number)) is not None:
            problem = followed.problem(
                engine, self._block_size, now=time.monotonic(), silent_s=SILENT_S
            )
            if problem:
                return problem
        elif self._needs_events:
            return (
                "there are no KV events for it (--kv-events), so its cached blocks are only "
                "estimated from the prompts that this router sends it"
            )
        if number in self._no_room:
            return f"the index has room for {self._ranks} workers; raise --index-ranks"
        return ""

    def query_of(self, parsed: ParsedRequest) -> Query:
        """Return the query for a request. Its blocks are hashed only if there is an index, or the
        policy has a record of its own. Thread-safe.
        """
        if not self._hashed:
            return Query(parsed.isl, self._block_size)
        follows = self._followed or self.pool is not None
        if follows and not parsed.exact and len(parsed.tokens) >= self._block_size:
            self._metrics.hashed_as_text()
        adapter = (
            parsed.model if parsed.model is not None and self._is_adapter(parsed.model) else ""
        )
        started = time.perf_counter()
        size, salt = self._block_size, parsed.salt or ""
        make = _hasher if len(salt) <= _SALT_SIZE_MAX else _hasher.__wrapped__
        hasher = make(size, salt, adapter)
        local = hasher.packed(parsed.tokens[:HASHED_TOKENS_MAX])
        hashed = time.perf_counter()
        sequence = hasher.chained(local)
        self._metrics.part("block_hashing", hashed - started)
        self._metrics.part("seq_hashing", time.perf_counter() - hashed)
        space = self._space_of(parsed.model) if self.pool is not None else None
        in_pool = () if space is None else in_space(local, space)
        return Query(parsed.isl, size, local, sequence, pool_hashes=in_pool)

    def find_matches(self, query: Query) -> Matches:
        """Return how many of a request's leading blocks each worker holds."""
        if self.index is None:
            return Matches()
        started = time.perf_counter()
        matches = _by_engine(self.index.find_matches(query.hashes, time.monotonic()))
        if query.pool_hashes:
            shared = self.index.indexer.find_matches(query.pool_hashes).shared
            held = {
                worker: Overlap(own.device, own.host, own.disk)
                for worker, own in matches.held.items()
            }
            matches = Matches(held, shared)
        self._metrics.part("indexer_find_matches", time.perf_counter() - started)
        return matches

    def longest(self, query: Query) -> int:
        """Return the largest number of a request's leading blocks that a worker holds."""
        matches = self.find_matches(query)
        return max((matches.of(worker).blocks for worker in matches.held), default=matches.shared)

    def routed(self, query: Query, choice: Choice) -> None:
        """Record that a request, and thus its blocks, is sent to a worker."""
        if self.index is None:
            return
        number = choice.worker.worker_id
        try:
            self.index.routed(choice.worker, query.hashes, time.monotonic())
            self._no_room.discard(number)
        except RouterError as error:  # the index has no space for more workers
            self._no_room.add(number)
            log.debug("%s", error)

    def restarted(self, engine: Engine) -> None:
        """Drop the record of blocks sent to an engine that has restarted. Engines with events are
        tracked by these.
        """
        number = engine.worker.worker_id
        if self.index is not None and number not in self._followed:
            self.index.remove_worker(number)

    def joined(self, engine: Engine) -> None:
        """Subscribe to an engine that publishes its blocks. Raises RouterError."""
        if self.index is None or not engine.spec.feeds:
            return
        number, listeners = engine.worker.worker_id, []
        try:
            for endpoint, replay in engine.spec.feeds:
                decoder = WireDecoder(
                    number,
                    block_size=self._block_size,
                    hash_blocks=self._hash_blocks,
                    learn=self.learn,
                )
                listeners.append(Listener(self.index.indexer, decoder, endpoint, replay))
        except RouterError:
            Following(listeners).close()
            raise
        self._followed[number] = Following(listeners)

    def left(self, engine: Engine) -> None:
        """Drop an engine's blocks."""
        number = engine.worker.worker_id
        if (followed := self._followed.pop(number, None)) is not None:
            followed.close()
        self._no_room.clear()  # there is room for one more
        if self.index is not None:
            self.index.remove_worker(number)

    def scrape(self) -> None:
        """Update the metrics of KV events."""
        if self.index is not None:
            lost = sum(followed.lost for followed in self._followed.values())
            unread = sum(followed.unread for followed in self._followed.values())
            self._metrics.kv_events(self.index.indexer, lost=lost, unread=unread)
        if self.pool is not None:
            self._metrics.pool(self.pool.figures())

    def close(self) -> None:
        """Close all subscriptions."""
        if self.pool is not None:
            self.pool.close()
        for followed in self._followed.values():
            followed.close()
        self._followed.clear()


def _by_engine(matches: Matches) -> Matches:
    """Return matches with one worker per engine: the data-parallel rank with the most blocks.
    Requests are sent to an engine, which chooses among its ranks itself.
    """
    if not any(worker.dp_rank for worker in matches.held):
        return matches
    held: dict[Worker, Overlap] = {}
    for worker, own in matches.held.items():
        engine = Worker(worker.worker_id)
        held[engine] = max(
            held.get(engine, own), own, key=lambda own: (own.blocks, own.held, own.device)
        )
    return Matches(held, matches.shared)


@lru_cache(maxsize=1024)
def _hasher(block_size: int, salt: str, adapter: str) -> BlockHasher:
    return BlockHasher(block_size=block_size, salt=salt, lora_name=adapter)
