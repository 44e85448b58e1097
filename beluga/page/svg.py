# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Charts as SVG. Colors are classes, so that the page's style can follow the reader's scheme."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from beluga.page.chart import Axis, AxisScale, Bar, BarChart, Chart, Line, LineChart, scale_of

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
        place = f'x="{x - 2.8:.1f}" y="{y - 2.8:.1f}" width="5.6" height="5.6"'
        return f"<rect {name} {place}>{label}</rect>"
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
    place = f'x="{_LEFT + width / 2:.0f}" y="{_HEIGHT - 6}" text-anchor="middle"'
    yield f'<text class="n" {place}>{escape(chart.x.label)}</text>'
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
        place = (_LEFT + across.place(x) * width, _TOP + (1 - up.place(y)) * height, title)
        runs[-1].append(place)
    return [run for run in runs if run]


def _grid(across: AxisScale, up: AxisScale, width: float, height: float) -> Iterator[str]:
    for tick in up.ticks:
        y = _TOP + (1 - up.place(tick)) * height
        yield f'<path class="g" d="M{_LEFT} {y:.1f}h{width}"/>'
        text = escape(up.axis.show(tick))
        yield f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>'
    for tick, text in _apart(across, width):
        x = _LEFT + across.place(tick) * width
        yield f'<path class="g" d="M{x:.1f} {_TOP}v{height}"/>'
        anchor = "end" if x > WIDTH - 30 else "middle"
        place = f'x="{x:.1f}" y="{_TOP + height + 16}" text-anchor="{anchor}"'
        yield f"<text {place}>{escape(text)}</text>"


def _apart(across: AxisScale, width: float) -> Iterator[tuple[float, str]]:
    """Yield the ticks whose texts do not touch the one before."""
    free = -1e9
    for tick in across.ticks:
        text = across.axis.show(tick)
        x, long = across.place(tick) * width, 7.2 * len(text)
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
        x = 4 + scale.place(tick) * width
        parts.insert(0, f'<path class="g" d="M{x:.1f} 2V{bottom}"/>')
    for tick, text in _apart(scale, width):
        x = 4 + scale.place(tick) * width
        anchor = "start" if x < 12 else "middle"
        place = f'x="{x:.1f}" y="{bottom + 14}" text-anchor="{anchor}"'
        parts.append(f'<text class="t" {place}>{escape(text)}</text>')
    label = escape(_axis_label(chart.axis))
    parts.append(f'<text class="n" x="4" y="{bottom + 31}">{label}</text>')
    return bottom + 38, "".join(parts)


def _axis_label(axis: Axis) -> str:
    return f"{axis.label} (logarithmic)" if axis.log else axis.label


def _bar(bar: Bar, name: str, scale: AxisScale, top: int, width: float) -> Iterator[str]:
    if bar.value is None or (scale.axis.log and bar.value <= 0):
        yield f'<text class="v" x="8" y="{top + 11}">no value</text>'
        return
    length = max(scale.place(bar.value) * width, 1.0)
    text = bar.text(scale.axis.show)
    label = escape(f"{name}{text}")
    yield (
        f'<rect class="b s{bar.series % COLORS}" x="4" y="{top}" width="{length:.1f}" '
        f'height="{_BAR}"><title>{label}</title></rect>'
    )
    end = length
    if bar.least is not None and bar.most is not None and bar.most > bar.least:
        first, last = (4 + max(scale.place(one), 0) * width for one in (bar.least, bar.most))
        yield f'<path class="e" d="M{first:.1f} {top + _BAR / 2}H{last:.1f}"/>'
        end = max(end, last - 4)
    if bar.limit is not None and bar.limit > 0:
        x = 4 + scale.place(bar.limit) * width
        yield f'<path class="e" d="M{x:.1f} {top - 2}v{_BAR + 4}"/>'
        end = max(end, x - 4)
    yield f'<text class="v" x="{end + 10:.1f}" y="{top + 11}">{escape(text)}</text>'


def _short(label: str, most: int = 66) -> str:
    return label if len(label) <= most else f"{label[: most - 1]}…"


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
        found: dict[float, dict[int, str]] = {}
        for at, line in enumerate(chart.lines):
            for x, y in line.points:
                if y is not None:
                    found.setdefault(x, {})[at] = chart.y.show(y)
        rows = [
            [chart.x.show(x), *(own.get(at, "-") for at in range(len(names)))]
            for x, own in sorted(found.items())
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
