# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The rows of a DSA: one with the reason if there is none, and the path itself with a fake."""

from __future__ import annotations

import pytest
from beluga_bench import Options
from beluga_bench.harness.ground import ground
from beluga_bench.harness.region import region_of
from beluga_bench.harness.row import Recorder
from beluga_bench.paper.dsa import CASES, crossover, dsa_coherence, dsa_latency
from support.soft_dsa import soft_portal

from beluga.transfer.dsa import nearest, work_queues

SIZES = (4096, 16384)


def test_without_a_device_rows_are_skipped_with_a_reason() -> None:
    if nearest(work_queues(), set()):
        pytest.skip("there is a DSA")
    with ground(Options(smoke=True), devices=1) as pool:
        recorder, region = Recorder("coherence", Options(smoke=True), {}), region_of(pool)
        rows = dsa_coherence(recorder, region, 16384)
        rows += dsa_latency(recorder, region, SIZES, [])
    assert [row["case"] for row in rows] == [*CASES, "dsa read", "dsa write"]
    assert all(str(row["note"]).startswith("skipped: ") for row in rows)
    assert all(row["ops_per_s"] is None for row in rows)


def test_rows_of_a_software_queue_are_measured_and_marked() -> None:
    with ground(Options(smoke=True), devices=1) as pool:
        recorder, region = Recorder("coherence", Options(smoke=True), {}), region_of(pool)
        rows = dsa_coherence(recorder, region, 16384, queue=soft_portal)
        rows += dsa_latency(recorder, region, SIZES, [], queue=soft_portal)
    assert len(rows) == len(CASES) + 2 * len(SIZES)
    for row in rows:
        assert str(row["note"]).startswith("software queue")
        assert float(str(row["ops_per_s"])) > 0


@pytest.mark.parametrize(
    ("cpu", "device", "expected"),
    [
        ({64: 1, 4096: 2, 16384: 6}, {64: 3, 4096: 3, 16384: 5}, "from 16384 bytes"),
        ({64: 1, 4096: 4, 16384: 6}, {64: 3, 4096: 3, 16384: 5}, "from 4096 bytes"),
        ({64: 9, 4096: 2, 16384: 6}, {64: 3, 4096: 3, 16384: 5}, "from 16384 bytes"),
        ({64: 1, 4096: 2}, {64: 3, 4096: 3}, "never"),
        ({64: 1}, {}, "never"),
    ],
)
def test_the_crossover_is_the_size_from_which_dsa_stays_faster(
    cpu: dict[int, float], device: dict[int, float], expected: str
) -> None:
    assert expected in crossover(cpu, device)
