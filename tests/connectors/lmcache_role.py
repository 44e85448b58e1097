# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""LMCache itself on a pool: a storage manager of its server with our L2 adapter, or of an engine.

Run it in .venv-adapters: lmcache_role.py POOL TIMEOUT_MS. It reads words on stdin and replies to
each in JSON on stdout. A new process is a restarted LMCache with nothing in its own memory.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.distributed.api import (
    GroupedObjectKeys,
    MemoryLayoutDesc,
    ObjectKey,
    PrefetchTaskSpec,
)
from lmcache.v1.distributed.config import (
    EvictionConfig,
    L1ManagerConfig,
    L1MemoryManagerConfig,
    StorageManagerConfig,
)
from lmcache.v1.distributed.l2_adapters.config import L2AdaptersConfig
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
from lmcache.v1.distributed.storage_manager import StorageManager
from lmcache.v1.event_manager import EventManager
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.storage_manager import StorageManager as EngineStorageManager

POOL, TIMEOUT_MS = sys.argv[1], int(sys.argv[2])
COUNT, LONG_S = 8, 60.0
SPARSE = 130  # chunks of a hybrid model's prompt
# By object group: the last chunks that a prefix needs (-1: all), and the chunks that there are.
GROUPS = {
    0: (-1, range(SPARSE)),
    1: (2, (88, 89, SPARSE - 2, SPARSE - 1)),
    2: (1, (89, SPARSE - 1)),
}
SHAPE = torch.Size([2, 4, 16, 64])


def content(number: int, tokens: int = 16) -> torch.Tensor:
    """Return the KV of a chunk."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(2, 4, tokens, 64, generator=generator).to(torch.bfloat16)


def same(memory: Any, number: int, tokens: int = 16) -> bool:
    """Return whether a chunk in memory has exactly its bytes."""
    bits = memory.tensor.view(torch.int16), content(number, tokens).view(torch.int16)
    return bool(torch.equal(*bits))


class Server:
    """The parts inside ``lmcache server``: L1, its controllers, and our adapter as L2."""

    layout = MemoryLayoutDesc([SHAPE], [torch.bfloat16])

    def __init__(self) -> None:
        adapter = PluginL2AdapterConfig.from_dict(
            {
                "module_path": "beluga.connectors.lmcache",
                "class_name": "BelugaL2Adapter",
                "adapter_params": {
                    "pool": POOL,
                    "timeout_ms": TIMEOUT_MS,
                    "retry_s": 0.1,
                    "identity": "a test",
                },
            }
        )
        adapter.shared = True
        memory = L1MemoryManagerConfig(
            size_in_bytes=32 << 20, use_lazy=False, shm_name=f"beluga-test-{os.getpid()}"
        )
        self.manager = StorageManager(
            StorageManagerConfig(
                L1ManagerConfig(memory), EvictionConfig("LRU"), L2AdaptersConfig([adapter])
            )
        )

    def keys(self, rank: int = 0) -> list[ObjectKey]:
        kv_rank = ObjectKey.ComputeKVRank(2, rank, 2, rank)
        return [ObjectKey(bytes([i]) * 32, "org/model", kv_rank) for i in range(COUNT)]

    def store(self) -> int:
        """Write chunks of both ranks to L1 and wait until L2 has them. Returns how many bytes it
        has.
        """
        for rank in (0, 1):
            keys = self.keys(rank)
            memories = self.manager.reserve_write(keys, self.layout)
            for i, key in enumerate(keys):
                memories[key].tensor.copy_(content(100 * rank + i))
            self.manager.finish_write(keys)
        wanted, end = 2 * COUNT * SHAPE.numel() * 2, time.monotonic() + LONG_S
        while (stored := self.manager.get_l2_usages()[0][0]) < wanted and time.monotonic() < end:
            time.sleep(0.02)
        return int(stored)

    def listed(self) -> dict[str, Any]:
        """Return the sizes of the objects that L2 lists, and how LMCache's events name it."""
        (adapter,) = self.manager._l2_adapters.values()
        sizes: list[int] = []
        token = None
        while not sizes or token is not None:
            page = adapter.list_l2_keys("org/model", 5, token)
            sizes += [entry.size_bytes for entry in page.entries]
            token = page.next_page_token
        return {"sizes": sizes, "name": adapter._backend_name, "shared": adapter._shared}

    def load(self, layout: MemoryLayoutDesc | None = None) -> dict[str, Any]:
        """Prefetch the chunks of both ranks. Returns the hits from L2, and which of them are
        whole.
        """
        start = time.monotonic()
        rows = [GroupedObjectKeys(self.keys(rank), 0, layout or self.layout) for rank in (0, 1)]
        handle = self.manager.submit_prefetch_task(PrefetchTaskSpec(rows))
        while (result := self.manager.query_prefetch_status(handle)) is None:
            if time.monotonic() - start > LONG_S:
                return {"hits": "no answer"}
            time.sleep(0.01)
        hits = [bitmap.popcount() for bitmap in result.l2_hit_cells]
        whole = 0
        for rank, count in enumerate(hits):
            keys = self.keys(rank)[:count]
            if keys:
                with self.manager.read_prefetched_results(keys) as memories:
                    whole += sum(same(m, 100 * rank + i) for i, m in enumerate(memories or []))
                self.manager.finish_read_prefetched(keys)
        return {"hits": hits, "whole": whole, "seconds": time.monotonic() - start}

    def load_other_layout(self) -> dict[str, Any]:
        """Load the same keys with as many bytes but another shape."""
        return self.load(MemoryLayoutDesc([torch.Size([2, 4, 64, 16])], [torch.bfloat16]))

    def sparse_keys(self, group: int) -> list[ObjectKey]:
        rank = ObjectKey.ComputeKVRank(2, 0, 2, 0)
        names = [(1000 + number).to_bytes(32, "big") for number in range(SPARSE)]
        return [ObjectKey(name, "org/model", rank, group) for name in names]

    def store_sparse(self) -> int:
        """Write a hybrid model's prompt: a group of full attention, a window, and states. Returns
        how many more bytes L2 has.
        """
        wanted, before = 0, int(self.manager.get_l2_usages()[0][0])
        for group, (_, numbers) in GROUPS.items():
            keys = [self.sparse_keys(group)[number] for number in numbers]
            memories = self.manager.reserve_write(keys, self.layout)
            for number, key in zip(numbers, keys, strict=True):
                memories[key].tensor.copy_(content(1000 * group + number))
            self.manager.finish_write(keys)
            wanted += len(keys) * SHAPE.numel() * 2
        end, stored = time.monotonic() + LONG_S, 0
        while stored < wanted and time.monotonic() < end:
            stored = int(self.manager.get_l2_usages()[0][0]) - before
            time.sleep(0.02)
        return stored

    def load_sparse(self) -> dict[str, Any]:
        """Prefetch that prompt. Returns which chunks of each group came from L2, from the last to
        the first, at most three of each; and how many were whole.
        """
        rows = [
            GroupedObjectKeys(self.sparse_keys(group), group, self.layout, window)
            for group, (window, _) in GROUPS.items()
        ]
        handle = self.manager.submit_prefetch_task(PrefetchTaskSpec(rows))
        start = time.monotonic()
        while (result := self.manager.query_prefetch_status(handle)) is None:
            if time.monotonic() - start > LONG_S:
                return {"hits": "no answer"}
            time.sleep(0.01)
        hits, whole = [], 0
        for group, bitmap in enumerate(result.l2_hit_cells):
            numbers = [number for number in range(SPARSE) if bitmap.test(number)]
            keys = [self.sparse_keys(group)[number] for number in numbers]
            if keys:
                with self.manager.read_prefetched_results(keys) as memories:
                    for number, memory in zip(numbers, memories or [], strict=False):
                        whole += same(memory, 1000 * group + number)
                self.manager.finish_read_prefetched(keys)
            hits.append([len(numbers), numbers[:-4:-1]])
        return {"hits": hits, "whole": whole}

    def clear(self) -> bool:
        """Empty L1."""
        self.manager.clear(force=True)
        return True

    def close(self) -> bool:
        self.manager.close()
        return True


