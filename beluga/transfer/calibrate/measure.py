# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Measure the costs of copies on this machine once, in a fraction of a second, and store the
result.

Nothing here runs in a request's path; a table is measured when an engine starts. The timed copies
are like those of caches: the bytes are not cached by the CPU, and the copies have checksums.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import time
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from beluga._ffi import ffi, lib
from beluga.errors import TransferError
from beluga.transfer.calibrate.calibration_cache import CalibrationCache, may_measure
from beluga.transfer.calibrate.cost import Cost, Table
from beluga.transfer.calibrate.scratch import scratch_pool
from beluga.transfer.engine import Direction
from beluga.transfer.plan import plan_blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from beluga.pool import Pool
    from beluga.transfer.engine import CopyEngine

    Engines = Mapping[tuple[str, Direction], CopyEngine]

_REPETITIONS = 9
_SHAPES = ((4096, 1), (4096, 64), (65536, 1), (65536, 4), (65536, 16))
"""Bytes of a fragment and number of fragments: enough shapes to fit the three parts of a cost."""
_SPAN = max(fragment * count for fragment, count in _SHAPES)


def stored_table(pool: Pool, setup: str) -> Table:
    """Return the stored costs of this machine for a pool's kind of memory.

    The table is empty if nothing is stored, or if BELUGA_TUNING is off. ``setup`` has the other
    parameters of the costs: the CPU's threads, the submission to a device's queue.
    """
    return table_of(CalibrationCache(pool).read(_part(setup))) if may_measure() else {}


def _part(setup: str) -> str:
    return f"costs: {setup}"


def table_of(content: object) -> Table:
    """Return the table that a file contains, or an empty one if it contains something else."""
    try:
        table = {
            (str(row["engine"]), Direction[row["direction"]]): Cost(*map(float, row["cost"]))
            for row in cast("Sequence[dict[str, Any]]", content or ())
        }
    except (ValueError, KeyError, TypeError):
        return {}
    costs = [part for cost in table.values() for part in dataclasses.astuple(cost)]
    return table if all(math.isfinite(part) and part >= 0 for part in costs) else {}


def calibrated(pool: Pool, setup: str, engines_of: Callable[[Pool], Engines]) -> Table:
    """Return the table of this machine, stored or measured now.

    ``engines_of``, given a scratch pool, makes the engines that are measured there and closed. It
    takes under half a second for each. If ``BELUGA_TUNING`` is off or nothing can be stored,
    nothing is measured, and the table is empty. Raises the engines' errors, TransferError for an
    engine with a fault, and OSError or a :class:`~beluga.errors.BelugaError` if there is no space.
    """
    kept = CalibrationCache(pool)
    table = stored_table(pool, setup)
    if table or not may_measure() or not kept.can_write():
        return table
    with scratch_pool(like=pool) as scratch:
        engines, offset = engines_of(scratch), scratch.geometry.data_offset
        try:
            table = {key: measure(engine, key[1], offset) for key, engine in engines.items()}
            for engine in engines.values():
                if (fault := getattr(engine, "fault", None)) is not None:
                    raise TransferError(f"{engine.name} was not measured: {fault}")
        finally:
            for engine in {id(engine): engine for engine in engines.values()}.values():
                engine.close()
    rows = [
        {"engine": name, "direction": direction.name, "cost": dataclasses.astuple(cost)}
        for (name, direction), cost in table.items()
    ]
    with contextlib.suppress(OSError):
        kept.write(_part(setup), rows)
    return table


def measure(engine: CopyEngine, direction: Direction, offset: int) -> Cost:
    """Measure the cost of an engine's copies, by least squares over a few shapes.

    This overwrites 1 MiB of its pool from ``offset`` on.
    """
    memory = np.ones(2 * _SPAN, np.uint8)
    return fit(
        [(fragment * count, count) for fragment, count in _SHAPES],
        [_time(engine, direction, memory, offset, shape) for shape in _SHAPES],
    )


def fit(shapes: Sequence[tuple[int, int]], times_ns: Sequence[float]) -> Cost:
    """Return the cost with the least relative errors for the times of (bytes, fragments).

    No part of the cost is below 0.
    """
    wanted = np.array(times_ns, float)
    rows = np.array([[1, fragments, size] for size, fragments in shapes], float)
    rows /= wanted[:, None]
    fits = []
    for parts in map(list, itertools.product((False, True), repeat=3)):  # those that are not 0
        found = np.zeros(3)
        found[parts] = np.linalg.lstsq(rows[:, parts], np.ones(len(wanted)), rcond=None)[0]
        if (found >= 0).all():
            fits.append((float(np.sum((rows @ found - 1) ** 2)), found))
    start, fragment, byte = map(float, min(fits, key=lambda fit: fit[0])[1])
    return Cost(start, fragment, byte)


def _time(
    engine: CopyEngine,
    direction: Direction,
    memory: NDArray[np.uint8],
    offset: int,
    shape: tuple[int, int],
) -> float:
    """Time one copy of (fragment, count), in nanoseconds: the median of several."""
    fragment, count = shape
    places = memory.ctypes.data + 2 * fragment * np.arange(count)
    plan = plan_blocks(
        places[None].astype(np.uint64),
        np.full(count, fragment),
        np.array([offset]),
        chunk_size=lib.BL_CHUNK_SIZE,
    )
    engine.gather_write(plan).wait()  # the bytes and checksums for reads
    move: Callable[[Any], Any] = (
        engine.gather_write if direction is Direction.WRITE else engine.scatter_read
    )
    times = []
    for _ in range(_REPETITIONS):
        lib.bl_flush(ffi.from_buffer(memory), memory.size)
        lib.bl_fence()
        start = time.perf_counter_ns()
        move(plan).wait()
        times.append(time.perf_counter_ns() - start)
    return float(np.median(times))
