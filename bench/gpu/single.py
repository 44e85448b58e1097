# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Measure single copies by a GPU: rows of ``coherence`` and of ``latency``.

The time is from the call in Python until its completion is observed and the case's launch, event
and flush are done. The caller, the registrar and CUDA's threads run on any CPU, as a user's do.
Without a GPU the rows have a note; kernels compiled for a CPU do not represent a GPU, so only tests
measure them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from beluga.errors import EngineUnavailableError
from beluga.transfer import CudaDevice, CudaEngine, plan_blocks
from beluga.transfer.policy import CacheMaintenance, Step, flush_threads
from beluga.transfer.policy import PolicyRow as Steps

from ..harness.machine import unpinned
from ..harness.region import Region, uniform
from ..harness.row import Recorder, Row, percentiles, speed
from ..paper.dsa import costs, crossover
from .runs import runs_of

MakeDevice = Callable[[], CudaDevice]
Operation = Callable[[int], None]  # makes one copy, to or from this offset of the pool

_WINDOW_SIZE = 64 << 20
_SETTLE_S = 120.0
_SAFE = Steps(Step.INVALIDATE, Step.FLUSH)
# The case; the verb; what the CPU runs around it; the paper's figure. The paper switches DDIO off
# to leave the flush out; here it is left out all the same, so that row is a limit, not a safe copy.
CASES = {
    "gpu write, then flush": ("write", Steps(Step.FENCE, Step.FLUSH), "11.06 us"),
    "gpu write, flush left out": ("write", Steps(Step.FENCE, Step.FENCE), "9.14 us"),
    "gpu read by our kernel": ("read", Steps(Step.INVALIDATE, Step.FENCE), None),
    "gpu read by memcpy": ("memcpy", Steps(Step.INVALIDATE, Step.FENCE), "10.55 us"),
}


def gpu_coherence(
    recorder: Recorder, region: Region, size: int, make: MakeDevice = CudaDevice
) -> list[Row]:
    """Return the rows of the paper's Table 4, one per case, or why there are none."""
    rows = []
    for case, (verb, steps, paper) in CASES.items():
        try:
            with unpinned(), _operation(region, size, verb, steps, make) as run:
                row = _measured(recorder, region, run, case, size)
        except EngineUnavailableError as error:
            row = recorder.skipped(case, str(error))
        row["paper"] = paper
        rows.append(row)
    return rows


def gpu_latency(
    recorder: Recorder,
    region: Region,
    sizes: tuple[int, ...],
    cpu: list[Row],
    make: MakeDevice = CudaDevice,
) -> list[Row]:
    """Return the rows of the paper's Exp 2: reads by kernel and by memcpy, writes by kernel, of
    each size.

    The note of the first of each has the size from which it is faster than ``cpu``, the rows of the
    CPU.
    """
    rows = []
    for verb, counterpart in (("read", "read"), ("memcpy", "read"), ("write", "write")):
        case = "gpu read by memcpy" if verb == "memcpy" else f"gpu {verb}"
        own = []
        try:
            for size in sizes:
                if size * 2 <= region.size_for(size):
                    with unpinned(), _operation(region, size, verb, _SAFE, make) as run:
                        own.append(_measured(recorder, region, run, case, size))
            own[0]["note"] = crossover(costs(cpu, counterpart), costs(own))
        except EngineUnavailableError as error:
            own = [recorder.skipped(case, str(error))]
        rows += own
    return rows


@contextmanager
def _operation(
    region: Region, size: int, verb: str, steps: Steps, make: MakeDevice
) -> Iterator[Operation]:
    """Return one copy between the pool and GPU memory, as a function of its offset in the pool."""
    driver = make()
    maintenance = CacheMaintenance(region.pool, steps, flush_threads())
    engine = CudaEngine(region.pool, driver, window_size=_WINDOW_SIZE, maintenance=maintenance)
    if not engine.settle(_SETTLE_S) or engine.stat.fault is not None:
        engine.close()
        raise EngineUnavailableError(f"the pool is not registered: {engine.stat.fault}")
    memory = driver.allocate(size)
    stream, event = driver.make_stream(urgent=True), driver.make_event()
    address = np.array([[memory]], np.uint64)

    def by_engine(offset: int) -> None:
        plan = plan_blocks(address, np.array([size]), np.array([offset], np.uint64))
        start = engine.gather_write if verb == "write" else engine.scatter_read
        start(plan, stream=stream).wait()

    def by_memcpy(offset: int) -> None:
        plan = plan_blocks(address, np.array([size]), np.array([offset], np.uint64))
        maintenance.before_read(plan)
        for source, target, length in runs_of(engine, region.pool, plan):
            driver.copy(memory + target, source, length, stream)
        driver.record(event, stream)
        driver.wait(event)

    try:
        yield by_memcpy if verb == "memcpy" else by_engine
    finally:
        driver.free_event(event)
        driver.end_stream(stream)
        driver.free(memory)
        engine.close()


def _measured(recorder: Recorder, region: Region, run: Operation, case: str, size: int) -> Row:
    options = recorder.options
    options.report(f"{recorder.bench} {case}, {size} bytes")
    in_data = uniform(region.size_for(size), size, options.seed)
    offsets = (in_data + np.uint64(region.pool.geometry.data_offset)).tolist()
    count = 5 if options.smoke else 500
    for index in range(3):
        run(offsets[index % len(offsets)])
    times = np.empty(count, np.uint64)
    for index in range(count):
        before = time.perf_counter_ns()
        run(offsets[index % len(offsets)])
        times[index] = time.perf_counter_ns() - before
    ops_per_s = count / (float(times.sum()) / 1e9)
    return recorder.row(case, bytes=size, **speed(ops_per_s, size), **percentiles(times))
