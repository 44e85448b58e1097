# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Servers elect, depose and replace each other in the simulator, with writers that are falsely
considered dead.
"""

from __future__ import annotations

import pytest
from simulator import caught, failures, play, site, total
from support.emulation import fewer

SEEDS = 15
RUNS = fewer(SEEDS)
ELECTIONS = fewer(150)

# Function, verb, and number of the verb in that function.
MUTANTS = {
    "elect": (
        ("bl_candidate_write", "fence_full", 0),  # written before the others are read
        ("bl_candidates_read", "invalidate", 0),
        ("bl_candidates_read", "fence_full", 0),
        ("bl_ballot", "verify", 0),  # a greater ballot was started
        ("bl_ballot", "verify", 1),  # an owner was accepted before
    ),
    "watch": (
        ("bl_watch_silent", "invalidate", 0),  # a heartbeat is read from memory
    ),
    "rivals": (
        ("bl_takeover_publish", "fence_full", 0),  # the successor's fence
        # the predecessor's fence for marks, cleared entries and sessions
        ("bl_register_read", "fence_full", 0),
        ("bl_takeover_inherit", "invalidate", 0),
        ("bl_takeover_inherit", "fence_full", 0),
        ("bl_lobby_look", "verify", 1),  # check that the request is for this server
        ("bl_server_still", "verify", 0),  # the server that ignores a newer epoch
    ),
    "takeover": (
        ("bl_recover_entries", "stream_line", 0),
        ("bl_housekeeping_write", "stream_line", 0),
    ),
}


@pytest.mark.parametrize("coherent", [False, True])
@pytest.mark.parametrize(
    "scenario", ["takeover", "watch", "rivals", "zombies", "tasks", "tasks_rivals"]
)
def test_stalled_servers_and_writers_do_no_harm(scenario: str, coherent: bool) -> None:
    runs = [play(scenario, seed, coherent=coherent) for seed in range(RUNS)]
    assert failures(runs) == []
    assert total(runs, "results") >= RUNS


@pytest.mark.parametrize("coherent", [False, True])
def test_an_epoch_has_one_owner_whichever_candidates_die(coherent: bool) -> None:
    runs = [play("elect", seed, coherent=coherent) for seed in range(ELECTIONS)]
    assert failures(runs) == []
    assert total(runs, "results") > ELECTIONS
    assert total(runs, "deaths") > ELECTIONS / 4


def test_servers_die_while_they_take_over_several_in_a_row() -> None:
    runs = [play("takeover", seed) for seed in range(RUNS)]
    assert failures(runs) == []
    assert total(runs, "deaths") > 4 * RUNS


@pytest.mark.parametrize(
    ("scenario", "mutant"),
    [(scenario, mutant) for scenario, mutants in MUTANTS.items() for mutant in mutants],
)
def test_a_takeover_without_one_verb_fails(scenario: str, mutant: tuple[str, str, int]) -> None:
    number = site(*mutant)
    assert any(caught(scenario, number, seeds=20 * SEEDS, coherent=kind) for kind in (False, True))
