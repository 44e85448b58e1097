# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A client process of a replay, which runs as a program with a :class:`Job` as its argument.

It reads request numbers from stdin, a pipe that all clients read. Each client takes the next number
when it has finished the last request, so requests begin in order and overlap. The client gets the
leading blocks of a request that exist, checks their bytes, and puts the rest; or it is an engine
(``engine.py``).
"""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from beluga.errors import BelugaError
from beluga.kvcache import KVCache
from beluga.metrics import REGISTRY
from beluga.pool import Pool
from beluga.replay.contents import Contents, digests
from beluga.replay.dispatcher import tickets
from beluga.replay.engine import EngineWorker
from beluga.replay.job import Job
from beluga.replay.patient import PatientCache, Tally
from beluga.replay.process import report
from beluga.replay.samples import packed
from beluga.replay.trace import TraceRequest, read_trace
from beluga.rpc import Client

_REPORT_INTERVAL_S = 0.1


class ReplayWorker:
    """Replays requests, one at a time."""

    def __init__(self, client: Client, job: Job) -> None:
        self.tally = Tally()
        self._client = client
        client.report.kind = "replay"
        self._compare = job.compare
        cache = KVCache(client, namespace=job.namespace)
        self._cache = PatientCache(cache, self.tally, patient=job.patient)
        self._contents = Contents(job.block_size)
        self._blocks = np.empty((0, job.block_size // 8), np.uint64)

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
        if job.engine_blocks:
            worker = EngineWorker(client, cleanup.enter_context(Client(pool)), job, cleanup)
        else:
            worker = ReplayWorker(client, job)
        progress = Progress(worker)
        report({"ready": True})
        for number in tickets(sys.stdin.fileno(), _REPORT_INTERVAL_S, progress.report):
            expected = number + job.client_count
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
