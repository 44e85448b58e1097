# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The content of a chart, independent of the drawing: its axes with units, its lines or bars."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from beluga.page.units import plain

_MOST_TICKS = 6


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis. The label has the unit unless ``show`` adds it to each value. Ticks are automatic
    unless ``ticks`` has them.
    """

    label: str
    log: bool = False
    show: Callable[[float], str] = plain
    ticks: Sequence[float] | None = None


@dataclass(frozen=True, slots=True)
class Line:
    """A line through points. A value of None leaves a gap. ``color`` is a place in the palette; a
    dashed line is a limit, or another value that was not measured here.
    """

    name: str
    points: Sequence[tuple[float, float | None]]
    color: int = 0
    dashed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LineChart:
    """Lines over a common axis."""

    title: str
    x: Axis
    y: Axis
    lines: Sequence[Line]
    note: str = ""

    @property
    def has_values(self) -> bool:
        """Whether there is a point to draw."""
        return any(y is not None for line in self.lines for _, y in line.points)


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar of a series. None is a value that is absent. ``least`` and ``most`` are its spread, and
    ``limit`` is the attainable maximum.
    """

    value: float | None
    series: int = 0
    least: float | None = None
    most: float | None = None
    limit: float | None = None

    def text(self, show: Callable[[float], str]) -> str:
        """Show the value, and the limit: 16.9 of 20.4 GB/s."""
        if self.value is None:
            return "no value"
        value = show(self.value)
        if self.limit is None:
            return value
        limit = show(self.limit)
        number, _, unit = value.partition(" ")
        return f"{number if limit.endswith(f' {unit}') else value} of {limit}"

    @property
    def extent(self) -> float:
        """The greatest value to be drawn."""
        return max(one for one in (self.value, self.most, self.limit, 0.0) if one is not None)


@dataclass(frozen=True, slots=True)
class BarGroup:
    """The bars of one category."""

    label: str
    bars: Sequence[Bar]


@dataclass(frozen=True, slots=True, kw_only=True)
class BarChart:
    """Horizontal bars. ``series`` names the colors."""

    title: str
    axis: Axis
    groups: Sequence[BarGroup]
    series: Sequence[str] = ()
    note: str = ""
    limit: str = ""  # the meaning of the bars' limits
    spread: str = ""  # the meaning of their spreads

    @property
    def has_values(self) -> bool:
        """Whether there is a bar to draw."""
        return any(bar.value is not None for group in self.groups for bar in group.bars)


Chart = LineChart | BarChart


@dataclass(frozen=True, slots=True)
class AxisScale:
    """Maps values to an axis: 0 is its start and 1 its end."""

    axis: Axis
    least: float
    most: float
    ticks: Sequence[float] = field(default=())

    def place(self, value: float) -> float:
        """Return a value's position."""
        if self.axis.log:
            return math.log(value / self.least) / math.log(self.most / self.least)
        return (value - self.least) / (self.most - self.least)


def scale_of(axis: Axis, values: Sequence[float], *, from_zero: bool = True) -> AxisScale:
    """Return a scale that covers all values, with its ticks."""
    usable = [value for value in values if not axis.log or value > 0]
    if axis.log and usable:
        return _log_scale(axis, min(usable), max(usable))
    least = 0.0 if from_zero else min(usable, default=0.0)
    most = max(usable, default=0.0)
    most = most if most > least else least + 1
    if axis.ticks is not None:
        return AxisScale(axis, least, most, axis.ticks)
    step = _step(most - least)
    end = math.ceil(most / step - 1e-9) * step
    start = math.floor(least / step + 1e-9) * step
    count = round((end - start) / step)
    ticks = [start + at * step for at in range(count + 1)]
    return AxisScale(Axis(axis.label, False, axis.show), start, end, ticks)


def _log_scale(axis: Axis, least: float, most: float) -> AxisScale:
    if axis.ticks is not None:
        edge = 1.0 if most > least else 2.0
        return AxisScale(axis, least / edge, most * edge, axis.ticks)
    low = 10.0 ** math.floor(math.log10(least) + 1e-9)
    high = 10.0 ** math.ceil(math.log10(most) - 1e-9)
    high = high if high > low else 10 * low
    decades = round(math.log10(high / low))
    steps = (1,) if decades > 3 else (1, 3) if decades > 1 else (1, 2, 5)
    every = -(-decades // _MOST_TICKS) or 1
    ticks = [low * 10**at * step for at in range(0, decades, every) for step in steps]
    return AxisScale(axis, low, high, [*ticks, high])


def _step(extent: float) -> float:
    """Return the step of at most that many round ticks."""
    rough = extent / _MOST_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    for factor in (1, 2, 5):
        if factor * power >= rough * (1 - 1e-9):
            return factor * power
    return 10 * power
