# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The benchmark of the gateway: its rows, and that it compares equal work."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from beluga_bench import Row

pytest.importorskip("aiohttp", reason="the router's packages are not installed")


@pytest.fixture(scope="module")
def rows(smoke: Callable[[str], list[Row]]) -> dict[str, Row]:
    return {str(row["case"]): row for row in smoke("gateway")}


@pytest.mark.long
def test_ours_stands_beside_a_bare_proxy(rows: dict[str, Row]) -> None:
    for case in ("time to first byte", "time to last byte"):
        row = rows[case]
        assert 0 < float(str(row["ratio_q1"])) <= float(str(row["ratio_q3"]))
        figures = re.findall(r"(\w+) ([\d.]+) / ([\d.]+)", str(row["note"]))
        assert [name for name, *_ in figures] == ["engine", "bare", "ours"]
        assert all(0 < float(p50) <= float(p99) for _, p50, p99 in figures)
        assert "to the bare proxy's p50" in str(row["note"])
