# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The tables of README and docs/understand/benchmarks.md have the figures of recorded files.

``python tests/repo/test_quoted_figures.py`` prints the tables of the files, to be pasted after a
new run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
BASICS = "bench/results/basics-xeon.json"
GATEWAY = "bench/results/gateway.json"
INDEX = "bench/results/index-xeon.json"

Row = dict[str, Any]


def rows_of(path: str) -> list[Row]:
    rows: list[Row] = json.loads((ROOT / path).read_text(encoding="utf-8"))
    return [row for row in rows if row["p50_ns"] is not None or row["limit"] is not None]


def found(bench: str, case: str, **fields: object) -> Row:
    """Return the only recorded row with these fields."""
    (row,) = [
        row
        for row in rows_of(BASICS)
        if (row["bench"], row["case"]) == (bench, case)
        and all(row[name] == value for name, value in fields.items())
    ]
    return row


def figures(value: float, digits: int) -> str:
    """Return a number with that many significant digits."""
    decimals = max(digits - len(str(int(abs(value)))), 0) if abs(value) >= 1 else digits
    return f"{value:,.{decimals}f}"


def duration(ns: float) -> str:
    return f"{figures(ns / 1e3, 2 if ns < 1e5 else 3)} us"


def ratio(row: Row) -> str:
    q1, q3 = row["ratio_q1"], row["ratio_q3"]
    return f"{row['ratio_to_limit']:.2f} ({q1:.2f}, {q3:.2f}){', noisy' if row['noisy'] else ''}"


def line(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def of_rpc() -> Iterator[str]:
    for row in rows_of(BASICS):
        if row["bench"] == "rpc":
            case = row["case"] + (", hardware coherence" if row["coherence"] == "hardware" else "")
            speeds = (f"{figures(one / 1e6, 3)} M" for one in (row["ops_per_s"], row["limit"]))
            times = duration(row["p50_ns"]), duration(row["p99_ns"])
            yield line(case, row["depth"], *speeds, ratio(row), *times)


SIZES = {64: "64", 16 << 10: "16 KiB", 256 << 10: "256 KiB", 16 << 20: "16 MiB"}


def of_latency() -> Iterator[str]:
    for case in ("read", "write"):
        for size, name in SIZES.items():
            row = found("latency", case, bytes=size, memory="tmpfs/DRAM")
            private = found("latency", case, bytes=size, memory="DRAM (private)")
            speeds = (figures(one, 3) for one in (row["gb_per_s"], row["limit"]))
            times = duration(row["p50_ns"]), duration(private["p50_ns"])
            yield line(case, name, *speeds, ratio(row), *times)


def of_coherence() -> Iterator[str]:
    for row in rows_of(BASICS):
        if row["bench"] == "coherence":
            share = "" if row["ratio_to_limit"] is None else f"{row['ratio_to_limit']:.2f}"
            speed = figures(row["gb_per_s"], 3)
            yield line(row["case"], duration(row["p50_ns"]), speed, share, row["paper"] or "")


def of_readme() -> Iterator[str]:
    one, many = (found("rpc", "c", depth=depth, coherence="software") for depth in (1, 128))
    yield line(
        "`rpc`, round trip, C to C",
        duration(1e9 / one["ops_per_s"]),
        f"{duration(1e9 / one['limit'])}, a bare exchange of lines",
        "2.11 us",
    )
    speeds = (f"{one / 1e6:.0f} M/s" for one in (many["ops_per_s"], many["limit"]))
    yield line("`rpc`, 128 calls in flight", *speeds, "12.1 M/s")
    for case, word, bare, paper in (
        ("write", "written", "bare streamed stores", "2.41 us"),
        ("read", "read", "bare flushes and loads", "5.98 us"),
    ):
        row = found("latency", case, bytes=16 << 10, memory="tmpfs/DRAM")
        own, limit = (duration((16 << 10) / speed) for speed in (row["gb_per_s"], row["limit"]))
        yield line(f"`latency`, 16 KiB {word}", own, f"{limit}, {bare}", paper)


def of_index() -> Iterator[str]:
    for row in rows_of(INDEX):
        call = duration(row["p50_ns"])
        speeds = (f"{figures(one / 1e6, 3)} M" for one in (row["keys_per_s"], row["limit"]))
        yield line(row["case"], f"{row['blocks']:,}", call, *speeds, ratio(row))


def of_gateway() -> Iterator[str]:
    for row in rows_of(GATEWAY):
        yield line(row["case"], row["note"].partition(";")[0].replace("<=", "at most"))


PAGE = "docs/understand/benchmarks.md"
TABLES: dict[str, tuple[str, Callable[[], Iterator[str]]]] = {
    "readme": ("README.md", of_readme),
    "rpc": (PAGE, of_rpc),
    "latency": (PAGE, of_latency),
    "coherence": (PAGE, of_coherence),
    "index": (PAGE, of_index),
    "gateway": (PAGE, of_gateway),
}


@pytest.mark.parametrize("table", TABLES)
def test_a_table_has_the_recorded_figures(table: str) -> None:
    path, rows = TABLES[table]
    text = (ROOT / path).read_text(encoding="utf-8")
    wanted = "\n".join(rows())
    assert wanted in text, f"{path} lacks these lines:\n{wanted}"


@pytest.mark.parametrize("path", [BASICS, GATEWAY, INDEX])
def test_a_page_names_the_commit_of_its_figures(path: str) -> None:
    commits = {row["commit"] for row in rows_of(path)}
    assert len(commits) == 1
    assert commits.pop() in (ROOT / PAGE).read_text(encoding="utf-8")


if __name__ == "__main__":
    for name, (_, make) in TABLES.items():
        print(f"\n{name}\n")
        print("\n".join(make()))
