# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Engines on a pool, without vLLM: the scheduler's side alone, a rank's worker alone, and both of
them behind vLLM's hooks.
"""

from __future__ import annotations

import importlib
import itertools
import logging
import threading
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import fake_vllm
import numpy as np
from fake_vllm import BLOCK_TOKENS, cache_config, config, layer_major, no_extra_keys, spec
from support.blocks import eventually

from beluga import KVCache, Namespace, Pool
from beluga.connectors.connection import Connection
from beluga.connectors.vllm.counters import ConnectorCounters
from beluga.connectors.vllm.events import Announcements
from beluga.connectors.vllm.layout import GroupLayout
from beluga.connectors.vllm.lookups import Lookups
from beluga.connectors.vllm.parts import BlockPart
from beluga.connectors.vllm.schedule import Schedule
from beluga.connectors.vllm.settings import VllmSettings
from beluga.connectors.vllm.staging import BlockSource
from beluga.connectors.vllm.steps import BlockRange, Loaded, Orders, StepReport
from beluga.connectors.vllm.worker import RankWorker

RANKS = tuple(Namespace({"rank": rank}) for rank in range(2))
NAMESPACE = Namespace.of("rank")
TOKENS = list(range(100, 100 + 5 * BLOCK_TOKENS + 1))  # five blocks and a token
LOGGER = logging.getLogger("test")
LONG_S = 60.0


def wait_for(condition: Callable[[], bool]) -> None:
    assert eventually(condition, LONG_S)


class Scheduler:
    """The scheduler's side for two ranks, and the engine's record of its requests' blocks."""

    def __init__(self, pool_name: str, *, block_count: int = 200, **changes: Any) -> None:
        given = {"pool": pool_name, "timeout_ms": 500, "retry_s": 0.05} | changes
        self.settings = VllmSettings(**given)
        self.connection = Connection(self.settings, name="lookups", logger=LOGGER)
        self.counters = ConnectorCounters()
        self.lookups = Lookups(self.connection, self.counters)
        self.lookups.ranks = RANKS
        self.blocks: dict[str, Any] = {}
        self.announcements = Announcements(
            rank_count=lambda: len(RANKS), block_size=self.block_tokens
        )
        groups = self.groups()
        self.schedule = Schedule(
            self.settings,
            self.lookups,
            self.counters,
            block_size=groups.block_size if groups else self.block_tokens,
            block_count=block_count,
            block_ids_of=lambda name: self.blocks.get(name, []),
            extra_keys_of=no_extra_keys,
            announcements=self.announcements,
            blocks=groups,
        )

    block_tokens = BLOCK_TOKENS

    def groups(self) -> Any:
        """Return the groups of a hybrid model, or None."""

    def start(self, made: Any, computed: int = 0) -> int:
        """Start a request. Returns the tokens that it loads."""
        tokens, _ = self.schedule.matched_tokens(made, computed)
        assert tokens is not None
        first = 10 * (len(self.blocks) + 1)
        self.blocks.setdefault(made.request_id, list(range(first, first + 10)))
        self.schedule.allocated(made, self.blocks[made.request_id], tokens)
        made.num_computed_tokens = computed + tokens
        return tokens

    def step(self, made: Any, tokens: int, preempted: tuple[str, ...] = ()) -> Orders:
        """Run a step that computes that many tokens of a request."""
        orders = self.schedule.orders({made.request_id: tokens}, list(preempted))
        made.num_computed_tokens += tokens
        return orders

    def saves(self, made: Any | None = None, tokens: int = 0) -> list[tuple[str, list[int]]]:
        """Run a step of a request and an empty one, and return what they save."""
        saves = self.step(made, tokens).saves if made is not None else []
        return names(saves + self.schedule.orders({}, []).saves)

    def loaded(
        self, name: str, ranks: int = 2, invalid: Iterable[int] = (), *, blocks: int = 5
    ) -> None:
        """Report that that many ranks have each loaded that many leading blocks of a request."""
        self.schedule.reported(StepReport({name: Loaded(ranks, blocks)}), set(invalid))

    def close(self) -> None:
        self.connection.close()


def names(ranges: list[BlockRange]) -> list[tuple[str, list[int]]]:
    return [(span.request, span.block_ids) for span in ranges]


