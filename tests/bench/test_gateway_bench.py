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
def test_the_gateway_is_compared_with_a_bare_proxy(rows: dict[str, Row]) -> None:
    for case in ("time to first byte", "time to last byte"):
        row = rows[case]
        assert 0 < float(str(row["ratio_q1"])) <= float(str(row["ratio_q3"]))
        figures = re.findall(r"(\w+) ([\d.]+) / ([\d.]+)", str(row["note"]))
        assert [name for name, *_ in figures] == ["engine", "bare", "ours"]
        assert all(0 < float(p50) <= float(p99) for _, p50, p99 in figures)
        assert "to the bare proxy's p50" in str(row["note"])


@pytest.mark.long
def test_cpu_time_is_reported_for_requests_and_events(rows: dict[str, Row]) -> None:
    for case in ("CPU of 2 kB", "CPU of an event", "CPU of 64 kB"):
        match = re.search(
            r"^([\d.]+) times the bare proxy's .*; bare (\d+) us, ours (\d+) us$",
            str(rows[case]["note"]),
        )
        assert match is not None
        times, bare_us, ours_us = map(float, match.groups())
        assert times > 0 and bare_us > 0 and ours_us > 0
    bare = {case: float(str(rows[case]["limit"])) for case in rows if case.startswith("CPU")}
    assert bare["CPU of an event"] > 2 * bare["CPU of 2 kB"]  # an event costs less than a request
