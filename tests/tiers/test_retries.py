# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""When failed removals of a tier are retried, in virtual time."""

from __future__ import annotations

import pytest
from support.virtual_clock import Clock

from beluga.tiers.service import Retries


def delay_of(retries: Retries, clock: Clock) -> float:
    """Return the seconds until an attempt starts."""
    begun = clock.now_s
    while not retries.begin():
        clock.sleep(0.01)
        assert clock.now_s < begun + 100
    return round(clock.now_s - begun, 2)


def test_one_retry_runs_at_a_time() -> None:
    clock = Clock()
    retries = Retries(clock.monotonic)
    assert retries.begin()
    clock.sleep(1000)
    assert not retries.begin()
    retries.end(done=True)
    assert retries.begin()


def test_a_tier_that_fails_has_longer_delays_up_to_a_bound() -> None:
    clock = Clock()
    retries, delays = Retries(clock.monotonic), []
    for _ in range(9):
        delays.append(delay_of(retries, clock))
        retries.end(done=False)
    assert delays == pytest.approx([0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5, 5], abs=0.02)


def test_a_tier_that_can_remove_again_is_retried_at_once() -> None:
    clock = Clock()
    retries = Retries(clock.monotonic)
    for _ in range(5):
        delay_of(retries, clock)
        retries.end(done=False)
    delay_of(retries, clock)
    retries.end(done=True)
    assert delay_of(retries, clock) == 0
    retries.end(done=False)
    assert delay_of(retries, clock) == pytest.approx(0.1, abs=0.02)
