# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""One frame of ``beluga top``: the snapshot, as wide as the terminal.

Names come from clients, so control characters are removed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from beluga.cli.frame import Legend
from beluga.cli.output import plain

if TYPE_CHECKING:  # the help of `beluga top` has the legends and must not import rich or numpy
    from rich.console import RenderableType
    from rich.text import Text

    from beluga.live import Snapshot

_ROWS = 8
_STATE_STYLES = {"serving": "bold green", "standby": "bold yellow", "stopped": "bold red"}
_BAR_MAX = 40
_RATES = {
    "calls": "rpc_calls_total",
    "keys": "rpc_keys_total",
    "errors": "rpc_errors_total",
    "evictions": "evictions_total",
    "refusals": "refusals_total",
    "read": "client_read_bytes_total",
    "written": "client_written_bytes_total",
}
_SHOWN = {*_RATES.values(), "process_cpu_seconds_total", "exporter_scrapes_total"}


def draw_frame(snapshot: Snapshot | None, width: int, *, failure: str = "") -> RenderableType:
    """Return a frame. ``failure`` is why the last request failed; without a snapshot there was none
    yet.
    """
    from rich.console import Group
    from rich.text import Text

    lines: list[Text] = []
    if failure:
        lines.append(Text(failure, style="bold red"))
    if snapshot is not None:
        lines += _head(snapshot, width)
        lines += [Text(f"! {plain(note.text)}", style="yellow") for note in snapshot.notes]
        lines += _figures(snapshot, width)
        lines += _devices(snapshot, width)
        lines += _table("sessions", _SESSION_COLUMNS, snapshot.sessions, width)
        lines += _table("tenants", _TENANT_COLUMNS, snapshot.tenants, width)
        lines += _table("tiers below", _TIER_COLUMNS, snapshot.tiers, width)
        lines += _table("slowest of the last calls", _CALL_COLUMNS, snapshot.slow_calls, width)
        grown = [row for row in snapshot.rates.items() if row[1] > 0 and row[0] not in _SHOWN]
        lines += _table("other counters per second", _RATE_COLUMNS, grown, width)
    return Group(*lines)


def _head(snapshot: Snapshot, width: int) -> list[Text]:
    from rich.text import Text

    server = snapshot.server
    state = {"serving": f"serving, epoch {server.epoch}", "standby": "standing by"}
    text = Text("beluga ", style="bold", no_wrap=True)
    text.append(state.get(server.state, server.state), style=_STATE_STYLES.get(server.state, ""))
    text.append(f"  {plain(server.machine)}:{server.pid}, up {_duration(server.uptime_s)}", "dim")
    clock = time.strftime("%H:%M:%S", time.localtime(snapshot.time_s))
    if text.cell_len + 2 + len(clock) <= width:
        text.append(clock.rjust(width - text.cell_len), "dim")
    text.truncate(width, overflow="ellipsis")
    return [text]


def _figures(snapshot: Snapshot, width: int) -> list[Text]:
    figure, rates = snapshot.figure, snapshot.rates
    facts = [
        ("hit rate", _percent(snapshot.recent_hit_rate)),
        ("since takeover", _percent(snapshot.hit_rate)),
    ]
    if rates:
        for name, metric in _RATES.items():
            value = rates.get(metric, 0.0)
            show = _speed(value) if "bytes" in metric else f"{_count(value)}/s"
            facts.append((name, show))
        facts.append(("server", f"{_percent(rates['process_cpu_seconds_total'])} of a core"))
    facts += [
        ("tokens saved", _count(figure("saved_tokens_total"))),
        ("sessions", f"{figure('sessions')} of {figure('lanes')}"),
    ]
    if figure("sessions_suspect"):
        facts.append(("suspect", str(figure("sessions_suspect"))))
    used, limit = figure("blocks") + figure("grants"), figure("blocks_limit")
    return [
        *_flow(facts, width),
        _bar("space", figure("pool_used_bytes"), figure("pool_bytes"), width),
        _bar("table", used, limit, width, f"{used:,} of {limit:,} blocks"),
    ]


def _flow(facts: Sequence[tuple[str, str]], width: int) -> list[Text]:
    """Return names and values in lines of this width."""
    from rich.text import Text

    lines = [Text(no_wrap=True)]
    for name, value in facts:
        item = len(name) + 1 + len(value)
        if lines[-1].cell_len and lines[-1].cell_len + 3 + item > width:
            lines.append(Text(no_wrap=True))
        if lines[-1].cell_len:
            lines[-1].append("   ")
        lines[-1].append(f"{name} ", "dim").append(value, "bold")
    return lines


