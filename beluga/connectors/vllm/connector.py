# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Implements vLLM's connector interface. It only forwards calls and decides nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
from typing import TYPE_CHECKING, Any

import vllm
from vllm import envs
from vllm.distributed.kv_events import BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from beluga.connectors.connection import Connection
from beluga.connectors.settings import settings_of
from beluga.connectors.vllm.blocks import BlockNames
from beluga.connectors.vllm.cachegroup import CacheGroups
from beluga.connectors.vllm.counters import ConnectorCounters
from beluga.connectors.vllm.events import (
    MEDIUM,
    Announcement,
    Announcements,
    TokenFeed,
    ownership_of,
)
from beluga.connectors.vllm.hints import Requests
from beluga.connectors.vllm.identity import check_hashing, identify, namespace
from beluga.connectors.vllm.lookups import Lookups
from beluga.connectors.vllm.parts import part_of
from beluga.connectors.vllm.policy import permit_amx, recompute_failed_loads
from beluga.connectors.vllm.schedule import Schedule
from beluga.connectors.vllm.settings import VllmSettings
from beluga.connectors.vllm.stats import SPACE, BelugaMetrics, BelugaStats
from beluga.connectors.vllm.steps import Orders, Rank, StepReport
from beluga.connectors.vllm.updates import EngineUpdates
from beluga.connectors.vllm.worker import RankWorker
from beluga.errors import ConnectorError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from beluga.connectors.vllm.groups import Groups

logger = init_logger(f"vllm.{__name__}")  # vLLM shows only the logs below its own name


class StepMetadata(KVConnectorMetadata):
    """The scheduler's orders as vLLM's metadata."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders


class RankMetadata(KVConnectorHandshakeMetadata):
    """A rank's handshake as vLLM's metadata."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank


class ReportMetadata(KVConnectorWorkerMetadata):
    """The workers' report as vLLM's metadata, which vLLM aggregates."""

    def __init__(self, report: StepReport) -> None:
        self.report = report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Add another rank's report."""
        self.report.add(other.report)
        return self


