# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Direct or staged: measured on this machine's GPU at start, and kept in the user's cache.

Both are right everywhere; which is faster depends on direction, size, number of fragments and
machine (figures for Hopper contradict each other). Pinned memory of this process stands in for the
pool: a CXL pool is slower for both alike.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics

import numpy as np

from beluga import config
from beluga.transfer.cuda.launch import Launcher
from beluga.transfer.cuda.parts import RUN, pack_chunks
from beluga.transfer.cuda.staged import Staging, Way, after
from beluga.transfer.cuda.tables import make_tables
from beluga.transfer.cuda.windows import Bases
from beluga.transfer.plan import Plan, plan_blocks

REPETITIONS = 25
_GAIN = 0.9  # staged takes GPU memory and a second pass over it: it must be faster by a tenth

SIZES = (64 << 10, 512 << 10, 4 << 20)
FRAGMENTS = (1280, 20 << 10, 256 << 10)  # bytes; a sparse row, the paper's, a large one


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """One measurement: medians, in seconds."""

    write: bool
    size: int
    fragments: int
    direct_s: float
    staged_s: float


# Before anything was measured: writes by copy engines, reads of many fragments by the kernel.
DEFAULT = (
    *(Point(True, size, 128, 2.0, 1.0) for size in SIZES[1:]),
    Point(True, SIZES[0], 128, 1.0, 2.0),
    *(Point(False, size, 128, 1.0, 2.0) for size in SIZES),
)


class Calibration:
    """The points, and what they say of a copy."""

    def __init__(self, points: tuple[Point, ...] = DEFAULT) -> None:
        self.points = points

    @classmethod
    def of(cls, launcher: Launcher) -> Calibration:
        """Of this machine: as measured before, or now if it is a GPU."""
        if launcher.driver.name != "cuda":
            return cls()  # what stands in for a GPU says nothing about one
        path = config.cache_dir() / f"cuda-{launcher.driver.identity}-{launcher.grid.blocks}.json"
        try:
            return cls(tuple(Point(**point) for point in json.loads(path.read_text())))
        except (OSError, ValueError, TypeError):
            made = cls(measure(launcher, REPETITIONS))
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = path.with_suffix(".new")
        draft.write_text(json.dumps([dataclasses.asdict(point) for point in made.points]))
        draft.replace(path)
        return made

    def choose(self, *, write: bool, size: int, fragments: int) -> str:
        """``direct`` or ``staged``: what was faster at the nearest point, sizes by their ratio."""

        def far(point: Point) -> float:
            by_size = math.log2(point.size / size)
            return by_size * by_size + math.log2(point.fragments / fragments) ** 2

        nearest = min((point for point in self.points if point.write == write), key=far)
        return "staged" if nearest.staged_s < _GAIN * nearest.direct_s else "direct"


def measure(launcher: Launcher, repetitions: int) -> tuple[Point, ...]:
    """Both ways, both directions, each size by each fragment: some milliseconds per point."""
    driver, buffers = launcher.driver, launcher.buffers
    pinned, engine, buffer = (
        buffers.take_pinned(SIZES[-1]),
        buffers.take(SIZES[-1]),
        buffers.take(SIZES[-1]),
    )
    stream, staging = driver.make_stream(urgent=True), Staging(launcher)
    places = (pinned.address, buffer)
    points = [
        _point(launcher, staging, stream, write, _plan(engine, size, fragment), places, repetitions)
        for write in (True, False)
        for size in SIZES
        for fragment in FRAGMENTS
        if fragment <= size
    ]
    driver.end_stream(stream)
    staging.close()
    buffers.give_pinned(pinned)
    buffers.give(engine)
    buffers.give(buffer)
    return tuple(points)


def _plan(engine: int, size: int, fragment: int) -> Plan:
    count = size // fragment
    addresses = engine + np.arange(count, dtype=np.uint64)[None, :] * np.uint64(fragment)
    return plan_blocks(addresses, np.full(count, fragment), np.zeros(1, np.uint64))


def _point(  # noqa: PLR0913, PLR0917  one measurement's own
    launcher: Launcher,
    staging: Staging,
    stream: int,
    write: bool,
    plan: Plan,
    places: tuple[int, int],
    repetitions: int,
) -> Point:
    tables, (pool, buffer) = make_tables(plan, write=write), places
    driver, packed = launcher.driver, pack_chunks(plan)
    runs = np.array([(pool, 0, packed.size)], RUN)

    def direct() -> None:
        launcher.give_back(launcher.launch(tables, Bases.flat(pool), write=write, stream=stream))

    def staged() -> None:
        copies = staging.copies(write=write)
        if not write:
            after(driver, stream, copies)
        launcher.give_back(staging.move(packed, runs, buffer, Way(write, stream)))
        if write:
            after(driver, copies, stream)

    times: dict[str, list[float]] = {"direct": [], "staged": []}
    first, last = driver.make_event(), driver.make_event()
    for _ in range(repetitions + 1):
        for name, run in (("direct", direct), ("staged", staged)):
            driver.record(first, stream)
            run()
            driver.record(last, stream)
            driver.wait(last)
            times[name].append(driver.elapsed_s(first, last))
    driver.free_event(first)
    driver.free_event(last)
    medians = {name: statistics.median(found[1:]) for name, found in times.items()}
    return Point(write, plan.size, len(plan.pieces), medians["direct"], medians["staged"])
