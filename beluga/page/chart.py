# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Charts: their content (axes with units, lines or bars), drawn as SVG, and numbers for display
with three digits and a unit. A page has each chart's values in a table, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape

_TIMES = ((60.0, 60.0, "min"), (1.0, 1.0, "s"), (1e-3, 1e-3, "ms"), (1e-6, 1e-6, "us"))
# The least values of each unit: 9,999 is as readable as 10 k.
_LARGE = ((1e12, 1e12, " T"), (1e9, 1e9, " G"), (1e6, 1e6, " M"), (1e4, 1e3, " k"))


def plain(value: float) -> str:
    """Show three digits, or all that a number has before its point: 0.0123, 1.5, 12,345."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def seconds(value: float) -> str:
    """Show a time in the largest unit of which it has at least one: 2.3 min, 1.4 s, 81 us."""
    if value <= 0:
        return "0 s"
    for lower, scale, unit in _TIMES:
        # Two minutes and more are minutes; 90 s is easier to compare with other seconds.
        if value >= lower * (2 if unit == "min" else 0.9995):
            return f"{plain(value / scale)} {unit}"
    return f"{plain(value / 1e-9)} ns"


def quantity(value: float, unit: str) -> str:
    """Show a large number by its thousands, millions and so on: 29 M/s, 1.25 G tokens, 12."""
    for lower, scale, prefix in _LARGE:
        if abs(value) >= lower:
            return f"{plain(value / scale)}{prefix}{' ' if unit[:1].isalpha() else ''}{unit}"
    return f"{plain(value)}{' ' if unit[:1].isalpha() else ''}{unit}"


def percent(value: float) -> str:
    """Show a share: 0.123 is 12.3 %."""
    return f"{100 * value:.3g} %"


_TICKS_MAX = 6


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
    low: float | None = None
    high: float | None = None
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
        return max(value for value in (self.value, self.high, self.limit, 0.0) if value is not None)


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
    low: float
    high: float
    ticks: Sequence[float] = field(default=())

    def position(self, value: float) -> float:
        """Return a value's position."""
        if self.axis.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def scale_of(axis: Axis, values: Sequence[float], *, from_zero: bool = True) -> AxisScale:
    """Return a scale that covers all values, with its ticks."""
    usable = [value for value in values if not axis.log or value > 0]
    if axis.log and usable:
        return _log_scale(axis, min(usable), max(usable))
    low = 0.0 if from_zero else min(usable, default=0.0)
    high = max(usable, default=0.0)
    high = high if high > low else low + 1
    if axis.ticks is not None:
        return AxisScale(axis, low, high, axis.ticks)
    step = _step(high - low)
    end = math.ceil(high / step - 1e-9) * step
    start = math.floor(low / step + 1e-9) * step
    count = round((end - start) / step)
    ticks = [start + at * step for at in range(count + 1)]
    return AxisScale(Axis(axis.label, False, axis.show), start, end, ticks)


def _log_scale(axis: Axis, smallest: float, largest: float) -> AxisScale:
    if axis.ticks is not None:
        edge = 1.0 if largest > smallest else 2.0
        return AxisScale(axis, smallest / edge, largest * edge, axis.ticks)
    low = 10.0 ** math.floor(math.log10(smallest) + 1e-9)
    high = 10.0 ** math.ceil(math.log10(largest) - 1e-9)
    high = high if high > low else 10 * low
    decades = round(math.log10(high / low))
    steps = (1,) if decades > 3 else (1, 3) if decades > 1 else (1, 2, 5)
    every = -(-decades // _TICKS_MAX) or 1
    ticks = [low * 10**at * step for at in range(0, decades, every) for step in steps]
    return AxisScale(axis, low, high, [*ticks, high])


def _step(extent: float) -> float:
    """Return the step of at most that many round ticks."""
    rough = extent / _TICKS_MAX
    power = 10.0 ** math.floor(math.log10(rough))
    for factor in (1, 2, 5):
        if factor * power >= rough * (1 - 1e-9):
            return factor * power
    return 10 * power


WIDTH = 440  # units of the drawing; a page scales it, and a telephone shows about 360 of them
_HEIGHT = 250  # of a line chart
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 14, 22, 44
_VALUE, _OF_LIMIT = 84, 132  # space for the value after a bar
_BAR, _GAP, _LABEL = 13, 3, 16
COLORS = 7  # classes s0 to s6
# Dashes and markers distinguish lines, too, and not only colors.
DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 2", "12 4", "1 2")


def svg(chart: Chart) -> str:
    """Draw a chart. Its text alternative names it; the page has its values in a table."""
    if isinstance(chart, LineChart):
        height, parts = _HEIGHT, "".join(_lines(chart))
    else:
        height, parts = _bars(chart)
    label = escape(f"{chart.title}. The values are in the table below.", quote=True)
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}" '
        f'xmlns="http://www.w3.org/2000/svg">{parts}</svg>'
    )


