# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The pool behind vLLM's own OffloadingConnector, as an out-of-tree ``OffloadingSpec``.

::

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "OffloadingConnector",
        "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"spec_name": "BelugaOffloadingSpec",
        "spec_module_path": "beluga.connectors.vllm.offloading"}}'

The settings are the KV connector's (``settings``); loads are always asynchronous. Prefer the KV
connector (``connector``): it is an interface that vLLM keeps, where this one moves; it loads sooner
and its lookups do not need the workers' cards (``meeting``). This is for those who have built on
OffloadingConnector. The two do not share blocks.

**Loads that fail.** OffloadingConnector knows no failed job: it asserts success, and an engine
would die of one. A block is pinned from the lookup that found it until its load has ended, so a
load fails only if the server, its pins or the block's bytes are lost in between; but it can. A job
is then reported as ended, as it is, and the blocks that did not come are given to vLLM through the
connector's ``get_block_ids_with_load_errors``, which OffloadingConnector leaves to its base class:
the spec puts its own in place of that on the instance it serves. vLLM computes such blocks if
``kv_load_failure_policy`` is "recompute", and fails the request if it is not; an engine without
that setting is refused at start. So are those where it would not do: more than one group of KV
layers, and loads within a step (``sync_load_budget_bytes`` of vLLM 0.33), whose failure would come
too late to keep what the step computes from being saved.

Refused besides: LoRA (its adapters are told apart only by name here), chunks of several blocks and
the canonical layout. A reset of the prefix cache by way of the connector sets all later blocks of
this engine apart from all before, as its weights may have changed.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import vllm
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
    PrepareStoreOutput,
    RequestOffloadingContext,
    TransferResult,
    get_offload_block_hash,
)

from beluga.connectors.link import Link
from beluga.connectors.settings import settings_of
from beluga.connectors.vllm import amx
from beluga.connectors.vllm.answers import Answers, Asker
from beluga.connectors.vllm.cachegroup import CacheGroup
from beluga.connectors.vllm.counters import Counters, figures
from beluga.connectors.vllm.errand import Errand
from beluga.connectors.vllm.identity import check_hashing, namespace
from beluga.connectors.vllm.jobs import Jobs
from beluga.connectors.vllm.layout import BlockLayout
from beluga.connectors.vllm.lookups import Lookups
from beluga.connectors.vllm.meeting import Meeting, process_start_s
from beluga.connectors.vllm.settings import VllmSettings
from beluga.connectors.vllm.worker import Worker
from beluga.errors import ConnectorError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from beluga.connectors.link import Attachment
    from beluga.kvcache import Namespace

__all__ = ["BelugaOffloadingSpec", "figures"]

logger = init_logger(f"vllm.{__name__}")  # vLLM shows what is below its own name

MEDIUM = Medium.CPU
VLLM_SETTINGS = (
    "spec_name",
    "spec_module_path",
    "offload_prompt_only",
    "self_describing_kv_events",
)
REFUSED_SETTINGS = ("blocks_per_chunk", "block_size", "canonical_layout", "sync_load_budget_bytes")


@dataclasses.dataclass
class PoolBlocks(LoadStoreSpec):
    """Blocks in the pool, by what they hold: 32 bytes of each, end to end."""

    digests: bytes


