# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Charts of rows as PNG files, with matplotlib (``pip install 'beluga-kv[plot]'``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from beluga.errors import BelugaError

from .row import Row


def plot(rows: Iterable[Row], directory: Path) -> list[Path]:
    """Draw one chart for each benchmark in the rows. Returns the paths.

    Raises BelugaError without matplotlib, and OSError if the directory cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:  # commands check this before the work
        raise BelugaError("charts need matplotlib; pip install 'beluga-kv[plot]'") from None
    measured = [row for row in rows if row["ops_per_s"] is not None]
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for bench in dict.fromkeys(str(row["bench"]) for row in measured):
        own = [row for row in measured if row["bench"] == bench]
        figure = Figure(figsize=(9, 5), layout="constrained")
        axes = figure.subplots()
        _CHARTS[bench](axes, own)
        axes.set_title(f"{bench}: {own[0]['machine']}, {own[0]['commit']}", fontsize=9)
        paths.append(directory / f"{bench}.png")
        figure.savefig(paths[-1], dpi=120)
    return paths


def _lines(axes: Any, rows: list[Row], x: str, y: str, *names: str) -> None:
    """Draw a line for every value of the fields ``names``, from the rows that have both
    coordinates.
    """
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row[x] is not None and row[y] is not None:
            groups.setdefault(", ".join(str(row[name]) for name in names), []).append(row)
    for label, group in groups.items():
        style = "--" if y == "limit" else "-"
        text = f"{label}: limit" if y == "limit" else label
        axes.plot([r[x] for r in group], [r[y] for r in group], style, marker="o", label=text)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.grid(visible=True, which="both", alpha=0.3)


def _bars(axes: Any, rows: list[Row], field: str, label: Callable[[Row], str]) -> None:
    """Draw a bar for each row, the first on top."""
    axes.barh([label(row) for row in rows], [row[field] for row in rows])
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=7)
    axes.grid(visible=True, axis="x", alpha=0.3)


def _rpc(axes: Any, rows: list[Row]) -> None:
    calls = [row for row in rows if row["case"] == "c"]
    _lines(axes, calls, "depth", "ops_per_s", "case", "memory", "coherence")
    _lines(axes, calls, "depth", "limit", "memory", "coherence")
    axes.set_xlabel("calls out at a time")
    axes.set_ylabel("calls per second")
    axes.legend()


def _latency(axes: Any, rows: list[Row]) -> None:
    _lines(axes, rows, "bytes", "p50_ns", "case", "memory", "coherence")
    axes.set_xlabel("bytes")
    axes.set_ylabel("median, ns")
    axes.legend()


def _bandwidth(axes: Any, rows: list[Row]) -> None:
    large = [row for row in rows if row["bytes"] == max(int(str(r["bytes"])) for r in rows)]
    _bars(axes, large, "gb_per_s", lambda row: f"{row['case']}, {row['threads']} threads")
    axes.set_xlabel(f"GB/s, {large[0]['bytes']} bytes each, {large[0]['memory']}")


def _coherence(axes: Any, rows: list[Row]) -> None:
    _bars(axes, rows, "p50_ns", lambda row: str(row["case"]))
    axes.set_xlabel(f"median of {rows[0]['bytes']} bytes, ns, {rows[0]['memory']}")


def _medians(axes: Any, rows: list[Row]) -> None:
    _bars(axes, rows, "p50_ns", lambda row: str(row["case"]))
    axes.set_xlabel(f"median, ns, {rows[0]['memory']}")


def _tiers(axes: Any, rows: list[Row]) -> None:
    moved = [row for row in rows if row["gb_per_s"] is not None]
    _bars(axes, moved, "gb_per_s", _tier_label)
    axes.set_xlabel("GB/s")


def _tier_label(row: Row) -> str:
    depth = f", depth {row['depth']}" if row["depth"] else ""
    return f"{row['case']}, {row['engine']}, {row['bytes']} bytes{depth}"


def _scheduler(axes: Any, rows: list[Row]) -> None:
    virtual = [row for row in rows if row["memory"] == "virtual time"]
    _bars(axes, virtual, "p99_ns", lambda row: str(row["case"]))
    axes.set_xscale("log")
    axes.set_xlabel(f"p99 of onboards of {virtual[0]['bytes']} bytes, ns, in virtual time")


def _copy(axes: Any, rows: list[Row]) -> None:
    own = [row for row in rows if row["note"] != "map"]
    _bars(axes, own, "gb_per_s", _copy_label)
    axes.set_xlabel(f"GB/s, {rows[0]['memory']}")


def _copy_label(row: Row) -> str:
    crc = ", checksums" if row["crc"] else ""
    shape = f"{row['fragments']} x {row['fragment_bytes']}"
    return f"{row['case']}, {row['engine'] or row['peer']}, {shape}, {row['threads']} threads{crc}"


_CHARTS: dict[str, Callable[[Any, list[Row]], None]] = {
    "coherence": _coherence,
    "latency": _latency,
    "bandwidth": _bandwidth,
    "rpc": _rpc,
    "recovery": _medians,
    "copy": _copy,
    "scheduler": _scheduler,
    "indexer": _medians,
    "blocks": _medians,
    "events": _medians,
    "tiers-disk": _tiers,
    "tiers-remote": _tiers,
    "gateway": _medians,
}
