# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The coherence oracle detects a missing flush or fence, with its site, whether or not bytes were
wrong.
"""

from __future__ import annotations

import re

import pytest
from simulator import COHERENCE, WRONG_BYTES, play, site

# One or two runs detect it, because the oracle checks the rule and not the bytes. Scenario,
# function, verb, index.
MUTANTS = (
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
SEEDS = 10


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m[0]}-{m[1]}-{m[2]}")
def test_a_missing_verb_is_reported_with_its_locations(
    mutant: tuple[str, str, str, int, str],
) -> None:
    scenario, function, verb, index, what = mutant
    number = site(function, verb, index)
    texts = []
    for seed in range(SEEDS):
        run = play(scenario, seed, skip=number)
        if run.result == COHERENCE:
            texts.append(run.report)
    assert len(texts) >= SEEDS // 2
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
