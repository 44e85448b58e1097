# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""``beluga verify`` in the simulator: every litmus program can fail, and none does with software
coherence.
"""

from __future__ import annotations

import pytest
from simulator import WRONG_BYTES, caught, failures, play, site, total
from support.emulation import fewer

SEEDS = 40
RUNS = fewer(SEEDS)
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
    found = caught(f"verify_bare_{name}", 0, seeds=SEEDS)
    assert found is not None
    assert found.result == WRONG_BYTES


@pytest.mark.parametrize("name", BARE)
def test_bare_loads_and_stores_hold_on_coherent_memory(name: str) -> None:
    runs = [play(f"verify_bare_{name}", seed, coherent=True) for seed in range(fewer(10))]
    assert failures(runs) == []


@pytest.mark.parametrize("missing", NEEDED)
def test_a_missing_verb_is_detected(missing: tuple[str, str, int]) -> None:
    found = caught("verify_software", site(*missing), seeds=15 * SEEDS)
    assert found is not None
    assert found.result == WRONG_BYTES
