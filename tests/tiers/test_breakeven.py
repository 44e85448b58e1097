# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Fetch or compute."""

from __future__ import annotations

import math

import pytest

from beluga.errors import TierError
from beluga.tiers.sizing import AlwaysFetch, BreakEven, MeasuredBandwidth

TOKEN = 256 << 10
QWEN = BreakEven(0.07663, 1.521e-6)


@pytest.mark.parametrize(
    ("bandwidth", "cached", "pays"),
    [(26e9, 0, True), (5e9, 0, True), (3.5e9, 0, True), (3.3e9, 0, False), (2e9, 36_000, True)],
)
def test_the_break_even_matches_the_reference(bandwidth: float, cached: int, pays: bool) -> None:
    """It lies near 3.4 GB/s for Qwen3-32B on an H200."""
    assert QWEN.pays(cached, 16, 16 * TOKEN, bandwidth) is pays


def test_latency_counts_once() -> None:
    assert QWEN.pays(0, 16, 16 * TOKEN, 26e9, 0.0005)
    assert not QWEN.pays(0, 16, 16 * TOKEN, 26e9, 0.0012)
    assert QWEN.pays(0, 1024, 1024 * TOKEN, 26e9, 0.0012)


def test_nothing_is_fetched_without_bandwidth_except_by_always() -> None:
    assert not QWEN.pays(0, 16, 16 * TOKEN, 0.0)
    assert AlwaysFetch().pays(0, 16, 16 * TOKEN, 0.0)


def test_the_bandwidth_follows_the_loads() -> None:
    tier = MeasuredBandwidth(1e9)
    assert tier.bytes_per_s == 1e9
    tier.note(1 << 20, 0.001)
    assert tier.bytes_per_s == pytest.approx((1 << 20) / 0.001)
    for _ in range(100):
        tier.note(1 << 20, 0.1)
    assert tier.bytes_per_s == pytest.approx((1 << 20) / 0.1, rel=0.01)
    tier.note(0, 1.0)
    tier.note(1 << 20, 0.0)
    assert tier.bytes_per_s == pytest.approx((1 << 20) / 0.1, rel=0.01)


@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan])
def test_invalid_costs_are_rejected(value: float) -> None:
    with pytest.raises(TierError, match="finite"):
        BreakEven(value, 0.0)
    with pytest.raises(TierError, match="greater than 0"):
        MeasuredBandwidth(value)
