# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A row of a benchmark that was not run, for tests of pages."""

from __future__ import annotations

from typing import Any

from beluga_bench import FIELDS, Row


def row(bench: str = "rpc", case: str = "c", **given: Any) -> Row:
    made: Row = {
        **dict.fromkeys(FIELDS), "bench": bench, "case": case, "machine": "a CPU",
        "commit": "unknown", "date": "2026-01-02", "command": f"beluga bench {bench}",
        "memory": "devdax", "coherence": "software", "p50_ns": 950.0, "p99_ns": 1234.0,
        "ops_per_s": 1_100_000, "depth": 1, "limit": 2_200_000, "limit_unit": "ops/s",
        "ratio_to_limit": 0.5, "ratio_q1": 0.4, "ratio_q3": 0.6, "noisy": False,
    }  # fmt: skip
    return made | given
