# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The pool as a secondary tier of vLLM's own offloading (``TieringOffloadingSpec``).

vLLM copies chunks between its GPUs and its memory, which is the primary tier. This tier copies them
on to the pool and back, for all engines that have the pool. It runs in the scheduler's process, and
submits its calls: stores to the background, lookups and loads as urgent.

vLLM passes no configuration of the model to a tier, so the namespace is made from that of the
connector which makes the tier. A chunk's bytes depend on the chunk's size and on all ranks, which
share it. Blocks of Beluga's own connector are others.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import vllm
from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import LookupResult, Medium
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import (
    JobResult,
    RequestOffloadingContext,
    SecondaryTierManager,
    TransferJob,
)

from beluga.connectors.connection import Connection
from beluga.connectors.identity import config_fields, digest_of, environment, with_weights
from beluga.connectors.settings import PoolSettings, settings_of
from beluga.connectors.vllm.identity import check_hashing, identify
from beluga.errors import ConnectorError
from beluga.index import BlockState
from beluga.kvcache import Namespace, OpTicket, Run

if TYPE_CHECKING:
    from numpy.typing import NDArray

logger = init_logger(f"vllm.{__name__}")  # vLLM shows only the logs below its own name

# Fields of vLLM's OffloadingConfig that differ between engines with equal chunks.
_OF_THIS_ENGINE = ("engine_id", "extra_config", "enable_kv_cache_events")
_OF_THIS_RANK = ("rank", "data_parallel_index", "data_parallel_size", "data_parallel_rank_local")


class _Lookups(AsyncLookupManager):
    """Lookups of a step in one call, on vLLM's thread."""

    def __init__(self, tier: BelugaTier) -> None:
        super().__init__(tier_type=tier.tier_type)
        self._tier = tier

    def batch_lookup(self, keys: list[bytes], req_context: Any) -> Iterable[bool]:
        """Return which chunks the pool or a tier below it has."""
        return self._tier.exist(keys)


class BelugaTier(SecondaryTierManager):
    """Stores and loads chunks of vLLM's memory. A failure is a miss, and a store that fails is
    skipped.

    ``settings`` are the fields of :class:`~beluga.connectors.settings.PoolSettings`. Raises
    ConnectorError for settings that are wrong, and for weights that cannot be identified.
    """

    medium = Medium.CPU

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **settings: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self._settings = settings_of(PoolSettings, settings)
        # No array is kept, because vLLM releases the view at its end.
        self._start = np.asarray(primary_kv_view).ctypes.data
        config = _connector()._vllm_config
        check_hashing(config.cache_config.prefix_caching_hash_algo)
        self._namespace = _namespace(offloading_spec.config, config, self._settings)
        self._identity = identify(
            config,
            self._settings.identity,
            variables=envs.environment_variables,
            logger=logger,
        )
        self._jobs: dict[int, tuple[list[bytes], OpTicket[JobResult]]] = {}
        self._connection = Connection(self._settings, name="tier", engine="vllm", logger=logger)
        self._lookups = _Lookups(self)
        self._connection.settle()

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        """Return whether a chunk exists; RETRY before the answer is there."""
        exists = self._lookups.lookup(key, req_context)
        if exists is None:
            return LookupResult.RETRY
        return LookupResult.HIT if exists else LookupResult.MISS

    def exist(self, keys: list[bytes]) -> list[bool]:
        """Return which chunks the pool or a tier below it has. Waits for the answer."""
        namespace = self._identified()
        if namespace is None:
            return [False] * len(keys)
        tiers = self._connection.attempt(
            "looking up chunks", lambda a: a.cache(namespace).lookup(keys).tiers
        )
        return [False] * len(keys) if tiers is None else [bool(tier) for tier in tiers]

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Submit a store of chunks."""
        self._submit(job_metadata, self._store, urgent=False)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Submit a load of chunks."""
        self._submit(job_metadata, self._load, urgent=True)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return the jobs that have ended since the last call. Chunks that could not be loaded miss
        from now on for the requests that wait for them.
        """
        ended = [job for job, (_, ticket) in self._jobs.items() if ticket.done()]
        finished = []
        for job in ended:
            loads, ticket = self._jobs.pop(job)
            result = ticket.result or JobResult(job, success=False)
            if not result.success:
                self._lookups.mark_miss(loads[len(result.successful_keys or ()) :])
            finished.append(result)
        return finished

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """Return that chunks are offloaded as they are computed."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        """Forget a request's lookups."""
        self._lookups.cleanup(req_context.req_id)

    def on_schedule_end(self, context: Any) -> None:
        """Send the step's lookups."""
        self._lookups.flush()

    def drain_jobs(self) -> None:
        """Wait for all jobs. From now on, this engine shares no chunks with others.

        vLLM calls this when its caches are reset: for a sleep or new weights, which it does not
        distinguish. Chunks of other weights must neither be found nor stored under this name.
        """
        for urgent in (True, False):
            self._connection.finish(lambda: None, urgent=urgent)
        fields = {**self._namespace.fields, "reset": os.urandom(16)}
        self._namespace = Namespace(fields, salt=self._settings.salt).of_tenant(
            self._settings.tenant
        )
        logger.warning(
            "beluga: vLLM has reset its caches, perhaps for other weights: this engine shares no "
            "more chunks with others; restart it to share them again"
        )

    def shutdown(self) -> None:
        """Finish the submitted jobs and end the session."""
        self._identity.close()
        self._connection.close()
        self._lookups.shutdown()

    def _identified(self) -> Namespace | None:
        """Return the namespace with the weights, or None while they are not identified."""
        known = self._identity.known
        return with_weights(self._namespace, known) if known else None

    def _submit(
        self,
        job: TransferJob,
        move: Callable[[list[bytes], Run, Namespace], list[bytes]],
        *,
        urgent: bool,
    ) -> None:
        """Submit a job. It always ends, with the chunks that ``move`` returns."""
        keys, namespace = list(job.keys), self._identified()
        size = self.block_size_bytes

        def run(_: OpTicket[JobResult]) -> JobResult:
            started_s = time.perf_counter()
            moved = [] if namespace is None else move(keys, self._run(job.chunk_ids), namespace)
            took_s, count = time.perf_counter() - started_s, len(moved)
            return JobResult(job.job_id, count == len(keys), moved, took_s, count * size)

        ticket = self._connection.submit(run, urgent=urgent)
        self._jobs[job.job_id] = keys if urgent else [], ticket

    def _run(self, chunk_ids: NDArray[np.integer[Any]]) -> Run:
        """Return the chunks' memory."""
        count, size = len(chunk_ids), self.block_size_bytes
        fragments = np.empty((count, 2), np.uint64)
        fragments[:, 0] = self._start + np.asarray(chunk_ids, np.uint64) * np.uint64(size)
        fragments[:, 1] = size
        return Run(count, size, 1, fragments)

    def _store(self, keys: list[bytes], run: Run, namespace: Namespace) -> list[bytes]:
        """Return the chunks that the pool has now."""
        result = self._connection.attempt(
            "storing chunks", lambda a: a.cache(namespace).put(keys, run).states.tolist()
        )
        states = result or [BlockState.REFUSED] * len(keys)
        pairs = zip(keys, states, strict=True)
        return [key for key, state in pairs if state != BlockState.REFUSED]

    def _load(self, keys: list[bytes], run: Run, namespace: Namespace) -> list[bytes]:
        """Return the leading chunks that were loaded."""
        hits = self._connection.attempt(
            "loading chunks", lambda a: a.cache(namespace).get(keys, run).hits
        )
        return keys[: hits or 0]