class Engine:
    """The parts of LMCache inside an engine: its storage manager, and our plugin."""

    def __init__(self) -> None:
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=16,
            local_cpu=False,
            max_local_cpu_size=0.05,
            storage_plugins=["beluga"],
            extra_config={
                "storage_plugin.beluga.module_path": "beluga.connectors.lmcache",
                "storage_plugin.beluga.class_name": "BelugaBackend",
                "beluga.pool": POOL,
                "beluga.timeout_ms": TIMEOUT_MS,
                "beluga.identity": "a test",
            },
        )
        metadata = LMCacheMetadata(
            model_name="org/model",
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.bfloat16,
            kv_shape=(4, 2, 16, 1, 64),
            role="worker",
            chunk_size=16,
        )
        self.manager = EngineStorageManager(config, metadata, EventManager())

    def keys(self) -> list[CacheEngineKey]:
        return [CacheEngineKey("org/model", 1, 0, 77 + i, torch.bfloat16) for i in range(COUNT)]

    def tokens(self, number: int) -> int:
        """Return the chunk's tokens. The last chunk is shorter than the others."""
        return 16 if number < COUNT - 1 else 5

    def engine_store(self) -> int:
        memories = []
        for i in range(COUNT):
            shape = torch.Size([2, 4, self.tokens(i), 64])
            memory = self.manager.allocate(shape, torch.bfloat16, MemoryFormat.KV_2LTD)
            memory.tensor.copy_(content(i, self.tokens(i)))
            memories.append(memory)
        self.manager.batched_put(self.keys(), memories)
        end = time.monotonic() + LONG_S
        while self.manager.batched_contains(self.keys())[0] < COUNT and time.monotonic() < end:
            time.sleep(0.02)
        return int(self.manager.batched_contains(self.keys())[0])

    def engine_load(self) -> dict[str, Any]:
        hits = self.manager.batched_contains(self.keys())[0]
        memories = self.manager.batched_get(self.keys(), location="beluga")
        whole = sum(m is not None and same(m, i, self.tokens(i)) for i, m in enumerate(memories))
        for memory in memories:
            if memory is not None:
                memory.ref_count_down()
        return {"hits": int(hits), "whole": int(whole)}

    def engine_close(self) -> bool:
        self.manager.close()
        return True


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")  # LMCache's log goes to the other descriptor
    os.dup2(2, 1)
    server, engine = Server(), Engine()
    for line in sys.stdin:
        owner = engine if line.startswith("engine") else server
        print(json.dumps(getattr(owner, line.strip())()), file=answers, flush=True)
