# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Results that were recorded in files: rows of benchmarks, and reports of other commands.

A recorded file is compact JSON. A table has its columns once and a line for each row:

    {"commit": "9b4bf7fd",
     "rows": {"same": {"bench": "rpc"}, "columns": ["case", "depth"], "rows": [
    ["c", 1],
    ["c", 128]]}}

``same`` has the columns with one value in all rows; a column without a value is left out. Readers
get the table as a list of rows. A file that has only ``rows`` has those of ``beluga bench``.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from beluga import page
from beluga.errors import BadValueError

from .machine import commit_date, cpu_model, version
from .row import FIELDS, Row

_FOLDER = Path(__file__).resolve().parent.parent / "results"
_PEERS = "vllm-demo.json"
_COUNTS = ("bytes", "fragment_bytes", "fragments", "depth", "threads")
_WIDTH = 100  # of a line with a whole object
_LONGEST = 400  # rows of a table that a page shows


@dataclass(frozen=True, slots=True)
class Recorded:
    """A recorded report of another command."""

    name: str
    content: Mapping[str, Any]


def computed(command: str) -> dict[str, Any]:
    """Return the origin of results that were computed, not measured, today by this program."""
    return {
        "what": "simulated",
        "machine": cpu_model(),
        "commit": version(),
        "date": datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat(),
        "command": command,
    }


def read_record(path: Path) -> Any:
    """Return what :func:`write_record` wrote, or the content of any other file of JSON."""
    content = msgspec.json.decode(path.read_bytes())
    if not isinstance(content, dict):
        return content
    content = {name: _expanded(value) for name, value in content.items()}
    return content["rows"] if list(content) == ["rows"] else content


def _expanded(value: Any) -> Any:
    if not isinstance(value, dict) or set(value) != {"same", "columns", "rows"}:
        return value
    columns = value["columns"]
    return [{**value["same"], **dict(zip(columns, row, strict=True))} for row in value["rows"]]


def write_record(path: Path, content: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
    """Write a report or the rows of a benchmark; the file is replaced at once."""
    report = content if isinstance(content, Mapping) else {"rows": content}
    fields = (f"{_json(name)}: {_compact(value)}" for name, value in report.items())
    draft = path.with_name(f"{path.name}.new")
    draft.write_text("{" + ",\n ".join(fields) + "}\n", encoding="utf-8")
    draft.replace(path)


def _json(value: object) -> str:
    """Return JSON with spaces after commas and colons, so that lines can be read."""
    return json.dumps(msgspec.to_builtins(value), ensure_ascii=False)


def _compact(value: Any) -> str:
    text = _json(value)
    if isinstance(value, Mapping) and len(text) > _WIDTH:
        return (
            "{" + ",\n  ".join(f"{_json(name)}: {_compact(of)}" for name, of in value.items()) + "}"
        )
    if not _is_table(value):
        return text
    names = dict.fromkeys(name for row in value for name in row)
    values = {name: [row.get(name) for row in value] for name in names}
    same = {name: each[0] for name, each in values.items() if all(x == each[0] for x in each)}
    columns = [name for name in names if name not in same]
    shared = {name: value for name, value in same.items() if value is not None}
    rows = ",\n".join(_json([row.get(name) for name in columns]) for row in value)
    head = f'{{"same": {_json(shared)},\n "columns": {_json(columns)},\n "rows": [\n'
    return f"{head}{rows}]}}"


def load(path: Path) -> list[Row] | Recorded:
    """Read a file of ``beluga bench --json``, or of another command's results.

    Raises BadValueError if it is neither, and OSError if it cannot be read.
    """
    try:
        content = read_record(path)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadValueError(f"{path} is not JSON ({error}); name a file of results") from None
    if isinstance(content, dict) and content:
        return Recorded(path.name, content)
    rows = content if isinstance(content, list) else []
    if not rows or not all(isinstance(row, dict) and {"bench", "case"} <= set(row) for row in rows):
        raise BadValueError(
            f"{path} has no results; write them with beluga bench NAME --json > FILE"
        )
    return [_row(path, row) for row in rows]


def _row(path: Path, given: dict[str, Any]) -> Row:
    row: Row = {name: given.get(name) for name in FIELDS}
    numbers = [name for name in FIELDS if name.endswith(("_ns", "_per_s")) or "ratio" in name]
    for name in (*numbers, "limit", *_COUNTS):
        value = row[name]
        if value is None:
            continue
        try:
            row[name] = _number(value)
        except (TypeError, ValueError):
            text = f"{name} of case {given['case']!r} is {value!r}, no number"
            raise BadValueError(f"{path}: {text}") from None
    return row


def _number(value: Any) -> float:
    """Return a number. Some recorded rows have numpy's numbers as text."""
    return float(value) if isinstance(value, str | float) else int(value)


def recorded_peers() -> list[Recorded]:
    """Return the recorded results of peers, if this is a checkout that has them."""
    peers = load(_FOLDER / _PEERS) if (_FOLDER / _PEERS).is_file() else []
    return [peers] if isinstance(peers, Recorded) else []


def recorded_sections(recorded: Sequence[Recorded]) -> list[str]:
    """Return each report's charts, facts and tables."""
    return [part for result in recorded for part in _parts(result)]


def _parts(result: Recorded) -> list[str]:
    chart = _peer_chart(result.content)
    charts = [page.chart(chart)] if chart else []
    tables = [
        page.hidden(f"{result.name}: {name}", _table(name, value))
        for name, value in result.content.items()
        if _is_table(value)
    ]
    plain = {
        name: _show(value)
        for name, value in result.content.items()
        if not isinstance(value, dict | list)
    }
    facts = page.hidden(f"{result.name}: facts", page.facts(plain)) if plain else ""
    return [*charts, page.text(f"{result.name}: {_origin(result.content)}"), facts, *tables]


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
    peers = content.get("peers")
    if not isinstance(peers, dict) or not isinstance(content.get("ttft_hit_s"), int | float):
        return None
    times = {
        "computed again, without a cache": content.get("ttft_recompute_s"),
        "from the engine's own cache": content.get("ttft_local_hit_s"),
        "from Beluga's pool": content["ttft_hit_s"],
        **{f"from {name}": seconds for name, seconds in peers.items()},
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
    note = page.text(f"The file has {more} further rows.") if more > 0 else ""
    return page.table(head, body, name) + note


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
