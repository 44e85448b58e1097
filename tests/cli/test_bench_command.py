# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""``beluga bench``: rows as JSON, and a table."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable

import pytest

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
