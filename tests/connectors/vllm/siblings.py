# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Connectors for engines under test: ours with a record of what it moves, and others beside it in
vLLM's MultiConnector.

Lines of ``BELUGA_TEST_HASHES`` are ``save DIGEST HASH`` for blocks that HashingConnector has saved,
and ``load DIGEST HASH`` for the engine's memory after a load. The hashes are computed from the
engine's own tensors.

Folders hold one file of bytes per block, named by vLLM's hash. ``BELUGA_TEST_RIGHT`` has the KV of
an engine without other connectors (RightConnector); ``BELUGA_TEST_SAVED`` has what ours puts into
the pool (KeepingConnector). ``BELUGA_TEST_FAULTS`` is a file with a line of JSON for each request,
in the order in which FaultyConnector gets them (:class:`Fault`, or null).

``BELUGA_TEST_SIBLINGS`` is a file with a word for each DictConnector, as JSON, which may change
while the engine runs: "off" finds nothing, "sync" and "async" load, and "fail" loads garbage and
reports that the request's load has failed.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

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

import beluga.connectors.vllm
from beluga.connectors.vllm.cachegroup import CacheGroup
from beluga.connectors.vllm.connector import BelugaConnector
from beluga.connectors.vllm.layout import GroupLayout
from beluga.index import BlockState

__all__ = ["DictConnector", "FaultyConnector", "HashingConnector", "MultiConnector", "figures"]

GARBAGE = 0x40  # value of each byte; as floats about 3

# MultiConnector finds the class of a child's figures by its name.
for _name in ("HashingConnector", "KeepingConnector"):
    KVConnectorFactory.register_connector(_name, "siblings", _name)

_counts: Counter[str] = Counter()


def figures() -> dict[str, float]:
    """Return our counters, and what the engine and the siblings have done."""
    ours = beluga.connectors.vllm.figures()
    return {**ours, **dict.fromkeys(("preempted", "sibling_loads"), 0), **_counts}


# ---- Ours.


def watch_saves(
    saves: Any, content_of: Callable[[int, int], Any], log: Callable[[str, Any], Any]
) -> None:
    """Call ``log`` with the digest of each block that the pool stores, and what the engine's
    block of a group had when it was copied.
    """
    read, account = saves._source.read, saves._account
    copied: list[Any] = []

    def read_watched(block_ids: Any, group: int = 0) -> Any:
        copied[:] = [content_of(block, group) for block in block_ids]
        return read(block_ids, group)

    def account_watched(digests: bytes, count: int, result: Any, group: int) -> None:
        account(digests, count, result, group)
        for index in range(count):
            if result.states[index] == BlockState.GRANTED:
                log(digests[32 * index : 32 * index + 32].hex(), copied[index])

    saves._source.read, saves._account = read_watched, account_watched


class HashingConnector(BelugaConnector):
    """Logs hashes of what it saves and loads."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        assert self._worker is not None
        saves, loads = self._worker.saves, self._worker.loads
        layouts = saves._source.layouts
        file = open(os.environ["BELUGA_TEST_HASHES"], "a", buffering=1)  # noqa: PTH123, SIM115

        def hash_of(block: int, group: int) -> str:
            digest = hashlib.blake2b(digest_size=16)
            for address, size in layouts[group].fragments([block]).tolist():
                digest.update(ctypes.string_at(address, size))
            return digest.hexdigest()

        def load_hashed(load: Any, source: Any, span: Any) -> int:
            hits: int = load(source, span)
            if span.split:  # other ranks have stored it, with other heads together
                return hits
            for index, block in enumerate(span.block_ids[:hits]):
                name = span.digests[32 * index : 32 * index + 32].hex()
                file.write(f"load {name} {hash_of(block, span.group)}\n")
            return hits

        watch_saves(saves, hash_of, lambda name, copy: file.write(f"save {name} {copy}\n"))
        loads._load = functools.partial(load_hashed, loads._load)  # type: ignore[method-assign]


class Memory:
    """An engine's blocks as bytes, and folders of blocks."""

    def __init__(self, connector: Any, tensors: dict[str, Any]) -> None:
        group = CacheGroup(connector._vllm_config, connector._kv_cache_config)
        self.layout: GroupLayout = group.layout(tensors)

    def read(self, block: int) -> bytes:
        return b"".join(ctypes.string_at(*fragment) for fragment in self._fragments(block))

    def write(self, block: int, content: bytes) -> None:
        for address, size in self._fragments(block):
            ctypes.memmove(address, content[:size], size)
            content = content[size:]

    def _fragments(self, block: int) -> Any:
        return self.layout.fragments([block]).tolist()


_memory: dict[str, Memory] = {}  # of this process's engine: both of its sides are here


def _folder(name: str) -> Path:
    return Path(os.environ[f"BELUGA_TEST_{name}"])


