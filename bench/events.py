# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""What publishing the pool's events costs: the same puts of named blocks at a server that announces
them and at one that does not, in interleaved pairs.

The server is another process. A third one reads the events, as a router does. Each sample has a new
server, so that no idle one takes time. *put, with pauses* is the time of one put, during which no
message is made; *put, without pauses* is the rate if the server, the one that publishes and the
reader share the machine's cores.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import numpy as np

from beluga import KVCache
from beluga.errors import BelugaError
from beluga.meta import chain_names

from .ground import coherence_of, ground
from .machine import cores, memory_of, pinned
from .options import Options
from .peer import Peer
from .ratio import race
from .row import Recorder, Row, percentiles, shares

_BATCH = 16  # blocks of one put, as of 256 tokens
_LENGTH = 16 << 10
_TOKENS = 16
_PAUSE_S = 0.01  # longer than the publisher's period


def bench_events(options: Options) -> list[Row]:
    """Run the benchmark: two rows."""
    recorder = Recorder("events", options, {"bytes": _LENGTH, "depth": _BATCH, "threads": 1})
    here, there = cores()[0], cores()[-1]
    try:
        import zmq  # noqa: F401
    except ImportError:
        return [recorder.skipped("put, with pauses", "events need pyzmq")]
    if here == there:
        return [recorder.skipped("put, with pauses", "needs two cores")]
    rows: list[Row] = []
    fresh = itertools.count(1)
    with (
        ground(options) as pool,
        pinned(here),
        tempfile.TemporaryDirectory(prefix="beluga-bench-") as folder,
    ):
        endpoints = [f"ipc://{folder}/live", f"ipc://{folder}/replay"]
        for case, pause_s, count in (
            ("put, with pauses", _PAUSE_S, 20 if options.smoke else 400),
            ("put, without pauses", 0.0, 50 if options.smoke else 4000),
        ):
            options.say(case)
            times = list[int]()

            def sample(events: bool, pause_s: float, count: int, seen: list[int]) -> float:
                with ExitStack() as stack:
                    server = stack.enter_context(Peer(pool, there))
                    server.start("serve_index", endpoints=endpoints if events else None)
                    if events:
                        stack.enter_context(Peer(pool, here)).start("follow", endpoint=endpoints[0])
                    cache = stack.enter_context(KVCache(pool, namespace="bench", timeout_s=10))
                    return _puts(cache, fresh, pause_s, count, seen)

            run: Callable[..., Callable[[], float]] = partial(
                partial, sample, pause_s=pause_s, count=count
            )
            found = race(
                run(events=False, seen=[]),
                run(events=True, seen=times),
                pair_count=options.pair_count,
                retry_count=0,
            )
            rows.append(
                recorder.row(
                    case,
                    memory=memory_of(pool),
                    coherence=coherence_of(pool),
                    ops_per_s=round(found.ours),
                    limit=round(found.limit),
                    limit_unit="ops/s",
                    note="a put of 16 named blocks; the limit is a server that publishes nothing",
                    **percentiles(np.array(times, np.uint64)),
                    **shares(found),
                )
            )
    return rows


def _puts(
    cache: KVCache, fresh: itertools.count[int], pause_s: float, count: int, seen: list[int]
) -> float:
    """Put new blocks. Returns puts per second; with pauses, of the median put alone."""
    blocks = np.zeros((_BATCH, _LENGTH), np.uint8)
    times = np.zeros(count, np.uint64)
    before_s = time.perf_counter()
    for turn in range(count):
        path = [next(fresh) for _ in range(_BATCH)]
        digests = [number.to_bytes(16, "big") for number in path]
        names = chain_names(path, path, block_tokens=_TOKENS, space=1)
        start_ns = time.perf_counter_ns()
        if cache.put(digests, blocks, names=names).stored != _BATCH:
            raise BelugaError("a put was refused; the pool is too small")
        times[turn] = time.perf_counter_ns() - start_ns
        if pause_s:
            time.sleep(pause_s)
    seen += times.tolist()
    if pause_s:
        return 1e9 / float(np.median(times))
    return count / (time.perf_counter() - before_s)