class BelugaConnector(KVConnectorBase_V1, SupportsHMA):
    """The connector: one in vLLM's scheduler, one in each worker. See the package's docstring."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._settings = dataclasses.replace(
            settings_of(VllmSettings, transfer.kv_connector_extra_config),
            kv_role=getattr(transfer, "kv_role", None) or "kv_both",
        )
        self._groups = CacheGroups(vllm_config, kv_cache_config)
        if self._groups.hybrid:  # loading a state before a forward is too late
            self._settings = dataclasses.replace(self._settings, load="async")
        check_hashing(vllm_config.cache_config.prefix_caching_hash_algo)
        if recompute_failed_loads(vllm_config) and role == KVConnectorRole.SCHEDULER:
            logger.info("beluga: kv_load_failure_policy is recompute, for all connectors")
        self._counters = ConnectorCounters()
        self._space = 0  # of the names of our blocks, as last reported to routers
        self._introduced = False  # whether this rank has sent its handshake to the scheduler's side
        self._worker: RankWorker | None = None
        self._start: Callable[[], RankWorker] | None = None  # makes it, after a sleep again
        self._last_report = StepReport()  # of a worker that has ended
        self._namespace: Any = None
        self._connection: Connection | None = None
        if role == KVConnectorRole.SCHEDULER:
            parallel = vllm_config.parallel_config
            self._rank_count = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
            self._met: dict[int, Rank] = {}
            self._connection = Connection(
                self._settings, name="lookups", engine="vllm", logger=logger
            )
            self._lookups = Lookups(
                self._connection,
                self._counters,
                block_size=1 if self._groups.hybrid else self._groups.block_size,
                logger=logger,
                identified=bool(self._settings.identity),
            )
            self._announcements = self._made_announcements(vllm_config)
            self._feed = self._made_feed(vllm_config.model_config)
            hybrid = self._made_hybrid(vllm_config, kv_cache_config)
            self._block_size = hybrid.block_size if hybrid else self._groups.block_size
            self._loaded = threading.Event()
            self._identity = identify(
                vllm_config,
                self._settings.identity,
                variables=envs.environment_variables,
                loaded=self._loaded,
                logger=logger,
                then=self._lookups.identified,
                hashed=lambda count: self._counters.add(identity_bytes=count),
            )
            self._schedule = Schedule(
                self._settings,
                self._lookups,
                self._counters,
                block_size=self._block_size,
                block_count=kv_cache_config.num_blocks,
                block_ids_of=self._block_ids_of,
                extra_keys_of=self._extra_keys_of,
                announcements=self._announcements,
                names=BlockNames(self._lookups, block_size=self._block_size, feed=self._feed),
                blocks=hybrid,
                hints=Requests(self._counters, logger),
            )
            self._following = EngineUpdates(
                self._schedule, self._lookups, vllm_config, lambda: self._kv_cache_manager
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """False: this is a cache, so an unsaved block is only a later miss."""
        return False

    # ---- Scheduler side

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Receive all ranks' namespaces, in rank order. Lookups then use the keys that these ranks
        load. Requests come next, so this waits for the session.

        ``MultiConnector`` passes the handshake of one connector to all. If it is another
        connector's, the ranks' first reports have the namespaces.
        """
        given = [metadata[rank] for rank in sorted(metadata)]
        if all(isinstance(handshake, RankMetadata) for handshake in given):
            self._meet([handshake.rank for handshake in given])
        if self._connection is not None:
            self._connection.settle()

    def on_new_request(self, request: Any) -> None:
        """Record that a request waits in vLLM's queue."""
        with self._timed("hook_s"):
            self._schedule.queued(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return the tokens in the pool beyond the computed ones, and whether they load
        asynchronously.
        """
        with self._timed("hook_s"):
            return self._schedule.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Record that the engine has allocated blocks for the tokens."""
        with self._timed("hook_s"):
            table = self._table(blocks.get_block_ids())
            self._schedule.allocated(request, table, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Return the workers' orders for this step."""
        state = getattr(scheduler_output, "kv_connector_block_state", None)
        with self._timed("hook_s", "save_hook_s"):
            return StepMetadata(
                self._schedule.orders(
                    scheduler_output.num_scheduled_tokens,
                    scheduler_output.preempted_req_ids or (),
                    state.boundary_state_offloads if state is not None else {},
                )
            )

    def update_connector_output(self, connector_output: Any) -> None:
        """Process the workers' report after the step."""
        metadata = connector_output.kv_connector_worker_meta
        report = metadata.report if metadata is not None else None
        self._schedule.reported(report, connector_output.invalid_block_ids)
        if report is not None:
            self._met |= report.ranks
            if not self._lookups.met and len(self._met) == self._rank_count:
                self._meet([self._met[number] for number in sorted(self._met)])
            if self._announcements is not None:
                self._announcements.reported(report)

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """Record that a request has ended. Returns whether its blocks are still being saved."""
        with self._timed("hook_s", "save_hook_s"):
            return self._schedule.finished(request, block_ids), None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Like :meth:`request_finished`, with the blocks of each group."""
        return self.request_finished(request, self._table(block_ids))

    def register_finished_partial_tail(
        self,
        request: Any,
        block_ids: tuple[list[int], ...],
        partial_tail_offloads: list[tuple[int, int, int]],
    ) -> bool:
        """Note the states at the end of a request's prompt. Returns False: they are pinned, so that
        the request's blocks need not stay.
        """
        with self._timed("hook_s", "save_hook_s"):
            self._schedule.offered(request, partial_tail_offloads)
        return False

    def has_pending_block_frees(self) -> bool:
        """Return whether blocks pinned for saves will soon be freed."""
        return self._schedule.saving

    def has_pending_push_work(self) -> bool:
        """Return whether the engine must run one more step, even an empty one: blocks are saved
        with the step after the one that computes them.
        """
        return self._schedule.pending

    def take_events(self) -> Iterable[Any]:
        """Return events for the blocks that were stored since the last call."""
        if self._announcements is None:
            return ()
        return map(self._event, self._announcements.take())

    def reset_cache(self) -> bool:
        """Separate this engine's blocks from all others, because its weights may have changed. It
        no longer finds older blocks, and other engines do not find its new ones.
        """
        self._schedule.reset()
        logger.info("beluga: reset; this engine's blocks are its own from now on")
        return True

    # ---- Worker side

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Register the engine's memory. Blocks can be moved from now on."""
        from vllm.distributed.parallel_state import get_pp_group, get_tp_group

        layout, *others = self._groups.layouts(kv_caches)
        permit_amx(layout.device)
        tp, pp = get_tp_group(), get_pp_group()
        parallel = self._vllm_config.parallel_config
        part = part_of(
            self._vllm_config,
            self._groups.specs(),
            tp_rank=tp.rank_in_group,
            pp_rank=pp.rank_in_group,
            model_heads=_kv_heads(self._vllm_config.model_config),
        )
        shards = self._groups.shards(layout, part)
        self._namespace = namespace(
            self._vllm_config,
            version=vllm.__version__,
            layout=layout,
            packing=self._groups.packing(),
            layers=self._groups.layers(part.heads if shards else 0),
            part=part.name,
            pp_rank=pp.rank_in_group,
            salt=self._settings.salt,
            identity=self._settings.identity,
            others=others,
            declared=shards.declared if shards else "",
            variables=envs.environment_variables,
        ).of_tenant(self._settings.tenant)
        self._rank = pp.rank_in_group * parallel.tensor_parallel_size + tp.rank_in_group
        self._start = functools.partial(
            RankWorker,
            self._settings,
            layout,
            self._namespace,
            self._counters,
            logger,
            part=part,
            more=others,
            shards=shards.all() if shards else (),
            whole=self._groups.hybrid,
        )
        self._worker = self._start()
        self._itself = Rank(
            self._namespace,
            sum(other.block_size for other in (layout, *others)),
            part.heads,
            self._worker.splits,
        )
        self._worker.settle()

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Return True: an engine may sleep (vLLM 0.33)."""
        return True

    def unregister_kv_caches(self) -> None:
        """End this rank's sessions and copies before vLLM's sleep, which unmaps the memory."""
        if self._worker is not None:
            worker, self._worker = self._worker, None
            worker.close()
            self._last_report.add(worker.report())

    def restore_kv_caches(self) -> None:
        """Load and save again after a sleep. The memory has its former addresses."""
        if self._worker is None and self._start is not None:
            self._worker = self._start()
            self._worker.settle()

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Return this rank's namespace of its part of each block, for the scheduler's side."""
        if self._namespace is None:
            return None
        return RankMetadata(self._itself)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Queue the saves of a step, before its forward. They belong to earlier steps' blocks."""
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            with self._timed("hook_s", "save_hook_s"):
                self._worker.save(connector_metadata.orders)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Stop reading blocks that preempted requests lose."""
        if self._worker is not None:
            with self._timed("hook_s", "save_hook_s"):
                self._worker.preempt(kv_connector_metadata.orders)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Load before the forward, or concurrently with it."""
        if self._worker is not None:
            with self._timed("hook_s"):
                self._worker.load(self._get_connector_metadata().orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: all layers were loaded before the forward."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: all layers of a block are saved together, with the next step."""

    def wait_for_save(self) -> None:
        """Do nothing: blocks of this step are saved after vLLM has processed its output."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose saves have ended, and those whose loads have arrived."""
        if self._worker is None:
            return None, None
        with self._timed("hook_s", "save_hook_s"):
            sent = self._worker.saves.ended(finished_req_ids)
            return sent or None, self._worker.loads.arrived() or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the result of :meth:`get_finished`, and the requests whose loads have failed."""
        sent, arrived = self.get_finished(finished_req_ids)
        failed = (
            self._worker.loads.failed_whole(arrived or set()) if self._worker is not None else set()
        )
        return KVConnectorTransferResults(
            finished_sending=sent or set(), finished_recving=arrived or set(), failed_recving=failed
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the engine's blocks that were not loaded."""
        return self._worker.loads.failed() if self._worker is not None else set()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Return the report for the scheduler's side: what was loaded and stored."""
        report, self._last_report = self._last_report, StepReport()
        if self._worker is not None:
            report.add(self._worker.report())
        if self._worker is not None and not self._introduced:
            report.ranks[self._rank] = self._itself
            self._introduced = True
        return ReportMetadata(report) if report else None

    def shutdown(self) -> None:
        """End the sessions."""
        self.unregister_kv_caches()
        self._start = None
        if self._connection is not None:
            self._identity.close()
            self._connection.close()
            self._connection = None
            if self._feed is not None:
                self._feed.close()

    # ---- Both

    def get_kv_connector_stats(self) -> Any:
        """Return the counts since the last call, with the space of our blocks."""
        taken: dict[str, Any] = dict(self._counters.take())
        space = self._lookups.space if self._connection is not None else 0
        if space and (any(taken.values()) or space != self._space):
            taken[SPACE], self._space = f"{space:016x}", space
        return BelugaStats(data=taken) if any(taken.values()) else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        """Make stats from the data of another process."""
        return BelugaStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> BelugaMetrics:
        """Make the Prometheus metrics."""
        return BelugaMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def _meet(self, ranks: list[Rank]) -> None:
        """Start to look up blocks for these ranks, which have loaded the weights."""
        self._loaded.set()
        parallel = self._vllm_config.parallel_config
        self._lookups.meet(
            [rank.namespace for rank in ranks],
            block_bytes=max(rank.block_bytes for rank in ranks),
            heads=ranks[0].heads if parallel.pipeline_parallel_size == 1 else 0,
            splits=[
                split for split in ranks[0].splits if all(split in rank.splits for rank in ranks)
            ],
        )
        logger.info(
            "beluga: blocks of %d tokens, %d bytes on each of %d ranks; namespace %s",
            self._block_size,
            ranks[0].block_bytes,
            len(ranks),
            ranks[0].namespace.digest.hex()[:8],
        )

    @contextlib.contextmanager
    def _timed(self, *names: str) -> Iterator[None]:
        """Count the time that the engine waited."""
        started = time.perf_counter()
        try:
            yield
        finally:
            took = time.perf_counter() - started
            self._counters.add(**dict.fromkeys(names, took))

    def _manager(self) -> Any:
        if self._kv_cache_manager is None:
            raise ConnectorError("vLLM has not bound its cache manager; is it older than 0.32?")
        return self._kv_cache_manager

    def _block_ids_of(self, request_id: str) -> Any:
        return self._table(self._manager().get_block_ids(request_id))

    def _table(self, block_ids: tuple[list[int], ...]) -> Any:
        """Convert a request's blocks for the schedule."""
        return block_ids if self._groups.hybrid else list(block_ids[0])

    def _made_hybrid(self, vllm_config: Any, kv_cache_config: Any) -> Groups | None:
        if not self._groups.hybrid:
            return None
        from beluga.connectors.vllm.groups import Groups  # only hybrid models need it

        return Groups(
            vllm_config,
            kv_cache_config,
            self._lookups,
            table_of=self._block_ids_of,
            pool=lambda: self._manager().block_pool,
            extra_keys_of=self._extra_keys_of,
            counters=self._counters,
            announcements=self._announcements,
        )

    def _extra_keys_of(self, request: Any, start: int, stop: int, size: int = 0) -> list[Any]:
        size, shown, extra_keys = size or self._block_size, 0, []
        for first in range(start * size, stop * size, size):
            keys, shown = generate_block_hash_extra_keys(request, first, first + size, shown)
            extra_keys.append(keys)
        return to_event_extra_keys(extra_keys) or []

    def _made_announcements(self, vllm_config: Any) -> Announcements | None:
        events = vllm_config.kv_events_config
        if events is None or not events.enable_kv_cache_events or not self._settings.announce:
            return None
        return Announcements(
            rank_count=lambda: len(self._lookups.ranks),
            block_size=0 if self._groups.hybrid else self._groups.block_size,
        )

    def _made_feed(self, model_config: Any) -> TokenFeed | None:
        if not self._settings.events_replay:
            return None
        named = getattr(model_config, "served_model_name", None) or model_config.model
        return TokenFeed(
            self._settings.events_replay,
            model=named if isinstance(named, str) else named[0],
            token_file=self._settings.events_token,
        )

    def _event(self, announcement: Announcement) -> Any:
        spec = self._kv_cache_config.kv_cache_groups[announcement.group].kv_cache_spec
        return BlockStored(
            block_hashes=[maybe_convert_block_hash(announcement.block_hash)],
            parent_block_hash=maybe_convert_block_hash(announcement.parent_hash)
            if announcement.parent_hash
            else None,
            token_ids=announcement.token_ids,
            block_size=len(announcement.token_ids),
            lora_id=None,
            medium=MEDIUM,
            lora_name=announcement.lora_name,
            extra_keys=[announcement.extra_keys],
            group_idx=announcement.group,
            kv_cache_spec_kind=get_kv_cache_spec_kind(spec).value,
            kv_cache_spec_sliding_window=get_kv_cache_spec_sliding_window(spec),
            **ownership_of(BlockStored),
        )


def _kv_heads(model_config: Any) -> int:
    """Return the number of the model's KV heads, or 0 if vLLM does not report it."""
    count_heads = getattr(model_config, "get_total_num_kv_heads", None)
    return int(count_heads()) if count_heads is not None else 0
