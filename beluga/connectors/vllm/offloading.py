# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The pool behind vLLM's own OffloadingConnector, as an out-of-tree ``OffloadingSpec``.

::

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "OffloadingConnector",
        "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"spec_name": "BelugaOffloadingSpec",
        "spec_module_path": "beluga.connectors.vllm.offloading"}}'

The settings are those of the KV connector (``settings``); loads are always asynchronous. Prefer the
KV connector (``connector``). vLLM keeps its interface stable, while this one changes. It also loads
sooner, and its lookups do not need the workers' cards (``rendezvous``). This spec is for sites that
have built on OffloadingConnector. The two do not share blocks.

**Loads that fail.** OffloadingConnector has no failed jobs: it asserts success, so a failure would
kill the engine. A block is pinned from the lookup that found it until its load has ended. So a load
fails only if the server, its pins or the block's bytes are lost in between, which can happen. Such
a job is reported as ended, and the blocks that did not arrive are given to vLLM through the
connector's ``get_block_ids_with_load_errors``. OffloadingConnector inherits that method from its
base class; the spec replaces it on the instance that it serves (and ``get_kv_connector_stats``, for
the counts of the worker's side). vLLM computes such blocks if ``kv_load_failure_policy`` is
"recompute" and fails the request otherwise, so an engine without that setting is refused at the
start. Two more kinds of engines are refused because the method would not help them: those with more
than one group of KV layers, and those that load within a step (``sync_load_budget_bytes`` of vLLM
0.33), where a failure would come too late to stop the save of what the step computes.

It is refused inside ``MultiConnector``: OffloadingConnector orders the save of a block with the
step that computes it, before vLLM knows what that step failed to load through other connectors.

The spec also refuses LoRA (this interface distinguishes adapters only by name), chunks of several
blocks, and the canonical layout. A reset of the prefix cache through the connector separates all
later blocks of this engine from all earlier ones, because its weights may have changed.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import vllm
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadingWorker,
    TransferResult,
)

from beluga.connectors.identity import with_weights
from beluga.connectors.settings import settings_of
from beluga.connectors.vllm import amx
from beluga.connectors.vllm.cachegroup import CacheGroup
from beluga.connectors.vllm.counters import NAMES, ConnectorCounters, figures, metric_name
from beluga.connectors.vllm.identity import check_hashing, identify, namespace
from beluga.connectors.vllm.jobs import Jobs
from beluga.connectors.vllm.layout import GroupLayout
from beluga.connectors.vllm.manager import BelugaManager, offload_stats
from beluga.connectors.vllm.rendezvous import Rendezvous
from beluga.connectors.vllm.retry import RetryTask
from beluga.connectors.vllm.settings import VllmSettings
from beluga.connectors.vllm.stats import forget_collectors
from beluga.connectors.vllm.worker import RankWorker
from beluga.errors import ConnectorError

if TYPE_CHECKING:
    from beluga.connectors.connection import Attachment
    from beluga.kvcache import Namespace

__all__ = ["BelugaOffloadingSpec", "figures"]

logger = init_logger(f"vllm.{__name__}")  # vLLM shows the logs below its own name

VLLM_SETTINGS = (
    "spec_name",
    "spec_module_path",
    "offload_prompt_only",
    "self_describing_kv_events",
)
REFUSED_SETTINGS = ("blocks_per_chunk", "block_size", "canonical_layout", "sync_load_budget_bytes")


class BelugaWorker(OffloadingWorker):
    """The worker's side of the offloading spec."""

    def __init__(self, jobs: Jobs, retry_task: RetryTask) -> None:
        self._jobs, self._retry_task = jobs, retry_task

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Queue a save."""
        self._jobs.save(job_id, src_spec.block_ids.tolist(), dst_spec.digests)
        return True

    def submit_load(
        self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False
    ) -> bool:
        """Queue a load. ``expedited`` is never set, because the setting for it is refused."""
        self._jobs.load(job_id, dst_spec.block_ids.tolist(), src_spec.digests)
        return True

    def get_finished(self) -> list[TransferResult]:
        """Return the jobs that have ended. The module's docstring explains those that failed."""
        return [TransferResult(one.job, True, one.size, one.time_s) for one in self._jobs.ended()]

    def wait(self, job_ids: set[int]) -> None:
        """Wait for jobs whose blocks the engine needs."""
        self._jobs.wait(job_ids)

    def shutdown(self) -> None:
        """End the sessions."""
        self._retry_task.close()
        self._jobs.close()


