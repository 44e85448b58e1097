# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Bytes moved by DMA are correct with the rules of transfer/device_range.h, and beluga verify with
software coherence; both are wrong without any one of their rules.
"""

import pytest
from simulator import WRONG_BYTES, caught, failures, play, site, total
from support.emulation import fewer

# ---- Puts and gets by DMA are correct with the rules of transfer/device_range.h, and wrong
# without any one of them.


SEEDS = fewer(20)
HUNT = 600
SCENARIOS = (
    "device_put",
    "device_get",
    "device_dsa",
    "device_dsa_memory",
    "device_death",
    "device_kv",
    "device_kv_death",
)

RULES = [
    (function, verb, index)
    for function in ("bl_device_written", "bl_device_reads")
    for verb, index in (("fence_full", 0), ("invalidate", 0), ("fence_full", 1))
]
# Besides device_dsa, in which a device both writes and reads, these scenarios show it.
WITNESS = {"bl_device_written": "device_put", "bl_device_reads": "device_get"}


@pytest.mark.parametrize("coherent", [False, True])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_devices_copy_the_correct_bytes(scenario: str, coherent: bool) -> None:
    runs = [play(scenario, seed, coherent=coherent) for seed in range(SEEDS)]
    assert failures(runs) == []
    assert total(runs, "device_lines") > SEEDS
    assert total(runs, "results") > SEEDS


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_is_necessary_for_gpu_and_dsa(rule: tuple[str, str, int]) -> None:
    assert caught(WITNESS[rule[0]], site(*rule), seeds=HUNT)
    assert caught("device_dsa", site(*rule), seeds=HUNT)


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule[1] == "invalidate"])
def test_the_block_protocol_requires_the_same_steps(rule: tuple[str, str, int]) -> None:
    assert caught("device_kv", site(*rule), seeds=HUNT)


def test_writers_die_with_dma_in_flight() -> None:
    runs = [play("device_death", seed) for seed in range(SEEDS)]
    assert total(runs, "deaths") == SEEDS


def test_cached_lines_of_a_dead_writer_must_be_flushed() -> None:
    assert caught("device_death", site("bl_device_written", "invalidate"), seeds=HUNT)


def test_reuse_of_space_before_its_dma_has_ended_is_detected() -> None:
    assert caught("device_zombie", 0, seeds=HUNT)


@pytest.mark.parametrize(
    "function", ["bl_index_flush", "bl_index_flush_held", "bl_kv_flush_guarded"]
)
def test_space_of_a_dead_writer_or_a_failed_put_is_flushed_before_it_is_granted(
    function: str,
) -> None:
    assert caught("device_kv_death", site(function, "invalidate"), seeds=HUNT)


# ---- ``beluga verify`` in the simulator: every litmus program can fail, and none does with
# software coherence.


VERIFY_SEEDS = 40
RUNS = fewer(VERIFY_SEEDS)
BARE = ("passing", "buffering", "eviction", "prefetch")
TEARING = ("tearing_8", "tearing_16", "tearing_32", "tearing_64")

# The verbs that coherence depends on: function, verb, and index of the verb in that function.
NEEDED = (
    ("bl_trial_put", "stream_line", 0),
    ("bl_trial_look", "fence_full", 0),
    ("bl_trial_look", "invalidate", 0),
    ("bl_trial_send", "fence_store", 0),
    ("bl_trial_receive", "invalidate", 0),
    ("bl_trial_receive", "fence_full", 1),
    ("bl_trial_buffer", "fence_full", 0),
    ("bl_trial_buffer", "invalidate", 0),
    ("bl_trial_buffer", "fence_full", 1),
    ("bl_trial_tear_look", "verify", 0),
    ("bl_trial_evict_late", "invalidate", 0),
)


@pytest.mark.parametrize("coherent", [False, True])
def test_coherence_holds_on_every_kind_of_memory(coherent: bool) -> None:
    runs = [play("verify_software", seed, coherent=coherent) for seed in range(RUNS)]
    assert failures(runs) == []
    # tests, sides, devices; reported by both sides
    assert total(runs, "results") >= RUNS * 8 * 2 * 2 * 2 * 4
    assert total(runs, "torn_lines") > 0


@pytest.mark.parametrize("name", BARE + TEARING)
def test_bare_loads_and_stores_fail_where_caches_are_private(name: str) -> None:
    found = caught(f"verify_bare_{name}", 0, seeds=VERIFY_SEEDS)
    assert found is not None
    assert found.result == WRONG_BYTES


@pytest.mark.parametrize("name", BARE)
def test_bare_loads_and_stores_hold_on_coherent_memory(name: str) -> None:
    runs = [play(f"verify_bare_{name}", seed, coherent=True) for seed in range(fewer(10))]
    assert failures(runs) == []


@pytest.mark.parametrize("missing", NEEDED)
def test_a_missing_verb_is_detected(missing: tuple[str, str, int]) -> None:
    found = caught("verify_software", site(*missing), seeds=15 * VERIFY_SEEDS)
    assert found is not None
    assert found.result == WRONG_BYTES
