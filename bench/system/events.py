# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The cost of publishing the pool's events: the same puts of named blocks to a server that
publishes events and to one that does not, in interleaved pairs.

The server is another process. A third one reads the events, as a router does. Each sample has a new
server, so that no idle one uses CPU time. The pool is full, so each block that is stored evicts
one; a user's pool of more than 1 GiB is not filled first.

*in the server's loop* is the time in which the loop handles the calls of one put, from the server's
own trace: the loop has its own core, and the publisher runs on the client's. Both servers get short
runs of puts with equal pauses between them, in which the publisher works. Without the pauses the
publisher would interrupt the client in a run, and the first calls after any interruption take twice
as long. *put, with pauses* is the time of one put, during which no message is made; *put, without
pauses* is the rate if the server, the one that publishes and the reader share the machine's cores.
*the publisher's CPU time* is that of the server's process outside its loop, per change that it
publishes.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from beluga import KVCache
from beluga.errors import BelugaError
from beluga.index import chain_names
from beluga.pool import STRIPE_SIZE, Pool
from beluga.rpc import read_trace

from ..harness.ground import coherence_of, ground
from ..harness.machine import cores, memory_of, pinned
from ..harness.options import Options
from ..harness.peer import Peer
from ..harness.ratio import race
from ..harness.row import Recorder, Row, percentiles, shares

_BATCH = 16  # blocks of one put, as of 256 tokens
_LENGTH = 16 << 10
_TOKENS = 16
_FILL_MAX = 4096  # puts
_PAUSE_S = 0.03  # longer than the publisher's period
_RUN = 48  # puts between two pauses that are rarely interrupted: a tenth of that period
_CALLS = ("reserve", "commit")  # the calls of one put
_PUT = "a put of 16 named blocks; the limit is a server that publishes nothing"


@dataclass(frozen=True, slots=True)
class _Case:
    name: str
    count: int  # puts of a sample
    pause_s: float
    run: int = 1  # puts between two pauses
    in_loop: bool = False
    note: str = _PUT


@dataclass(slots=True)
class _Ground:
    """Where samples are taken, and results of those with events."""

    pool: Pool
    endpoints: list[str]
    core: int  # the cores of client and server
    far_core: int
    fresh: Iterator[int] = field(default_factory=partial(itertools.count, 1))
    times_ns: list[float] = field(default_factory=list)
    cpu_ns: list[float] = field(default_factory=list)  # of the publisher, for each change

    def sample(self, case: _Case, *, events: bool) -> float:
        """Return puts per second: of the loop's time, of the median put alone, or of all."""
        with self._serving(case, events=events) as (server, cache):
            before, spent_ns = cache.stat().evict_count, self._spent_ns(server, 0)
            start_s = time.perf_counter()
            times_ns = self._puts(cache, case)
            wall_s = time.perf_counter() - start_s
            changes = case.count * _BATCH + cache.stat().evict_count - before
            spent_ns = self._spent_ns(server, spent_ns)
            if case.in_loop:
                times_ns = [self._loop_ns()]
        if events:
            self.times_ns += times_ns
            self.cpu_ns.append(spent_ns / changes)
        if case.pause_s or case.in_loop:
            return 1e9 / float(np.median(times_ns))
        return case.count / wall_s

    @contextmanager
    def _serving(self, case: _Case, *, events: bool) -> Iterator[tuple[Peer, KVCache]]:
        with ExitStack() as stack:
            server = stack.enter_context(Peer(self.pool, self.far_core))
            server.start(
                "serve_index",
                endpoints=self.endpoints if events else None,
                publisher_cpu=self.core if case.in_loop else None,
            )
            if events:
                reader = stack.enter_context(Peer(self.pool, self.core))
                reader.start("follow", endpoint=self.endpoints[0])
            yield (
                server,
                stack.enter_context(KVCache(self.pool, namespace="bench", timeout_s=10)),
            )

    @staticmethod
    def _spent_ns(server: Peer, since_ns: int) -> int:
        """Return the CPU time of the server's process outside its loop."""
        server.start("spent", since_ns=since_ns)
        return int(server.result()["outside_loop_ns"])

    def _loop_ns(self) -> float:
        """Return the median time of the server's loop for the calls of a put."""
        trace = read_trace(self.pool.runtime_dir)
        return (
            sum(
                float(
                    np.median([call.seconds for call in trace.calls(method=method) if call.seconds])
                )
                for method in _CALLS
            )
            * 1e9
        )

    def _puts(self, cache: KVCache, case: _Case) -> list[float]:
        """Put new blocks, and return how long each put took."""
        blocks = np.zeros((_BATCH, _LENGTH), np.uint8)
        times_ns = []
        for done in range(1, case.count + 1):
            path = [next(self.fresh) for _ in range(_BATCH)]
            digests = [number.to_bytes(16, "big") for number in path]
            names = chain_names(path, path, block_tokens=_TOKENS, space=1)
            start_ns = time.perf_counter_ns()
            if cache.put(digests, blocks, names=names).stored != _BATCH:
                raise BelugaError("a put was refused; the pool is too small")
            times_ns.append(float(time.perf_counter_ns() - start_ns))
            if case.pause_s and done % case.run == 0:
                time.sleep(case.pause_s)
        return times_ns


def bench_events(options: Options) -> list[Row]:
    """Run the benchmark: four rows."""
    recorder = Recorder("events", options, {"bytes": _LENGTH, "depth": _BATCH, "threads": 1})
    core, far_core = cores()[0], cores()[-1]
    loop = _Case(
        "in the server's loop",
        count=_RUN * (2 if options.smoke else 40),
        pause_s=_PAUSE_S,
        run=_RUN,
        in_loop=True,
        note="the loop's time for the calls of " + _PUT,
    )
    if core == far_core:
        return [recorder.skipped(loop.name, "needs two cores")]
    with (
        ground(options) as pool,
        pinned(core),
        tempfile.TemporaryDirectory(prefix="beluga-bench-") as folder,
    ):
        state = _Ground(pool, [f"ipc://{folder}/live", f"ipc://{folder}/replay"], core, far_core)
        capacity = pool.geometry.stripe_count * STRIPE_SIZE // (_BATCH * _LENGTH)
        state.sample(_Case("fill", min(capacity, _FILL_MAX), 0.0), events=False)
        paused = _Case("put, with pauses", 10 if options.smoke else 200, _PAUSE_S)
        hurried = _Case("put, without pauses", 50 if options.smoke else 4000, 0.0)
        rows = [_row(recorder, options, state, case) for case in (loop, paused, hurried)]
        spent = np.array(state.cpu_ns)
        rows.append(
            recorder.row(
                "the publisher's CPU time",
                memory=memory_of(pool),
                coherence=coherence_of(pool),
                ops_per_s=round(1e9 / float(np.median(spent))),
                **percentiles(spent.astype(np.uint64)),
                note="per change, without pauses: the server's process outside of its loop",
            )
        )
    return rows


def _row(recorder: Recorder, options: Options, ground: _Ground, case: _Case) -> Row:
    options.report(case.name)
    ground.times_ns, ground.cpu_ns = [], []
    ratio = race(
        partial(ground.sample, case, events=False),
        partial(ground.sample, case, events=True),
        pair_count=options.pair_count,
        retry_count=0,
    )
    return recorder.row(
        case.name,
        memory=memory_of(ground.pool),
        coherence=coherence_of(ground.pool),
        ops_per_s=round(ratio.ours),
        limit=round(ratio.limit),
        limit_unit="ops/s",
        note=case.note,
        **percentiles(np.array(ground.times_ns, np.uint64)),
        **shares(ratio),
    )
