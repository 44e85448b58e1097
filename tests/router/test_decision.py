# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Local or remote prefill: the reference's examples of every rule, and settings that change at run
time.
"""

from __future__ import annotations

import pytest

from beluga.errors import RouterError
from beluga.router import RULES, Choice, Decision, Load, Overlap, Prompt, Query, Worker


def decide(rule: str, prompt: Prompt, **settings: float) -> str:
    return "remote" if Decision(rule, **settings).remote(prompt) else "local"


@pytest.mark.parametrize(
    ("tokens", "cached", "queued", "expected"),
    [
        (1001, 0, 1, "remote"),
        (1000, 0, 0, "local"),
        (1001, 0, 2, "local"),
        (4000, 3000, 0, "local"),
        (4000, 2999, 0, "remote"),
    ],
)
def test_the_rule_of_the_article(tokens: int, cached: int, queued: int, expected: str) -> None:
    prompt = Prompt(tokens=tokens, cached=cached, queue_size=queued)
    assert decide("length-and-queue", prompt) == expected


@pytest.mark.parametrize(("cached", "expected"), [(999, "remote"), (1000, "local")])
def test_the_rust_variant_ignores_the_queue(cached: int, expected: str) -> None:
    prompt = Prompt(tokens=2000, cached=cached, queue_size=99)
    assert decide("length", prompt) == expected


def test_without_a_router_every_prefill_is_remote() -> None:
    assert decide("always-remote", Prompt(tokens=1)) == "remote"


@pytest.mark.parametrize(
    ("tokens", "cached", "expected"),
    [
        (1000, 14 * 64, "local"),
        (100_000, 1000 * 64, "remote"),
        (200, 0, "remote"),
        (10_000, 10_000 - 2048, "remote"),
        (10_000, 10_000 - 2047, "local"),
        (1000, 300, "remote"),
        (1000, 301, "local"),
        (0, 0, "local"),
        (100, 128, "local"),
    ],
)
def test_the_rule_bounds_the_input_length(tokens: int, cached: int, expected: str) -> None:
    prompt = Prompt(tokens=tokens, cached=cached)
    assert decide("isl-bounding", prompt) == expected
    assert decide("isl-or-load", prompt) == expected


BUSY = Load(active_prefill_tokens=16 * 8192 + 1)


@pytest.mark.parametrize("rule", ["prefill-load", "isl-or-load"])
def test_a_busy_prefill_worker_is_bypassed(rule: str) -> None:
    assert decide(rule, Prompt(tokens=200, prefill=BUSY)) == "local"
    at_it = Load(active_prefill_tokens=16 * 8192)
    assert decide(rule, Prompt(tokens=200, prefill=at_it)) == "remote"
    assert decide(rule, Prompt(tokens=200)) == "remote"  # an unknown load is not busy


@pytest.mark.parametrize("rule", ["isl-bounding", "prefill-load", "isl-or-load"])
def test_a_full_decode_worker_never_prefills(rule: str) -> None:
    full = Load(active_decode_blocks=91, kv_total_blocks=100)
    prompt = Prompt(tokens=1000, cached=900, prefill=BUSY, decode=full)
    assert decide(rule, prompt) == "local"
    assert decide(rule, prompt, decode_blocks_max=0.9) == "remote"
    assert decide(rule, prompt, decode_blocks_max=0.91) == "local"


def test_the_earlier_rule_requires_space() -> None:
    half = Load(active_decode_blocks=50, kv_total_blocks=100)
    fuller = Load(active_decode_blocks=51, kv_total_blocks=100)
    assert decide("roomy", Prompt(tokens=5000, decode=half)) == "local"
    assert decide("roomy", Prompt(tokens=5001, decode=half)) == "remote"
    assert decide("roomy", Prompt(tokens=5000, decode=fuller)) == "remote"
    assert decide("roomy", Prompt(tokens=5000, decode=half, decode_queue_blocks=1)) == "remote"
    assert decide("roomy", Prompt(tokens=16384, cached=16000)) == "local"
    assert decide("roomy", Prompt(tokens=16385, cached=16000)) == "remote"


def test_a_prompt_is_made_of_a_choice() -> None:
    choice = Choice(Worker(1), Overlap(device=10, shared=4), 0.896)
    prompt = Prompt.of(Query(1000, 64), choice, queue_size=3)
    assert (prompt.effective, prompt.queue_size) == (104, 3)


def test_settings_can_be_changed_and_restored_at_run_time() -> None:
    decision = Decision("length-and-queue", max_prefill_queue_size=9)
    prompt = Prompt(tokens=500, queue_size=5)
    assert not decision.remote(prompt)
    decision.update({"max_local_prefill_length": 100})
    assert decision.remote(prompt)
    with pytest.raises(RouterError, match="has no setting 'typo'"):
        decision.update({"typo": 1})
    with pytest.raises(RouterError, match="is '7'; give a number"):
        decision.update({"max_local_prefill_length": "7"})
    with pytest.raises(RouterError, match="is None; give a number"):
        decision.update({"max_local_prefill_length": None})
    assert decision.remote(prompt)
    decision.update(None)
    assert not decision.remote(prompt)


def test_rules_are_selected_by_name() -> None:
    for rule in RULES:
        Decision(rule).remote(Prompt(tokens=100))
    with pytest.raises(RouterError, match=r"'mood'.*isl-bounding"):
        Decision("mood")
