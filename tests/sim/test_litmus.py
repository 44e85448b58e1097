# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The rules of coherence/coherence.h hold in the simulator; each one is violated if a verb is
omitted, and the oracles of reads and writes detect it, whether or not bytes were wrong.
"""

import re

import pytest
from simulator import (
    COHERENCE,
    KINDS,
    OWNERSHIP,
    RAW_ACCESS,
    WRONG_BYTES,
    caught,
    failures,
    play,
    site,
    sites,
    total,
)
from support.emulation import fewer

# ---- The rules of coherence/coherence.h hold in the simulator; each one is violated if a verb
# is omitted.


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


# ---- The coherence oracle detects a missing flush or fence, with its site, whether or not bytes
# were wrong.


# One or two runs detect it, because the oracle checks the rule and not the bytes. Scenario,
# function, verb, index.
REPORTED = (
    ("message_passing", "bl_litmus_write", "fence_store", 1, "unfenced"),
    ("message_passing", "bl_litmus_read", "invalidate", 0, "stale"),
    ("message_passing", "bl_litmus_look", "invalidate", 0, "late look"),
    ("store_buffering", "bl_litmus_store_load", "fence_full", 0, "early look"),
    ("store_buffering", "bl_litmus_store_load", "invalidate", 0, "early look"),
    ("lane", "bl_lane_reply", "fence_store", 0, "unfenced"),
    ("lane", "bl_reply_decode", "invalidate", 0, "stale"),
    ("index", "bl_blocks_copy", "invalidate", 0, "stale"),
    ("index", "bl_register_read", "invalidate", 0, "early look"),
    ("kv", "bl_part_drop", "invalidate", 0, "stale"),
    ("kv", "bl_checksums_read", "invalidate", 0, "stale"),
    ("kv", "bl_entry_look", "invalidate", 0, "late look"),
)
ORACLE_SEEDS = 10


@pytest.mark.parametrize("mutant", REPORTED, ids=lambda m: f"{m[0]}-{m[1]}-{m[2]}")
def test_a_missing_verb_is_reported_with_its_locations(
    mutant: tuple[str, str, str, int, str],
) -> None:
    scenario, function, verb, index, what = mutant
    number = site(function, verb, index)
    texts = []
    for seed in range(ORACLE_SEEDS):
        run = play(scenario, seed, skip=number)
        if run.result == COHERENCE:
            texts.append(run.report)
    assert len(texts) >= ORACLE_SEEDS // 2
    assert any(text.startswith(what) for text in texts)
    for text in texts:
        assert re.search(r"line 0x[0-9a-f]+, process \d+ of host \d+", text)
        assert len(re.findall(r"[a-z_]+\.[ch]:\d+", text)) >= 2


def test_a_missing_second_read_is_detected_without_an_injected_skip() -> None:
    number = site("bl_litmus_read", "verify", 0)
    found = {play("message_passing", seed, skip=number).result for seed in range(30)}
    assert COHERENCE in found
    assert found <= {0, COHERENCE, WRONG_BYTES}


def test_clean_run_has_no_report() -> None:
    assert play("message_passing", 0, skip=site("bl_litmus_read", "invalidate")).report != ""
    assert play("message_passing", 0).report == ""


# ---- The ownership oracle, raw access, and operations on hosts detect the planted errors.


OWNERSHIP_SEEDS = 60
OWNERSHIP_RUNS = fewer(OWNERSHIP_SEEDS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_writer_is_detected_even_without_wrong_bytes(kind: str) -> None:
    for seed in range(OWNERSHIP_RUNS):
        run = play("two_writers", seed, kind=kind)
        assert run.result == OWNERSHIP
        assert re.match(r"two writers, the other is process \d of host \d, \w+", run.report)
        assert "sim/native/scenarios/litmus.c" in run.report


def test_a_dirty_line_over_newer_bytes_is_detected() -> None:
    runs = [play("stale_store", seed) for seed in range(OWNERSHIP_RUNS)]
    assert {run.result for run in runs} == {0, OWNERSHIP}
    for run in runs:
        assert run.report == "" or run.report.startswith("newer bytes overwritten by a dirty line")


def test_a_lane_that_is_assigned_twice_is_detected() -> None:
    """A takeover that misses a lane's live writer is detected."""
    number = site("bl_housekeeping_write", "stream_line")
    runs = (play("recovery", seed, skip=number) for seed in range(OWNERSHIP_SEEDS))
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
    runs = [play(scenario, seed, kind=kind) for seed in range(OWNERSHIP_RUNS)]
    assert failures(runs) == []
    if scenario == "host_crash":
        assert total(runs, "host_crashes") == OWNERSHIP_RUNS
        assert total(runs, "deaths") == OWNERSHIP_RUNS
        assert total(runs, "results") > 0  # lines that were lost
