# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Measure several GPUs at once against one device of the pool, and against one NUMA node's own
memory: the GPU's rows of ``bandwidth`` (the GPUs of the paper's Fig. 6, which also has NICs).

Each GPU has a thread, whose copy engine moves runs of a stripe one after the other. This is the
path's bandwidth, whichever engine copies. ``threads`` of a row is the number of GPUs.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np

from beluga.errors import BelugaError, EngineUnavailableError
from beluga.pool import STRIPE_SIZE, Pool
from beluga.transfer import CudaDevice, CudaEngine, plan_blocks

from ..harness.machine import nodes
from ..harness.private import private
from ..harness.row import Recorder, Row, percentiles, speed
from ..harness.threads import run_together
from .runs import runs_of

VERBS = ("read", "write")

_WINDOW_SIZE = 64 << 20
_SETTLE_S = 120.0
_RUNS = 16  # places of each GPU, or all if there are fewer

Drivers = Callable[[], list[CudaDevice]]
Targets = Callable[[ExitStack, CudaDevice], list[int]]  # GPU addresses of runs of a stripe


def all_gpus() -> list[CudaDevice]:
    """Return the drivers of all GPUs here. Raises EngineUnavailableError if there is none."""
    drivers = [CudaDevice(0)]
    while True:
        try:
            drivers.append(CudaDevice(len(drivers)))
        except EngineUnavailableError:
            return drivers


def gpu_bandwidth(recorder: Recorder, pool: Pool, make: Drivers = all_gpus) -> list[Row]:
    """Return rows for 1, 2, ... GPUs; ``pool`` has one device."""
    targets: dict[str, Targets] = {"the pool's device": functools.partial(_of_pool, pool)}
    for node in nodes():
        targets[f"DRAM of NUMA node {node}"] = functools.partial(_of_node, node)
    rows = []
    for name, addresses in targets.items():
        fixed = dict(recorder.fixed) if "pool" in name else {**recorder.fixed, "memory": name}
        own = Recorder(recorder.bench, recorder.options, fixed)
        try:
            with ExitStack() as stack:
                drivers = make()
                feeders = [
                    stack.enter_context(_feeder(driver, addresses(stack, driver)))
                    for driver in drivers
                ]
                rows += [
                    _row(own, f"gpu {verb}, {name}", feeders[:count], verb)
                    for verb in VERBS
                    for count in range(1, len(feeders) + 1)
                ]
        except BelugaError as error:
            rows += [
                own.skipped(f"gpu {verb}, {name}", str(error), engine="cuda") for verb in VERBS
            ]
    return rows


class _Feeder:
    """One GPU, its memory, and the addresses that it copies between."""

    def __init__(self, driver: CudaDevice, addresses: list[int]) -> None:
        self._driver, self._addresses = driver, addresses
        self.memory = driver.allocate(STRIPE_SIZE)
        self.stream, self.event = driver.make_stream(urgent=True), driver.make_event()
        self.times: list[float] = []
        self.stopping = threading.Event()

    def run(self, verb: str, count: int) -> None:
        for index in range(count):
            if self.stopping.is_set():
                break
            self._copy(verb, index)
        self._driver.record(self.event, self.stream)
        self._driver.wait(self.event)

    def sample(self, verb: str, count: int) -> None:
        """Return the seconds of each of ``count`` copies by the GPU's clock."""
        events = [self._driver.make_event() for _ in range(count + 1)]
        self._driver.record(events[0], self.stream)
        recorded = events[:1]
        for index, event in enumerate(events[1:]):
            if self.stopping.is_set():
                break
            self._copy(verb, index)
            self._driver.record(event, self.stream)
            recorded.append(event)
        self._driver.wait(recorded[-1])
        self.times = [self._driver.elapsed_s(*pair) for pair in itertools.pairwise(recorded)]
        for event in events:
            self._driver.free_event(event)

    def _copy(self, verb: str, index: int) -> None:
        address = self._addresses[index % len(self._addresses)]
        pair = (address, self.memory) if verb == "write" else (self.memory, address)
        self._driver.copy(*pair, STRIPE_SIZE, self.stream)


@contextmanager
def _feeder(driver: CudaDevice, addresses: list[int]) -> Iterator[_Feeder]:
    feeder = _Feeder(driver, addresses)
    try:
        yield feeder
    finally:
        driver.free_event(feeder.event)
        driver.end_stream(feeder.stream)
        driver.free(feeder.memory)


def _of_pool(pool: Pool, stack: ExitStack, driver: CudaDevice) -> list[int]:
    """Return whole stripes of the pool's data. Raises EngineUnavailableError if it is not
    registered.
    """
    engine = CudaEngine(pool, driver, window_size=_WINDOW_SIZE)
    stack.callback(engine.close)
    if not engine.settle(_SETTLE_S) or engine.stat.fault is not None:
        raise EngineUnavailableError(f"the pool is not registered: {engine.stat.fault}")
    first = -(-pool.geometry.data_offset // STRIPE_SIZE)
    stripes = range(first, min(first + _RUNS, pool.geometry.size // STRIPE_SIZE))
    address, size = np.zeros((1, 1), np.uint64), np.array([STRIPE_SIZE])
    plans = [plan_blocks(address, size, np.array([i * STRIPE_SIZE], np.uint64)) for i in stripes]
    return [runs_of(engine, pool, plan)[0][0] for plan in plans]


def _of_node(node: int, stack: ExitStack, driver: CudaDevice) -> list[int]:
    """Return memory of this process on that node, registered with the driver."""
    requested_node = node if len(nodes()) > 1 else None
    size = _RUNS * STRIPE_SIZE
    base = stack.enter_context(private(size, requested_node, shared=True))
    address = driver.register(base, size)
    stack.callback(driver.unregister, base)
    return [address + index * STRIPE_SIZE for index in range(_RUNS)]


def _row(recorder: Recorder, case: str, feeders: list[_Feeder], verb: str) -> Row:
    options = recorder.options
    options.report(f"bandwidth {case}, {len(feeders)} GPUs")
    count = 3 if options.smoke else 200
    runs = [functools.partial(feeder.run, verb, count) for feeder in feeders]
    _together(runs, feeders)
    took_s = statistics.median(_together(runs, feeders) for _ in range(options.pair_count))
    _together([functools.partial(feeder.sample, verb, count) for feeder in feeders], feeders)
    times = np.concatenate([feeder.times for feeder in feeders])
    return recorder.row(
        case,
        engine="cuda",
        bytes=STRIPE_SIZE,
        threads=len(feeders),
        **speed(count * len(feeders) / took_s, STRIPE_SIZE),
        **percentiles((times * 1e9).astype(np.uint64)),
    )


def _together(runs: Sequence[Callable[[], None]], feeders: Sequence[_Feeder]) -> float:
    """Return the seconds that the runs take, with a thread each. Ctrl-C stops the feeders."""

    def stop() -> None:
        for feeder in feeders:
            feeder.stopping.set()

    before = time.perf_counter()
    run_together(runs, stop)
    return time.perf_counter() - before
