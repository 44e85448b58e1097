# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The summary of a comparison: a load, the two runs that a report shows, and a sentence."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from beluga import page
from beluga.router import DEFAULT_POLICY
from beluga.simulate.goodput import goodput
from beluga.simulate.result import Row

# The default objective of a report for the p90 of the time to first token.
OBJECTIVE_S = 5.0
_ALIKE = 1.05  # two times with a smaller ratio count as equal


@dataclasses.dataclass(frozen=True, slots=True)
class Summary:
    """One load, with the run on the pool and the run on split DRAM that stand for it."""

    speed: float
    pool: Row | None
    split: Row | None

    @property
    def shown(self) -> Row | None:
        """The run whose figures are shown first."""
        return self.pool or self.split


def at_speed(rows: Sequence[Row], memory: str, speed: float) -> list[Row]:
    """Return the means on a memory at a load."""
    return [row for row in rows if row.seed is None and (row.memory, row.speed) == (memory, speed)]


def summarize(rows: Sequence[Row], objective_s: float) -> Summary:
    """Choose the highest load at which some run on a pool (or, without one, on split DRAM) meets
    the objective, else the lowest load. The pool is judged by the default policy, where it ran;
    split DRAM by its best, so that it is compared at its strongest.
    """
    means = [row for row in rows if row.seed is None]
    speeds = sorted({row.speed for row in means}) or [1.0]
    memory = "pool" if any(row.memory == "pool" for row in means) else "split"
    held = [
        row.speed
        for row in means
        if row.memory == memory and row.ttft_p90_s is not None and row.ttft_p90_s <= objective_s
    ]
    speed = max(held, default=speeds[0])
    pool = at_speed(means, "pool", speed)
    usual = [row for row in pool if row.policy == DEFAULT_POLICY]
    return Summary(speed, _best(usual or pool), _best(at_speed(means, "split", speed)))


def _best(rows: Sequence[Row]) -> Row | None:
    served = [row for row in rows if row.ttft_mean_s is not None]
    return min(served, key=lambda row: row.ttft_mean_s or 0.0, default=None)


def sustained_load(
    rows: Sequence[Row], memory: str, policy: str, objective_s: float
) -> float | None:
    """Return the load that a policy sustains within the objective, as a multiple of the trace's."""
    points = [
        (row.speed, row.ttft_p90_s)
        for row in rows
        if row.seed is None and (row.memory, row.policy) == (memory, policy)
        if row.ttft_p90_s is not None
    ]
    return goodput(points, objective_s)


def headline(summary: Summary, workers: int) -> str:
    """Return the main result of the comparison as a sentence."""
    engines = "one engine begins" if workers == 1 else f"{workers} engines begin"
    pool, split = summary.pool, summary.split
    if pool is None and split is None:
        return "No request was served."
    only = pool or split
    if pool is None or split is None:
        place = "With a shared pool" if pool else "Without a shared pool"
        late = ", and cannot keep up" if only and only.saturated else ""
        return f"{place} {engines} to answer after {_time(only)} on average at this load{late}."
    same = "the same engine begins" if workers == 1 else f"the same {engines}"
    if pool.saturated and split.saturated:
        return (
            f"At this load {workers} engines cannot keep up: requests queue for minutes, "
            f"{_time(pool)} on average with a shared pool and {_time(split)} without."
        )
    ratio = (split.ttft_mean_s or 0.0) / (pool.ttft_mean_s or 1.0)
    if 1 / _ALIKE <= ratio <= _ALIKE:
        return (
            f"A shared pool makes no difference here: {same} to answer after {_time(pool)} "
            f"with it and {_time(split)} without."
        )
    if ratio < 1:
        return (
            f"A shared pool does not help here: {same} to answer after {_time(pool)} with it "
            f"and {_time(split)} without."
        )
    late = " Without it they cannot keep up." if split.saturated else ""
    return (
        f"With a shared pool {same} to answer after {_time(pool)} instead of {_time(split)} "
        f"at this load.{late}"
    )


def _time(row: Row | None) -> str:
    return page.seconds((row and row.ttft_mean_s) or 0.0)
