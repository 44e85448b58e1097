# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Charts as a picture (SVG) for the docs, with matplotlib of the extra ``plot``."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from beluga.errors import BelugaError
from beluga.page import Line, LineChart

# Okabe and Ito's colors, which are distinct for all kinds of color vision.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b59a00", "#56b4e9", "#555555")
_DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)), "-.", (0, (3, 1.5)), (0, (8, 3)), (0, (1, 3)))
_MARKERS = "os^Dv<>"
_WIDTH, _HEIGHT = 8.0, 3.8  # inches of a column


def picture(title: str, charts: Sequence[LineChart]) -> bytes:
    """Draw charts side by side, with the same values at the same height. Returns an SVG file.

    Raises BelugaError without matplotlib.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        raise BelugaError("charts need matplotlib; pip install 'beluga-kv[plot]'") from None
    with mpl.rc_context({"svg.hashsalt": "beluga", "svg.fonttype": "none"}):
        size = (_WIDTH * 0.8 * len(charts), 0.5 + _HEIGHT)
        figure = Figure(figsize=size, layout="constrained")
        figure.suptitle(title, fontsize=10)
        grid = figure.add_gridspec(1, len(charts), height_ratios=[_HEIGHT])
        for column, chart in enumerate(charts):
            shared = figure.axes[0] if figure.axes else None
            axes = figure.add_subplot(grid[0, column], sharey=shared)
            axes.set_title(chart.title, fontsize=10, loc="left")
            for side in ("top", "right"):
                axes.spines[side].set_visible(False)
            _draw_lines(axes, chart)
        file = io.BytesIO()
        figure.savefig(file, format="svg", dpi=110, metadata={"Date": None})
    return file.getvalue()


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
