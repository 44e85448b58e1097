# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""What copying costs on this machine: measured once, in a fraction of a second, and kept.

Nothing here runs in a request's path: who wants a measured table asks for it when the engine
starts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from beluga.transfer.engine import Direction
from beluga.transfer.kept import Kept
from beluga.transfer.plan import plan_blocks
from beluga.transfer.planner import DEFAULT, Cost, EngineKind, Table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from beluga.pool import Pool
    from beluga.transfer.engine import Engine

_REPETITIONS = 9
_SHAPES = ((4096, 1), (4096, 64), (65536, 1), (65536, 4), (65536, 16))
"""Fragments of so many bytes, and how many: enough to tell the three parts of a cost apart."""


def table_of(content: object) -> Table:
    """What a file says; of what is something else, nothing."""
    try:
        return {
            (EngineKind(row["engine"]), Direction[row["direction"]]): Cost(*map(float, row["cost"]))
            for row in cast("Sequence[dict[str, Any]]", content or ())
        }
    except (ValueError, KeyError, TypeError):
        return {}


def calibrated(pool: Pool, offset: int, size: int, engines: dict[EngineKind, Engine]) -> Table:
    """The table of this machine: kept, or measured with these engines and kept from now on.

    A measurement writes over ``size`` bytes of the pool at ``offset``, 1 MiB at least, which are
    the caller's to write. Kinds that were not measured have their default. It takes under half a
    second for each engine; where it cannot be kept it is measured again the next time.
    """
    kept = Kept(pool)
    table = dict(table_of(kept.read("costs")))
    missing = {
        kind: engine for kind, engine in engines.items() if (kind, Direction.WRITE) not in table
    }
    for kind, engine in missing.items():
        table |= measure(kind, engine, offset, size)
    if missing:
        rows = [
            {"engine": kind, "direction": direction.name, "cost": dataclasses.astuple(cost)}
            for (kind, direction), cost in table.items()
        ]
        with contextlib.suppress(OSError):
            kept.write("costs", rows)
    return {**DEFAULT, **table}


def measure(kind: EngineKind, engine: Engine, offset: int, size: int) -> Table:
    """What an engine's copies cost, by least squares over a few shapes."""
    memory = np.ones(2 * size, np.uint8)
    shapes = [(fragment, count) for fragment, count in _SHAPES if fragment * count <= size]
    return {
        (kind, direction): fit(
            [(fragment * count, count) for fragment, count in shapes],
            [_time(engine, direction, memory, offset, shape) for shape in shapes],
        )
        for direction in Direction
    }


def fit(shapes: Sequence[tuple[int, int]], times_ns: Sequence[float]) -> Cost:
    """The cost that comes closest to the times of (bytes, fragments), in proportion to each."""
    wanted = np.array(times_ns, float)
    rows = np.array([[1, fragments, size] for size, fragments in shapes], float)
    found = np.linalg.lstsq(rows / wanted[:, None], np.ones(len(wanted)), rcond=None)[0]
    start, fragment, byte = (max(0.0, float(part)) for part in found)
    return Cost(start, fragment, byte)


def _time(
    engine: Engine,
    direction: Direction,
    memory: NDArray[np.uint8],
    offset: int,
    shape: tuple[int, int],
) -> float:
    """Nanoseconds of one copy of (fragment, count): the median of several."""
    fragment, count = shape
    places = memory.ctypes.data + 2 * fragment * np.arange(count)
    plan = plan_blocks(places[None].astype(np.uint64), np.full(count, fragment), np.array([offset]))
    move: Callable[[Any], Any] = (
        engine.gather_write if direction is Direction.WRITE else engine.scatter_read
    )
    times = []
    for _ in range(_REPETITIONS):
        start = time.perf_counter_ns()
        move(plan).wait()
        times.append(time.perf_counter_ns() - start)
    return float(np.median(times))