class BelugaManager(OffloadingManager):
    """The scheduler's side."""

    def __init__(self, settings: VllmSettings, config: Any) -> None:
        self._saves = settings.save
        self._events: list[OffloadingEvent] | None = [] if config.enable_kv_cache_events else None
        self._link = Link(settings, name="lookups", logger=logger)
        self._lookups = Lookups(self._link, Counters())
        self._answers = Answers(self._lookups)
        meeting = Meeting(config.engine_id, settings.salt)
        world_size, since_s = config.parallel.world_size, process_start_s()

        def look(attachment: Attachment) -> bool:
            self._lookups.ranks = tuple(meeting.look(attachment, world_size, since_s))
            return bool(self._lookups.ranks)

        doing = "looking for the workers' cards"
        self._errand = Errand(settings, name="meeting", doing=doing, call=look, logger=logger)
        if not self._errand.wait(settings.timeout_ms / 1000):
            logger.warning("beluga: no word of the workers in the pool yet; until then all misses")

    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        """Whether the pool has a block; it is kept there if so."""
        if not req_context.load_tier_filter.allows(MEDIUM, None):
            return LookupResult.MISS
        following = _after(req_context, key)
        block_hash = get_offload_block_hash(key)
        found = self._answers.ask(self._asker(req_context), block_hash, following)
        return LookupResult.HIT if found else LookupResult.MISS

    def prepare_load(self, keys: Collection[Any], req_context: Any) -> LoadStoreSpec:
        """They are pinned already."""
        self._answers.loading(self._asker(req_context))
        return self._blocks(keys)

    def complete_load(self, keys: Collection[Any], req_context: Any) -> None:
        """Let go of what was loaded, or was not."""
        self._answers.loaded(self._asker(req_context))

    def prepare_store(self, keys: Collection[Any], req_context: Any) -> PrepareStoreOutput:
        """All of them: the pool says what it has when they are saved."""
        stored = list(keys) if self._saves and self._link.attached else []
        return PrepareStoreOutput(stored, self._blocks(stored), [])

    def complete_store(self, keys: Collection[Any], req_context: Any, success: bool = True) -> None:
        """Announce them, if anybody listens, as far as the pool has them without a gap."""
        if self._events is None:
            return
        ordered = sorted(keys, key=lambda key: req_context.get_offload_key_position(key) or 0)
        count, pins = self._lookups.pin(list(map(self._digest, ordered)))
        self._lookups.release(pins)
        if count:
            self._events.append(OffloadingEvent(ordered[:count], MEDIUM, removed=False))

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """Only what is computed is saved."""
        req_context.set_state(self._answers.begin(req_context.req_id))
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        """Let go of what was found for it."""
        self._answers.end(req_context.req_id)

    def on_schedule_end(self, context: Any) -> None:
        """Requests that start now load nothing any more; preempted ones may again."""
        self._answers.started(context.new_req_ids)
        self._answers.preempted(context.preempted_req_ids)

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Blocks stored since the last time."""
        if self._events is None:
            return ()
        events, self._events = self._events, []
        return events

    def reset_cache(self) -> None:
        """Never again a block from before: the weights may be others now."""
        logger.info("beluga: reset; this engine's blocks are its own from now on")
        self._answers.reset()

    def shutdown(self) -> None:
        """Give the sessions back."""
        self._errand.close()
        self._link.close()

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


class BelugaWorker(OffloadingWorker):
    """A worker's side."""

    def __init__(self, jobs: Jobs, errand: Errand) -> None:
        self._jobs, self._errand = jobs, errand

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Queue a save."""
        self._jobs.save(job_id, src_spec.block_ids.tolist(), dst_spec.digests)
        return True

    def submit_load(
        self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False
    ) -> bool:
        """Queue a load. None are expedited: the setting that makes them so is refused."""
        self._jobs.load(job_id, dst_spec.block_ids.tolist(), src_spec.digests)
        return True

    def get_finished(self) -> list[TransferResult]:
        """Jobs that have ended: see the module on those that have failed."""
        return [TransferResult(one.job, True, one.size, one.time_s) for one in self._jobs.ended()]

    def wait(self, job_ids: set[int]) -> None:
        """The engine needs their blocks."""
        self._jobs.wait(job_ids)

    def shutdown(self) -> None:
        """Give the sessions back."""
        self._errand.close()
        self._jobs.close()


class BelugaOffloadingSpec(OffloadingSpec):
    """Named in ``spec_name``. Raises :class:`~beluga.errors.ConnectorError` for what is refused."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        given = dict(config.extra_config)
        for name in REFUSED_SETTINGS:
            if given.pop(name, None):
                raise ConnectorError(f"beluga does not serve an engine with {name}; leave it out")
        own = {name: value for name, value in given.items() if name not in VLLM_SETTINGS}
        self._settings = dataclasses.replace(settings_of(VllmSettings, own), load="async")
        if len(config.groups) != 1:
            raise ConnectorError(
                f"this model's KV cache has {len(config.groups)} groups; beluga serves one"
            )

    def get_manager(self) -> OffloadingManager:
        """The scheduler's side; waits a moment for the workers' cards."""
        return BelugaManager(self._settings, self.config)

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        """A worker's side."""
        connector = _connector_of(self)
        config = connector.connector_worker.vllm_config
        kv_cache_config = connector.connector_worker.kv_cache_config
        group = CacheGroup(config, kv_cache_config)
        check_engine(config)
        parts = {f"part {place}": one for place, one in enumerate(kv_caches.tensors)}
        layout = BlockLayout(
            {name: one.tensor for name, one in parts.items()},
            block_count=kv_cache_config.num_blocks,
            page_sizes={name: one.page_size_bytes for name, one in parts.items()},
        )
        amx.permit(layout.device)
        own = self._namespace(config, group, layout)
        worker = Worker(self._settings, layout, own, Counters(), logger)
        timeout_s = self._settings.timeout_ms / 1000
        jobs = Jobs(worker, block_size=layout.block_size, timeout_s=timeout_s)
        connector.get_block_ids_with_load_errors = jobs.failed
        meeting = Meeting(self.config.engine_id, self._settings.salt)
        rank = self.config.parallel.rank
        errand = Errand(
            self._settings,
            name="card",
            doing="leaving a rank's card",
            call=lambda attachment: meeting.leave(attachment, rank, own),
            logger=logger,
        )
        return BelugaWorker(jobs, errand)

    def _namespace(self, config: Any, group: CacheGroup, layout: Any) -> Namespace:
        from vllm.distributed.parallel_state import get_pp_group, get_tp_group

        return namespace(
            config,
            version=vllm.__version__,
            layout=layout,
            packing=f"offloading {group.packing()}",
            layers=group.layers(),
            tp_rank=get_tp_group().rank_in_group,
            pp_rank=get_pp_group().rank_in_group,
            salt=self._settings.salt,
        )