def marker(series: int, x: float, y: float, title: str = "") -> str:
    """Draw the mark of a series at a point."""
    shape = series % 4
    label = f"<title>{escape(title)}</title>" if title else ""
    name = f'class="m s{series % COLORS}"'
    if shape == 0:
        return f'<circle {name} cx="{x:.1f}" cy="{y:.1f}" r="3">{label}</circle>'
    if shape == 1:
        position = f'x="{x - 2.8:.1f}" y="{y - 2.8:.1f}" width="5.6" height="5.6"'
        return f"<rect {name} {position}>{label}</rect>"
    if shape == 2:
        return f'<path {name} d="M{x:.1f} {y - 3.6:.1f}l3.6 6.4h-7.2z">{label}</path>'
    return f'<path {name} d="M{x:.1f} {y - 4:.1f}l4 4l-4 4l-4 -4z">{label}</path>'


def dashes(line: Line) -> str:
    """Return the attribute for the dashes of a line."""
    pattern = "4 4" if line.dashed else DASHES[line.color % len(DASHES)]
    return f' stroke-dasharray="{pattern}"' if pattern else ""


def _lines(chart: LineChart) -> Iterator[str]:
    points = [(x, y) for line in chart.lines for x, y in line.points if y is not None]
    zero = not chart.x.log and chart.x.ticks is None
    across = scale_of(chart.x, [x for x, _ in points], from_zero=zero)
    up = scale_of(chart.y, [y for _, y in points])
    width, height = WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    yield from _grid(across, up, width, height)
    yield f'<text class="n" x="4" y="13">{escape(chart.y.label)}</text>'
    position = f'x="{_LEFT + width / 2:.0f}" y="{_HEIGHT - 6}" text-anchor="middle"'
    yield f'<text class="n" {position}>{escape(chart.x.label)}</text>'
    for line in chart.lines:
        runs = _runs(line, across, up, width, height)
        path = "".join(
            "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y, _ in run) for run in runs if len(run) > 1
        )
        if path:
            yield f'<path class="l s{line.color % COLORS}" d="{path}"{dashes(line)}/>'
        few = not line.dashed and sum(map(len, runs)) <= 24
        for run in runs:
            for x, y, title in run:
                if few or len(run) == 1:
                    yield marker(line.color, x, y, title)


def _runs(
    line: Line, across: AxisScale, up: AxisScale, width: float, height: float
) -> list[list[tuple[float, float, str]]]:
    """Return the unbroken parts of a line as points of the drawing with their texts."""
    runs: list[list[tuple[float, float, str]]] = [[]]
    for x, y in line.points:
        if y is None or (up.axis.log and y <= 0) or (across.axis.log and x <= 0):
            runs.append([])
            continue
        title = f"{line.name}: {up.axis.show(y)} at {across.axis.show(x)}"
        point = (_LEFT + across.position(x) * width, _TOP + (1 - up.position(y)) * height, title)
        runs[-1].append(point)
    return [run for run in runs if run]


def _grid(across: AxisScale, up: AxisScale, width: float, height: float) -> Iterator[str]:
    for tick in up.ticks:
        y = _TOP + (1 - up.position(tick)) * height
        yield f'<path class="g" d="M{_LEFT} {y:.1f}h{width}"/>'
        text = escape(up.axis.show(tick))
        yield f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>'
    for tick, text in _apart(across, width):
        x = _LEFT + across.position(tick) * width
        yield f'<path class="g" d="M{x:.1f} {_TOP}v{height}"/>'
        anchor = "end" if x > WIDTH - 30 else "middle"
        position = f'x="{x:.1f}" y="{_TOP + height + 16}" text-anchor="{anchor}"'
        yield f"<text {position}>{escape(text)}</text>"


def _apart(across: AxisScale, width: float) -> Iterator[tuple[float, str]]:
    """Yield the ticks whose texts do not touch the one before."""
    free = -1e9
    for tick in across.ticks:
        text = across.axis.show(tick)
        x, long = across.position(tick) * width, 7.2 * len(text)
        start = max(x - long / 2, 0.0)
        if start >= free:
            yield tick, text
            free = start + long + 8


