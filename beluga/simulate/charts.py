# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The charts of a report: policies side by side, the course of a run, and a sweep of loads."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from beluga import page
from beluga.simulate.options import MEMORIES
from beluga.simulate.result import Row
from beluga.simulate.summary import Summary, at_speed
from beluga.simulate.trace import Trace

NAMES = {"pool": "shared pool", "split": "split DRAM"}
_COLOR = {"pool": 0, "split": 1}
# field, title, the axis's label, how a value is shown
_FIGURES: tuple[tuple[str, str, str, Callable[[float], str]], ...] = (
    ("ttft_mean_s", "Mean time to first token", "time", page.seconds),
    ("ttft_p90_s", "90th percentile of the time to first token", "time", page.seconds),
    ("ttft_p99_s", "99th percentile of the time to first token", "time", page.seconds),
    ("tpot_mean_ms", "Time per further token", "time", lambda ms: page.seconds(ms / 1e3)),
    ("hit_rate", "Prompt blocks that were found", "share of all blocks", page.percent),
    ("load_imbalance", "Busiest engine, compared with the mean", "ratio", page.plain),
)


def side_by_side(rows: Sequence[Row], speed: float) -> list[page.BarChart]:
    """Return bars for each policy, on the pool and on split DRAM, at one load."""
    memories = [memory for memory in MEMORIES if at_speed(rows, memory, speed)]
    found = {(row.policy, row.memory): row for m in memories for row in at_speed(rows, m, speed)}
    policies = list(dict.fromkeys(policy for policy, _ in found))
    many = any(row.spread and _seeds(rows) > 1 for row in found.values())
    return [
        page.BarChart(
            title=title,
            axis=page.Axis(label, show=show),
            series=[NAMES[memory] for memory in memories],
            groups=[
                page.BarGroup(
                    policy,
                    [
                        _bar(found[policy, memory], field, at)
                        for at, memory in enumerate(memories)
                        if (policy, memory) in found
                    ],
                )
                for policy in policies
            ],
            spread="from the least to the greatest of the seeds" if many else "",
        )
        for field, title, label, show in _FIGURES
        if any(getattr(row, field) for row in found.values())
    ]


def _bar(row: Row, field: str, series: int) -> page.Bar:
    spread = (row.spread or {}).get(field)
    ends = (spread.min, spread.max) if spread else (None, None)
    return page.Bar(getattr(row, field), series, *ends)


def _seeds(rows: Sequence[Row]) -> int:
    return len({row.seed for row in rows} - {None})


def courses(summary: Summary) -> list[page.LineChart]:
    """Return curves over the simulated time of the two runs that are compared."""
    runs = [row for row in (summary.pool, summary.split) if row and row.course]
    longest = max((row.course.end_s[-1] for row in runs if row.course), default=0.0)
    minutes = longest > 600
    axis = page.Axis(f"simulated time, {'minutes' if minutes else 'seconds'}")
    shown: tuple[tuple[str, str, page.Axis, str], ...] = (
        ("waiting", "Requests that wait for their first token",
         page.Axis("requests"), "On average over each interval; these are queued or prefilled."),
        ("hit_rate", "Prompt blocks that were found", page.Axis("share", show=page.percent),
         "Of the requests that arrived in each interval."),
        ("ttft_mean_s", "Mean time to first token", page.Axis("", show=page.seconds),
         "Of the requests that arrived in each interval."),
    )  # fmt: skip
    return [
        page.LineChart(
            title=title,
            note=note,
            x=axis,
            y=y,
            lines=[
                page.Line(name_of(row), list(_points(row, field, minutes)), _COLOR[row.memory])
                for row in runs
            ],
        )
        for field, title, y, note in shown
        if runs
    ]


def _points(row: Row, field: str, minutes: bool) -> Iterator[tuple[float, float | None]]:
    course = row.course
    if course is None:
        return
    step = course.end_s[0]
    for end_s, value in zip(course.end_s, getattr(course, field), strict=True):
        yield (end_s - step / 2) / (60 if minutes else 1), value


def name_of(row: Row) -> str:
    """Return a name of a run for a key."""
    return f"{NAMES[row.memory]} ({row.policy})"


def rate_of(trace: Trace, speed: float) -> float:
    """Return the requests that arrive in a second."""
    return len(trace) * speed / trace.duration_s if trace.duration_s > 0 else math.nan


def sweep(
    rows: Sequence[Row], trace: Trace, summary: Summary, objective_s: float
) -> list[page.LineChart]:
    """Return curves over the load of the policies that are compared."""
    chosen = [row for row in (summary.pool, summary.split) if row]
    speeds = sorted({row.speed for row in rows})
    loads = {speed: rate_of(trace, speed) for speed in speeds}
    x = page.Axis("requests that arrive in a second", ticks=[loads[speed] for speed in speeds])
    charts = []
    for field, title, y in (
        ("ttft_mean_s", "Mean time to first token", page.Axis("", log=True, show=page.seconds)),
        ("ttft_p90_s", "90th percentile of the time to first token",
         page.Axis("", log=True, show=page.seconds)),
        ("throughput_per_s", "Requests served", page.Axis("requests per second")),
    ):  # fmt: skip
        lines = [_over_load(rows, row, field, loads) for row in chosen]
        ends = (loads[speeds[0]], loads[speeds[-1]])
        if field == "ttft_p90_s":
            aim = [(load, objective_s) for load in ends]
            lines.append(page.Line(f"objective, {page.seconds(objective_s)}", aim, 6, dashed=True))
        charts.append(page.LineChart(title=title, x=x, y=y, lines=lines))
    return charts


def _over_load(
    rows: Sequence[Row], chosen: Row, field: str, loads: dict[float, float]
) -> page.Line:
    points = [
        (load, getattr(row, field))
        for speed, load in loads.items()
        for row in at_speed(rows, chosen.memory, speed)
        if row.policy == chosen.policy
    ]
    return page.Line(name_of(chosen), points, _COLOR[chosen.memory])
