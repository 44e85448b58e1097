# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""When failed removals of a tier are retried, in virtual time."""

from __future__ import annotations

import pytest
from support.virtual_clock import Clock

from beluga.tiers import removals
from beluga.tiers.removals import Retries


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(removals, "time", clock)
    return clock


def pause_of(retries: Retries, clock: Clock) -> float:
    """Return the seconds until an attempt starts."""
    begun = clock.now_s
    while not retries.begin():
        clock.sleep(0.01)
        assert clock.now_s < begun + 100
    return round(clock.now_s - begun, 2)


def test_one_retry_runs_at_a_time(clock: Clock) -> None:
    retries = Retries()
    assert retries.begin()
    clock.sleep(1000)
    assert not retries.begin()
    retries.end(done=True)
    assert retries.begin()


def test_a_tier_that_fails_has_longer_pauses_up_to_a_bound(clock: Clock) -> None:
    retries, pauses = Retries(), []
    for _ in range(9):
        pauses.append(pause_of(retries, clock))
        retries.end(done=False)
    assert pauses == pytest.approx([0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5, 5], abs=0.02)


def test_a_tier_that_can_remove_again_is_retried_at_once(clock: Clock) -> None:
    retries = Retries()
    for _ in range(5):
        pause_of(retries, clock)
        retries.end(done=False)
    pause_of(retries, clock)
    retries.end(done=True)
    assert pause_of(retries, clock) == 0
    retries.end(done=False)
    assert pause_of(retries, clock) == pytest.approx(0.1, abs=0.02)