class BelugaOffloadingSpec(OffloadingSpec):
    """The spec that ``spec_name`` names. Raises :class:`~beluga.errors.ConnectorError` for what is
    refused.
    """

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

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        """Define one Prometheus counter for each of our counters. vLLM makes them next."""
        forget_collectors()
        return {
            metric_name(name, offload=True): OffloadingCounterMetadata(
                documentation=f"Beluga: {meaning}."
            )
            for name, meaning in NAMES.items()
        }

    def get_manager(self) -> OffloadingManager:
        """Make the scheduler's side. It waits a moment for the workers' cards."""
        return BelugaManager(self._settings, self.config)

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        """Make the worker's side."""
        connector = _connector_of(self)
        config = connector.connector_worker.vllm_config
        kv_cache_config = connector.connector_worker.kv_cache_config
        group = CacheGroup(config, kv_cache_config)
        check_engine(config)
        parts = {f"part {place}": one for place, one in enumerate(kv_caches.tensors)}
        layout = GroupLayout(
            {name: one.tensor for name, one in parts.items()},
            block_count=kv_cache_config.num_blocks,
            page_sizes={name: one.page_size_bytes for name, one in parts.items()},
        )
        amx.permit(layout.device)
        own = self._namespace(config, group, layout)
        counters = ConnectorCounters()
        worker = RankWorker(self._settings, layout, own, counters, logger)
        worker.settle()
        timeout_s = self._settings.timeout_ms / 1000
        jobs = Jobs(worker, block_size=layout.block_size, timeout_s=timeout_s)
        connector.get_block_ids_with_load_errors = jobs.failed
        connector.get_kv_connector_stats = lambda: offload_stats(counters)
        rendezvous = Rendezvous(self.config.engine_id, self._settings.salt)
        rank = self.config.parallel.rank
        identity = identify(
            config,
            self._settings.identity,
            logger=logger,
            then=worker.identify,
            hashed=lambda count: counters.add(identity_bytes=count),
        )

        def leave(attachment: Attachment) -> bool:
            """Leave the card when it is known what the blocks are, not before."""
            weights = identity.known
            return bool(weights) and rendezvous.leave(attachment, rank, with_weights(own, weights))

        retry_task = RetryTask(
            self._settings,
            name="card",
            doing="leaving a rank's card",
            call=leave,
            logger=logger,
        )
        return BelugaWorker(jobs, retry_task)

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
            identity=self._settings.identity,
        )


def _connector_of(spec: BelugaOffloadingSpec) -> Any:
    """Return the connector that is receiving its worker. Raises ConnectorError beside others."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    group = get_kv_transfer_group()
    for connector in (group, *getattr(group, "sub_connectors", list)()):
        side = getattr(connector, "connector_worker", None)
        if getattr(side, "spec", None) is not spec:
            continue
        if connector is not group:
            raise ConnectorError(
                "OffloadingConnector saves what is computed on another connector's failed load; "
                "use BelugaConnector inside MultiConnector"
            )
        return connector
    raise ConnectorError("this spec serves vLLM's OffloadingConnector, and finds none around it")


def check_engine(config: Any) -> None:
    """Raise ConnectorError for an engine that could get wrong blocks, or fail when a block is
    lost.
    """
    check_hashing(config.cache_config.prefix_caching_hash_algo)
    if config.kv_transfer_config.kv_load_failure_policy != "recompute":
        raise ConnectorError(
            'a load from a pool may fail: add "kv_load_failure_policy": "recompute" to '
            "--kv-transfer-config"
        )
    if getattr(config.model_config, "is_multimodal_model", False):
        raise ConnectorError(
            "OffloadingConnector does not tell names of media that clients chose from hashes of "
            "contents; use BelugaConnector with multimodal models"
        )
    if config.lora_config is not None:
        raise ConnectorError(
            "OffloadingConnector tells LoRA adapters apart by their names alone; use "
            "BelugaConnector with LoRA"
        )
