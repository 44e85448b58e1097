# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The comparison of a hit with its reference answer, and the reasons of a miss."""

from __future__ import annotations

from typing import Any

import pytest
from beluga_bench.vllm.likeness import agreed, faults, found_tokens, identical, warnings

WHOLE, BLOCK = 3840, 128


def reply(logprob: float, cached: int = WHOLE, failed: int = 0) -> dict[str, Any]:
    figures = {"load_failed_blocks": float(failed)}
    return {
        "tokens": [7],
        "logprobs": {"7": logprob},
        "cached_tokens": cached,
        "figures": figures,
    }


# these are rounded differently in bfloat16
COMPUTED, LOCAL = reply(-3.5174, cached=0), reply(-3.5481)


@pytest.mark.parametrize(
    ("hit", "is_like"),
    [
        (reply(-3.5481), True),
        # the answer equals a computed one, but all blocks count as loaded
        (reply(-3.5174), False),
        (reply(-3.5174, cached=0), True),  # a miss was computed like the first time
        (reply(-3.5481, cached=0), False),
        (reply(-3.5174, failed=30), True),  # announced but not loaded, and so computed
        (reply(-3.5481, failed=30), False),
        (reply(-3.5481, cached=1280), None),
        (reply(-3.5174, failed=7), None),
    ],
)
def test_a_hit_is_compared_with_an_answer_of_the_same_steps(
    hit: dict[str, Any], is_like: bool | None
) -> None:
    found = found_tokens(hit, BLOCK)
    assert identical(hit, found=found, whole=WHOLE, miss=COMPUTED, local=LOCAL) is is_like


def test_a_partial_hit_is_not_compared() -> None:
    assert agreed([True, None])
    assert not agreed([True, False, None])
    assert not agreed([None])


def test_only_fields_that_explain_a_miss_are_listed() -> None:
    saving = {"save_failures": 1.0, "save_skipped_blocks": 30.0, "save_s": 0.9, "mismatches": 0.0}
    assert faults(saving, {"lookup_failures": 1.0, "load_bytes": 5.0}) == {
        "lookup_failures": 1,
        "save_failures": 1,
        "save_skipped_blocks": 30,
    }
    assert faults({}) == {}


def test_the_connectors_warnings_are_found_in_a_log() -> None:
    line = "beluga saves: saving blocks: the server did not answer in time (after 612 ms)"
    log = f"WARNING 11-22 06:38:31 [link.py:230] {line}\nINFO beluga: blocks of 128 tokens\nWARNING"
    assert warnings(log) == [line]