def store(caches: list[KVCache], made: Any, *counts: int) -> None:
    """Put that many leading blocks of a request for each rank."""
    for cache, count in zip(caches, counts, strict=True):
        cache.put(list(made.block_hashes[:count]), np.ones((count, 4096), dtype=np.uint8))


def pinned(caches: list[KVCache]) -> int:
    return caches[0].stat().pinned_count


def digests(start: int, count: int) -> bytes:
    """Return the digests of blocks by number."""
    return b"".join(bytes([i]) * 32 for i in range(start, start + count))


def blocks(name: str, ids: list[int], start: int = 0, **fields: Any) -> BlockRange:
    return BlockRange(name, digests(start, len(ids)), ids, **fields)


class Rank:
    """A worker over layers in numpy memory. ``shape`` has layers, blocks, and 16-bit values of a
    block; ``device`` is that of the tensors.
    """

    def __init__(
        self,
        pool_name: str,
        *,
        shape: tuple[int, int, int] = (2, 64, 512),
        device: Any = None,
        attached: bool = True,
        part: BlockPart | None = None,
        **changes: Any,
    ) -> None:
        tensors, self.memory = layer_major(*shape)
        for tensor in tensors.values() if device else ():
            tensor.device = device
        self.layout = GroupLayout(tensors, block_count=shape[1], page_sizes={})
        self.counters = ConnectorCounters()
        settings = VllmSettings(
            **{"pool": pool_name, "timeout_ms": 5000, "retry_s": 0.05, **changes}
        )
        self.worker = RankWorker(settings, self.layout, NAMESPACE, self.counters, LOGGER, part=part)
        if attached:
            assert self.worker.connection.wait(LONG_S)

    def fill(self, seed: int) -> None:
        self.memory[...] = np.random.default_rng(seed).integers(
            0, 1 << 16, self.memory.shape, dtype=np.uint16
        )

    def begin_save(self, *ranges: BlockRange) -> None:
        self.worker.save(Orders(saves=list(ranges)))

    def saved(self, name: str = "r") -> None:
        """Wait until a request's saves have ended."""
        wait_for(lambda: name in self.worker.saves.ended({name}))

    def save(self, name: str, ids: list[int], start: int = 0) -> None:
        self.begin_save(blocks(name, ids, start))
        self.saved(name)

    def load(self, *ranges: BlockRange) -> None:
        self.worker.load(Orders(loads=list(ranges)))

    def loaded(self, name: str = "s") -> None:
        """Wait until a request is loaded."""
        wait_for(lambda: name in self.worker.loads.loaded())
        assert self.worker.loads.failed() == set()

    def close(self) -> None:
        self.worker.close()


class Gate(BlockSource):
    """A source that blocks saves, and loads, until it is opened."""

    def __init__(self, *layouts: GroupLayout) -> None:
        super().__init__(*layouts)
        self.reading, self.go = threading.Event(), threading.Event()

    def read(self, block_ids: Any, group: int = 0) -> Any:
        self.reading.set()
        assert self.go.wait(LONG_S)
        return super().read(block_ids, group)

    def write(self, block_ids: Any, group: int = 0) -> Any:
        assert self.go.wait(LONG_S)
        return super().write(block_ids, group)


_numbers = itertools.count()
LAYERS, BLOCKS = 2, 16  # of an Engine


