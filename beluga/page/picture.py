# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Charts as a picture (PNG, SVG) with matplotlib, of the extra ``plot``."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from beluga.errors import BelugaError
from beluga.page.chart import BarChart, Chart, Line, LineChart

# Okabe and Ito's colors, which are distinct for all kinds of color vision.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b59a00", "#56b4e9", "#555555")
_DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)), "-.", (0, (3, 1.5)), (0, (8, 3)), (0, (1, 3)))
_MARKERS = "os^Dv<>"
_WIDTH = 8.0  # inches of a column


def picture(
    title: str,
    charts: Sequence[Chart],
    *,
    columns: int = 1,
    same_y: bool = False,
    form: str = "png",
) -> bytes:
    """Draw charts below each other, or in columns. Returns the file's bytes. With ``same_y`` the
    charts have the same values at the same height.

    Raises BelugaError without matplotlib.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:  # commands check this before they start
        raise BelugaError("charts need matplotlib; pip install 'beluga-kv[plot]'") from None
    charts = [chart for chart in charts if chart.has_values]
    count = -(-len(charts) // columns)
    rows = [charts[at * columns : (at + 1) * columns] for at in range(count)]
    heights = [max(map(_height, row)) for row in rows]
    with mpl.rc_context({"svg.hashsalt": "beluga", "svg.fonttype": "none"}):
        figure = Figure(
            figsize=(_WIDTH * (columns if columns == 1 else 0.8 * columns), 0.5 + sum(heights)),
            layout="constrained",
        )
        figure.suptitle(title, fontsize=10)
        grid = figure.add_gridspec(max(count, 1), columns, height_ratios=heights or [1])
        for row, drawn in enumerate(rows):
            for column, chart in enumerate(drawn):
                shared = figure.axes[0] if same_y and figure.axes else None
                _draw(figure.add_subplot(grid[row, column], sharey=shared), chart)
        metadata = {"Date": None} if form == "svg" else None
        file = io.BytesIO()
        figure.savefig(file, format=form, dpi=110, metadata=metadata)
    return file.getvalue()


def _height(chart: Chart) -> float:
    if isinstance(chart, LineChart):
        return 3.8
    bars = sum(max(len(group.bars), 1) for group in chart.groups)
    return 1.3 + 0.22 * bars + 0.06 * len(chart.groups) + 0.2 * bool(chart.series or chart.limit)


def _draw(axes: Any, chart: Chart) -> None:
    axes.set_title(chart.title, fontsize=10, loc="left")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if isinstance(chart, LineChart):
        _draw_lines(axes, chart)
    else:
        _draw_bars(axes, chart)


def _draw_lines(axes: Any, chart: LineChart) -> None:
    for line in chart.lines:
        points = [(x, float("nan") if y is None else y) for x, y in line.points]
        axes.plot(*zip(*points, strict=True), label=line.name, **_style(line, len(points)))
    for axis, setter in ((chart.x, "x"), (chart.y, "y")):
        if axis.log:
            getattr(axes, f"set_{setter}scale")("log")
        getattr(axes, f"set_{setter}label")(axis.label)
        drawn = getattr(axes, f"{setter}axis")
        drawn.set_major_formatter(lambda value, _, show=axis.show: show(value))
        if axis.log:
            drawn.set_minor_formatter("")
        if axis.ticks is not None:
            drawn.set_ticks(list(axis.ticks))
            drawn.set_ticks([], minor=True)
    _tick_more(axes, chart)
    if not chart.y.log:
        axes.set_ylim(bottom=0)
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.tick_params(labelsize=8)
    axes.legend(fontsize=8, framealpha=0.8)


def _tick_more(axes: Any, chart: LineChart) -> None:
    """Label a logarithmic axis of few decades at 1, 2 and 5, so that it has enough labels."""
    if not chart.y.log or chart.y.ticks is not None:
        return
    from matplotlib.ticker import LogLocator

    low, high = axes.get_ylim()
    steps = (1.0,) if high / low > 1e4 else (1.0, 3.0) if high / low > 100 else (1.0, 2.0, 5.0)
    axes.yaxis.set_major_locator(LogLocator(subs=steps))


def _style(line: Line, count: int) -> dict[str, Any]:
    # The second round through the colors has other dashes and hollow markers.
    round_, at = divmod(line.color, len(_COLORS))
    return {
        "color": _COLORS[at],
        "linestyle": (0, (4, 4)) if line.dashed else _DASHES[(at + 3 * round_) % len(_DASHES)],
        "marker": _MARKERS[at] if count <= 24 and not line.dashed else None,
        "markersize": 5,
        "markerfacecolor": "white" if round_ else _COLORS[at],
    }


def _draw_bars(axes: Any, chart: BarChart) -> None:
    places, names, top = [], [], 0.0
    for group in chart.groups:
        names.append(group.label)
        places.append(top + (len(group.bars) - 1) / 2)
        for bar in group.bars:
            value = bar.value or 0.0
            axes.barh(top, value, height=0.85, color=_COLORS[bar.series % len(_COLORS)])
            if bar.least is not None and bar.most is not None and bar.most > bar.least:
                axes.plot([bar.least, bar.most], [top, top], color="black", linewidth=1.2)
            if bar.limit is not None:
                axes.plot([bar.limit] * 2, [top - 0.5, top + 0.5], color="black", linewidth=1.6)
            shown = bar.text(chart.axis.show)
            axes.annotate(
                shown, (max(bar.extent, value), top), xytext=(5, 0), textcoords="offset points",
                va="center", fontsize=7.5,
            )  # fmt: skip
            top += 1
        top += 0.3
    axes.set_yticks(places, names, fontsize=8)
    axes.invert_yaxis()
    if chart.axis.log:
        axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: chart.axis.show(value))
    axes.margins(x=0.3 if chart.limit else 0.14, y=0.02)
    axes.tick_params(axis="x", labelsize=8)
    axes.set_xlabel(f"{chart.axis.label}{' (logarithmic)' if chart.axis.log else ''}", fontsize=9)
    axes.grid(visible=True, axis="x", alpha=0.3)
    _bar_key(axes, chart)


def _bar_key(axes: Any, chart: BarChart) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    keys: list[Any] = [Patch(color=_COLORS[at], label=name) for at, name in enumerate(chart.series)]
    if chart.limit:
        keys.append(Line2D([], [], color="black", marker="|", linestyle="", label=chart.limit))
    if chart.spread:
        keys.append(Line2D([], [], color="black", label=chart.spread))
    if keys:
        axes.legend(
            handles=keys, fontsize=8, loc="lower right", bbox_to_anchor=(1, 1), ncols=3,
            frameon=False,
        )  # fmt: skip
