# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Charts of a run as PNG files. Without matplotlib there are none, and a line says so."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from .report import Report
from .summary import Row


def draw(report: Report, folder: Path, say: Callable[[str], None]) -> list[Path]:
    """Draw charts of the measurements. Returns their paths."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        say("no charts: they need matplotlib; pip install 'beluga-kv[plot]'")
        return []
    paths = []
    for name, chart in (("passes", _passes), ("rates", _rates), ("variants", _variants)):
        if not report[name]:
            continue
        figure = Figure(figsize=(9, 5), layout="constrained")
        chart(figure, report[name])
        figure.suptitle(f"{report['machine']}, {report['model']}, {report['commit']}", fontsize=9)
        paths.append(folder / f"vllm-{name}.png")
        figure.savefig(paths[-1], dpi=120)
    return paths


def _groups(rows: Iterable[Row], *names: str) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(", ".join(str(row[name]) for name in names), []).append(row)
    return groups


def _line(axes: Any, rows: list[Row], x: str, y: str, label: str) -> None:
    axes.plot([row[x] for row in rows], [row[y] for row in rows], marker="o", label=label)


def _finish(axes: Any, x: str, y: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend(fontsize=7)


def _passes(figure: Any, rows: list[Row]) -> None:
    first, second = figure.subplots(1, 2)
    for label, group in _groups(rows, "arm", "pass").items():
        _line(first, group, "length", "ttft_mean_s", f"{label}. pass")
        _line(second, group, "length", "qps", f"{label}. pass")
    _finish(first, "tokens of a prompt", "mean time to first token, s")
    _finish(second, "tokens of a prompt", "requests per second")


def _rates(figure: Any, rows: list[Row]) -> None:
    axes = figure.subplots()
    for label, group in _groups(rows, "arm").items():
        _line(axes, group, "rate_per_s", "ttft_mean_s", label)
    _finish(axes, "requests asked per second", "mean time to first token, s")


def _variants(figure: Any, rows: list[Row]) -> None:
    axes = figure.subplots()
    labels = [f"{row['arm']} (beside {row['variant']})" for row in rows]
    for column, name in (("ttft_hit_s", "from the pool"), ("ttft_local_hit_s", "own cache")):
        axes.barh(labels, [1000 * row[column] for row in rows], alpha=0.6, label=name)
    axes.invert_yaxis()
    axes.set_xlabel("time to first token, ms")
    axes.legend(fontsize=7)
