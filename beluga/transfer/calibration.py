# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""What copying costs on this machine: measured once, in a fraction of a second, and kept.

Kept in the user's cache directory, by CPU model, instructions in use and kind of memory; a file
that cannot be read is measured again. Nothing here runs in a request's path: who wants a measured
table asks for it when the engine starts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from beluga import config
from beluga.primitives import isa
from beluga.transfer.plan import plan_blocks
from beluga.transfer.planner import DEFAULT, Cost, Course, Table, Way

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from beluga.pool import Pool
    from beluga.transfer.engine import Engine

_VERSION = 1
_REPETITIONS = 9
_SHAPES = ((4096, 1), (4096, 64), (65536, 1), (65536, 4), (65536, 16))
"""Fragments of so many bytes, and how many: enough to tell the three parts of a cost apart."""


def kept(pool: Pool) -> Path:
    """Where this machine's table for a pool's kind of memory is, or would be."""
    name = json.dumps([_cpu_model(), isa(), sorted({d.kind for d in pool.devices})])
    return config.cache_dir() / f"copy-{hashlib.sha256(name.encode()).hexdigest()[:16]}.json"


def load(path: Path) -> Table | None:
    """A kept table; None if there is none, or it is not one."""
    try:
        found = json.loads(path.read_text())
        if found["version"] != _VERSION:
            return None
        return {
            (Way(row["way"]), Course(row["course"])): Cost(*(float(cost) for cost in row["cost"]))
            for row in found["costs"]
        }
    except (OSError, ValueError, KeyError, TypeError):
        return None


def keep(path: Path, table: Table) -> None:
    """Keep a table, whole or not at all. Raises OSError where it cannot be."""
    rows = [
        {"way": way, "course": course, "cost": dataclasses.astuple(cost)}
        for (way, course), cost in table.items()
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps({"version": _VERSION, "costs": rows}))
    part.replace(path)


def calibrated(pool: Pool, offset: int, size: int, engines: dict[Way, Engine]) -> Table:
    """The table of this machine: kept, or measured with these engines and kept from now on.

    A measurement writes over ``size`` bytes of the pool at ``offset``, 1 MiB at least, which are
    the caller's to write. Ways that were not measured have their default. It takes under half a
    second for each engine; where it cannot be kept it is measured again the next time.
    """
    path = kept(pool)
    table = dict(load(path) or {})
    missing = {
        way: engine for way, engine in engines.items() if (way, Course.GATHER_WRITE) not in table
    }
    for way, engine in missing.items():
        table |= measure(way, engine, offset, size)
    if missing:
        with contextlib.suppress(OSError):
            keep(path, table)
    return {**DEFAULT, **table}


def measure(way: Way, engine: Engine, offset: int, size: int) -> Table:
    """What an engine's copies cost, by least squares over a few shapes."""
    memory = np.ones(2 * size, np.uint8)
    shapes = [(fragment, count) for fragment, count in _SHAPES if fragment * count <= size]
    return {
        (way, course): fit(
            [(fragment * count, count) for fragment, count in shapes],
            [_time(engine, course, memory, offset, shape) for shape in shapes],
        )
        for course in Course
    }


def fit(shapes: Sequence[tuple[int, int]], times_ns: Sequence[float]) -> Cost:
    """The cost that comes closest to the times of (bytes, fragments), in proportion to each."""
    wanted = np.array(times_ns, float)
    rows = np.array([[1, fragments, size] for size, fragments in shapes], float)
    found = np.linalg.lstsq(rows / wanted[:, None], np.ones(len(wanted)), rcond=None)[0]
    start, fragment, byte = (max(0.0, float(part)) for part in found)
    return Cost(start, fragment, byte)


def _time(
    engine: Engine, course: Course, memory: NDArray[np.uint8], offset: int, shape: tuple[int, int]
) -> float:
    """Nanoseconds of one copy of (fragment, count): the median of several."""
    fragment, count = shape
    places = memory.ctypes.data + 2 * fragment * np.arange(count)
    plan = plan_blocks(places[None].astype(np.uint64), np.full(count, fragment), np.array([offset]))
    move: Callable[[Any], Any] = getattr(engine, course)
    times = []
    for _ in range(_REPETITIONS):
        start = time.perf_counter_ns()
        move(plan).wait()
        times.append(time.perf_counter_ns() - start)
    return float(np.median(times))


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return " ".join(line.split(":", 1)[1].split())
    return "unknown"
