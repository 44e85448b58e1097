# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Each path of the protocol passes in the simulator, takeovers and stalled writers included, and
fails if a verb is omitted.
"""

import pytest
from simulator import caught, failures, play, site, total
from support.emulation import FULL, fewer

# ---- Each path of the protocol passes in the simulator, and fails if a verb is omitted.


SEEDS = 100
RUNS = SEEDS if FULL else fewer(40)

# Function, verb, and number of the verb in that function.
MUTANTS = {
    "lane": (
        ("bl_lane_take", "invalidate", 0),  # a reply is read from memory
        ("bl_lane_take", "verify", 0),  # a torn reply is read again
        ("bl_round_refetch", "invalidate", 1),  # a request is read from memory
        ("bl_lane_gather", "verify", 0),  # a torn request is read again
        ("bl_bulk_send", "fence_store", 0),  # the bytes are in memory before their request
        # the bytes are invalidated after the read of their request
        ("bl_bulk_take", "fence_full", 0),
        ("bl_bulk_take", "invalidate", 0),  # and not taken from the cache
        ("bl_lane_reply", "fence_store", 0),  # the bytes are in memory before their reply
        ("bl_reply_decode", "fence_full", 0),
        ("bl_reply_decode", "invalidate", 0),
    ),
    "turns": (("bl_lane_gather", "verify", 1),),  # requests beyond a quantum wait
    "lobby": (
        ("bl_lobby_look", "invalidate", 0),
        ("bl_lobby_reply_read", "invalidate", 0),
        ("bl_lobby_exchange", "verify", 0),  # check that the reply belongs to this session
        ("bl_lobby_publish", "stream_line", 0),
    ),
    "index": (
        ("bl_blocks_copy", "fence_full", 0),  # the payload is invalidated after the lookup
        ("bl_blocks_copy", "invalidate", 0),  # and not taken from the cache
        ("bl_blocks_same", "verify", 0),  # the second read
    ),
    "recovery": (
        ("bl_entry_write", "stream_line", 0),
        ("bl_extent_write", "stream_line", 0),
        ("bl_housekeeping_write", "stream_line", 0),  # sessions that may still write
        ("bl_recover_entries", "stream_line", 0),
    ),
    "removal": (("bl_tombstone_write", "stream_line", 0),),
    "kv": (
        ("bl_gather_flush", "stream", 0),
        ("bl_entry_clear", "stream_line", 0),  # the result of the second read
        ("bl_part_drop", "invalidate", 0),  # the payload is not taken from the cache
    ),
    "rows": (
        ("bl_part_drop", "invalidate", 0),  # rows are not taken from the cache
        ("bl_chunk_drop", "invalidate", 0),  # nor the chunks whose checksums are requested
        ("bl_chunk_pick", "fetch", 0),
        ("bl_part_step", "fetch", 0),
        ("bl_part_scatter", "fence_full", 1),  # invalidated before they are fetched
        ("bl_part_pick", "fence_full", 1),
        ("bl_plan_write", "fence_store", 0),  # the bytes are in memory before their line
    ),
    "kv_names": (
        ("bl_name_write", "stream_line", 0),
        ("bl_recover_name", "stream_line", 0),
        ("bl_names_guarded", "invalidate", 0),  # entries are not taken from the cache
        ("bl_names_guarded", "invalidate", 1),  # nor names
    ),
    "kv_calm": (
        ("bl_gather_direct", "stream", 0),
        ("bl_gather_direct", "stream", 1),
        ("bl_checksums_write", "stream", 0),  # the checksums
        ("bl_checksums_read", "fetch", 0),
        ("bl_entry_look", "load_line", 0),
    ),
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


TAKEOVERS = {"elect", "watch", "rivals", "takeover"}


@pytest.mark.parametrize("coherent", [False, True])
@pytest.mark.parametrize("path", [path for path in MUTANTS if path not in TAKEOVERS])
def test_the_path_is_correct_with_any_cache_behavior(path: str, coherent: bool) -> None:
    runs = [play(path, seed, coherent=coherent) for seed in range(RUNS)]
    assert failures(runs) == []
    assert total(runs, "results") > RUNS
    assert (total(runs, "stale_loads") > 0) is not coherent
    assert total(runs, "dirty_invalidations") == 0


FAULTY = (
    "range register first_word damage damage_names below followed system heartbeats kv_stops "
    "reserves held farewell given_up asleep doorbells"
)


@pytest.mark.parametrize("path", FAULTY.split())
def test_the_path_never_returns_wrong_bytes_under_faults(path: str) -> None:
    runs = [play(path, seed, coherent=seed % 2 == 1) for seed in range(RUNS)]
    assert failures(runs) == []
    assert total(runs, "results") > RUNS


@pytest.mark.parametrize(
    ("path", "mutant"), [(path, mutant) for path, mutants in MUTANTS.items() for mutant in mutants]
)
def test_a_path_without_one_verb_fails(path: str, mutant: tuple[str, str, int]) -> None:
    number = site(*mutant)
    seeds = 3 * SEEDS if path in TAKEOVERS else SEEDS
    assert any(caught(path, number, seeds=seeds, coherent=kind) for kind in (False, True))


def test_recovery_survives_the_deaths_of_its_servers() -> None:
    runs = [play("recovery", seed) for seed in range(RUNS)]
    assert total(runs, "deaths") > RUNS


# ---- Servers elect, depose and replace each other in the simulator, with writers that are
# falsely considered dead.


TAKEOVER_SEEDS = 15
TAKEOVER_RUNS = fewer(TAKEOVER_SEEDS)
ELECTIONS = fewer(150)


@pytest.mark.parametrize("coherent", [False, True])
@pytest.mark.parametrize(
    "scenario", ["takeover", "watch", "rivals", "zombies", "tasks", "tasks_rivals"]
)
def test_stalled_servers_and_writers_do_no_harm(scenario: str, coherent: bool) -> None:
    runs = [play(scenario, seed, coherent=coherent) for seed in range(TAKEOVER_RUNS)]
    assert failures(runs) == []
    assert total(runs, "results") >= TAKEOVER_RUNS


@pytest.mark.parametrize("coherent", [False, True])
def test_an_epoch_has_one_owner_whichever_candidates_die(coherent: bool) -> None:
    runs = [play("elect", seed, coherent=coherent) for seed in range(ELECTIONS)]
    assert failures(runs) == []
    assert total(runs, "results") > ELECTIONS
    assert total(runs, "deaths") > ELECTIONS / 4


def test_servers_die_while_they_take_over_several_in_a_row() -> None:
    runs = [play("takeover", seed) for seed in range(TAKEOVER_RUNS)]
    assert failures(runs) == []
    assert total(runs, "deaths") > 4 * TAKEOVER_RUNS
