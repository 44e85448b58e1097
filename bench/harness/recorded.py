# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Results that were recorded in files: rows of benchmarks, and reports of other commands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from beluga import page
from beluga.errors import BelugaError

from .machine import commit_date
from .row import FIELDS, Row

_FOLDER = Path(__file__).resolve().parent.parent / "results"
_PEERS = "vllm-demo.json"
_COUNTS = ("bytes", "fragment_bytes", "fragments", "depth", "threads")
_LONGEST = 400  # rows of a table that a page shows


@dataclass(frozen=True, slots=True)
class Recorded:
    """A recorded report of another command."""

    name: str
    content: Mapping[str, Any]


def load(path: Path) -> list[Row] | Recorded:
    """Read a file of ``beluga bench --json``, or of another command's results.

    Raises BelugaError if it is neither, and OSError if it cannot be read.
    """
    try:
        content = msgspec.json.decode(path.read_bytes())
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BelugaError(f"{path} is not JSON: {error}") from None
    if isinstance(content, dict) and content:
        return Recorded(path.name, content)
    rows = content if isinstance(content, list) else []
    if not rows or not all(isinstance(row, dict) and {"bench", "case"} <= set(row) for row in rows):
        raise BelugaError(f"{path} has no results; write them with beluga bench NAME --json > FILE")
    return [_row(path, row) for row in rows]


def _row(path: Path, found: dict[str, Any]) -> Row:
    row: Row = {name: found.get(name) for name in FIELDS}
    numbers = [name for name in FIELDS if name.endswith(("_ns", "_per_s")) or "ratio" in name]
    for name in (*numbers, "limit", *_COUNTS):
        value = row[name]
        if value is None:
            continue
        try:
            row[name] = _number(value)
        except (TypeError, ValueError):
            text = f"{name} of case {found['case']!r} is {value!r}, no number"
            raise BelugaError(f"{path}: {text}") from None
    return row


def _number(value: Any) -> float:
    """Return a number. Some recorded rows have numpy's numbers as text."""
    return float(value) if isinstance(value, str | float) else int(value)


def recorded_peers() -> list[Recorded]:
    """Return the recorded results of peers, if this is a checkout that has them."""
    found = load(_FOLDER / _PEERS) if (_FOLDER / _PEERS).is_file() else []
    return [found] if isinstance(found, Recorded) else []


def recorded_sections(recorded: Sequence[Recorded]) -> list[str]:
    """Return each report's charts, facts and tables."""
    return [part for one in recorded for part in _parts(one)]


def _parts(one: Recorded) -> list[str]:
    chart = _peer_chart(one.content)
    charts = [page.chart(chart)] if chart else []
    tables = [
        page.hidden(f"{one.name}: {name}", _table(name, value))
        for name, value in one.content.items()
        if _is_table(value)
    ]
    plain = {
        name: _show(value)
        for name, value in one.content.items()
        if not isinstance(value, dict | list)
    }
    facts = page.hidden(f"{one.name}: facts", page.facts(plain)) if plain else ""
    return [*charts, page.text(f"{one.name}: {_origin(one.content)}"), facts, *tables]


def _origin(content: Mapping[str, Any]) -> str:
    commit = str(content.get("commit", "unknown"))
    day = commit_date(commit)
    date = content.get("date") or (f"no date (the commit is of {day})" if day else "no date")
    what = "simulated, " if content.get("what") == "simulated" else ""
    return (
        f"{what}{content.get('machine', 'unknown machine')}, commit {commit}, {date}, "
        f"command: {content.get('command', 'unknown')}"
    )


def _peer_chart(content: Mapping[str, Any]) -> page.BarChart | None:
    """Return the recorded times to first token of engines with Beluga and with peers."""
    found = content.get("peers")
    if not isinstance(found, dict) or not isinstance(content.get("ttft_hit_s"), int | float):
        return None
    times = {
        "computed again, without a cache": content.get("ttft_recompute_s"),
        "from the engine's own cache": content.get("ttft_local_hit_s"),
        "from Beluga's pool": content["ttft_hit_s"],
        **{f"from {name}": seconds for name, seconds in found.items()},
    }
    groups = [
        page.BarGroup(name, [page.Bar(float(value))])
        for name, value in times.items()
        if isinstance(value, int | float)
    ]
    tokens = content.get("prompt_tokens", "?")
    return page.BarChart(
        title=f"Time to first token of a prompt of {tokens} tokens, real vLLM on CPUs",
        note=f"recorded: {_origin(content)}",
        axis=page.Axis("time", log=True, show=page.seconds),
        groups=groups,
    )


def _is_table(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)


def _table(name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    head = list(dict.fromkeys(key for row in rows for key, cell in row.items() if _flat(cell)))
    body = [[_show(row.get(key)) for key in head] for row in rows[:_LONGEST]]
    more = len(rows) - _LONGEST
    rest = page.text(f"The file has {more} further rows.") if more > 0 else ""
    return page.table(head, body, name) + rest


def _flat(cell: object) -> bool:
    return not isinstance(cell, dict | list)


def _show(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) and not value.is_integer():
        return page.plain(value)
    return str(value)