def _bar(name: str, part: int, whole: int, width: int, label: str | None = None) -> Text:
    from rich.text import Text

    share = part / whole if whole else 0.0
    text = label if label is not None else f"of {_size(whole)}"
    text_width = len(text) + 9
    room = min(width - len(name) - text_width - 2, _BAR_MAX)
    line = Text(f"{name} ", style="dim", no_wrap=True)
    if room >= 4:
        full = round(share * room)
        line.append("█" * full, "cyan").append("░" * (room - full), "dim").append(" ")
    line.append(f"{_percent(share)} ", "bold").append(text)
    line.truncate(width, overflow="ellipsis")
    return line


def _devices(snapshot: Snapshot, width: int) -> list[Text]:
    """Return a line for each device: the fill level of its parts, from start to end."""
    from rich.text import Text

    lines = []
    for device in snapshot.devices[:_ROWS]:
        name = plain(device.path)
        name = name if len(name) <= width // 3 else f"…{name[1 - width // 3 :]}"
        room = max(min(width - len(name) - 1, _BAR_MAX + 24), 4)
        line = Text(f"{name} ", style="dim", no_wrap=True)
        for character, style in _cells(device.states, device.fill, room):
            line.append(character, style)
        lines.append(line)
    return lines


_LEVELS = " ▁▂▃▄▅▆▇█"
_CELL_STYLES = ("dim", "cyan", "magenta", "bright_black", "yellow", "red")


def _cells(states: str, fill: str, room: int) -> list[tuple[str, str]]:
    """Return ``room`` characters for a map; each shows the most serious state of its cells."""
    count = len(states)
    cells = []
    for number in range(min(room, count)):
        first, last = number * count // min(room, count), (number + 1) * count // min(room, count)
        worst = max(states[first:last], default="0")
        full = [int(fill[2 * at : 2 * at + 2], 16) for at in range(first, last)]
        share = sum(full) / (255 * max(len(full), 1))
        level = "▒" if worst == "3" else _LEVELS[round(share * (len(_LEVELS) - 1))]
        if level == " ":
            level = "x" if worst in "45" else "·"
        cells.append((level, _CELL_STYLES[int(worst)]))
    return cells


class _Column(NamedTuple):
    """A column: its heading, its text for a row, its rank (the highest is dropped first if there is
    no room), its alignment (text left, numbers right), and its meaning.
    """

    name: str
    show: Callable[[Any], str]
    rank: int
    left: bool
    meaning: str


def _columns(*columns: tuple[str, Callable[[Any], str], int, bool, str]) -> list[_Column]:
    return [_Column(*column) for column in columns]


def _size(count: int) -> str:
    from beluga.pool import show_size

    return show_size(count)


def _pid(pid: int | None) -> str:
    return "-" if pid is None else str(pid)


