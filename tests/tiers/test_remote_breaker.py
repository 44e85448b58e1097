# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The circuit breaker, in virtual time."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.virtual_clock import Clock

from beluga.tiers.remote import Breaker, RemoteSettings
from beluga.tiers.remote.health import CLOSED, HALF_OPEN, OPEN

SETTINGS = RemoteSettings(failures=3, open_s=1.0, open_limit_s=8.0)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker(SETTINGS, clock=clock.monotonic, chance=lambda: 0.5)


def fail(breaker: Breaker, times: int) -> list[bool]:
    return [breaker.failed(float("inf")) for _ in range(times)]


def pause_of(breaker: Breaker, clock: Clock) -> float:
    """Return the time until a trial starts, in tenths of a second."""
    begun = clock.now_s
    while not breaker.begin_trial():
        clock.sleep(0.1)
        assert clock.now_s < begun + 100
    return clock.now_s - begun


def test_consecutive_failures_open_the_breaker(breaker: Breaker) -> None:
    for _ in range(10):
        assert fail(breaker, 2) == [False, False]
        breaker.succeeded()
    assert breaker.state == CLOSED
    assert fail(breaker, 3) == [False, False, True]
    assert (breaker.state, breaker.closed, breaker.openings) == (OPEN, False, 1)
    assert fail(breaker, 3) == [False] * 3, "one opening is reported once"


def test_only_one_trial_is_allowed_at_a_time(breaker: Breaker, clock: Clock) -> None:
    assert not breaker.begin_trial(), "a closed breaker needs none"
    fail(breaker, 3)
    assert pause_of(breaker, clock) == pytest.approx(1, abs=0.11)
    assert breaker.state == HALF_OPEN
    clock.sleep(1000)
    assert not breaker.begin_trial()
    breaker.end_trial(True)
    assert breaker.closed


def test_the_pause_doubles_to_its_limit_and_resets_after_a_success(
    breaker: Breaker, clock: Clock
) -> None:
    fail(breaker, 3)
    for expected in (1, 2, 4, 8, 8):
        assert pause_of(breaker, clock) == pytest.approx(expected, abs=0.11)
        breaker.end_trial(False)
    pause_of(breaker, clock)
    breaker.end_trial(True)
    breaker.succeeded()
    fail(breaker, 3)
    assert pause_of(breaker, clock) == pytest.approx(1, abs=0.11)


def test_a_store_that_only_passes_trials_gets_longer_pauses(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, 3)
    for expected in (1, 2, 4, 8):
        assert pause_of(breaker, clock) == pytest.approx(expected, abs=0.11)
        breaker.end_trial(True)
        assert fail(breaker, 1) == [True], "after a trial, one failure is enough"


def test_late_results_are_ignored(breaker: Breaker, clock: Clock) -> None:
    breaker.end_trial(True)
    breaker.end_trial(False)
    assert breaker.closed
    fail(breaker, 3)
    breaker.succeeded()
    breaker.end_trial(True)
    assert breaker.state == OPEN
    pause_of(breaker, clock)
    breaker.succeeded()
    fail(breaker, 5)
    assert breaker.state == HALF_OPEN
    breaker.end_trial(True)
    breaker.end_trial(False)
    assert breaker.closed


def test_failures_from_before_the_trial_do_not_reopen_the_breaker(
    breaker: Breaker, clock: Clock
) -> None:
    begun = clock.now_s
    fail(breaker, 3)
    pause_of(breaker, clock)
    breaker.end_trial(True)
    assert not breaker.failed(begun)
    assert breaker.failed(clock.now_s)


def test_pauses_vary_between_clients(clock: Clock) -> None:
    pauses = []
    for seed in range(20):
        breaker = Breaker(SETTINGS, clock=clock.monotonic, chance=random.Random(seed).random)
        fail(breaker, 3)
        pauses.append(pause_of(breaker, clock))
    assert 0.7 < min(pauses) < 0.95
    assert 1.05 < max(pauses) < 1.4


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.floats(0, 3),  # time between two calls
            st.integers(0, 3),  # successful operations of 4
            st.booleans(),  # and whether a trial succeeds
        ),
        max_size=300,
    ),
    st.integers(0, 1 << 32),
)
def test_a_store_that_never_serves_costs_few_operations(
    calls: list[tuple[float, int, bool]], seed: int
) -> None:
    clock = Clock()
    breaker = Breaker(SETTINGS, clock=clock.monotonic, chance=random.Random(seed).random)
    lost, served, trial = 0, 0, False
    for pause_s, share, answers in calls:
        clock.sleep(pause_s)
        if breaker.closed:
            if share == 3:
                breaker.succeeded()
                served += 1
            else:
                breaker.failed(clock.now_s)
                lost += 1
        elif trial:
            breaker.end_trial(answers)
            trial = False
        else:
            trial = breaker.begin_trial()
    spent = clock.now_s - 1000
    if not served:  # pauses of at least .75, 1.5, 3, 6, 6, ... s
        assert lost <= 3 + 4 + spent / 6
    assert (breaker.state == HALF_OPEN) == trial
