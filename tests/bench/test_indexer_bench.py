# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""``beluga bench indexer``: compared rows have a ratio, timed rows have percentiles."""

from __future__ import annotations

from collections.abc import Callable

from beluga_bench import Row
from beluga_bench.system.indexer import LENGTH


def test_lookups_have_a_ratio_and_the_rest_percentiles(smoke: Callable[[str], list[Row]]) -> None:
    rows = {str(row["case"]): row for row in smoke("indexer")}
    for case in ("find_matches, c", "find_matches, python"):
        row = rows[case]
        assert row["memory"] == "DRAM (private)"
        assert row["fragments"] == LENGTH
        assert 0 < row["ratio_q1"] <= row["ratio_to_limit"] <= row["ratio_q3"]
    assert {"stored", "removed", "decision, least-tokens", "decision, linear"} <= rows.keys()
    assert all(0 < row["p50_ns"] <= row["p99_ns"] for row in rows.values())
