# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The report: it compares policies on one trace with bars of a few figures, pool beside split, in
one self-contained HTML file or as a picture (PNG).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from beluga.errors import SimulateError
from beluga.simulate.options import Options
from beluga.simulate.result import Row
from beluga.simulate.trace import Trace

# field, title, format of the value
_CHARTS = (
    ("ttft_mean_s", "Mean time to first token, s", ".3g"),
    ("ttft_p99_s", "99th percentile, s", ".3g"),
    ("tpot_mean_ms", "Time per further token, ms", ".3g"),
    ("hit_rate", "Blocks that were found", ".1%"),
    ("load_imbalance", "Busiest worker / mean", ".3g"),
)
_COLORS = {"pool": "#2a6fbb", "split": "#c9822b"}
_NAME, _BAR, _VALUE, _HEIGHT = 130, 330, 70, 16  # pixels
_STYLE = (
    "body{font:15px/1.4 sans-serif;max-width:72em;margin:2em auto;padding:0 1em;color:#222}"
    "section{display:inline-block;margin:0 1.5em 1em 0;vertical-align:top}"
    "h2{font-size:16px;margin:.5em 0}table{border-collapse:collapse;font-size:13px}"
    "td,th{padding:2px 8px;text-align:right;border-bottom:1px solid #ddd}"
    "td:first-child,td:nth-child(2){text-align:left}"
)


def check_report(path: Path) -> None:
    """Check before the work that the path has a suffix of a report. Raises SimulateError."""
    if path.suffix not in (".html", ".png"):
        raise SimulateError(f"{path}: a report is .html or .png")


def write_report(path: Path, trace: Trace, options: Options, rows: Sequence[Row]) -> None:
    """Write the report to a file, in the format of its suffix. Raises SimulateError if it cannot be
    written or drawn, or if the suffix is neither .html nor .png.
    """
    check_report(path)
    means = [row for row in rows if row.seed is None]
    try:
        if path.suffix == ".html":
            path.write_text(_html(trace, options, means))
        else:
            _draw(path, trace, options, means)
    except OSError as error:
        raise SimulateError(f"{path}: {error.strerror}") from None


def _title(trace: Trace, options: Options) -> str:
    return (
        f"{trace.name} at {options.speed:g}x: {options.workers} workers, {options.model.name}, "
        f"{options.engine} engines"
    )


def _facts(trace: Trace, options: Options) -> str:
    return (
        f"{len(trace)} requests, {trace.block_tokens} tokens a block; a boundless cache would have "
        f"{trace.ideal_hit_rate:.1%} of the blocks. {options.hbm_bytes / 1e9:.0f} GB of HBM a "
        f"worker; behind it a pool of {options.pool_bytes / 1e12:.2f} TB at "
        f"{options.path_speed / 1e9:g} GB/s a worker ({options.adapter_count} adapters, "
        f"{options.device_count} devices), or {options.local_bytes / 1e9:.0f} GB of its own DRAM "
        f"at {options.local_bandwidth / 1e9:g} GB/s. Simulated; nothing here was run on GPUs."
    )


def _html(trace: Trace, options: Options, rows: Sequence[Row]) -> str:
    title = escape(_title(trace, options))
    charts = "\n".join(
        f"<section><h2>{escape(label)}</h2>{_svg(rows, field, digits)}</section>"
        for field, label, digits in _CHARTS
    )
    key = " ".join(
        f'<b style="color:{color}">&#9632; {name}</b>' for name, color in _COLORS.items()
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style><h1>{title}</h1><p>{escape(_facts(trace, options))}</p>"
        f"<p>{key}; a thin line spans the seeds.</p>\n{charts}\n{_table(rows)}</html>\n"
    )


def _svg(rows: Sequence[Row], field: str, digits: str) -> str:
    """Draw a bar for each row, with a thin line from the least to the greatest value of the
    seeds.
    """
    most = max((_top(row, field) for row in rows), default=0.0) or 1.0
    width, height = _NAME + _BAR + _VALUE, _HEIGHT * len(rows)
    parts = "".join(
        _bar(row, place * _HEIGHT, field, digits, most) for place, row in enumerate(rows)
    )
    return (
        f'<svg width="{width}" height="{height}" role="img" font-size="12" '
        f'font-family="sans-serif">{parts}</svg>'
    )


def _bar(row: Row, top: int, field: str, digits: str, most: float) -> str:
    value = getattr(row, field)
    name = f'<text x="0" y="{top + 12}">{escape(row.policy)}</text>'
    if value is None:
        return name
    length = _BAR * value / most
    spread = (row.spread or {}).get(field)
    line = ""
    if spread:
        x1, x2 = (_NAME + _BAR * end / most for end in (spread.min, spread.max))
        middle = top + _HEIGHT / 2 - 1
        line = f'<path d="M{x1:.1f} {middle}H{x2:.1f}" stroke="#000"/>'
    return (
        f'{name}<rect x="{_NAME}" y="{top + 1}" width="{length:.1f}" height="{_HEIGHT - 4}" '
        f'fill="{_COLORS[row.memory]}"/>{line}'
        f'<text x="{_NAME + _BAR + 6}" y="{top + 12}">{value:{digits}}</text>'
    )


def _top(row: Row, field: str) -> float:
    spread = (row.spread or {}).get(field)
    return float((spread.max if spread else getattr(row, field)) or 0.0)


def _table(rows: Sequence[Row]) -> str:
    names = ("policy", "memory", "ttft_mean_s", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s",
             "tpot_mean_ms", "hit_rate", "hit_rate_hbm", "hit_rate_pool", "hit_rate_local",
             "load_imbalance", "rejects", "throughput_per_s", "link_read_utilisation",
             "onboard_ms", "onboard_queue_ms")  # fmt: skip
    head = "".join(f"<th>{name.replace('_', ' ')}</th>" for name in names)
    body = "".join(
        "<tr>" + "".join(f"<td>{cell}</td>" for cell in _cells(row, names)) + "</tr>"
        for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _cells(row: Row, names: Sequence[str]) -> Iterator[str]:
    for name in names:
        value = getattr(row, name)
        yield f"{value:.4g}" if isinstance(value, int | float) else escape(str(value or "-"))


def _draw(path: Path, trace: Trace, options: Options, rows: Sequence[Row]) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise SimulateError(
            f"{path}: drawing needs matplotlib; pip install 'beluga-kv[plot]', or name a .html file"
        ) from None
    figure = Figure(figsize=(14, 2 + 0.22 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{_title(trace, options)} (simulated)")
    shown = [chart for chart in _CHARTS if any(getattr(row, chart[0]) for row in rows)]
    places = range(len(rows))
    for axes, (field, label, _) in zip(
        figure.subplots(1, len(shown), sharey=True, squeeze=False)[0], shown, strict=True
    ):
        values = [getattr(row, field) or 0.0 for row in rows]
        axes.barh(places, values, color=[_COLORS[row.memory] for row in rows])
        axes.set_title(label, fontsize=9)
        axes.set_yticks(places, [f"{row.policy} ({row.memory})" for row in rows], fontsize=8)
    axes.invert_yaxis()
    figure.savefig(path)
