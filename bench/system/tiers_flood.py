# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Loads of single blocks from the disk tier while another thread saves as fast as possible,
compared with the same loads alone, in interleaved pairs.

Loads arrive at intervals of 2 ms and of 30 ms: between the latter, the tier admits more writes.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from beluga.errors import TierError
from beluga.threads import wait_for
from beluga.tiers import BLOCK
from beluga.tiers.arena import Arena
from beluga.tiers.disk import DiskTier

from ..harness.row import Recorder, Row
from ..harness.tails import Times, tails_row

_INTERVALS_S = (0.002, 0.030)
_LOADS, _LOADS_SMOKE = 100, 5  # per half of a pair
_SETTLE_S = 0.1  # after the flood has begun, and after it has ended
_SAVE_BYTES = 32 << 20
_FLOOD_CALLS = 8  # different blocks that the flood saves, in calls


class _Flood:
    """Saves blocks repeatedly on its own thread, until it is stopped."""

    def __init__(self, tier: DiskTier, keys: NDArray[np.uint64], size: int) -> None:
        self.written = 0
        self._tier, self._size = tier, size
        self._each = max(1, _SAVE_BYTES // size)
        self._payload = Arena().take(self._each * size).reshape(self._each, size)
        self._payload[:] = np.random.default_rng(0).integers(
            0, 256, self._payload.shape, dtype=np.uint8
        )
        self._keys = keys
        self._let = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @contextmanager
    def under_way(self) -> Iterator[None]:
        self._let.set()
        time.sleep(_SETTLE_S)
        try:
            yield
        finally:
            self._let.clear()
            time.sleep(_SETTLE_S)

    def stop(self) -> None:
        """End after the current save."""
        self._stopping = True
        self._let.set()
        wait_for([self._thread])

    def close(self) -> None:
        """End, with all blocks saved."""
        self.stop()
        for first in range(0, len(self._keys), self._each):
            self._save(self._keys[first : first + self._each])

    def _run(self) -> None:
        for first in itertools.cycle(range(0, len(self._keys), self._each)):
            self._let.wait()
            if self._stopping:
                return
            keys = self._keys[first : first + self._each]
            self._tier.remove(keys)
            self._save(keys)

    def _save(self, keys: NDArray[np.uint64]) -> None:
        records = np.zeros(len(keys), BLOCK)
        records["key"], records["length"] = keys, self._size
        saved = self._tier.save(records, self._payload[: len(keys)])
        self.written += int(np.count_nonzero(saved)) * self._size


def flood_rows(
    recorder: Recorder, tier: DiskTier, keys: NDArray[np.uint64], size: int, engine: str
) -> Iterator[Row]:
    """Measure loads during a flood of saves; the tier has blocks of these keys. The flood saves
    some of them, and the others are loaded.
    """
    count = min(len(keys) // 2, _FLOOD_CALLS * max(1, _SAVE_BYTES // size))
    rng = np.random.default_rng(size)
    loads = _LOADS_SMOKE if recorder.options.smoke else _LOADS
    flood = _Flood(tier, keys[:count], size)

    def times(interval_s: float) -> Times:
        times_ns = np.zeros(loads, np.uint64)
        for at, key in enumerate(rng.choice(keys[count:], loads)):
            before = time.perf_counter_ns()
            (block,) = tier.load(key[np.newaxis])
            times_ns[at] = time.perf_counter_ns() - before
            if block is None:
                raise TierError("a block is missing")
            time.sleep(interval_s)
        return times_ns

    def pair(interval_s: float) -> tuple[Times, Times, float]:
        alone = times(interval_s)
        with flood.under_way():
            before, started_s = flood.written, time.perf_counter()
            loaded = times(interval_s)
            return alone, loaded, (flood.written - before) / (time.perf_counter() - started_s)

    try:
        for interval_s in _INTERVALS_S[: 1 if recorder.options.smoke else None]:
            pairs = [pair(interval_s) for _ in range(recorder.options.pair_count)]
            written = np.mean([pair[2] for pair in pairs])  # a call may be longer than half a pair
            yield tails_row(
                recorder,
                f"load beside saves, each {interval_s * 1e3:.0f} ms",
                [(alone, loaded) for alone, loaded, _ in pairs],
                work=f"saves of {written / 1e6:.0f} MB/s",
                peer="the tier alone",
                bytes=size,
                engine=engine,
            )
        flood.close()
    finally:
        flood.stop()