_SESSION_COLUMNS = _columns(
    ("session", lambda row: row.nonce[:8], 0, True, "the first digits of the session"),
    ("host", lambda row: str(row.host), 3, False, "the client's number among the pool's hosts"),
    ("pid", lambda row: _pid(row.pid), 1, False, "its process on that host"),
    ("kind", lambda row: plain(row.kind), 4, True, "its kind, such as vllm"),
    ("state", lambda row: row.state, 5, True, "live, or suspect: its heartbeat has stopped"),
    ("age", lambda row: _duration(row.since_s), 6, False, "the time since it attached"),
    (
        "calls/s",
        lambda row: "-" if row.calls_per_s is None else _count(row.calls_per_s),
        0,
        False,
        "its calls per second",
    ),
    ("pins", lambda row: f"{row.pin_count:,}", 2, False, "the number of blocks it has pinned"),
    ("writing", lambda row: f"{row.grant_count:,}", 7, False, "the number of blocks it is writing"),
    (
        "holds",
        lambda row: _size(row.bytes),
        8,
        False,
        "the bytes of the pool it is writing and has pinned",
    ),
)
_TENANT_COLUMNS = _columns(
    (
        "namespace",
        lambda row: plain(row.name or row.fingerprint)[:40],
        0,
        True,
        "a tenant: the name of a namespace, or its fingerprint",
    ),
    ("block", lambda row: _size(row.block_bytes), 4, False, "the size of each of its blocks"),
    ("blocks", lambda row: f"{row.blocks:,}", 2, False, "the number of its blocks in the pool"),
    ("size", lambda row: _size(row.bytes), 0, False, "the bytes of its blocks"),
    ("hits", lambda row: _count(row.hits), 3, False, "the hits of its keys"),
    ("evicted", lambda row: _count(row.evictions), 5, False, "the number of its evicted blocks"),
)
_TIER_COLUMNS = _columns(
    ("tier", lambda row: plain(row.name)[:40], 0, True, "a lower tier"),
    (
        "used",
        lambda row: "-" if row.used_bytes is None else _size(row.used_bytes),
        1,
        False,
        "the bytes that it holds",
    ),
    (
        "saved",
        lambda row: _size(row.saved_bytes),
        3,
        False,
        "the bytes written to it",
    ),
    (
        "loaded",
        lambda row: _size(row.loaded_bytes),
        2,
        False,
        "the bytes fetched from it",
    ),
    (
        "breaker",
        lambda row: row.breaker or "-",
        1,
        True,
        "open: it failed, and is not used for a while",
    ),
)
_CALL_COLUMNS = _columns(
    (
        "at",
        lambda row: time.strftime("%H:%M:%S", time.localtime(row.time_s)),
        1,
        True,
        "the start of the call",
    ),
    ("call", lambda row: plain(row.method), 0, True, "the method"),
    ("host", lambda row: str(row.host), 5, False, "the client's number among the pool's hosts"),
    ("pid", lambda row: _pid(row.pid), 2, False, "its process on that host"),
    ("keys", lambda row: str(row.keys), 3, False, "the number of keys"),
    (
        "took",
        lambda row: "running" if row.seconds is None else _duration(row.seconds),
        0,
        False,
        "its time in the server's loop",
    ),
    ("status", lambda row: plain(row.status), 4, True, "ok, or the returned error"),
)
_RATE_COLUMNS = _columns(
    ("counter", lambda row: row[0], 0, True, "a metric that has grown (docs: Monitoring)"),
    ("rate", lambda row: _count(row[1]), 0, False, "its growth per second"),
)
LEGENDS = tuple(
    Legend({column.name: column.meaning for column in columns})
    for columns in (_SESSION_COLUMNS, _TENANT_COLUMNS, _TIER_COLUMNS, _CALL_COLUMNS, _RATE_COLUMNS)
)


def _table(
    title: str, columns: Sequence[_Column], rows: Sequence[object], width: int
) -> list[Text]:
    """Return a title, headings and rows: the columns that fit, by their rank."""
    from rich.text import Text

    if not rows:
        return []
    shown = rows[:_ROWS]
    cells = {column.name: [column.show(row) for row in shown] for column in columns}
    widths = {name: max(len(name), *map(len, texts)) for name, texts in cells.items()}
    fitting = sorted(columns, key=lambda column: column.rank)
    while len(fitting) > 1 and sum(widths[column.name] + 2 for column in fitting) - 2 > width:
        fitting.pop()
    fitting = [column for column in columns if column in fitting]
    more = f" ({len(shown)} of {len(rows)})" if len(rows) > len(shown) else ""
    lines = [Text(""), Text(f"{title}{more}", style="bold", no_wrap=True)]
    lines.append(Text(_row([column.name for column in fitting], fitting, widths), style="dim"))
    for number in range(len(shown)):
        lines.append(
            Text(_row([cells[column.name][number] for column in fitting], fitting, widths))
        )
    for line in lines:
        line.no_wrap = True
        line.truncate(width, overflow="ellipsis")
    return lines


def _row(texts: Sequence[str], columns: Sequence[_Column], widths: dict[str, int]) -> str:
    return "  ".join(
        text.ljust(widths[column.name]) if column.left else text.rjust(widths[column.name])
        for text, column in zip(texts, columns, strict=True)
    ).rstrip()


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _count(value: float) -> str:
    for scale, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= scale:
            return f"{value / min(scale, 1e3 if unit == 'k' else scale):.3g}{unit}"
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"


def _speed(value: float) -> str:
    for scale, unit in ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s")):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.0f} B/s"


def _duration(seconds: float) -> str:
    for limit, scale, unit in (
        (1e-3, 1e6, "us"),
        (1.0, 1e3, "ms"),
        (120.0, 1.0, "s"),
        (7200.0, 1 / 60, "min"),
        (172800.0, 1 / 3600, "h"),
    ):
        if seconds < limit:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds / 86400:.3g} d"