beluga = BelugaTier
"""The name for ``"type": "beluga"`` in ``secondary_tiers``."""


def _connector() -> KVConnectorBase_V1:
    """Return the connector that is making this tier. Raises ConnectorError.

    vLLM passes a tier no configuration. Without it, engines with equal folders and different
    options would share wrong KV. The connector is further up the stack, and has it.
    """
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, KVConnectorBase_V1):
            return owner
        frame = frame.f_back  # type: ignore[assignment]
    raise ConnectorError(
        "no KV connector makes this tier, so vLLM's configuration is unknown; configure it in "
        "secondary_tiers of OffloadingConnector"
    )


def _namespace(offloading: Any, config: Any, settings: PoolSettings) -> Namespace:
    """Return the namespace of chunks, without the weights. ``offloading`` is vLLM's
    OffloadingConfig.
    """
    chunk = {
        field.name: getattr(offloading, field.name)
        for field in dataclasses.fields(offloading)
        if field.name not in _OF_THIS_ENGINE
    }
    ranks = dataclasses.asdict(chunk.pop("parallel"))
    if ranks["is_parallelism_agnostic"] or offloading.replicated_layout:
        # A chunk has the same bytes for any number of ranks.
        chunk.pop("worker_kv_bytes_per_block")
    else:
        chunk["parallel"] = {k: ranks[k] for k in sorted(ranks.keys() - set(_OF_THIS_RANK))}
    sections = config_fields(config, identity=settings.identity)
    fields: dict[str, str | int | bytes] = {
        "engine": "vllm offloading",
        "engine_version": vllm.__version__,
        **{f"config {name}": digest for name, digest in sections.items()},
        "chunk": digest_of(chunk),
        "environment": digest_of(environment("VLLM_", envs.environment_variables)),
        "device": f"{current_platform.device_type} {_device()}",
    }
    return Namespace(fields, salt=settings.salt).of_tenant(settings.tenant)


def _device() -> str:
    """Return what selects the kernels, and so the order of values inside a page."""
    if current_platform.device_type == "cpu":
        import torch

        return str(torch.backends.cpu.get_cpu_capability())
    return str(current_platform.get_device_name())