def _after(req_context: Any, key: Any) -> list[bytes]:
    """The request's blocks after this one; none if vLLM no longer keeps them where it did."""
    places: dict[Any, int] = getattr(req_context, "_offload_key_positions", {})
    here = places.get(key, 0)
    following = sorted((place, one) for one, place in places.items() if place > here)
    return [get_offload_block_hash(one) for _, one in following] if here else []


def _connector_of(spec: BelugaOffloadingSpec) -> Any:
    """The connector that is being given its worker, itself or as one of several."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    group = get_kv_transfer_group()
    for connector in (group, *getattr(group, "sub_connectors", list)()):
        side = getattr(connector, "connector_worker", None)
        if getattr(side, "spec", None) is spec:
            return connector
    raise ConnectorError("this spec serves vLLM's OffloadingConnector, and finds none around it")


def check_engine(config: Any) -> None:
    """Raise ConnectorError for an engine that could be given wrong blocks, or die of a lost one."""
    check_hashing(config.cache_config.prefix_caching_hash_algo)
    if config.kv_transfer_config.kv_load_failure_policy != "recompute":
        raise ConnectorError(
            'a load from a pool may fail: add "kv_load_failure_policy": "recompute" to '
            "--kv-transfer-config"
        )
    if config.lora_config is not None:
        raise ConnectorError(
            "OffloadingConnector tells LoRA adapters apart by their names alone; use "
            "BelugaConnector with LoRA"
        )
