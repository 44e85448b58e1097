# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""An emulated engine: memory for some blocks, which a block manager moves to the pool and back.

It computes nothing: a block that neither its memory nor the pool has gets its contents at once. So
it waits after each request until its blocks have moved, which a real engine's computing would give
time for.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from beluga.errors import ReplayError
from beluga.kvbm import BlockManager, BlockPool, CacheTier, RegisteredBlock
from beluga.kvcache import KVCache
from beluga.metrics import REGISTRY
from beluga.pool import show_size
from beluga.replay.contents import Contents, digests
from beluga.replay.job import Job
from beluga.replay.patient import PATIENCE_S, PatientCache, Tally
from beluga.replay.trace import TraceRequest
from beluga.rpc import Client
from beluga.transfer import BlockLayout, View

_TIER = "device"


@dataclass(frozen=True, slots=True)
class EngineTally:
    """What engines' block managers counted, in blocks. ``missed_targets`` is text for display."""

    device_hits: int = 0
    onboarded: int = 0
    prefetched: int = 0
    offloaded: int = 0
    evicted: int = 0
    missed_targets: tuple[str, ...] = ()


class EngineWorker:
    """Replays requests, one at a time, in an engine with ``job.engine_blocks`` blocks.

    ``up`` and ``down`` are sessions of two threads: one onboards, the other one offloads.
    """

    def __init__(self, up: Client, down: Client, job: Job, cleanup: ExitStack) -> None:
        self.tally = Tally()
        self._client, self._compare = up, job.compare
        self._contents = Contents(job.block_size)
        self._memory = _allocated(job.engine_blocks, job.block_size)
        self._up, self._down = (self._cache(client, job) for client in (up, down))
        view = View.of(self._memory.view(np.uint8))
        below = CacheTier(self._up, self._down, BlockLayout([view], ("block", "dim")))
        self._device = BlockPool(_TIER, job.engine_blocks)
        cleanup.callback(self._device.close)
        self._manager = BlockManager(self._device, below, offload=job.engine_offload)
        cleanup.callback(self._manager.close)

    def replay(self, request: TraceRequest, upcoming: TraceRequest | None = None) -> None:
        """Serve a request from the engine's memory and the pool, and compute the others.

        Hot blocks of the ``upcoming`` request are prefetched.
        """
        number = self.tally.request_count
        names = _names(request)
        keys = list(names)
        matched = self._device.match(keys, number)
        blocks = self._manager.onboard(keys, number).result()
        del matched
        hits = len(blocks)
        ids = np.array(list(names.values()), np.uint64)
        if self._compare:
            rows = self._memory[[block.index for block in blocks]]
            self.tally.wrong_count += self._contents.wrong_count(ids[:hits], rows)
        blocks += self._compute(keys, ids, hits, number)
        del blocks
        self._manager.release(number)
        self._manager.flush(PATIENCE_S)
        if upcoming is not None:
            self._manager.prefetch(list(_names(upcoming)))
            self._manager.flush(PATIENCE_S)
        self.tally.rpc_ns.append(int(self._up.retrying(self._client.ping) * 1e9))
        self.tally.request_count += 1
        self.tally.looked_up_count += len(request.hash_ids)
        there = set(ids[:hits].tolist())
        missing = (place for place, one in enumerate(request.hash_ids) if one not in there)
        self.tally.hit_count += next(missing, len(request.hash_ids))

    def engine_tally(self) -> EngineTally:
        """Return what the block manager counted."""

        def count(name: str, **labels: str) -> int:
            return int(REGISTRY.counter(f"beluga_kvbm_{name}", "").value(tier=_TIER, **labels))

        return EngineTally(
            device_hits=count("hit_blocks_total"),
            onboarded=count("moved_blocks_total", kind="onboard"),
            prefetched=count("moved_blocks_total", kind="prefetch"),
            offloaded=count("moved_blocks_total", kind="offload"),
            evicted=count("evicted_blocks_total"),
            missed_targets=tuple(map(str, self._device.missed_targets())),
        )

    def _cache(self, client: Client, job: Job) -> PatientCache:
        client.report.kind = "replay"
        cache = KVCache(client, namespace=job.namespace)
        return PatientCache(cache, self.tally, patient=job.patient)

    def _compute(
        self, keys: list[bytes], ids: np.ndarray, hits: int, number: int
    ) -> list[RegisteredBlock]:
        """Compute the blocks that were not hits."""
        room = self._device.reserve(number, len(keys) - hits).result()
        if not room:
            return []
        rows = np.empty((len(room), self._memory.shape[1]), np.uint64)
        self._contents.fill(ids[hits:], rows)
        self._memory[[block.index for block in room]] = rows
        for place, block in enumerate(room, hits):
            block.fill(self._device.block_size)
            block.commit(keys[place], parent=keys[place - 1] if place else None)
        return self._device.register(room)


def _allocated(count: int, size: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint64]]:
    try:
        return np.zeros((count, size // 8), np.uint64)
    except MemoryError:
        raise ReplayError(
            f"an engine of {count} blocks needs {show_size(count * size)} of memory, which this "
            "machine does not have; give fewer --engine-blocks"
        ) from None


def _names(request: TraceRequest) -> dict[bytes, int]:
    """Return the blocks' keys, each once, with their ids."""
    ids = np.array(list(dict.fromkeys(request.hash_ids)), np.uint64)
    return dict(zip((row.tobytes() for row in digests(ids)), ids.tolist(), strict=True))
