# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Ratios as docs/understand/benchmarks.md defines them, on invented speeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from beluga_bench.harness.ratio import compare, race


def player(speeds: list[float], log: list[str], name: str) -> Callable[[], float]:
    left: Iterator[float] = iter(speeds)

    def play() -> float:
        log.append(name)
        return next(left)

    return play


def test_a_ratio_is_the_median_of_the_pairs_and_not_of_the_speeds() -> None:
    results = compare([(100.0, 50.0), (200.0, 180.0), (110.0, 66.0)])
    assert results.ratio == pytest.approx(0.6)
    assert (results.limit, results.ours) == (110.0, 66.0)


def test_the_spread_is_that_of_the_ratios() -> None:
    results = compare([(10.0, ours) for ours in (1.0, 2.0, 3.0, 4.0, 5.0)])
    assert (results.ratio_q1, results.ratio, results.ratio_q3) == pytest.approx((0.2, 0.3, 0.4))


@pytest.mark.parametrize(("last", "noisy"), [(124.0, False), (126.0, True)])
def test_a_limit_that_varies_by_more_than_a_quarter_is_noisy(last: float, noisy: bool) -> None:
    assert compare([(100.0, 90.0), (100.0, 90.0), (last, 90.0)]).noisy is noisy


def test_limit_and_engine_are_timed_alternately() -> None:
    log: list[str] = []
    limit, ours = player([10.0] * 9, log, "limit"), player([5.0] * 9, log, "ours")
    found = race(limit, ours, pair_count=9, retry_count=3)
    assert log == ["limit", "ours"] * 9
    assert (found.ratio, found.noisy) == (0.5, False)


def test_a_noisy_limit_is_remeasured_until_it_is_stable() -> None:
    log: list[str] = []
    limit = player([10.0, 20.0, 10.0, 10.0, 10.0, 10.0], log, "limit")
    found = race(limit, player([5.0] * 6, log, "ours"), pair_count=2, retry_count=3)
    assert len(log) == 8
    assert (found.ratio, found.noisy) == (0.5, False)


def test_a_limit_that_stays_noisy_is_marked_after_three_retries() -> None:
    log: list[str] = []
    limit = player([10.0, 20.0] * 4, log, "limit")
    found = race(limit, player([5.0] * 8, log, "ours"), pair_count=2, retry_count=3)
    assert len(log) == 16
    assert found.noisy
