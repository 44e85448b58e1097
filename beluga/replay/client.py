# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A client process of a replay, which runs as a program with a :class:`Job` as its argument.

It reads request numbers from stdin, a pipe that all clients read. Each client takes the next number
when it has finished the last request, so requests begin in order and overlap. The client gets the
leading blocks of a request that exist, checks their bytes, and puts the rest.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from beluga._ffi import lib
from beluga.errors import BelugaError, RpcError
from beluga.index import BlockState
from beluga.kvcache import KVCache
from beluga.pool import Pool
from beluga.replay.contents import Contents, Digests, Ids, digests
from beluga.replay.dispatcher import tickets
from beluga.replay.job import Job
from beluga.replay.process import report
from beluga.replay.trace import TraceRequest, read_trace
from beluga.rpc import Client

T = TypeVar("T")

_REPORT_INTERVAL_S = 0.1
_PENDING_WAIT_S = 0.1  # the longest wait for a block that another client is writing
_PENDING_NAP_S = 0.0002
# A tier is behind, or the server ended between a grant and its commit.
_TRY_AGAIN = -int(lib.BL_ERROR_OFFLOADING), -int(lib.BL_ERROR_NO_GRANT)
_OFFLOADING_NAP_S = 0.001
_PATIENCE_S = 60.0  # how long a patient client waits for a server or for tiers


@dataclass(slots=True)
class Tally:
    """The counts of one client."""

    request_count: int = 0
    looked_up_count: int = 0
    hit_count: int = 0
    put_count: int = 0
    refused_count: int = 0
    wrong_count: int = 0
    mismatch_count: int = 0
    get_s: float = 0.0
    put_s: float = 0.0
    rpc_ns: list[int] = field(default_factory=list)


class ReplayWorker:
    """Replays requests, one at a time."""

    def __init__(self, client: Client, job: Job) -> None:
        self.tally = Tally()
        self._client = client
        client.report.kind = "replay"
        self._compare, self._patient = job.compare, job.patient
        self._cache = KVCache(client, namespace=job.namespace)
        self._contents = Contents(job.block_size)
        self._blocks = np.empty((0, job.block_size // 8), np.uint64)

    def replay(self, request: TraceRequest) -> None:
        """Get the request's blocks that exist, and put the others."""
        ids = np.array(request.hash_ids, np.uint64)
        if len(ids) > len(self._blocks):
            self._blocks = np.empty((len(ids), self._blocks.shape[1]), np.uint64)
        keys = digests(ids)
        hit_count = self._get(ids, keys)
        if hit_count < len(ids):
            self._put(ids[hit_count:], keys[hit_count:])
        self.tally.rpc_ns.append(int(self._ask(self._client.ping) * 1e9))
        self.tally.request_count += 1
        self.tally.looked_up_count += len(ids)
        self.tally.hit_count += hit_count

    def _get(self, ids: Ids, keys: Digests) -> int:
        """Get and check the leading blocks. Returns how many there were."""
        blocks = self._blocks[: len(ids)]
        deadline = None
        count = 0
        while count < len(ids):
            start = time.perf_counter()
            result = self._ask(partial(self._cache.get, keys[count:], blocks[count:]))
            now = time.perf_counter()
            self.tally.get_s += now - start
            self.tally.mismatch_count += result.mismatches
            count += result.hits
            if count == len(ids) or result.states[result.hits] != BlockState.PENDING:
                break
            deadline = deadline or now + _PENDING_WAIT_S
            if now > deadline:
                break
            time.sleep(_PENDING_NAP_S)
        if self._compare:
            self.tally.wrong_count += self._contents.wrong_count(ids[:count], blocks[:count])
        return count

    def _put(self, ids: Ids, keys: Digests) -> None:
        until = time.monotonic() + _PATIENCE_S
        while True:
            blocks = self._blocks[: len(ids)]
            self._contents.fill(ids, blocks)
            start = time.perf_counter()
            result = self._ask(partial(self._cache.put, keys, blocks))
            self.tally.put_s += time.perf_counter() - start
            self.tally.put_count += result.stored
            waiting = np.isin(result.statuses, _TRY_AGAIN) & self._patient
            if not waiting.any() or time.monotonic() > until:
                self.tally.refused_count += result.refused
                return
            self.tally.refused_count += result.refused - int(np.count_nonzero(waiting))
            ids, keys = ids[waiting], keys[waiting]
            time.sleep(_OFFLOADING_NAP_S)

    def _ask(self, call: Callable[[], T]) -> T:
        """Call, again if the server ended meanwhile and another is being started."""
        until = time.monotonic() + _PATIENCE_S
        while True:
            try:
                return call()
            except RpcError:
                if not self._patient or time.monotonic() > until:
                    raise
                time.sleep(_PENDING_WAIT_S)


def work(job: Job) -> None:
    """Do the job and report it."""
    requests = read_trace(Path(job.trace))
    with Pool.open(job.devices) as pool, Client(pool) as client:
        worker = ReplayWorker(client, job)
        report({"ready": True})
        reported_s = time.monotonic()
        for number in tickets(sys.stdin.fileno()):
            worker.replay(requests[number])
            if time.monotonic() - reported_s > _REPORT_INTERVAL_S:
                reported_s = time.monotonic()
                report({"done": worker.tally.request_count})
        report({"tally": msgspec.to_builtins(worker.tally)})


def main() -> None:
    """Do the job, or report in one line why it failed."""
    try:
        work(msgspec.json.decode(sys.argv[1], type=Job))
    except (BelugaError, OSError) as error:
        report({"error": str(error)})
        sys.exit(1)


if __name__ == "__main__":
    main()