class KeepingConnector(BelugaConnector):
    """Keeps a copy of each block that it puts into the pool."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        assert self._worker is not None
        memory = Memory(self, kv_caches)
        watch_saves(
            self._worker.saves,
            lambda block, _: memory.read(block),
            lambda name, content: (_folder("SAVED") / name).write_bytes(content),
        )


# ---- One that fails to load, and one that keeps what is right.


@dataclasses.dataclass
class Fault:
    """How a request is loaded: that many leading blocks, ``bad`` ones of which fail."""

    blocks: int
    bad: list[int]
    load: str = "sync"
    # Of asynchronous loads: whether failures are reported before the load ends ("early"), with its
    # end ("end"), or for the request as a whole ("request").
    report: str = "end"
    polls: int = 3  # of an asynchronous load, until it ends


class Loads(KVConnectorMetadata):
    """The loads of a step: the request, its fault, and the blocks with their hashes."""

    def __init__(self, loads: list[tuple[str, Fault, list[int], list[str]]]) -> None:
        self.loads = loads


class Silent(KVConnectorBase_V1):
    """A connector without effects."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return Loads([])

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, *given: Any, **named: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        _memory["engine"] = Memory(self, kv_caches)


class RightConnector(Silent):
    """Keeps the blocks that an engine without loads has computed."""

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        size = self._kv_cache_config.hash_block_size
        full = min(request.num_computed_tokens // size, len(request.block_hashes))
        for block, name in zip(block_ids[:full], request.block_hashes[:full], strict=True):
            (_folder("RIGHT") / name.hex()).write_bytes(_memory["engine"].read(block))
        return False, None


class FaultyConnector(Silent):
    """Loads right blocks and wrong ones as the file of faults specifies. It saves nothing."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._size = kv_cache_config.hash_block_size
        self._faults: dict[str, Fault] = {}
        self._requested: dict[str, int] = {}
        self._count = 0
        self._starting: list[Any] = []
        self._running: list[Any] = []
        self._invalid: set[int] = set()

    def on_new_request(self, request: Any) -> None:
        line = _folder("FAULTS").read_text().splitlines()[self._count]
        self._count += 1
        given = json.loads(line)
        if given is not None:
            self._faults[request.request_id] = Fault(**given)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        fault = self._faults.get(request.request_id)
        tokens = fault.blocks * self._size - num_computed_tokens if fault is not None else 0
        if fault is None or tokens <= 0:
            return 0, False
        self._requested[request.request_id] = num_computed_tokens // self._size
        return tokens, fault.load == "async"

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens == 0:
            return
        fault = self._faults.pop(request.request_id)  # what was requested again would fail again
        part = slice(self._requested[request.request_id], fault.blocks)
        names = [name.hex() for name in request.block_hashes[part]]
        fault.bad = [index - part.start for index in fault.bad if index >= part.start]
        self._starting.append((request.request_id, fault, blocks.get_block_ids()[0][part], names))

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        starting, self._starting = self._starting, []
        return Loads(starting)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for load in self._get_connector_metadata().loads:
            if load[1].load == "sync":
                self._invalid |= self._loaded(load)
            else:
                self._running.append(load)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = KVConnectorTransferResults()
        for load in list(self._running):
            request, fault, *_ = load
            fault.polls -= 1
            if fault.polls == 1 and fault.report == "early":
                self._invalid |= self._loaded(load)
            if fault.polls > 0:
                continue
            self._running.remove(load)
            invalid = set() if fault.report == "early" else self._loaded(load)
            if fault.report == "request":
                results.failed_recving.add(request)
            else:
                self._invalid |= invalid
            results.finished_recving.add(request)
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        invalid, self._invalid = self._invalid, set()
        return invalid

    def _loaded(self, load: Any) -> set[int]:
        """Fill the blocks. Returns those that are filled with garbage."""
        _, fault, blocks, names = load
        memory, invalid = _memory["engine"], set()
        for index, (block, name) in enumerate(zip(blocks, names, strict=True)):
            content = (_folder("RIGHT") / name).read_bytes()
            if index in fault.bad:
                content = bytes([GARBAGE]) * len(content)
                invalid.add(block)
            memory.write(block, content)
        return invalid


# ---- Two that keep a hybrid model's blocks in a dict, before ours and after it.

_saved: dict[tuple[int, bytes], list[Any]] = {}  # the layers' blocks, by group and hash


class DictMetadata(KVConnectorMetadata):
    """A step's loads by request, and its saves: the group and hash, and the engine's block."""

    def __init__(self) -> None:
        self.loads: list[tuple[str, str, list[tuple[int, bytes, int]]]] = []
        self.saves: list[tuple[int, bytes, int]] = []


class DictConnector(Silent, SupportsHMA):
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
        made = DictMetadata()
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
