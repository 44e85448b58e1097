# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A connector that keeps a hybrid model's blocks in a dict, for engines under test: one before ours
and one after it, in vLLM's MultiConnector.

``BELUGA_TEST_SIBLINGS`` is a file with a word for each of the two, as JSON, which may change while
the engine runs: "off" finds nothing, "sync" and "async" load, and "fail" loads garbage and reports
that the request's load has failed.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import hashing
from hashing import HashingConnector
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.coordinator import (
    ExternalCachedBlockPool,
    MooncakeStoreCoordinator,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

__all__ = ["DictConnector", "HashingConnector", "MultiConnector", "figures"]

GARBAGE = 0x40  # the value of each byte

_saved: dict[tuple[int, bytes], list[Any]] = {}  # the layers' blocks, by group and hash
_counts: Counter[str] = Counter()

# MultiConnector finds the class of a child's figures by its name.
KVConnectorFactory.register_connector("HashingConnector", "hashing", "HashingConnector")


def figures() -> dict[str, float]:
    """Return our counters, and what the engine and the siblings have done."""
    return {**hashing.figures(), **dict.fromkeys(("preempted", "sibling_loads"), 0), **_counts}


class Metadata(KVConnectorMetadata):
    """A step's loads by request, and its saves: the group and hash, and the engine's block."""

    def __init__(self) -> None:
        self.loads: list[tuple[str, str, list[tuple[int, bytes, int]]]] = []
        self.saves: list[tuple[int, bytes, int]] = []


class DictConnector(KVConnectorBase_V1, SupportsHMA):
    """One of the two. Both of an engine's sides are in this process."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._position = vllm_config.kv_transfer_config.kv_connector_extra_config["position"]
        size, self._unit = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
        self._rules = MooncakeStoreCoordinator.from_kv_cache_config(
            kv_cache_config, vllm_config, size, self._unit
        )
        self._specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        self._requests: dict[str, Any] = {}
        self._saved: Counter[tuple[str, int]] = Counter()
        self._loads: list[Any] = []
        self._local: dict[str, int] = {}
        self._failed_before: set[str] = set()
        self._pinned: list[Any] = []
        self._arrived: set[str] = set()
        self._failed: set[str] = set()

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def _mode(self) -> str:
        result = json.loads(Path(os.environ["BELUGA_TEST_SIBLINGS"]).read_text())
        return str(result.get(self._position, "off"))

    # ---- the scheduler's side

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._pool = gpu_block_pool

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        self._requests[request.request_id] = request
        self._local[request.request_id] = num_computed_tokens
        mode = self._mode()
        if mode == "off" or request.request_id in self._failed_before:
            return 0, False
        store = ExternalCachedBlockPool(self._unit, set(_saved))
        limit = self._rules.align_lookup_length(request.num_tokens - 1)
        _, hit = self._rules.find_longest_cache_hit(request.block_hashes, limit, store)
        return max(hit - num_computed_tokens, 0), mode != "sync" and hit > num_computed_tokens

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if not num_external_tokens:
            return
        local = self._local[request.request_id]
        total, ids = local + num_external_tokens, blocks.get_block_ids()
        wanted = []
        for group, mask in enumerate(self._rules.load_mask(request.block_hashes, total)):
            size = self._specs[group].block_size
            hashes = self._hashes(request, group)
            for number, needed in enumerate(mask):
                if needed and number >= local // size:
                    wanted.append((group, bytes(hashes[number]), ids[group][number]))
        mode = self._mode()
        if mode == "fail":
            self._failed_before.add(request.request_id)
        self._loads.append((request.request_id, mode, wanted))

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        self._pool.free_blocks(reversed(self._pinned))
        made = Metadata()
        made.loads, self._loads = self._loads, []
        if self._position == "first":
            _counts["preempted"] += len(scheduler_output.preempted_req_ids or ())
        state = scheduler_output.kv_connector_block_state
        for name, count in scheduler_output.num_scheduled_tokens.items():
            request, table = self._requests[name], state.get_block_ids(name)
            if request.num_computed_tokens == 0:
                for group in range(len(table)):
                    self._saved[name, group] = 0
            for group, row in enumerate(table):
                if group in self._rules.mamba_group_ids:
                    continue
                hashes, size = self._hashes(request, group), self._specs[group].block_size
                full = (request.num_computed_tokens + count) // size
                stop = min(full, len(hashes), len(row))
                for number in range(self._saved[name, group], stop):
                    if row[number]:
                        made.saves.append((group, bytes(hashes[number]), row[number]))
                self._saved[name, group] = stop
        for name, offers in state.boundary_state_offloads.items():
            for group, block, tokens in offers:
                digest = self._requests[name].block_hashes[tokens // self._unit - 1]
                made.saves.append((group, bytes(digest), block))
        self._pinned = [self._pool.blocks[block] for _, _, block in made.saves]
        self._pool.touch(self._pinned)
        return made

    def has_pending_push_work(self) -> bool:
        return bool(self._pinned)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        return False, None

    def _hashes(self, request: Any, group: int) -> Any:
        return self._rules.block_hashes_for_spec(request.block_hashes, self._specs[group])

    # ---- the worker's side

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        groups = self._kv_cache_config.kv_cache_groups
        self._layers = [[kv_caches[name] for name in group.layer_names] for group in groups]

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for name, mode, wanted in self._get_connector_metadata().loads:
            _counts["sibling_loads"] += 1
            for group, digest, block in wanted:
                for layer, content in zip(self._layers[group], _saved[group, digest], strict=True):
                    layer[block].copy_(content)
                    if mode == "fail":
                        layer[block].view(layer.dtype).fill_(GARBAGE)
            if mode != "sync":
                self._arrived.add(name)
            if mode == "fail":
                self._failed.add(name)

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, *given: Any, **named: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        for group, digest, block in self._get_connector_metadata().saves:
            content = [layer[block].clone() for layer in self._layers[group]]
            _saved.setdefault((group, digest), content)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        arrived, self._arrived = self._arrived, set()
        failed, self._failed = self._failed, set()
        return KVConnectorTransferResults(finished_recving=arrived, failed_recving=failed)

    def reset_cache(self) -> bool:
        _saved.clear()
        return True
