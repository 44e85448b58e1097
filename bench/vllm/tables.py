# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The tables of the benchmark as text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .report import Report
from .summary import Row

_Column = Callable[[Row], str]


def print_tables(report: Report) -> None:
    """Print passes, rates, variants and the verdict."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    title = f"{report['machine']}, model {report['model']}, {report['commit']}"
    for heading, key, columns in (
        (f"two passes: {title}", "passes", _PASSES),
        (f"at a rate, {report['passes'][0]['length']} tokens", "rates", _RATES),
        ("variants", "variants", _VARIANTS),
    ):
        if not report[key]:
            continue
        table = Table(title=heading)
        for name in columns:
            table.add_column(name, justify="left" if name == "arm" else "right")
        for row in report[key]:
            table.add_row(*(column(row) for column in columns.values()))
        console.print(table)
    console.print(_summary(report["verdict"], report["passes"]), highlight=False)
    for name, why in report["peers_skipped"].items():
        console.print(f"{name}: skipped, {why}", highlight=False)


def _ms(name: str) -> _Column:
    return lambda row: "" if row[name] is None else f"{1000 * row[name]:,.1f}"


def _count(name: str) -> _Column:
    return lambda row: f"{row[name]:,}"


_TIMES: Mapping[str, _Column] = {
    "first token, mean ms": _ms("ttft_mean_s"),
    "p99": _ms("ttft_p99_s"),
    "per token, mean ms": _ms("tpot_mean_s"),
    "p99 ": _ms("tpot_p99_s"),
    "cached": lambda row: f"{row['cached_tokens'] / row['full_tokens']:.0%}",
}
_PASSES: Mapping[str, _Column] = {
    "tokens": _count("length"),
    "pass": _count("pass"),
    "arm": lambda row: str(row["arm"]),
    "requests": _count("requests"),
    "requests/s": lambda row: f"{row['qps']:.2f}",
    **_TIMES,
}
_RATES: Mapping[str, _Column] = {
    "requests/s": lambda row: f"{row['rate_per_s']:.2f}",
    "arm": lambda row: str(row["arm"]),
    "answered/s": lambda row: f"{row['qps']:.2f}",
    **_TIMES,
}
_VARIANTS: Mapping[str, _Column] = {
    "arm": lambda row: str(row["arm"]),
    "block": _count("block_tokens"),
    "interleaved": lambda row: "yes" if row["interleave"] else "no",
    "computed, ms": _ms("ttft_miss_s"),
    "from the pool": _ms("ttft_hit_s"),
    "own cache": _ms("ttft_local_hit_s"),
    "loading": _ms("load_s"),
    "bare copy": _ms("load_limit_s"),
}


def _summary(verdict: Mapping[str, Any], passes: Sequence[Row]) -> str:
    full = ", ".join(f"{arm} {'yes' if ok else 'NO'}" for arm, ok in verdict["full_hits"].items())
    first = [row for row in passes if row["pass"] == 1 and row["arm"] == "plain"]
    reuse = sum(row["repeated_tokens"] for row in first) / sum(row["full_tokens"] for row in first)
    return (
        f"{reuse:.0%} of the first pass's whole blocks stand in an earlier request\n"
        f"second pass and rates found every whole block: {full}\n"
        f"the same work in every arm: {'yes' if verdict['same_work'] else 'NO'}"
    )
