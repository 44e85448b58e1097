# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The charts of each benchmark's rows, for pages and pictures."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from beluga import page
from beluga.pool import show_size

from .row import Row, is_emulated, is_smoke

Charts = Sequence[page.Chart]
_Label = Callable[[Row], str]


def charts(rows: Sequence[Row]) -> list[page.Chart]:
    """Return the charts of one benchmark's rows: none of rows without figures."""
    measured = [row for row in rows if row["ops_per_s"] is not None]
    if not measured:
        return []
    drawn = _CHARTS.get(str(measured[0]["bench"]), _medians)(measured)
    return [chart for chart in drawn if chart.has_values]


def remark(rows: Sequence[Row]) -> str:
    """Return the warning to show with every figure of these rows, or nothing."""
    notes = []
    if any(map(is_smoke, rows)):
        notes.append("SMOKE RUN, not a measurement")
    if any(map(is_emulated, rows)):
        notes.append("emulated memory")
    if any(row.get("noisy") for row in rows):
        notes.append("noisy")
    return "; ".join(notes)


def show_ns(value: float) -> str:
    """Show nanoseconds."""
    return page.seconds(value / 1e9)


def show_bytes(value: float) -> str:
    """Show a size in short units."""
    return show_size(int(value)).replace(" bytes", " B")


def show_gb(value: float) -> str:
    """Show a bandwidth."""
    return f"{page.plain(value)} GB/s"


def show_rate(value: float) -> str:
    """Show operations per second."""
    return page.quantity(value, "/s")


def _number(row: Row, field: str) -> float | None:
    value = row[field]
    return float(value) if isinstance(value, int | float) else None


def _line(  # noqa: PLR0913  what is drawn, by name
    rows: Sequence[Row], name: str, color: int, *, x: str, y: str, dashed: bool = False
) -> page.Line:
    points = [(at, _number(row, y)) for row in rows if (at := _number(row, x)) is not None]
    return page.Line(name, points, color, dashed)


def _groups(rows: Sequence[Row], *names: str) -> dict[str, list[Row]]:
    """Return the rows by the values of these fields, without fields that are the same in all
    rows.
    """
    distinctive = [name for name in names if len({row[name] for row in rows}) > 1] or names[:1]
    groups: dict[str, list[Row]] = {}
    for row in rows:
        label = ", ".join(str(row[name]) for name in distinctive if row[name] is not None)
        groups.setdefault(label, []).append(row)
    return groups


def _ticks(rows: Sequence[Row], field: str) -> list[float]:
    return sorted({value for row in rows if (value := _number(row, field)) is not None})


def _bars(  # noqa: PLR0913  what is drawn, by name
    title: str,
    rows: Sequence[Row],
    field: str,
    label: _Label,
    *,
    axis: page.Axis,
    limit: str = "",
) -> page.BarChart:
    groups = [
        page.BarGroup(
            label(row),
            [page.Bar(_number(row, field), limit=_number(row, "limit") if limit else None)],
        )
        for row in rows
    ]
    return page.BarChart(title=title, axis=axis, groups=groups, limit=limit, note=remark(rows))


def _rpc(rows: Sequence[Row]) -> Charts:
    calls = [row for row in rows if row["case"] == "c"]
    x = page.Axis("calls out at a time", log=True, ticks=_ticks(calls, "depth"))
    lines, times = [], []
    for at, (name, group) in enumerate(_groups(calls, "coherence", "memory").items()):
        lines.append(_line(group, name, at, x="depth", y="ops_per_s"))
        bare = f"{name}: bare exchange of lines"
        lines.append(_line(group, bare, at, x="depth", y="limit", dashed=True))
        times.append(_line(group, f"{name}, median", 2 * at, x="depth", y="p50_ns"))
        times.append(_line(group, f"{name}, p99", 2 * at + 1, x="depth", y="p99_ns"))
    rate, note = page.Axis("calls per second", log=True, show=show_rate), remark(rows)
    time = page.Axis("time of a call", log=True, show=show_ns)
    title = "Calls per second, C to C, and the machine's limit"
    return [
        page.LineChart(title=title, x=x, y=rate, lines=lines, note=note),
        page.LineChart(title="Time of a call, C to C", x=x, y=time, lines=times, note=note),
    ]


