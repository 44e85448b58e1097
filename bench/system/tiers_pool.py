# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The waiting times of a pool's client while the tiers below the pool are busy or hang, in
interleaved pairs.

*onboard beside offloads*: gets of single blocks that only the disk has, while another process
stores new blocks in the pool, each of which is saved on the disk; and the same gets alone. *hit
beside a stopped store*: gets of single blocks that the pool has, with an occasional put of one,
while the remote store below it is stopped (SIGSTOP), and while it responds.

The server, its tiers, the client and the other process share all cores.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from beluga import KVCache
from beluga.errors import TierError
from beluga.pool import Pool

from ..harness.ground import coherence_of, ground
from ..harness.machine import cores, memory_of
from ..harness.options import Options
from ..harness.peer import Peer
from ..harness.row import Recorder, Row
from ..harness.tails import Times, tails_row
from ..peers.redis_server import redis_server

_MIB = 1 << 20
_SIZE = 2560 << 10
_POOL_SIZE, _POOL_SIZE_SMOKE = 192 * _MIB, 64 * _MIB
_DISK_BLOCKS, _DISK_BLOCKS_SMOKE = 400, 60  # blocks to onboard
_FLOOD_BLOCKS, _FLOOD_BLOCKS_SMOKE = 400, 20  # blocks that the other process stores repeatedly
_GETS, _GETS_SMOKE = 100, 5  # per half of a pair
_INTERVAL_S = 0.005  # between two gets
_SETTLE_S = 0.3  # after the other work has begun or ended
_SAVED_S = 60.0
_PUT_EACH = 10  # gets to a put
_FLOODS_MB_PER_S = (200, 0)  # 0: as fast as possible


def bench_tiers_pool(options: Options) -> list[Row]:
    """Run the benchmark, with the disk tier in a temporary folder inside ``options.disk``."""
    recorder = Recorder("tiers-pool", options, {"bytes": _SIZE, "crc": True})
    size = _POOL_SIZE_SMOKE if options.smoke else _POOL_SIZE
    with (
        ground(options, size=size) as pool,
        tempfile.TemporaryDirectory(prefix="beluga-bench-", dir=options.disk) as folder,
    ):
        return [*_onboard_rows(recorder, pool, Path(folder)), _stopped_row(recorder, pool)]


@contextmanager
def _serving(pool: Pool, **tiers: object) -> Iterator[KVCache]:
    """Serve the pool and tiers below it with another process, on all cores."""
    with Peer(pool, cores()[-1]) as server:
        server.start("serve_tiers", block_size=_SIZE, **tiers)
        with KVCache(pool, namespace="bench", timeout_s=30) as cache:
            yield cache


def _onboard_rows(recorder: Recorder, pool: Pool, folder: Path) -> Iterator[Row]:
    options = recorder.options
    count = _DISK_BLOCKS_SMOKE if options.smoke else _DISK_BLOCKS
    flood_blocks = _FLOOD_BLOCKS_SMOKE if options.smoke else _FLOOD_BLOCKS
    space = 2 * (count + flood_blocks) * _SIZE
    for speed in _FLOODS_MB_PER_S[:1] if options.smoke else _FLOODS_MB_PER_S:
        case = "onboard beside offloads, " + (f"{speed} MB/s" if speed else "as fast as they may")
        options.report(case)
        disk = folder / str(speed)
        with (
            _serving(pool, disk=str(disk), disk_size=space, remote=None) as cache,
            Peer(pool, cores()[0]) as flood,
        ):
            digests = _digests(count)
            _save(cache, digests)
            period_s = _SIZE / (speed * 1e6) if speed else 0.0
            flood.start("flood", block_size=_SIZE, count=flood_blocks, period_s=period_s)
            flood.pause()
            pairs = []
            for _ in range(options.pair_count):
                alone = _onboards(cache, digests, options)
                flood.resume()
                time.sleep(_SETTLE_S)
                pairs.append((alone, _onboards(cache, digests, options)))
                flood.pause()
                time.sleep(_SETTLE_S)
        fields = {"memory": memory_of(pool), "coherence": coherence_of(pool), "peer": "alone"}
        yield tails_row(recorder, case, pairs, work="offloads", **fields)


