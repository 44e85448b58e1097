# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The benchmark of the index of KV events: lookups compared with a bare hash table and a
dictionary, events, and decisions.

The index has one million blocks, each held by 16 workers. A lookup is of a whole path of 1,000
blocks. Paths are looked up in random order, so blocks are as cold as the machine's caches leave
them. The comparison looks up the same 1,000 keys in a hash table or dictionary that holds only the
million keys.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from beluga._ffi import ffi, lib
from beluga.router import (
    BlockHasher,
    Indexer,
    Query,
    Removed,
    Router,
    RouterEvent,
    Stored,
    Worker,
    make_policy,
)

from .. import _limit
from .._limit import ffi as limit_ffi
from .._limit import lib as limit_lib
from ..harness.options import Options
from ..harness.ratio import race
from ..harness.row import Recorder, Row, calls, percentiles

WORKERS = 16
LENGTH = 1000  # blocks in a path
PATHS = 1000
EVENT = 16  # blocks in a stored event
BLOCK_SIZE = 16  # tokens in a block
TARGET = "routing decision p99 < 5 ms"  # the goal of the Dynamo KV router article

_SMOKE_PATHS = 20


class _Ground:
    """Paths of random blocks in the index, in a bare table, and in a dictionary."""

    def __init__(self, paths: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        keys = rng.integers(1, 1 << 63, paths * LENGTH, dtype=np.uint64)
        self.keys = keys
        self.paths = [array("Q", row.tobytes()) for row in keys.reshape(paths, LENGTH)]
        self.order = rng.permutation(paths).tolist()
        self.index = Indexer(blocks=2 * paths * LENGTH)
        for path in self.paths:
            for worker in range(WORKERS):
                self.index.apply(RouterEvent(Worker(worker), Stored(path, path)))
        slots = 1 << (2 * paths * LENGTH - 1).bit_length()
        self._slots = np.zeros(2 * slots, np.uint64)
        self._table = limit_ffi.new("limit_hash *")
        self._table.slot = limit_ffi.cast("limit_slot *", self._slots.ctypes.data)
        self._table.slots = slots
        limit_lib.limit_hash_put(self._table, self._keys_at(0), len(keys))
        self.table = {key: index for index, key in enumerate(keys.tolist())}

    def _keys_at(self, path: int) -> _limit.uint64_p:
        return limit_ffi.cast("uint64_t *", self.keys.ctypes.data) + path * LENGTH

    def bare(self) -> Callable[[int], object]:
        """Return a function that looks up one path in the bare table."""
        keys = [self._keys_at(path) for path in range(len(self.paths))]
        return lambda path: limit_lib.limit_hash_walk(self._table, keys[path], LENGTH)

    def lookup_in_c(self) -> Callable[[int], object]:
        """Return a function that finds the matches of one path, from C into C."""
        pointers = [ffi.from_buffer("uint64_t[]", path) for path in self.paths]
        matches, shared = ffi.new("bl_prefix_match[]", 64), ffi.new("uint32_t *")
        prefix = self.index.handle
        return lambda path: lib.bl_prefix_find(prefix, pointers[path], LENGTH, 0, matches, shared)

    def hashes(self, path: int) -> list[int]:
        """Return a path in the form of a request that was just hashed."""
        return self.paths[path].tolist()


def _samples(work: Callable[[Any], object], queries: Iterable[object]) -> npt.NDArray[np.uint64]:
    """Return the nanoseconds of each call. Its argument is made before, untimed."""
    clock, samples = time.perf_counter_ns, []
    for query in queries:
        start_ns = clock()
        work(query)
        samples.append(clock() - start_ns)
    return np.array(samples, np.uint64)


def _per_s(samples: npt.NDArray[np.uint64]) -> float:
    return 1e9 / float(np.median(samples))


def bench_indexer(options: Options) -> list[Row]:
    """Return rows for find_matches in C and from Python, for events, and for whole decisions."""
    paths = _SMOKE_PATHS if options.smoke else PATHS
    options.report(f"indexer: {paths * LENGTH:,} blocks, {WORKERS} workers")
    ground = _Ground(paths, options.seed)
    fixed: Row = {"memory": "DRAM (private)", "threads": 1}
    recorder = Recorder("indexer", options, fixed)
    rows = [_in_c(recorder, ground), _in_python(recorder, ground), *_events(recorder, ground)]
    for policy in ("least-tokens", "linear"):
        options.report(f"indexer: decisions, {policy}")
        rows.append(_decision(recorder, ground, policy))
    return rows


def _in_c(recorder: Recorder, ground: _Ground) -> Row:
    """Measure from C to C: the tree alone distinguishes 16 workers block by block."""
    options, bare, ours = recorder.options, ground.bare(), ground.lookup_in_c()
    ratio = race(
        lambda: _per_s(_samples(bare, ground.order)),
        lambda: _per_s(_samples(ours, ground.order)),
        pair_count=options.pair_count,
        retry_count=options.retry_count,
    )
    single = percentiles(_samples(ours, ground.order))
    return recorder.row("find_matches, c", fragments=LENGTH, **calls(ratio), **single)


def _in_python(recorder: Recorder, ground: _Ground) -> Row:
    """Measure Indexer.find_matches of a list of integers, compared with the same lookups in a
    dictionary.
    """
    options, table = recorder.options, ground.table

    def walk(hashes: list[int]) -> None:
        for key in hashes:
            table[key]

    def ours() -> npt.NDArray[np.uint64]:
        return _samples(ground.index.find_matches, map(ground.hashes, ground.order))

    def peer() -> npt.NDArray[np.uint64]:
        return _samples(walk, map(ground.hashes, ground.order))

    ratio = race(
        lambda: _per_s(peer()),
        lambda: _per_s(ours()),
        pair_count=options.pair_count,
        retry_count=options.retry_count,
    )
    return recorder.row(
        "find_matches, python",
        fragments=LENGTH,
        note="the limit is 1,000 lookups in a dictionary of as many blocks",
        **calls(ratio),
        **percentiles(ours()),
    )


def _events(recorder: Recorder, ground: _Ground) -> list[Row]:
    """Measure stored and removed events of 16 blocks that the index already has from other
    workers.
    """
    worker = Worker(WORKERS)
    stored, removed = [], []
    for path in ground.order[: max(len(ground.order) // 10, 1)]:
        names = ground.paths[path]
        for at in range(0, LENGTH - EVENT + 1, EVENT):
            blocks, parent = names[at : at + EVENT], names[at - 1] if at else None
            stored.append(RouterEvent(worker, Stored(blocks, blocks, parent)))
            removed.append(RouterEvent(worker, Removed(blocks)))
    rows = []
    for case, events in (("stored", stored), ("removed", removed[::-1])):
        samples = _samples(ground.index.apply, events)
        speed = len(events) * 1e9 / int(samples.sum())
        note = f"{speed * EVENT / 1e6:.2f} M blocks/s"
        row = recorder.row(
            case, fragments=EVENT, ops_per_s=round(speed), note=note, **percentiles(samples)
        )
        rows.append(row)
    ground.index.remove_worker(worker.worker_id)
    return rows


def _decision(recorder: Recorder, ground: _Ground, policy: str) -> Row:
    """Measure from a prompt's tokens to a worker with its account: hashing, index, policy, load."""
    router = Router(make_policy(policy), find_matches=ground.index.matches)
    for worker in range(WORKERS):
        router.add_worker(Worker(worker))
    hasher = BlockHasher(block_size=BLOCK_SIZE)
    rng = np.random.default_rng(1)
    prompts = rng.integers(0, 100_000, (64, LENGTH * BLOCK_SIZE), dtype=np.uint32)
    pieces = []
    for number, path in enumerate(ground.order):
        hashes = ground.hashes(path)
        start_ns = time.perf_counter_ns()
        query = hasher.query(prompts[number % len(prompts)])
        # No worker has a random prompt's blocks, so the index is requested a path that workers
        # hold.
        router.route(number, Query(query.isl, BLOCK_SIZE, hashes, query.sequence))
        pieces.append(time.perf_counter_ns() - start_ns)
        router.tracker.free(number - len(prompts), 0.0)
    samples = np.array(pieces, np.uint64)
    return recorder.row(
        f"decision, {policy}",
        fragments=LENGTH,
        ops_per_s=round(_per_s(samples)),
        paper=TARGET,
        note=f"{LENGTH * BLOCK_SIZE:,} tokens hashed, {WORKERS} workers",
        **percentiles(samples),
    )
