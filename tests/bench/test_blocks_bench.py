# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""``beluga bench blocks``: each step has its percentiles, with eviction and without."""

from __future__ import annotations

from collections.abc import Callable

from beluga_bench import Row
from beluga_bench.system.blocks import COUNT


def test_each_step_is_measured_on_a_free_pool_and_on_a_full_one(
    smoke: Callable[[str], list[Row]],
) -> None:
    rows = {str(row["case"]): row for row in smoke("blocks")}
    assert list(rows) == [
        *("reserve, free", "release, free"),
        *("reserve, evicting", "register, evicting", "match, evicting", "release, evicting"),
    ]
    for case, row in rows.items():
        assert 0 < row["p50_ns"] <= row["p99_ns"], case
        assert row["fragments"] == COUNT
    assert rows["reserve, free"]["paper"] == "allocation < 1 ms"
    assert rows["release, evicting"]["paper"] == "release < 0.5 ms"
