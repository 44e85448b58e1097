# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Several GPUs at once against one device of the pool, and against one NUMA node's own memory: the
GPU's rows of ``bandwidth`` (the paper's Fig. 6).

Each GPU has a thread, which lets its copy engine move runs of a stripe one after the other: what
the path carries, whoever copies. ``threads`` of a row is the number of GPUs.
"""

from __future__ import annotations

import functools
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import numpy as np

from beluga.errors import BelugaError, EngineUnavailableError
from beluga.pool import STRIPE_SIZE, Pool
from beluga.transfer import CudaDriver, CudaEngine, CupyDriver, plan_blocks

from .machine import nodes
from .private import private
from .row import Recorder, Row, speed

VERBS = ("read", "write")

_WINDOW_SIZE = 64 << 20
_SETTLE_S = 120.0
_RUNS = 16  # places of each GPU, or as many as there are

Drivers = Callable[[], list[CudaDriver]]
Places = Callable[[ExitStack, CudaDriver], list[int]]  # GPU addresses of runs of a stripe


def all_gpus() -> list[CudaDriver]:
    """Drivers of all GPUs here. Raises EngineUnavailableError if there is none."""
    found: list[CudaDriver] = [CupyDriver(0)]
    while True:
        try:
            found.append(CupyDriver(len(found)))
        except EngineUnavailableError:
            return found


def gpu_bandwidth(recorder: Recorder, pool: Pool, make: Drivers = all_gpus) -> list[Row]:
    """Rows for 1, 2, ... GPUs; ``pool`` has one device."""
    targets: dict[str, Places] = {"the pool's device": functools.partial(_of_pool, pool)}
    for node in nodes():
        targets[f"DRAM of NUMA node {node}"] = functools.partial(_of_node, node)
    rows = []
    for name, places in targets.items():
        fixed = dict(recorder.fixed) if "pool" in name else {**recorder.fixed, "memory": name}
        own = Recorder(recorder.bench, recorder.options, fixed)
        try:
            with ExitStack() as stack:
                drivers = make()
                for driver in drivers:
                    stack.callback(driver.close)
                feeders = [
                    stack.enter_context(_feeder(driver, places(stack, driver)))
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
    """One GPU, its memory, and where it copies from and to."""

    def __init__(self, driver: CudaDriver, places: list[int]) -> None:
        self._driver, self._places = driver, places
        self.memory = driver.allocate(STRIPE_SIZE)
        self.stream, self.event = driver.make_stream(urgent=True), driver.make_event()

    def run(self, verb: str, count: int) -> None:
        self._driver.use()
        for index in range(count):
            place = self._places[index % len(self._places)]
            pair = (place, self.memory) if verb == "write" else (self.memory, place)
            self._driver.copy(*pair, STRIPE_SIZE, self.stream)
        self._driver.record(self.event, self.stream)
        self._driver.wait(self.event)


@contextmanager
def _feeder(driver: CudaDriver, places: list[int]) -> Iterator[_Feeder]:
    feeder = _Feeder(driver, places)
    try:
        yield feeder
    finally:
        driver.free_event(feeder.event)
        driver.end_stream(feeder.stream)
        driver.free(feeder.memory)


def _of_pool(pool: Pool, stack: ExitStack, driver: CudaDriver) -> list[int]:
    """Whole stripes of the pool's data. Raises EngineUnavailableError if it is not registered."""
    engine = CudaEngine(pool, path="direct", window_size=_WINDOW_SIZE, driver=driver)
    stack.callback(engine.close)
    if not engine.settle(_SETTLE_S) or engine.stat.fault is not None:
        raise EngineUnavailableError(f"the pool is not registered: {engine.stat.fault}")
    first = -(-pool.geometry.data_offset // STRIPE_SIZE)
    stripes = range(first, min(first + _RUNS, pool.geometry.size // STRIPE_SIZE))
    address, size = np.zeros((1, 1), np.uint64), np.array([STRIPE_SIZE])
    plans = [plan_blocks(address, size, np.array([i * STRIPE_SIZE], np.uint64)) for i in stripes]
    return [engine.runs(plan)[0][0] for plan in plans]


def _of_node(node: int, stack: ExitStack, driver: CudaDriver) -> list[int]:
    """Memory of this process on that node, registered with the driver."""
    node_asked = node if len(nodes()) > 1 else None
    size = _RUNS * STRIPE_SIZE
    base = stack.enter_context(private(size, node_asked, shared=True))
    address = driver.register(base, size)
    stack.callback(driver.unregister, base)
    return [address + index * STRIPE_SIZE for index in range(_RUNS)]


def _row(recorder: Recorder, case: str, feeders: list[_Feeder], verb: str) -> Row:
    options = recorder.options
    options.say(f"bandwidth {case}, {len(feeders)} GPUs")
    count = 3 if options.smoke else 200
    _together(feeders, verb, count)
    found = statistics.median(_together(feeders, verb, count) for _ in range(options.pair_count))
    return recorder.row(
        case,
        engine="cuda",
        bytes=STRIPE_SIZE,
        threads=len(feeders),
        **speed(found, STRIPE_SIZE),
    )


def _together(feeders: list[_Feeder], verb: str, count: int) -> float:
    """Copies per second of all of them."""
    threads = [threading.Thread(target=feeder.run, args=(verb, count)) for feeder in feeders]
    before = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return count * len(feeders) / (time.perf_counter() - before)
