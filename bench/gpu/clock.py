# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Measure GPU time: the time between two events of a stream, without the host's time.

The measured work is enqueued behind other copies within the GPU's memory (the ballast), which are
still running when all of the work has been enqueued. If they are not, the ballast is doubled, and
the measurement starts again.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import numpy as np

from beluga.transfer import CudaDevice, Transfer

from ..harness.options import Options
from ..harness.ratio import race
from ..harness.row import Row, copies, percentiles

Enqueue = Callable[[int], Transfer | None]  # enqueues work on this stream, and does not wait for it

_BALLAST_SIZE = 256 << 20  # 0.1 ms on an H200, many times the time of the call
_BALLAST_MAX = 256  # copies; a stream accepts a thousand before the caller must wait
_SAMPLES = 5  # samples per speed


class StreamClock:
    """A clock with its own stream.

    ``exposed`` counts the samples for which the maximum ballast was not enough: they include some
    of the host's time.
    """

    def __init__(self, driver: CudaDevice) -> None:
        self._driver = driver
        self._source, self._target = (driver.allocate(_BALLAST_SIZE) for _ in range(2))
        self.stream = driver.make_stream(urgent=True)
        self._first, self._last = driver.make_event(), driver.make_event()
        self._count = 1
        self.exposed = 0

    def seconds(self, enqueue: Enqueue) -> float:
        """Return the seconds that the GPU takes for the work."""
        while True:
            for _ in range(self._count):
                self._driver.copy(self._target, self._source, _BALLAST_SIZE, self.stream)
            self._driver.record(self._first, self.stream)
            transfer = enqueue(self.stream)
            self._driver.record(self._last, self.stream)
            covered = not self._driver.ended(self._first)
            self._driver.wait(self._last)
            if transfer is not None:
                transfer.wait()
            if covered or self._count >= _BALLAST_MAX:
                self.exposed += not covered
                return self._driver.elapsed_s(self._first, self._last)
            self._count *= 2

    def race(self, limit: Enqueue, ours: Enqueue, size: int, options: Options) -> Row:
        """Return the fields of a row: both move ``size`` bytes, in turn; percentiles are ours."""
        times: list[float] = []
        count = 1 if options.smoke else _SAMPLES
        self._count = 1  # an earlier row may have needed more ballast
        self.seconds(limit)
        self.seconds(ours)

        def speed_of_limit() -> float:
            return 1 / median(self.seconds(limit) for _ in range(count))

        def speed_of_ours() -> float:
            own = [self.seconds(ours) for _ in range(count)]
            times.extend(own)
            return 1 / median(own)

        self.exposed = 0
        ratio = race(
            speed_of_limit,
            speed_of_ours,
            pair_count=options.pair_count,
            retry_count=options.retry_count,
        )
        return {**copies(ratio, size), **percentiles((np.array(times) * 1e9).astype(np.uint64))}

    def close(self) -> None:
        """Free the memory; no copy is in flight."""
        for event in (self._first, self._last):
            self._driver.free_event(event)
        self._driver.end_stream(self.stream)
        for address in (self._source, self._target):
            self._driver.free(address)
