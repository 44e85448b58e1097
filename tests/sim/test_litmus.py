# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The rules of coherence/coherence.h hold in the simulator; each one is violated if a verb is
omitted.
"""

from __future__ import annotations

import pytest
from simulator import COHERENCE, WRONG_BYTES, caught, failures, play, site, sites, total
from support.emulation import fewer

SEEDS = 300
RUNS = fewer(SEEDS)
RIGHT = ("message_passing", "torn_line", "store_buffering")

# Function, verb, and number of the verb in that function.
MUTANTS = {
    "message_passing": (
        # "free" is in memory before the old bytes are dropped
        ("bl_litmus_write", "fence_store", 0),
        ("bl_litmus_write", "stream", 0),  # the payload
        ("bl_litmus_write", "fence_store", 1),  # the payload is in memory before it is published
        (
            "bl_litmus_read",
            "fence_full",
            0,
        ),  # the read of the entry comes before the payload's invalidation
        ("bl_litmus_read", "invalidate", 0),  # the payload's
        ("bl_litmus_read", "fence_full", 1),  # the payload's invalidation is complete
        ("bl_litmus_read", "verify", 0),  # the second read
        ("bl_litmus_look", "verify", 0),  # the line's check
    ),
    "torn_line": (("bl_litmus_look", "verify", 0),),
    "store_buffering": (
        ("bl_litmus_store_load", "fence_full", 0),
        ("bl_litmus_store_load", "invalidate", 0),
        ("bl_litmus_store_load", "fence_full", 1),
    ),
}


@pytest.mark.parametrize("coherent", [False, True])
@pytest.mark.parametrize("scenario", RIGHT)
def test_a_litmus_program_with_all_verbs_never_fails(scenario: str, coherent: bool) -> None:
    runs = [play(scenario, seed, coherent=coherent) for seed in range(RUNS)]
    assert failures(runs) == []


@pytest.mark.parametrize(
    ("scenario", "mutant"),
    [(scenario, mutant) for scenario, mutants in MUTANTS.items() for mutant in mutants],
)
def test_a_litmus_program_without_one_verb_fails(
    scenario: str, mutant: tuple[str, str, int]
) -> None:
    run = caught(scenario, site(*mutant), seeds=SEEDS)
    assert run is not None
    assert run.result in (WRONG_BYTES, COHERENCE)


def test_message_passing_survives_stale_reads_and_delivers() -> None:
    runs = [play("message_passing", seed) for seed in range(RUNS)]
    assert total(runs, "results") > RUNS
    assert total(runs, "stale_loads") > 0
    assert total(runs, "evictions") > 0
    assert total(runs, "prefetches") > 0


def test_torn_lines_are_detected_and_rejected() -> None:
    runs = [play("torn_line", seed) for seed in range(RUNS)]
    assert total(runs, "torn_lines") > 0
    assert total(runs, "results") > 0


def test_a_store_by_a_second_writer_restores_old_bytes() -> None:
    runs = [play("stray_store", seed) for seed in range(RUNS)]
    assert {run.result for run in runs} == {0, WRONG_BYTES}
    assert total(runs, "dirty_invalidations") > 0


def test_coherent_memory_has_no_stale_lines() -> None:
    runs = [play("stray_store", seed, coherent=True) for seed in range(RUNS)]
    assert failures(runs) == []
    assert total(runs, "stale_loads") == 0


def test_a_seed_reproduces_its_run() -> None:
    for seed in range(fewer(20)):
        first = play("message_passing", seed, skip=site("bl_litmus_read", "invalidate"))
        assert first == play("message_passing", seed, skip=site("bl_litmus_read", "invalidate"))
    assert play("message_passing", 1).stat != play("message_passing", 2).stat


def test_sites_are_numbered_and_named() -> None:
    assert [s.number for s in sorted(sites(), key=lambda s: s.number)] == list(
        range(1, len(sites()) + 1)
    )
    files = {"sim/native/scenarios/litmus.c", "rpc/lane.c", "rpc/lobby.c", "rpc/server.c"}
    assert {s.file for s in sites()} >= files
    assert all(s.function and s.verb for s in sites())
