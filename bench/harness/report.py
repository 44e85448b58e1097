# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""One page of all results: charts, tables, the machine, its limits, and peers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from statistics import median

from beluga import page

from .charts import charts, remark, show_bytes, show_gb, show_ns, show_rate
from .machine import commit_date
from .recorded import Recorded, recorded_sections
from .row import Row, is_emulated, is_smoke

_SKIPPED = "skipped: "
_MANY = 24  # rows of a table that is folded
_TEXT: Callable[[object], str] = str
_COLUMNS: dict[str, tuple[str, Callable[..., str]]] = {
    "case": ("case", _TEXT),
    "engine": ("engine", _TEXT),
    "peer": ("peer", _TEXT),
    "crc": ("checksums", lambda given: "yes" if given else "no"),
    "fragment_bytes": ("fragment", show_bytes),
    "fragments": ("fragments", page.plain),
    "bytes": ("bytes", show_bytes),
    "depth": ("at a time", page.plain),
    "threads": ("threads", page.plain),
    "memory": ("memory", _TEXT),
    "coherence": ("coherence", _TEXT),
    "p50_ns": ("median", show_ns),
    "p99_ns": ("p99", show_ns),
    "blocks": ("blocks", page.plain),
    "ops_per_s": ("rate", show_rate),
    "keys_per_s": ("keys", show_rate),
    "gb_per_s": ("bandwidth", show_gb),
    "limit": ("limit, same run", page.plain),
    "ratio_to_limit": ("ratio (quartiles)", page.plain),
    "ratio_to_peer": ("ratio to peer", page.plain),
    "paper": ("paper, CXL switch", page.plain),
    "note": ("note", _TEXT),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """The content of a page. ``source`` is the origin of the rows, ``machine`` has facts about the
    machine that ran them, and ``missing`` the reasons why benchmarks have no rows.
    """

    rows: Sequence[Row]
    source: str
    machine: Mapping[str, str] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    recorded: Sequence[Recorded] = ()


def report(results: Results) -> str:
    """Return the page."""
    rows = results.rows
    benches = {name: list(own) for name, own in groupby(_sorted(rows), lambda row: row["bench"])}
    targets = {f"bench-{name}": str(name) for name in benches}
    charts = [
        page.section("Limits", *_limits(rows), anchor="limits"),
        page.section("Peers", *_peers(results), anchor="peers"),
        page.section("Machine", *_machine(results), anchor="machine"),
    ]
    ends = {"limits": "Limits", "peers": "Peers", "machine": "Machine"}
    parts = [
        *map(page.warning, _warnings(results)),
        page.cards(list(_cards(rows))),
        page.links({**targets, **ends}),
        *(_bench(str(name), own) for name, own in benches.items()),
        *charts,
    ]
    smoke = "Smoke run: " if any(map(is_smoke, rows)) else ""
    return page.page(f"{smoke}Benchmarks of Beluga", _lead(rows), *parts)


def _sorted(rows: Sequence[Row]) -> list[Row]:
    """Return the rows grouped by benchmark, in the order of their first rows."""
    order = list(dict.fromkeys(row["bench"] for row in rows))
    return sorted(rows, key=lambda row: order.index(row["bench"]))


def _lead(rows: Sequence[Row]) -> str:
    if any(map(is_smoke, rows)):
        return (
            "SMOKE RUN: each benchmark ran for a moment, to see that it works. These figures are "
            "not measurements."
        )
    ratios = _ratios(rows)
    if not ratios:
        return f"{len(rows)} results."
    return (
        f"Half of {len(ratios)} measured cases reach {page.percent(median(ratios))} or more of "
        "what bare instructions reached on the same machine, in the same run."
    )


def _ratios(rows: Sequence[Row]) -> list[float]:
    return [
        float(row["ratio_to_limit"])
        for row in rows
        if isinstance(row["ratio_to_limit"], int | float) and not row["noisy"]
    ]


def _warnings(results: Results) -> Iterator[str]:
    rows = results.rows
    if any(map(is_smoke, rows)):
        yield "SMOKE RUN. Do not quote these figures; run without --smoke on an idle machine."
    if any(map(is_emulated, rows)):
        yield (
            "Emulated memory: rows whose memory is tmpfs/DRAM, a file or paced ran on ordinary "
            "memory. They show what the software costs, not what a CXL switch adds."
        )
    noisy = [row for row in rows if row["noisy"]]
    if noisy:
        yield (
            f"Noisy: in {len(noisy)} of {len(rows)} rows the machine's own limit varied by more "
            "than 25 %, so other work ran at the same time. Their ratios decide nothing."
        )
    for name, reason in results.missing.items():
        yield f"{name} is missing: {reason}"
    machines = {str(row["machine"]) for row in rows}
    if len(machines) > 1:
        yield (
            f"The rows come from {len(machines)} machines; do not compare their figures with each "
            "other. Each part says which machine it is from."
        )


def _cards(rows: Sequence[Row]) -> Iterator[page.Card]:
    wanted: tuple[tuple[str, str, dict[str, object]], ...] = (
        ("A call, round trip", "p50_ns", {"bench": "rpc", "case": "c", "depth": 1}),
        ("16 KiB written", "p50_ns", {"bench": "latency", "case": "write", "bytes": 16384}),
        ("16 KiB read", "p50_ns", {"bench": "latency", "case": "read", "bytes": 16384}),
        ("Calls, 128 at a time", "ops_per_s", {"bench": "rpc", "case": "c", "depth": 128}),
    )
    for name, value, unit_name in wanted:
        for row in rows:
            fits = all(row[key] == wish for key, wish in unit_name.items())
            if fits and row[value] is not None and row["coherence"] in ("software", None):
                shown = _COLUMNS[value][1](row[value])
                yield page.Card(name, shown, _judged(row))
                break
    if ratios := _ratios(rows):
        than = f"median of {len(ratios)} ratios that are not noisy"
        yield page.Card("Of the machine's own limit", page.percent(median(ratios)), than)


def _judged(row: Row) -> str:
    parts = [str(row["memory"])]
    if row["ratio_to_limit"] is not None:
        parts.insert(0, f"{page.percent(_float(row['ratio_to_limit']))} of the limit's speed")
    parts += ["noisy"] if row["noisy"] else []
    parts += ["smoke run"] if is_smoke(row) else []
    return ", ".join(parts)


def _bench(name: str, rows: Sequence[Row]) -> str:
    """Return the section of one benchmark. Runs on different machines or commits are separate."""
    runs: dict[tuple[object, object], list[Row]] = {}
    for row in rows:
        runs.setdefault((row["machine"], row["commit"]), []).append(row)
    notes = remark(rows)
    parts = [part for own in runs.values() for part in _run(name, own)]
    return page.section(f"{name} ({notes})" if notes else name, *parts, anchor=f"bench-{name}")


def _run(name: str, rows: Sequence[Row]) -> Iterator[str]:
    yield page.text(_origin(rows))
    yield from map(page.chart, charts(rows))
    measured = [row for row in rows if not str(row["note"]).startswith(_SKIPPED)]
    if measured:
        table = _table(name, measured)
        many = len(measured) > _MANY
        yield page.hidden(f"All {len(measured)} results of {name}", table) if many else table
    if skipped := [row for row in rows if row not in measured]:
        lines = [f"{row['case']}: {str(row['note']).removeprefix(_SKIPPED)}" for row in skipped]
        title = f"Skipped, for this machine lacks something: {len(skipped)}"
        yield page.hidden(title, page.notes(list(dict.fromkeys(lines))))


def _origin(rows: Sequence[Row]) -> str:
    """Return the machine, commits, days and commands of the rows."""
    runs = dict.fromkeys(
        (str(row["machine"]), str(row["commit"]), _date(row), str(row["command"])) for row in rows
    )
    origin_text = (f"{machine}, commit {commit}, {date}, command: {command}"
            for machine, commit, date, command in runs)  # fmt: skip
    return f"From {'; and '.join(origin_text)}"


def _date(row: Row) -> str:
    if row["date"] is not None:
        return str(row["date"])
    day = commit_date(str(row["commit"]))
    return f"no date recorded (the commit is of {day})" if day else "no date recorded"


def _float(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _table(name: str, rows: Sequence[Row]) -> str:
    fields = [column for column in _COLUMNS if any(row[column] is not None for row in rows)]
    head = [_COLUMNS[field][0] for field in fields]
    body = [[_shown(row, field) for field in fields] for row in rows]
    return page.table(head, body, f"All results of {name}")


def _shown(row: Row, name: str) -> str:
    value = row[name]
    if value is None:
        return "-"
    if name == "limit":
        return _limit(row)
    if name == "ratio_to_limit":
        return _ratio(row)
    show = _COLUMNS[name][1]
    return str(value) if isinstance(value, str) else show(value)


def _limit(row: Row) -> str:
    value, unit = _float(row["limit"]), str(row["limit_unit"])
    return show_rate(value) if unit == "ops/s" else f"{page.plain(value)} {unit}"


def _ratio(row: Row) -> str:
    text = page.plain(_float(row["ratio_to_limit"]))
    if row["ratio_q1"] is not None and row["ratio_q3"] is not None:
        low, high = (page.plain(_float(row[name])) for name in ("ratio_q1", "ratio_q3"))
        text = f"{text} ({low}, {high})"
    return f"{text}, noisy" if row["noisy"] else text


def _limits(rows: Sequence[Row]) -> Iterator[str]:
    judged = [row for row in rows if row["ratio_to_limit"] is not None]
    yield page.text(
        "A limit is what bare instructions (or, for tiers, the bare store) reached on the same "
        "machine, in turns with the measured case. 1 is as fast as the machine goes."
    )
    if not judged:
        yield page.text("No row has a limit.")
        return
    fields = ("case", "bytes", "depth", "threads", "memory", "coherence", "limit", "ratio_to_limit")
    head = ["benchmark", *(_COLUMNS[name][0] for name in fields)]
    body = [[str(row["bench"]), *(_shown(row, name) for name in fields)] for row in judged]
    yield page.hidden(f"All {len(judged)} limits", page.table(head, body, "Limits"))


def _peers(results: Results) -> Iterator[str]:
    rows = [row for row in results.rows if row["peer"] is not None and row["ops_per_s"] is not None]
    if rows:
        yield page.text("Other programs that did the same work in the same run:")
        head = ["benchmark", "case", "peer", "bytes", "median", "bandwidth", "ratio", "from"]
        yield page.table(head, [_peer(row) for row in rows], "Peers of this run")
    sections = recorded_sections(results.recorded)
    if sections:
        yield page.text(
            "Recorded earlier, not in this run, and perhaps on another machine; each says where "
            "and when:"
        )
        yield from sections
    if not rows and not sections:
        yield page.text("No result has a peer.")


def _peer(row: Row) -> list[str]:
    ratio = "-"
    if row["ratio_to_peer"] is not None:
        ratio = f"ours is {page.plain(_float(row['ratio_to_peer']))} times as fast"
    elif row["ratio_to_limit"] is not None:
        ratio = f"ours is {_ratio(row)} times as fast"
    shown = [_shown(row, name) for name in ("case", "peer", "bytes", "p50_ns", "gb_per_s")]
    return [str(row["bench"]), *shown, ratio, f"{row['commit']}, {_date(row)}"]


def _machine(results: Results) -> Iterator[str]:
    yield page.facts({"Results": results.source, **results.machine})
    runs: dict[str, set[str]] = {}
    for row in results.rows:
        key = f"{row['machine']}, commit {row['commit']}, {_date(row)}"
        runs.setdefault(key, set()).add(str(row["command"]))
    body = [[key, "; ".join(sorted(commands))] for key, commands in runs.items()]
    if body:
        yield page.table(["machine, commit, date", "commands"], body, "Where the rows come from")