class Engine:
    """Two connectors, as vLLM has them: one in its scheduler and one in its worker."""

    def __init__(
        self,
        pool_name: str,
        *,
        events: bool = False,
        wait: bool = True,
        vllm_config: Any = None,
        **extra: Any,
    ) -> None:
        module = importlib.import_module("beluga.connectors.vllm.connector")
        self.config = set_connector(vllm_config or config(), pool_name, **extra)
        self.config.instance_id = f"engine {next(_numbers)}"
        self.config.kv_events_config = SimpleNamespace(enable_kv_cache_events=events)
        tensors, self.memory = layer_major(LAYERS, BLOCKS, BLOCK_TOKENS, 8)
        caches = cache_config(spec(page_size_bytes=64), num_blocks=BLOCKS, layers=LAYERS)
        make, role = module.BelugaConnector, fake_vllm.Role
        self.scheduler: Any = make(self.config, role.SCHEDULER, caches)
        self.worker: Any = make(self.config, role.WORKER, caches)
        self.manager = fake_vllm.KVCacheManager()
        self.block_ids = self.manager.block_ids
        self.scheduler._kv_cache_manager = self.manager
        assert self.worker.get_handshake_metadata() is None
        meet(self.scheduler, self.worker, tensors, wait=wait)

    def start(self, made: Any, first: int) -> tuple[int, bool]:
        """Start a request in blocks from ``first`` on. Returns what the pool should provide."""
        matched: tuple[int, bool] = self.scheduler.get_num_new_matched_tokens(made, 0)
        ids = list(range(first, first + made.num_tokens // BLOCK_TOKENS + 1))
        self.block_ids[made.request_id] = ids
        self.scheduler.update_state_after_alloc(made, allocated(ids), matched[0])
        made.num_computed_tokens = matched[0]
        return matched

    def step(self, made: Any, *, fill: int | None = None, preempted: Any = None) -> None:
        """Run a forward pass for all remaining tokens of a request. It writes ``fill`` into the
        blocks.
        """
        tokens = made.num_tokens - made.num_computed_tokens
        metadata = self.scheduler.build_connector_meta(
            SimpleNamespace(
                num_scheduled_tokens={made.request_id: tokens}, preempted_req_ids=preempted
            )
        )
        made.num_computed_tokens += tokens
        made.num_in_flight_tokens += tokens
        self.worker.handle_preemptions(metadata)
        self.worker.bind_connector_metadata(metadata)
        self.worker.start_load_kv(None)
        self.worker.wait_for_layer_load("layer.0")
        if fill is not None:
            self.memory[:, self.block_ids[made.request_id]] = fill
        self.worker.save_kv_layer("layer.0", None, None)
        self.worker.wait_for_save()
        made.num_in_flight_tokens -= tokens

    def report(self, *, invalid: set[int] | None = None) -> Any:
        """Pass the worker's report after a step to the scheduler."""
        meta = self.worker.build_connector_worker_meta()
        self.scheduler.update_connector_output(
            SimpleNamespace(kv_connector_worker_meta=meta, invalid_block_ids=invalid or set())
        )
        return meta

    def finish(self, made: Any) -> bool:
        """End a request. If its blocks are held, wait until they are saved. Returns whether they
        were.
        """
        held, parameters = self.scheduler.request_finished(made, self.block_ids[made.request_id])
        assert parameters is None
        self.report()
        self.worker.bind_connector_metadata(
            self.scheduler.build_connector_meta(
                SimpleNamespace(num_scheduled_tokens={}, preempted_req_ids=())
            )
        )
        assert not self.scheduler.has_pending_push_work()
        sent: set[str] = set()
        finished = {made.request_id}

        def ended() -> bool:
            sent.update(self.worker.get_finished(finished)[0] or ())
            return sent == finished

        if held:
            wait_for(ended)
        return bool(held)

    def run(self, made: Any, first: int, fill: int) -> int:
        """Run a whole request. Returns the tokens that the pool provided."""
        tokens, _ = self.start(made, first)
        self.step(made, fill=fill if tokens == 0 else None)
        self.finish(made)
        self.report()
        return tokens

    def close(self) -> None:
        self.scheduler.shutdown()
        self.worker.shutdown()


def set_connector(vllm_config: Any, pool_name: str, **extra: Any) -> Any:
    """Give vLLM's configuration our connector on a pool."""
    vllm_config.kv_transfer_config = SimpleNamespace(
        kv_load_failure_policy="fail",
        kv_connector_extra_config={"pool": pool_name, "timeout_ms": 5000} | extra,
    )
    vllm_config.kv_events_config = None
    return vllm_config


def allocated(ids: list[int]) -> Any:
    """Return blocks of a request as vLLM passes them to a connector."""
    return SimpleNamespace(get_block_ids=lambda: (ids,))


def meet(scheduler: Any, worker: Any, tensors: Any, *, wait: bool = True) -> None:
    """Give a worker its memory, and the scheduler what the worker reports about itself."""
    worker.register_kv_caches(tensors)
    scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): worker.get_handshake_metadata()})
    for connection in (scheduler._connection, worker._worker.connection) if wait else ():
        assert connection.wait(LONG_S)


def rank_caches(pool: Pool) -> list[KVCache]:
    """Return a cache for each rank of a Scheduler."""
    return [KVCache(pool, namespace=rank) for rank in RANKS]
