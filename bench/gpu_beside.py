# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""What copying costs the computing on the same GPU: a matrix product alone, and beside copies.

The limit of these rows of ``copy`` is the product alone; a ratio of 0.95 says that it was slowed by
5 %, which is the most that issue 5 of the project allows.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import numpy as np

from beluga.errors import BelugaError, EngineUnavailableError
from beluga.pool import Pool
from beluga.transfer import CudaDriver, CudaEngine, CupyDriver, Plan, plan_blocks

from .ratio import Once, race, rate
from .row import Recorder, Row, calls

FRAGMENTS, FRAGMENT_SIZE = 128, 20 << 10
CASES = ("gather_write", "scatter_read")

_ORDER = 8192
_WINDOW_SIZE = 64 << 20
_SETTLE_S = 120.0


def cupy_product() -> Once:
    """A product of two matrices of 16-bit floats, and the wait for it."""
    try:
        import cupy
    except ImportError as error:
        raise EngineUnavailableError(f"a matrix product needs cupy: {error}") from None
    left, right = (cupy.random.rand(_ORDER, _ORDER).astype(cupy.float16) for _ in range(2))
    out = cupy.empty_like(left)

    def once() -> None:
        cupy.matmul(left, right, out=out)
        cupy.cuda.get_current_stream().synchronize()

    return once


def gpu_beside(
    recorder: Recorder,
    pool: Pool,
    make: Callable[[], CudaDriver] = CupyDriver,
    product: Callable[[], Once] = cupy_product,
) -> list[Row]:
    """A row for each direction of the copies, or why there is none."""
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
    make: Callable[[], CudaDriver],
    product: Callable[[], Once],
) -> Row:
    options = recorder.options
    options.say(f"copy {name}")
    with (
        contextlib.closing(make()) as driver,
        contextlib.closing(CudaEngine(pool, driver=driver, window_size=_WINDOW_SIZE)) as engine,
    ):
        if not engine.settle(_SETTLE_S) or engine.stat.fault is not None:
            raise EngineUnavailableError(f"the pool is not registered: {engine.stat.fault}")
        size = FRAGMENTS * FRAGMENT_SIZE
        memory = driver.allocate(size)
        at = memory + np.arange(FRAGMENTS, dtype=np.uint64) * np.uint64(FRAGMENT_SIZE)
        plan = plan_blocks(
            at[None, :],
            np.full(FRAGMENTS, FRAGMENT_SIZE),
            np.array([pool.geometry.data_offset], np.uint64),
        )
        once, count = product(), 3 if options.smoke else 50
        copied: list[int] = []

        def beside() -> float:
            with _copying(driver, engine, case, plan, copied):
                return rate(once, count)

        found = race(
            lambda: rate(once, count),
            beside,
            pair_count=options.pair_count,
            retry_count=options.retry_count,
        )
        driver.free(memory)
    slowed = 100 * (1 - found.ours / found.limit)
    return recorder.row(
        name,
        engine="cuda",
        crc=False,
        bytes=size,
        fragments=FRAGMENTS,
        fragment_bytes=FRAGMENT_SIZE,
        note=f"slowed by {slowed:.1f} % beside {len(copied)} blocks",
        **calls(found),
    )


@contextlib.contextmanager
def _copying(
    driver: CudaDriver, engine: CudaEngine, case: str, plan: Plan, copied: list[int]
) -> Iterator[None]:
    """A thread that copies a block again and again, one at least before anything is measured.

    Raises the copy's BelugaError, when the copying ends.
    """
    start = engine.gather_write if case == "gather_write" else engine.scatter_read
    under_way, stop = threading.Event(), threading.Event()
    errors: list[BelugaError] = []

    def run() -> None:
        driver.use()
        try:
            while not stop.is_set():
                start(plan).wait()
                copied.append(1)
                under_way.set()
        except BelugaError as error:
            errors.append(error)
        finally:
            under_way.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        under_way.wait()
        yield
    finally:
        stop.set()
        thread.join()
    if errors:
        raise errors[0]
