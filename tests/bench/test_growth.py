# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The growth table: its arithmetic, and that its measurements work."""

from __future__ import annotations

import pytest
from beluga_bench.studies import growth


def test_the_first_exhausted_resource_follows_from_the_measurements() -> None:
    work = growth.Work(requests_per_s=1.0, prompt_tokens=1600, hit_rate=0.25)
    assert work.keys == 100
    rows = {
        name: (needed, has)
        for name, needed, has, _ in growth.table(work, growth.Measured(key_s=1e-6, route_s=1e-4))
    }
    request = 1600 * 262144 / 1e9
    assert rows["GPU paths, onboarding"] == pytest.approx((128 * 0.25 * request, 128 * 26))
    assert rows["adapters, written"] == pytest.approx((128 * 0.75 * request, 64 * 33))
    assert rows["32 memory devices"] == pytest.approx((128 * request, 720))
    assert rows["the switch"] == pytest.approx((128 * request, 1000))
    # Each key is looked up and released; three of four are also reserved and committed.
    assert rows["the pool's server, one thread"] == pytest.approx((128 * 100 * 3.5 / 1e6, 1.0))
    assert rows["a router, one process"] == pytest.approx((128, 10_000))


def test_the_costs_can_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "_ROUNDS", 3)
    found = growth.measure(growth.Work(prompt_tokens=320))
    assert 0 < found.key_s < 1
    assert 0 < found.route_s < 1
