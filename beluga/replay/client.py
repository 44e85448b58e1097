# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A client process of a replay, which runs as a program with a :class:`Job` as its argument.

It reads request numbers from stdin, a pipe that all clients read. Each client takes the next number
when it has finished the last request, so requests begin in order and overlap. The client gets the
leading blocks of a request that exist, checks their bytes, and puts the rest; or it is an emulated
engine: memory for some blocks, which a block manager moves to the pool and back. The engine
computes nothing: a block that neither its memory nor the pool has gets its contents at once. So it
waits after each request until its blocks have moved, which a real engine's computing would give
time for.
"""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from beluga.errors import BelugaError, ReplayError
from beluga.kvbm import BlockManager, BlockPool, CacheTier, RegisteredBlock
from beluga.kvcache import KVCache
from beluga.metrics import REGISTRY
from beluga.pool import Pool, show_size
from beluga.replay.blocks import (
    PATIENCE_S,
    Contents,
    EngineTally,
    PatientCache,
    Tally,
    digests,
)
from beluga.replay.process import Job, packed, report, tickets
from beluga.replay.trace import TraceRequest, read_trace
from beluga.rpc import Client
from beluga.transfer import BlockLayout, View

_TIER = "device"


class EngineWorker:
    """Replays requests, one at a time, in an engine with ``engine_blocks`` blocks.

    ``up`` and ``down`` are sessions of two threads: one onboards, the other one offloads.
    """

    def __init__(self, up: Client, down: Client, job: Job, cleanup: ExitStack) -> None:
        self.tally = Tally()
        self._client, self._compare = up, job.options.compare
        self._contents = Contents(job.options.block_size)
        self._memory = _allocated(job.options.engine_blocks, job.options.block_size)
        self._up, self._down = (self._cache(client, job) for client in (up, down))
        view = View.of(self._memory.view(np.uint8))
        below = CacheTier(self._up, self._down, BlockLayout([view], ("block", "dim")))
        self._device = BlockPool(_TIER, job.options.engine_blocks)
        cleanup.callback(self._device.close)
        self._manager = BlockManager(self._device, below, offload=job.options.engine_offload)
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
        present = set(ids[:hits].tolist())
        missing = (
            index for index, block_id in enumerate(request.hash_ids) if block_id not in present
        )
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
        return PatientCache(cache, self.tally, patient=job.options.patient)

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
        for index, block in enumerate(room, hits):
            block.fill(self._device.block_size)
            block.commit(keys[index], parent=keys[index - 1] if index else None)
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


_REPORT_INTERVAL_S = 0.1


class ReplayWorker:
    """Replays requests, one at a time."""

    def __init__(self, client: Client, job: Job) -> None:
        self.tally = Tally()
        self._client = client
        client.report.kind = "replay"
        self._compare = job.options.compare
        cache = KVCache(client, namespace=job.namespace)
        self._cache = PatientCache(cache, self.tally, patient=job.options.patient)
        self._contents = Contents(job.options.block_size)
        self._blocks = np.empty((0, job.options.block_size // 8), np.uint64)

    def replay(self, request: TraceRequest, upcoming: TraceRequest | None = None) -> None:
        """Get the request's blocks that exist, and put the others."""
        del upcoming
        ids = np.array(request.hash_ids, np.uint64)
        if len(ids) > len(self._blocks):
            self._blocks = np.empty((len(ids), self._blocks.shape[1]), np.uint64)
        keys, blocks = digests(ids), self._blocks[: len(ids)]
        hits = self._cache.get(keys, blocks).hits if len(ids) else 0
        if self._compare:
            self.tally.wrong_count += self._contents.wrong_count(ids[:hits], blocks[:hits])
        if hits < len(ids):
            self._contents.fill(ids[hits:], blocks[hits:])
            self._cache.put(keys[hits:], blocks[hits:])
        self.tally.rpc_ns.append(int(self._cache.retrying(self._client.ping) * 1e9))
        self.tally.request_count += 1
        self.tally.looked_up_count += len(ids)
        self.tally.hit_count += hits


class Progress:
    """Reports what was done, at most every :data:`_REPORT_INTERVAL_S`."""

    def __init__(self, worker: ReplayWorker | EngineWorker) -> None:
        self._worker, self._reported_s, self._is_stale = worker, time.monotonic(), False

    def advance(self) -> None:
        """Report after a request, unless another report was made a moment ago."""
        self._is_stale = True
        if time.monotonic() - self._reported_s > _REPORT_INTERVAL_S:
            self.report()

    def report(self) -> None:
        """Report what is new, if anything is."""
        if self._is_stale:
            self._reported_s, self._is_stale = time.monotonic(), False
            report({"done": self._worker.tally.request_count, **self.metrics()})

    def metrics(self) -> dict[str, Any]:
        """Return the metrics of an engine."""
        if isinstance(self._worker, ReplayWorker):
            return {}
        return {"metrics": packed(REGISTRY.snapshot())}


def work(job: Job) -> None:
    """Do the job and report it."""
    requests = read_trace(Path(job.trace))
    with ExitStack() as cleanup:
        pool = cleanup.enter_context(Pool.open(job.devices))
        client = cleanup.enter_context(Client(pool))
        worker: ReplayWorker | EngineWorker
        if job.options.engine_blocks:
            worker = EngineWorker(client, cleanup.enter_context(Client(pool)), job, cleanup)
        else:
            worker = ReplayWorker(client, job)
        progress = Progress(worker)
        report({"ready": True})
        for number in tickets(sys.stdin.fileno(), _REPORT_INTERVAL_S, progress.report):
            expected = number + job.options.client_count
            upcoming = requests[expected] if expected < len(requests) else None
            worker.replay(requests[number], upcoming)
            progress.advance()
        tally: dict[str, Any] = msgspec.to_builtins(worker.tally)
        if isinstance(worker, EngineWorker):
            tally["engine"] = msgspec.to_builtins(worker.engine_tally())
        report({"tally": tally, **progress.metrics()})


def main() -> None:
    """Do the job, or report in one line why it failed."""
    try:
        work(msgspec.json.decode(sys.argv[1], type=Job))
    except (BelugaError, OSError) as error:
        report({"error": str(error)})
        sys.exit(1)


if __name__ == "__main__":
    main()
