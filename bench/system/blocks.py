# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The benchmark of the block manager: how long it takes to reserve, register, match and release 64
blocks of a pool that is free, and of one that must evict.

A pool has 65,536 blocks, in chains of 64. No bytes are moved.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from beluga.kvbm import BlockPool, Key, MutableBlock, RegisteredBlock
from beluga.metrics import Registry

from ..harness.options import Options
from ..harness.row import Recorder, Row, percentiles

COUNT = 64  # blocks of a request
BLOCK_SIZE = 16  # tokens of a block
TOTAL = 65_536

_SMOKE_TOTAL = 1024
_REQUEST = "request"
_TARGETS = {"reserve": "allocation < 1 ms", "release": "release < 0.5 ms"}


class _Ground:
    """A pool, and requests of one chain of blocks each."""

    def __init__(self, total: int) -> None:
        self.pool = BlockPool("bench", total, block_size=BLOCK_SIZE, registry=Registry())
        self.samples: dict[str, list[int]] = {}
        self._chains = 0

    def timed(self, step: str, call: Callable[[], object]) -> None:
        """Call, and add the time to the samples of a step."""
        start_ns = time.perf_counter_ns()
        call()
        self.samples.setdefault(step, []).append(time.perf_counter_ns() - start_ns)

    def serve(self, *, fills: bool = True) -> None:
        """Serve one request: reserve, fill and register its blocks, match them, and release."""
        blocks: list[MutableBlock] = []

        def reserve() -> None:
            blocks.extend(self.pool.reserve(_REQUEST, COUNT).result())

        self.timed("reserve", reserve)
        if fills:
            keys: list[Key] = [(self._chains, index) for index in range(COUNT)]
            self._chains += 1
            for index, block in enumerate(blocks):
                block.fill(BLOCK_SIZE)
                block.commit(keys[index], parent=keys[index - 1] if index else None)
            self.timed("register", lambda: self.pool.register(blocks))
            self.pool.release(_REQUEST)
            held: list[RegisteredBlock] = []
            self.timed("match", lambda: held.extend(self.pool.match(keys, _REQUEST)))
        self.timed("release", lambda: self.pool.release(_REQUEST))


def bench_blocks(options: Options) -> list[Row]:
    """Run the benchmark."""
    total = _SMOKE_TOTAL if options.smoke else TOTAL
    recorder = Recorder(
        "blocks", options, {"threads": 1, "fragments": COUNT, "memory": "DRAM (private)"}
    )
    rows = []
    for case, fills, times in (("free", False, total // COUNT), ("evicting", True, total // COUNT)):
        ground = _Ground(total)
        if fills:  # the pool is full of chains before the first sample
            for _ in range(total // COUNT):
                ground.serve()
            ground.samples.clear()
        options.report(f"blocks: {case}")
        for _ in range(times):
            ground.serve(fills=fills)
        for step, times_ns in ground.samples.items():
            samples = np.array(times_ns, np.uint64)
            rows.append(
                recorder.row(
                    f"{step}, {case}",
                    ops_per_s=round(len(times_ns) * 1e9 / int(samples.sum())),
                    note=f"{COUNT} of {total:,} blocks",
                    paper=_TARGETS.get(step),
                    **percentiles(samples),
                )
            )
    return rows
