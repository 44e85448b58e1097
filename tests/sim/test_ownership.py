# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The ownership oracle, raw access, and operations on hosts detect the planted errors."""

from __future__ import annotations

import re

import pytest
from simulator import KINDS, OWNERSHIP, RAW_ACCESS, failures, play, site, total
from support.emulation import fewer

SEEDS = 60
RUNS = fewer(SEEDS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_writer_is_detected_even_without_wrong_bytes(kind: str) -> None:
    for seed in range(RUNS):
        run = play("two_writers", seed, kind=kind)
        assert run.result == OWNERSHIP
        assert re.match(r"two writers, the other is process \d of host \d, \w+", run.report)
        assert "sim/native/scenarios/litmus.c" in run.report


def test_a_dirty_line_over_newer_bytes_is_detected() -> None:
    runs = [play("stale_store", seed) for seed in range(RUNS)]
    assert {run.result for run in runs} == {0, OWNERSHIP}
    for run in runs:
        assert run.report == "" or run.report.startswith("newer bytes overwritten by a dirty line")


def test_a_lane_that_is_assigned_twice_is_detected() -> None:
    """A takeover that misses a lane's live writer is detected."""
    number = site("bl_housekeeping_write", "stream_line")
    runs = (play("recovery", seed, skip=number) for seed in range(SEEDS))
    assert any(run.result == OWNERSHIP for run in runs)


def test_a_raw_access_faults_with_its_location() -> None:
    for kind in KINDS:
        run = play("raw_access", 1, kind=kind)
        assert run.result == RAW_ACCESS
        assert "raw access: device 1, offset 0x3000, process 0 of host 0" in run.report
        assert re.search(r"after sim/native/scenarios/litmus\.c:\d+", run.report)
    assert play("message_passing", 1).result == 0  # the fault is over


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scenario", ["host_crash", "pause"])
def test_every_action_has_its_documented_effect(scenario: str, kind: str) -> None:
    runs = [play(scenario, seed, kind=kind) for seed in range(RUNS)]
    assert failures(runs) == []
    if scenario == "host_crash":
        assert total(runs, "host_crashes") == RUNS
        assert total(runs, "deaths") == RUNS
        assert total(runs, "results") > 0  # lines that were lost