def _latency(rows: Sequence[Row]) -> Charts:
    x = page.Axis("size of an operation", log=True, show=show_bytes, ticks=_ticks(rows, "bytes"))
    y = page.Axis("median time", log=True, show=show_ns)
    lines = [
        _line(group, name, at, x="bytes", y="p50_ns")
        for at, (name, group) in enumerate(_groups(rows, "case", "memory", "coherence").items())
    ]
    title = "Median time of one operation"
    return [page.LineChart(title=title, x=x, y=y, lines=lines, note=remark(rows))]


def _bandwidth(rows: Sequence[Row]) -> Charts:
    return [
        _bars(
            f"Bandwidth, {show_bytes(size)} an operation",
            [row for row in rows if row["bytes"] == size],
            "gb_per_s",
            lambda row: f"{row['case']}, {_threads(row)}",
            axis=page.Axis("bandwidth", show=show_gb),
            limit="the machine's limit, same run",
        )
        for size in _ticks(rows, "bytes")
    ]


def _threads(row: Row) -> str:
    return "1 thread" if row["threads"] == 1 else f"{row['threads']} threads"


def _medians(rows: Sequence[Row]) -> Charts:
    return [_bars("Median time", rows, "p50_ns", _case, axis=page.Axis("time", show=show_ns))]


def _case(row: Row) -> str:
    parts = [str(row["case"])]
    parts += [str(row[name]) for name in ("engine", "peer") if row[name] is not None]
    return ", ".join(parts)


def _tiers(rows: Sequence[Row]) -> Charts:
    moved = [row for row in rows if row["gb_per_s"] is not None]
    limit = "the bare store's, same run"
    axis = page.Axis("bandwidth", show=show_gb)
    return [_bars("Bandwidth of a tier", moved, "gb_per_s", _tier_label, axis=axis, limit=limit)]


def _tier_label(row: Row) -> str:
    size, depth = _number(row, "bytes"), f"{row['depth']} at a time" if row["depth"] else ""
    parts = [row["case"], row["engine"], show_bytes(size) if size else "", depth]
    return ", ".join(str(part) for part in parts if part)


def _scheduler(rows: Sequence[Row]) -> Charts:
    virtual = [row for row in rows if row["memory"] == "virtual time"]
    real = [row for row in rows if row["memory"] != "virtual time" and row["p50_ns"] is not None]
    axis = page.Axis("time", log=True, show=show_ns)
    size = show_bytes(max(_ticks(virtual, "bytes"), default=0))
    title = f"p99 of onboards of {size}, in virtual time"
    return [
        _bars(title, virtual, "p99_ns", _case, axis=axis),
        _bars("Median time, measured", real, "p50_ns", _case, axis=axis),
    ]


def _copy(rows: Sequence[Row]) -> Charts:
    own = [row for row in rows if row["note"] != "map"]
    axis = page.Axis("bandwidth", show=show_gb)
    return [
        _bars(
            f"Copies: {case}", group, "gb_per_s", _copy_label, axis=axis,
            limit="the machine's limit, same run",
        )
        for case, group in _groups(own, "case").items()
    ]  # fmt: skip


def _copy_label(row: Row) -> str:
    crc = ", checksums" if row["crc"] else ""
    size = _number(row, "fragment_bytes")
    shape = f"{row['fragments']} x {show_bytes(size)}" if size else ""
    shown = [str(row["engine"] or row["peer"]), shape, _threads(row) if row["threads"] else ""]
    return ", ".join(filter(None, shown)) + crc


_CHARTS: dict[str, Callable[[Sequence[Row]], Charts]] = {
    "latency": _latency,
    "bandwidth": _bandwidth,
    "rpc": _rpc,
    "copy": _copy,
    "scheduler": _scheduler,
    "tiers-disk": _tiers,
    "tiers-remote": _tiers,
}