def _bars(chart: BarChart) -> tuple[int, str]:
    """Draw each name above its bars. Returns the height, too."""
    bars = [bar for group in chart.groups for bar in group.bars]
    logged = [bar.value for bar in bars if bar.value] if chart.axis.log else [0.0]
    scale = scale_of(chart.axis, [*(bar.extent for bar in bars), *logged])
    width = WIDTH - 4 - (_OF_LIMIT if chart.limit else _VALUE)
    top, parts = 4, []
    for group in chart.groups:
        parts.append(f'<text x="0" y="{top + 11}">{escape(_short(group.label))}</text>')
        top += _LABEL
        for bar in group.bars:
            series = f"{chart.series[bar.series]}, " if chart.series else ""
            parts += _bar(bar, f"{group.label}: {series}", scale, top, width)
            top += _BAR + _GAP
        top += 5
    bottom = top + 2
    for tick in scale.ticks:
        x = 4 + scale.position(tick) * width
        parts.insert(0, f'<path class="g" d="M{x:.1f} 2V{bottom}"/>')
    for tick, text in _apart(scale, width):
        x = 4 + scale.position(tick) * width
        anchor = "start" if x < 12 else "middle"
        position = f'x="{x:.1f}" y="{bottom + 14}" text-anchor="{anchor}"'
        parts.append(f'<text class="t" {position}>{escape(text)}</text>')
    label = escape(chart.axis.label + " (logarithmic)" * chart.axis.log)
    parts.append(f'<text class="n" x="4" y="{bottom + 31}">{label}</text>')
    return bottom + 38, "".join(parts)


def _bar(bar: Bar, name: str, scale: AxisScale, top: int, width: float) -> Iterator[str]:
    if bar.value is None or (scale.axis.log and bar.value <= 0):
        yield f'<text class="v" x="8" y="{top + 11}">no value</text>'
        return
    length = max(scale.position(bar.value) * width, 1.0)
    text = bar.text(scale.axis.show)
    label = escape(f"{name}{text}")
    yield (
        f'<rect class="b s{bar.series % COLORS}" x="4" y="{top}" width="{length:.1f}" '
        f'height="{_BAR}"><title>{label}</title></rect>'
    )
    end = length
    if bar.low is not None and bar.high is not None and bar.high > bar.low:
        first, last = (4 + max(scale.position(end), 0) * width for end in (bar.low, bar.high))
        yield f'<path class="e" d="M{first:.1f} {top + _BAR / 2}H{last:.1f}"/>'
        end = max(end, last - 4)
    if bar.limit is not None and bar.limit > 0:
        x = 4 + scale.position(bar.limit) * width
        yield f'<path class="e" d="M{x:.1f} {top - 2}v{_BAR + 4}"/>'
        end = max(end, x - 4)
    yield f'<text class="v" x="{end + 10:.1f}" y="{top + 11}">{escape(text)}</text>'


def _short(label: str, length_max: int = 66) -> str:
    return label if len(label) <= length_max else f"{label[: length_max - 1]}…"


def swatch(series: int, line: Line | None = None) -> str:
    """Draw the legend entry of a series: a square, or a piece of its line with its mark."""
    if line is None:
        drawn = f'<rect class="b s{series % COLORS}" x="2" y="2" width="12" height="10"/>'
        return f'<svg class="k" width="16" height="14" aria-hidden="true">{drawn}</svg>'
    mark = "" if line.dashed else marker(series, 15, 7)
    drawn = f'<path class="l s{series % COLORS}" d="M0 7H30"{dashes(line)}/>{mark}'
    return f'<svg class="k" width="30" height="14" aria-hidden="true">{drawn}</svg>'


def values(chart: Chart) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Return the head and the rows of a chart's table."""
    if isinstance(chart, LineChart):
        names = [line.name for line in chart.lines]
        by_x: dict[float, dict[int, str]] = {}
        for at, line in enumerate(chart.lines):
            for x, y in line.points:
                if y is not None:
                    by_x.setdefault(x, {})[at] = chart.y.show(y)
        rows = [
            [chart.x.show(x), *(own.get(at, "-") for at in range(len(names)))]
            for x, own in sorted(by_x.items())
        ]
        return [chart.x.label, *names], rows
    series = chart.series or [chart.axis.label]
    limit = [chart.limit] if chart.limit else []
    rows = []
    for group in chart.groups:
        own = {bar.series: bar for bar in group.bars}
        cells = [_shown(chart, own[at].value) if at in own else "-" for at in range(len(series))]
        limits = [_shown(chart, group.bars[0].limit)] if limit else []
        rows.append([group.label, *cells, *limits])
    return ["", *series, *limit], rows


def _shown(chart: BarChart, value: float | None) -> str:
    return "-" if value is None else chart.axis.show(value)
