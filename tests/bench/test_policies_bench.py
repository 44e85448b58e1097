# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The comparison of all policies: its verdict, goodput, and the page that it writes."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from beluga_bench import policies
from beluga_bench.policies import BEGIN, END, Result, check

from beluga.router import DEFAULT_POLICY, POLICIES
from beluga.simulate import goodput


def result(
    load: float, mean: float, error: float = 0.0, p90: float = 1.0, policy: str = DEFAULT_POLICY
) -> Result:
    return Result("trace", load, "pool", policy, 5, mean, error, p90, 0.0, 0.0, 0.0)


def test_the_default_is_held_to_its_bounds_below_and_above_saturation() -> None:
    results = [
        result(1.0, 1.02), result(1.0, 1.0, policy="linear"),
        result(1.2, 1.03), result(1.2, 1.0, policy="linear"),
        result(1.3, 1.03, 0.02), result(1.3, 1.0, 0.01, policy="linear"),
        result(2.0, 20.9), result(2.0, 20.0, policy="linear"),
        result(3.0, 42.2), result(3.0, 40.0, policy="linear"),
    ]  # fmt: skip
    rows = check(results)
    assert [row["holds"] for row in rows] == [True, False, True, True, False]
    assert [row["saturated"] for row in rows] == [False, False, False, True, True]
    assert {row["best"] for row in rows} == {"linear"}


def test_goodput_is_interpolated_between_the_loads_that_were_run() -> None:
    results = [(2.0, 8.0), (1.0, 2.0)]
    assert goodput(results, 5.0) == pytest.approx(1.5)
    assert goodput(results, 9.0) == 2.0
    assert goodput(results, 1.0) is None


def test_one_command_writes_results_tables_and_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra plot is not installed")
    page, target = tmp_path / "page.md", tmp_path / "out.json"
    page.write_text(f"before\n{BEGIN}\nstale\n{END}\nafter\n")
    policies.main("--smoke", str(target), str(page))
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "stale" not in text
    rows = msgspec.json.decode(target.read_bytes())["rows"]
    assert {row["policy"] for row in rows} == set(POLICIES)
    assert all(f"| {name} |" in text for name in POLICIES)
    assert (tmp_path / "images/policies-without-reuse.svg").exists()
