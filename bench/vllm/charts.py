# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Charts of a run, each in a page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from beluga import page

from .report import Report
from .summary import Row


def draw(report: Report, folder: Path) -> list[Path]:
    """Draw charts of the measurements, as pages. Returns their paths."""
    paths = []
    for name, charts in (("passes", _passes), ("rates", _rates), ("variants", _variants)):
        if report[name]:
            title = f"vLLM on CPUs, {report['model']} model: {name}"
            lead = f"{report['machine']}, {report['commit']}"
            paths.append(folder / f"vllm-{name}.html")
            shown = page.section(name.capitalize(), *map(page.chart, charts(report[name])))
            paths[-1].write_text(page.page(title, lead, shown))
    return paths


def _groups(rows: Iterable[Row], *names: str) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(", ".join(str(row[name]) for name in names), []).append(row)
    return groups


def _over(
    groups: dict[str, list[Row]], x: page.Axis, y: page.Axis, title: str, fields: tuple[str, str]
) -> page.LineChart:
    lines = [
        page.Line(label, [(row[fields[0]], row[fields[1]]) for row in group], color)
        for color, (label, group) in enumerate(groups.items())
    ]
    return page.LineChart(title=title, x=x, y=y, lines=lines)


def _axis(rows: Iterable[Row], field: str, label: str) -> page.Axis:
    return page.Axis(label, log=True, ticks=sorted({row[field] for row in rows}))


def _passes(rows: Sequence[Row]) -> Sequence[page.Chart]:
    groups = {f"{name}. pass": own for name, own in _groups(rows, "arm", "pass").items()}
    x = _axis(rows, "length", "tokens of a prompt")
    time, rate = page.Axis("mean TTFT", log=True, show=page.seconds), page.Axis("requests/s")
    return [
        _over(groups, x, time, "Mean time to first token", ("length", "ttft_mean_s")),
        _over(groups, x, rate, "Requests per second", ("length", "qps")),
    ]


def _rates(rows: Sequence[Row]) -> Sequence[page.Chart]:
    if len({row["rate_per_s"] for row in rows}) == 1:
        title = f"Mean time to first token at {page.plain(rows[0]['rate_per_s'])} requests/s"
        return [_bars(title, [(row["arm"], [row["ttft_mean_s"]]) for row in rows], ())]
    x = _axis(rows, "rate_per_s", "requests sent per second")
    y = page.Axis("mean TTFT", log=True, show=page.seconds)
    title, fields = "Mean time to first token", ("rate_per_s", "ttft_mean_s")
    return [_over(_groups(rows, "arm"), x, y, title, fields)]


def _variants(rows: Sequence[Row]) -> Sequence[page.Chart]:
    groups = [
        (f"{row['arm']} (beside {row['variant']})", [row["ttft_hit_s"], row["ttft_local_hit_s"]])
        for row in rows
    ]
    names = ("from the pool", "from the engine's own cache")
    return [_bars("Time to first token of a hit", groups, names)]


def _bars(
    title: str, labeled: Sequence[tuple[str, Sequence[float]]], series: Sequence[str]
) -> page.BarChart:
    groups = [
        page.BarGroup(label, [page.Bar(value, at) for at, value in enumerate(values)])
        for label, values in labeled
    ]
    axis = page.Axis("time", show=page.seconds)
    return page.BarChart(title=title, axis=axis, groups=groups, series=series)
