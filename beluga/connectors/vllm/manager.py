# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The scheduler's side of the offloading spec: an ``OffloadingManager`` over the pool."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingManager,
    PrepareStoreOutput,
    RequestOffloadingContext,
    get_offload_block_hash,
)

from beluga.connectors.connection import Connection
from beluga.connectors.process import process_start_s
from beluga.connectors.vllm.answers import Answers, Asker
from beluga.connectors.vllm.counters import ConnectorCounters, metric_name
from beluga.connectors.vllm.following import OffloadingFollowing
from beluga.connectors.vllm.lookups import Lookups
from beluga.connectors.vllm.rendezvous import Rendezvous
from beluga.connectors.vllm.retry import RetryTask

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from beluga.connectors.connection import Attachment
    from beluga.connectors.vllm.settings import VllmSettings

logger = init_logger(f"vllm.{__name__}")  # vLLM shows the logs below its own name

MEDIUM = Medium.CPU


@dataclasses.dataclass
class PoolBlocks(LoadStoreSpec):
    """Blocks in the pool, by their digests: 32 bytes for each, end to end."""

    digests: bytes


class BelugaManager(OffloadingManager):
    """The scheduler's side of the offloading spec."""

    def __init__(self, settings: VllmSettings, config: Any) -> None:
        self._saves = settings.save
        self._events: list[OffloadingEvent] | None = [] if config.enable_kv_cache_events else None
        self._connection = Connection(settings, name="lookups", engine="vllm", logger=logger)
        self._counters = ConnectorCounters()
        self._lookups = Lookups(self._connection, self._counters)
        self._answers = Answers(self._lookups, settings.onboard_ms / 1000)
        self._following = OffloadingFollowing(self._answers, self._lookups)
        rendezvous = Rendezvous(config.engine_id, settings.salt)
        world_size, since_s = config.parallel.world_size, process_start_s()

        def look(attachment: Attachment) -> bool:
            ranks = rendezvous.look(attachment, world_size, since_s)
            if ranks:
                digest = ranks[0].digest.hex()[:8]
                logger.info(
                    "beluga: met %d of the engine's ranks; namespace %s", len(ranks), digest
                )
                self._lookups.ranks = tuple(ranks)
            return bool(ranks)

        doing = "looking for the workers' cards"
        self._retry_task = RetryTask(
            settings, name="rendezvous", doing=doing, call=look, logger=logger
        )
        if not self._retry_task.wait(settings.timeout_ms / 1000):
            logger.warning("beluga: no word of the workers in the pool yet; until then all misses")
        self._connection.settle()

    @property
    def met(self) -> bool:
        """Whether it knows the workers' namespaces."""
        return bool(self._lookups.ranks)

    @property
    def attached(self) -> bool:
        """Whether it would ask the pool now."""
        return self._connection.attached

    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        """Return whether the pool has a block. If so, the block is pinned. RETRY means that it is
        on its way to the pool from a tier below.
        """
        if not req_context.load_tier_filter.allows(MEDIUM, None):
            return LookupResult.MISS
        following = _after(req_context, key)
        block_hash = get_offload_block_hash(key)
        found = self._answers.ask(self._asker(req_context), block_hash, following)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def prepare_load(self, keys: Collection[Any], req_context: Any) -> LoadStoreSpec:
        """Prepare a load. The blocks are already pinned."""
        self._answers.loading(self._asker(req_context))
        return self._blocks(keys)

    def complete_load(self, keys: Collection[Any], req_context: Any) -> None:
        """Release the pins of a load that has ended."""
        self._answers.loaded(self._asker(req_context))

    def prepare_store(self, keys: Collection[Any], req_context: Any) -> PrepareStoreOutput:
        """Accept all blocks: when they are saved, the pool reports which ones it already has."""
        stored = list(keys) if self._saves and self.attached and self._lookups.ready else []
        return PrepareStoreOutput(stored, self._blocks(stored), [])

    def complete_store(self, keys: Collection[Any], req_context: Any, success: bool = True) -> None:
        """Announce the leading blocks that the pool has, if events are enabled."""
        if self._events is None:
            return
        ordered = sorted(keys, key=lambda key: req_context.get_offload_key_position(key) or 0)
        count, pins = self._lookups.pin(list(map(self._digest, ordered)))
        self._lookups.release(pins)
        if count:
            self._events.append(OffloadingEvent(ordered[:count], MEDIUM, removed=False))

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """Begin a request. Only computed blocks are saved."""
        req_context.set_state(self._answers.begin(req_context.req_id))
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        """Release the request's pins."""
        self._answers.end(req_context.req_id)

    def on_schedule_end(self, context: Any) -> None:
        """Requests that start now load nothing more; preempted ones may load again."""
        self._answers.started(context.new_req_ids)
        self._answers.preempted(context.preempted_req_ids)

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return events for the blocks stored since the last call."""
        if self._events is None:
            return ()
        events, self._events = self._events, []
        return events

    def reset_cache(self) -> None:
        """Find no earlier block again, because the weights may have changed."""
        logger.info("beluga: reset; this engine's blocks are its own from now on")
        self._answers.reset()

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Return the counts since the last call."""
        return offload_stats(self._counters)

    def shutdown(self) -> None:
        """End the sessions."""
        self._retry_task.close()
        self._connection.close()

    def _asker(self, req_context: Any) -> Asker:
        asker = req_context.get_state(Asker)
        if asker is None:
            self.on_new_request(req_context)
            asker = req_context.get_state(Asker)
        return asker  # type: ignore[no-any-return]

    def _digest(self, key: Any) -> bytes:
        return self._answers.digest(get_offload_block_hash(key))

    def _blocks(self, keys: Collection[Any]) -> PoolBlocks:
        return PoolBlocks(b"".join(map(self._digest, keys)))


def _after(req_context: Any, key: Any) -> list[bytes]:
    """Return the request's blocks after this one, or none if vLLM no longer keeps them there."""
    places: dict[Any, int] = getattr(req_context, "_offload_key_positions", {})
    here = places.get(key, 0)
    following = sorted((place, one) for one, place in places.items() if place > here)
    return [get_offload_block_hash(one) for _, one in following] if here else []


def offload_stats(counters: ConnectorCounters) -> OffloadingConnectorStats | None:
    """Return the counts since the last call in the form that OffloadingConnector adds up."""
    taken = {name: amount for name, amount in counters.take().items() if amount > 0}
    if not taken:
        return None
    stats = OffloadingConnectorStats()
    for name, amount in taken.items():
        stats.increase_counter(metric_name(name, offload=True), amount)
    return stats
