# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Connectors for engines under test: one that fails to load, used with ours, and two that keep KV.

Folders hold one file of bytes per block, named by vLLM's hash. ``BELUGA_TEST_RIGHT`` has the KV of
an engine without other connectors; ``BELUGA_TEST_SAVED`` has what ours puts into the pool.
``BELUGA_TEST_FAULTS`` is a file with a line of JSON for each request, in the order in which the
engine gets them (:class:`Fault`, or null).
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
)

from beluga.connectors.vllm.cachegroup import CacheGroup
from beluga.connectors.vllm.connector import BelugaConnector
from beluga.connectors.vllm.layout import GroupLayout
from beluga.index import BlockState

GARBAGE = 0x40  # value of each byte; as floats about 3


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
    """Ours. It keeps a copy of each block that it puts into the pool."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        assert self._worker is not None
        saves, memory = self._worker.saves, Memory(self, kv_caches)
        read, account = saves._source.read, saves._account
        copied: list[bytes] = []

        def read_saved(block_ids: Any, group: int = 0) -> Any:
            copied[:] = map(memory.read, block_ids)
            return read(block_ids, group)

        def account_saved(digests: bytes, count: int, result: Any, group: int) -> None:
            account(digests, count, result, group)
            for index in range(count):
                if result.states[index] == BlockState.GRANTED:
                    name = digests[32 * index : 32 * index + 32].hex()
                    (_folder("SAVED") / name).write_bytes(copied[index])

        saves._source.read = read_saved  # type: ignore[method-assign]
        saves._account = account_saved  # type: ignore[method-assign]


# MultiConnector finds the class of a child's figures by its name.
KVConnectorFactory.register_connector("KeepingConnector", "siblings", "KeepingConnector")


class Metadata(KVConnectorMetadata):
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
        return Metadata([])

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
        return Metadata(starting)

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