def _save(cache: KVCache, digests: list[bytes]) -> None:
    """Put blocks, and put those again that were evicted before they were saved, until the disk has
    them.
    """
    rng = np.random.default_rng(0)
    missing, until_s = list(range(len(digests))), time.monotonic() + _SAVED_S
    while missing:
        if time.monotonic() > until_s:
            raise TierError("the disk tier has not saved all blocks")
        for number in missing:
            block = rng.integers(0, 256, (1, _SIZE), np.uint8)
            cache.put([digests[number]], block).raise_for_refused()
        time.sleep(_SETTLE_S)
        missing = np.flatnonzero(cache.lookup(digests).tiers == 0).tolist()


def _onboards(cache: KVCache, digests: list[bytes], options: Options) -> Times:
    """Get random blocks that only the disk has."""
    rng = np.random.default_rng()
    target = np.zeros((1, _SIZE), np.uint8)
    times: list[int] = []
    while len(times) < (_GETS_SMOKE if options.smoke else _GETS):
        wanted = [digests[rng.integers(len(digests))]]
        if cache.lookup(wanted).tiers[0] == 1:
            continue  # the pool has it
        times.append(_get(cache, wanted, target))
        time.sleep(_INTERVAL_S)
    return np.array(times, np.uint64)


def _get(cache: KVCache, wanted: list[bytes], target: NDArray[np.uint8]) -> int:
    """Get a block, and return how many nanoseconds it took. Raises TierError for a miss."""
    start_ns = time.perf_counter_ns()
    got = cache.get(wanted, target)
    spent_ns = time.perf_counter_ns() - start_ns
    if got.hits != 1:
        raise TierError("a block is missing")
    return spent_ns


def _stopped_row(recorder: Recorder, pool: Pool) -> Row:
    options = recorder.options
    case = "hit beside a stopped store"
    options.report(case)
    with ExitStack() as stack:
        try:
            port, store = stack.enter_context(redis_server())
        except (ImportError, FileNotFoundError) as error:
            return recorder.skipped(case, str(error))
        cache = stack.enter_context(
            _serving(pool, disk=None, disk_size=0, remote=f"redis://127.0.0.1:{port}/0")
        )
        digests = _digests(4)
        for digest in digests:
            cache.put([digest], np.ones((1, _SIZE), np.uint8)).raise_for_refused()
        fresh = iter(_digests(1 << 16)[len(digests) :])
        pairs = []
        for _ in range(options.pair_count):
            alone = _hits(cache, digests, fresh, options)
            os.kill(store.pid, signal.SIGSTOP)
            time.sleep(_SETTLE_S)
            pairs.append((alone, _hits(cache, digests, fresh, options)))
            os.kill(store.pid, signal.SIGCONT)
            time.sleep(_SETTLE_S)
    fields = {"memory": memory_of(pool), "coherence": coherence_of(pool), "peer": "redis answers"}
    return tails_row(recorder, case, pairs, work="a redis-server that is stopped", **fields)


def _hits(cache: KVCache, digests: list[bytes], fresh: Iterator[bytes], options: Options) -> Times:
    """Get blocks that the pool has, with an occasional put of one."""
    target = np.zeros((1, _SIZE), np.uint8)
    times: list[int] = []
    while len(times) < (_GETS_SMOKE if options.smoke else 10 * _GETS):
        if len(times) % _PUT_EACH == 0:
            cache.put([next(fresh)], target)
        times.append(_get(cache, [digests[len(times) % len(digests)]], target))
    return np.array(times, np.uint64)


def _digests(count: int) -> list[bytes]:
    return [number.to_bytes(16, "big") for number in range(count)]
