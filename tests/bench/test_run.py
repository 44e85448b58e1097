# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A run of benchmarks: what was finished is kept, whatever ends it, and what is left is shown."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import beluga_bench
import pytest
from beluga_bench import Options, Row, run
from beluga_bench.harness.row import Recorder
from click.testing import CliRunner

from beluga.cli.app import app
from beluga.errors import BelugaError, CallTimeoutError

Bench = Callable[[Any], list[Row]]


def rows_then(count: int, end: BaseException | None = None) -> Bench:
    """Return a benchmark that finishes that many rows and then fails or succeeds."""

    def measure(options: Options) -> list[Row]:
        recorder, rows = Recorder("rpc", options, {"memory": "DRAM"}), []
        for number in range(count):
            options.report(f"case {number}")
            rows.append(recorder.row(f"case {number}", depth=number, ops_per_s=1))
        if end is not None:
            raise end
        return rows

    return measure


@pytest.fixture
def benches(monkeypatch: pytest.MonkeyPatch) -> dict[str, Bench]:
    made: dict[str, Bench] = {}
    monkeypatch.setattr(beluga_bench, "BENCHES", made)
    return made


@pytest.mark.parametrize("end", [CallTimeoutError("late"), OSError(5, "gone")])
def test_rows_before_a_failure_are_kept_and_later_benchmarks_run(end: Exception) -> None:
    done = run({"a": rows_then(3, end), "b": rows_then(2)}, ["a", "b"], Options())
    assert [row["case"] for row in done.rows] == ["case 0", "case 1", "case 2", "case 0", "case 1"]
    assert list(done.missing) == ["a"] and "it failed after 3 rows" in done.missing["a"]
    assert done.ended is None


@pytest.mark.parametrize("end", [KeyboardInterrupt(), SystemExit(143)])
def test_an_interruption_ends_the_run_and_loses_no_row(end: BaseException) -> None:
    done = run({"a": rows_then(2, end), "b": rows_then(1)}, ["a", "b"], Options())
    assert (len(done.rows), done.ended, list(done.missing)) == (2, end, ["a", "b"])


def test_progress_shows_a_total_and_the_remaining_time() -> None:
    calls: list[str] = []
    run({"a": rows_then(2), "b": rows_then(2)}, ["a", "b"], Options(progress=calls.append))
    assert calls[0].startswith("case 0 (1 of about ")
    assert all(", about " in line and line.endswith(" left)") for line in calls[1:])
    assert calls[-1].startswith("case 1 (4 of about 4, about ")


@pytest.mark.parametrize(
    ("end", "status"),
    [(BelugaError("late"), 1), (KeyboardInterrupt(), 130), (SystemExit(143), 143)],
)
@pytest.mark.parametrize("form", ["--json", "--wide"])
def test_the_command_prints_what_was_finished(
    benches: dict[str, Bench], end: BaseException, status: int, form: str
) -> None:
    benches["rpc"] = rows_then(3, end)
    done = CliRunner().invoke(app, ["bench", "rpc", form])
    assert done.exit_code == status
    if form == "--json":
        assert [row["case"] for row in json.loads(done.stdout)] == ["case 0", "case 1", "case 2"]
    else:
        assert [f"case {number}" in done.stdout for number in range(4)] == [True] * 3 + [False]
    output = done.stderr + str(done.exception)
    assert "3 completed rows" in output


def test_a_table_is_printed_when_its_benchmark_ends(benches: dict[str, Bench]) -> None:
    benches["one"] = rows_then(1)
    benches["two"] = rows_then(2, KeyboardInterrupt())
    done = CliRunner().invoke(app, ["bench", "one", "two"])
    assert done.exit_code == 130
    assert done.stdout.count("case 0") == 2


def test_a_table_of_a_benchmark_fits_80_columns(
    benches: dict[str, Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(options: Options) -> list[Row]:
        recorder = Recorder("copy", options, {"memory": "DRAM", "threads": 1, "bytes": 40})
        figures = {"p50_ns": 123456.7, "p99_ns": 1234567.8, "ops_per_s": 29_000_000.0,
                   "gb_per_s": 123.4, "limit": 54_000_000.0, "ratio_to_limit": 0.987,
                   "ratio_to_peer": 1.23, "paper": "12.13 M calls/s"}  # fmt: skip
        return [recorder.row(f"a case of many words {n}", depth=n, **figures) for n in range(8)]

    monkeypatch.setenv("COLUMNS", "80")
    benches["copy"] = measure
    done = CliRunner().invoke(app, ["bench", "copy"])
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(line.startswith("┏") for line in lines) == 1  # one table
    assert "threads 1" in lines[0] and "0.987" in done.stdout
    assert "--wide" in done.stderr
    whole = CliRunner().invoke(app, ["bench", "copy", "--wide"]).stdout
    assert "12.13 M calls/s" in whole
