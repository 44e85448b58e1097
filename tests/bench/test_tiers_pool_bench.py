# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The benchmark of a pool's clients while its tiers work: pairs of tail latencies, or a row with
the reason why there are none.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable

import numpy as np
import pytest
from beluga_bench import BENCHES, Options, Row
from beluga_bench.harness.row import Recorder
from beluga_bench.harness.tails import tails_row

HAS_REDIS = bool(importlib.util.find_spec("redis") and shutil.which("redis-server"))


@pytest.mark.long
def test_gets_during_tier_work_are_compared_with_the_same_gets_alone(
    smoke: Callable[[str], list[Row]],
) -> None:
    onboard, hit = smoke("tiers-pool")
    assert onboard["case"] == "onboard beside offloads, 200 MB/s"
    assert hit["case"] == "hit beside a stopped store"
    assert str(hit["note"]).startswith("skipped: ") is not HAS_REDIS
    for row in [onboard, hit] if HAS_REDIS else [onboard]:
        assert 0 < row["ratio_q1"] <= row["ratio_to_limit"] <= row["ratio_q3"]
        assert 0 < row["p50_ns"] <= row["p99_ns"]


@pytest.mark.long
def test_without_a_server_a_row_has_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("redis")
    monkeypatch.setenv("PATH", "/nowhere")
    rows = BENCHES["tiers-pool"](Options(smoke=True))
    assert "apt-get install redis-server" in str(rows[-1]["note"])


def test_the_ratio_is_that_of_the_99th_percentiles() -> None:
    alone = np.array([100] * 97 + [1000] * 3, np.uint64)
    beside = np.array([100] * 97 + [4000] * 3, np.uint64)
    row = tails_row(
        Recorder("tiers-pool", Options(), {}), "get", [(alone, beside)] * 2, work="tests"
    )
    assert row["ratio_to_limit"] == 0.25
    assert row["p50_ns"] == 100
    assert str(row["note"]).endswith("beside tests, 0.00 ms alone: 4.00 times")
