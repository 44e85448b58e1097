# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Measure whether direct or staged copies are faster on this GPU, and store the result.

Both paths give the same bytes. Which one is faster depends on direction, size, number of fragments
and machine (published figures for Hopper contradict each other). Pinned memory of this process
replaces the pool: a CXL pool would be slower for both paths.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from beluga.transfer.calibrate.calibration_cache import CalibrationCache
from beluga.transfer.calibrate.cost import Cost
from beluga.transfer.engines.cuda.launch import Launcher
from beluga.transfer.engines.cuda.parts import RUN, pack_chunks
from beluga.transfer.engines.cuda.staged import DirectedStream, Staging, after
from beluga.transfer.engines.cuda.tables import make_tables
from beluga.transfer.engines.cuda.windows import Bases
from beluga.transfer.plan.plan import Plan, plan_blocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from beluga.pool import Pool

# From the Beluga paper: a custom kernel up to 24 KB, above that a copy engine, which takes 10.55 us
# for 16 KB, of which 2.68 us are data.
COSTS = {"direct": Cost(5000, 5, 1 / 23), "staged": Cost(5120, 5, 1 / 26)}
"""Default costs of each path without measurements."""
REPETITIONS = 25
_GAIN = 0.9  # staged copies need GPU memory and a second pass, so they must save at least a tenth

SIZES = (64 << 10, 512 << 10, 4 << 20)
FRAGMENTS = (1280, 20 << 10, 256 << 10)  # bytes; a sparse row, the paper's, a large one


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """One measurement of both paths, as medians in seconds."""

    write: bool
    size: int
    fragments: int
    direct_s: float
    staged_s: float


class Calibration:
    """Chooses a path by measured points, or by default costs if there are none."""

    def __init__(self, points: tuple[Point, ...] = ()) -> None:
        self.points = points

    @classmethod
    def of(cls, launcher: Launcher, pool: Pool) -> Calibration:
        """Return the calibration of this machine: the stored one, or one that is measured now.

        Only a GPU is measured. If the result cannot be stored, the next process measures again.
        """
        if launcher.driver.name != "cuda":
            return cls()  # a stand-in's times do not apply to a GPU
        kept, part = (
            CalibrationCache(pool),
            f"{launcher.driver.identity}, {launcher.grid.blocks} blocks",
        )
        if found := points_of(kept.read(part)):
            return cls(found)
        made = cls(measure(launcher, REPETITIONS))
        with contextlib.suppress(OSError):
            kept.write(part, [dataclasses.asdict(point) for point in made.points])
        return made

    def choose(self, *, write: bool, size: int, fragments: int) -> str:
        """Return ``direct`` or ``staged``, the faster at the nearest point (sizes by ratio)."""
        if not self.points:
            return min(COSTS, key=lambda path: COSTS[path].of(size, fragments))

        def far(point: Point) -> float:
            by_size = math.log2(point.size / size)
            return by_size * by_size + math.log2(point.fragments / fragments) ** 2

        nearest = min((point for point in self.points if point.write == write), key=far)
        return "staged" if nearest.staged_s < _GAIN * nearest.direct_s else "direct"


def points_of(content: object) -> tuple[Point, ...]:
    """Return the points that a file contains, or none if it lacks a direction or is damaged."""
    try:
        points = tuple(Point(**row) for row in cast("Sequence[dict[str, Any]]", content or ()))
        right = all(
            point.size >= 1
            and point.fragments >= 1
            and 0 < point.direct_s < math.inf
            and 0 < point.staged_s < math.inf
            for point in points
        )
    except TypeError:
        return ()
    return points if right and {point.write for point in points} == {True, False} else ()


def measure(launcher: Launcher, repetitions: int) -> tuple[Point, ...]:
    """Measure both paths, in both directions, for each size and fragment, in milliseconds each."""
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
        launcher.give_back(staging.move(packed, runs, buffer, DirectedStream(write, stream)))
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
