# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Measure how much copies slow down computation on the same GPU: a matrix product alone, and during
copies.

The limit of these rows of ``copy`` is the product alone. A ratio of 0.95 means that copies slowed
it by 5 %, the project's limit. Products are enqueued on the GPU many at a time, and copies one
ahead, without the CPU's cache maintenance: both keep the GPU busy.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np

from beluga.errors import BelugaError, EngineUnavailableError
from beluga.pool import Pool
from beluga.threads import wait_for
from beluga.transfer import CudaDevice, CudaEngine, Plan, plan_blocks
from beluga.transfer.policy import CacheMaintenance, Step
from beluga.transfer.policy import PolicyRow as Steps

from ..harness.ratio import Once, race, rate
from ..harness.row import Recorder, Row, calls, percentiles
from .copy import BLOCK_SIZE, CASES, FRAGMENT_SIZE, FRAGMENTS

_ORDER = 8192
_AT_A_TIME = 20  # products: 30 ms of an H200
_BLOCKS = 4  # blocks per copy
_SWITCH_S = 1e-4  # Python's threads switch often, so that neither delays the other's GPU work
_WINDOW_SIZE = 64 << 20
_SETTLE_S = 120.0


def cupy_product() -> Once:
    """Some products of two matrices of 16-bit floats, and the wait for them."""
    try:
        import cupy
    except ImportError as error:
        raise EngineUnavailableError(f"a matrix product needs cupy: {error}") from None
    random = np.random.default_rng(1)
    left, right = (
        cupy.asarray(random.random((_ORDER, _ORDER), np.float32).astype(np.float16))
        for _ in range(2)
    )
    out = cupy.empty_like(left)

    def once() -> None:
        for _ in range(_AT_A_TIME):
            cupy.matmul(left, right, out=out)
        cupy.cuda.get_current_stream().synchronize()

    return once


def gpu_beside(
    recorder: Recorder,
    pool: Pool,
    make: Callable[[], CudaDevice] = CudaDevice,
    product: Callable[[], Once] = cupy_product,
) -> list[Row]:
    """Return a row for each direction of the copies, or why there is none."""
    rows = []
    for case in CASES:
        name = f"matrix product beside {case}"
        try:
            rows.append(_row(recorder, name, pool, case, make, product))
        except BelugaError as error:
            rows.append(recorder.skipped(name, str(error), engine="cuda"))
    return rows


def _row(  # noqa: PLR0913, PLR0917  one row's own
    recorder: Recorder,
    name: str,
    pool: Pool,
    case: str,
    make: Callable[[], CudaDevice],
    product: Callable[[], Once],
) -> Row:
    options = recorder.options
    options.report(f"copy {name}")
    maintenance = CacheMaintenance(pool, Steps(Step.FENCE, Step.FENCE))
    driver = make()
    with (
        contextlib.closing(
            CudaEngine(pool, driver, window_size=_WINDOW_SIZE, maintenance=maintenance)
        ) as engine,
        _quick_switches(),
    ):
        if not engine.settle(_SETTLE_S) or engine.stat.fault is not None:
            raise EngineUnavailableError(f"the pool is not registered: {engine.stat.fault}")
        size = _BLOCKS * BLOCK_SIZE
        memory = driver.allocate(size)
        at = memory + np.arange(_BLOCKS * FRAGMENTS, dtype=np.uint64) * np.uint64(FRAGMENT_SIZE)
        first = np.uint64(pool.geometry.data_offset)
        plan = plan_blocks(
            at.reshape(_BLOCKS, FRAGMENTS),
            np.full(FRAGMENTS, FRAGMENT_SIZE),
            first + np.arange(_BLOCKS, dtype=np.uint64) * np.uint64(BLOCK_SIZE),
        )
        once, count = product(), 3 if options.smoke else 5
        copied: list[float] = []
        times: list[float] = []

        def timed() -> None:
            before = time.perf_counter()
            once()
            times.append(time.perf_counter() - before)

        def loaded() -> float:
            with _copying(engine, case, plan, copied):
                return rate(timed, count)

        ratio = race(
            lambda: rate(once, count),
            loaded,
            pair_count=options.pair_count,
            retry_count=options.retry_count,
        )
        driver.free(memory)
    slowed = 100 * (1 - ratio.ours / ratio.limit)
    return recorder.row(
        name,
        engine="cuda",
        crc=False,
        bytes=size,
        fragments=_BLOCKS * FRAGMENTS,
        fragment_bytes=FRAGMENT_SIZE,
        note=f"slowed by {slowed:.1f} % beside copies at {sum(copied) / len(copied):.1f} GB/s; "
        f"{_AT_A_TIME} products at a time",
        **calls(ratio),
        **percentiles((np.array(times) * 1e9).astype(np.uint64)),
    )


@contextlib.contextmanager
def _quick_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextlib.contextmanager
def _copying(engine: CudaEngine, case: str, plan: Plan, copied: list[float]) -> Iterator[None]:
    """Copy blocks in a thread again and again; the first copy ends before measurements start.

    Adds the GB/s of the copies to ``copied``. Raises the copy's BelugaError when the copying ends.
    """
    start = engine.gather_write if case == "gather_write" else engine.scatter_read
    under_way, stop = threading.Event(), threading.Event()
    errors: list[BelugaError] = []

    def run() -> None:
        count, before = 0, time.perf_counter()
        try:
            ahead = start(plan)
            while not stop.is_set():
                last, ahead = ahead, start(plan)
                last.wait()
                count += 1
                under_way.set()
            ahead.wait()
            copied.append((count + 1) * plan.size / (time.perf_counter() - before) / 1e9)
        except BelugaError as error:
            errors.append(error)
        finally:
            under_way.set()

    thread = threading.Thread(target=run)
    try:
        thread.start()
        under_way.wait()
        yield
    finally:
        stop.set()
        wait_for([thread])
    if errors:
        raise errors[0]
