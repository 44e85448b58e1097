# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The command ``beluga bench`` and its report."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import beluga_bench
import pytest
from click.testing import CliRunner, Result
from page.bench_row import row
from page.well_formed import Page

from beluga.cli.app import app
from beluga.errors import BelugaError

Run = Callable[..., "subprocess.CompletedProcess[str]"]

PROMISED = {
    *("bench", "case", "bytes", "depth", "threads", "memory", "coherence", "p50_ns", "p99_ns"),
    *("ops_per_s", "gb_per_s", "limit", "ratio_to_limit"),
}


def test_rows_have_the_documented_fields(run: Run) -> None:
    ended = run("bench", "coherence", "--smoke", "--json", "--coherence", "hardware")
    assert ended.returncode == 0, ended.stderr
    rows = json.loads(ended.stdout)
    assert {row["case"] for row in rows} >= {"streamed store", "read after flush"}
    assert all(row.keys() >= PROMISED for row in rows)
    assert all(row["coherence"] == "hardware" and row["memory"] for row in rows)


@pytest.mark.long
def test_calls_are_measured_or_the_row_reports_too_few_cores(run: Run) -> None:
    ended = run("bench", "rpc", "--smoke", "--json", "--coherence", "hardware")
    assert ended.returncode == 0, ended.stderr
    rows = json.loads(ended.stdout)
    assert all(row.keys() >= PROMISED for row in rows)
    if len(os.sched_getaffinity(0)) > 1:
        assert {row["case"] for row in rows} == {"c", "python"}
        assert all(row["coherence"] == "hardware" and row["memory"] for row in rows)
    else:
        assert [(row["case"], row["note"]) for row in rows] == [("c", "skipped: needs two cores")]


def test_an_unknown_benchmark_is_a_usage_error(run: Run) -> None:
    refused = run("bench", "everything")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "no benchmark 'everything'" in refused.stderr


Benches = dict[str, Callable[[Any], Any]]


@pytest.fixture
def benches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Benches:
    """Replace the benchmarks by one that has a row. The current folder is an empty one."""
    monkeypatch.chdir(tmp_path)
    made: Benches = {"rpc": lambda options: [row()]}
    monkeypatch.setattr(beluga_bench, "BENCHES", made)
    return made


def beluga(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["bench", "report", *map(str, arguments)])


def ends_with(error: BaseException) -> Callable[[Any], Any]:
    def run(options: Any) -> Any:
        raise error

    return run


def test_the_page_has_the_rows_that_json_has(benches: Benches, tmp_path: Path) -> None:
    ended = beluga("--json", "--out", "page.html")
    assert (ended.exit_code, ended.stderr) == (0, "wrote page.html\n")
    assert json.loads(ended.stdout) == [row()]
    read = Page((tmp_path / "page.html").read_text())
    assert "950 ns" in read.texts["td"]
    assert {"CPU", "Kernel", "Memory", "Commit", "Command"} <= set(read.texts["dt"])


def test_without_a_name_the_page_is_written_to_the_current_folder(benches: Benches) -> None:
    assert beluga("rpc", "--smoke").exit_code == 0
    assert Path("beluga-bench.html").is_file()


def test_a_failed_benchmark_does_not_stop_the_others(benches: Benches) -> None:
    benches["a"] = ends_with(BelugaError("no fio"))
    benches["b"] = lambda options: [row("b")]
    ended = beluga()
    assert isinstance(ended.exception, BelugaError)
    assert str(ended.exception) == "a failed; the page has the others"
    read = Page(Path("beluga-bench.html").read_text())
    assert "a is missing: it failed: no fio" in read.texts["p"]
    assert {"bench-rpc", "bench-b"} <= set(read.ids)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(143)])
def test_an_interruption_leaves_a_page_of_completed_rows(
    benches: Benches, error: BaseException
) -> None:
    benches["a"] = ends_with(error)
    benches["b"] = lambda options: pytest.fail("it went on")
    ended = beluga()
    assert ended.exit_code in (130, 143)
    assert ended.stderr.splitlines()[-2:] == ["wrote beluga-bench.html", "interrupted"]
    read = Page(Path("beluga-bench.html").read_text())
    assert "bench-rpc" in read.ids
    for name in ("a", "b"):
        assert f"{name} is missing: the run was interrupted" in read.texts["p"]


def test_an_interruption_of_the_first_benchmark_leaves_no_file(
    benches: Benches, tmp_path: Path
) -> None:
    benches["rpc"] = ends_with(KeyboardInterrupt())
    ended = beluga()
    assert ended.exit_code == 130
    assert ended.stderr.splitlines() == ["interrupted before any benchmark was complete: no page"]
    assert list(tmp_path.iterdir()) == []


def test_a_page_of_files_runs_nothing(benches: Benches, tmp_path: Path) -> None:
    benches["rpc"] = lambda options: pytest.fail("it ran")
    for name in ("one", "two"):
        (tmp_path / f"{name}.json").write_text(json.dumps([row(case=name)]))
    ended = beluga("--from", "one.json", "two.json", "--out", "page.html")  # as a shell expands *
    assert ended.exit_code == 0, ended.output
    read = Page(Path("page.html").read_text())
    assert {"one", "two"} <= set(read.texts["td"])
    assert "recorded in one.json, two.json; nothing was run" in read.texts["dd"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "page.txt"], "does not end with .html"),
        (["--out", "none/page.html"], "No such file or directory"),
        (["nothing"], "no benchmark 'nothing'"),
        (["--from", "none.json"], "No such file or directory"),
    ],
)
def test_invalid_arguments_are_rejected_before_the_work(
    benches: Benches, arguments: list[str], message: str
) -> None:
    benches["rpc"] = lambda options: pytest.fail("it ran")
    ended = beluga(*arguments)
    assert ended.exit_code != 0
    assert message in ended.stderr + str(ended.exception)


def test_report_options_are_rejected_without_report(benches: Benches) -> None:
    ended = CliRunner().invoke(app, ["bench", "rpc", "--out", "page.html"])
    assert ended.exit_code == 2
    assert "add report" in ended.stderr
