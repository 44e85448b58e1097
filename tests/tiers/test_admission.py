# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The policies of admission, on batches of keys."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from beluga.errors import TierError
from beluga.tiers.admission import ADMISSIONS, Adaptive, Always, SecondTouch, Sketch


def keys(first: int, count: int) -> NDArray[np.uint64]:
    """Return well-mixed keys of these numbers; equal numbers have equal keys."""
    numbers = np.arange(first, first + count, dtype=np.uint64)
    mixed = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(32)
    return np.stack([mixed, mixed * np.uint64(0x94D049BB133111EB)], axis=1)


def test_always_admits_every_block() -> None:
    assert Always().admit(keys(0, 5)).tolist() == [True] * 5


@pytest.mark.parametrize("policy", [SecondTouch(1 << 16), Sketch(1 << 16)], ids=["table", "sketch"])
def test_a_key_is_admitted_at_its_second_touch(policy: SecondTouch | Sketch) -> None:
    assert np.count_nonzero(policy.admit(keys(0, 1000))) == 0
    assert policy.admit(keys(500, 1000)).tolist() == [True] * 500 + [False] * 500


def test_the_table_drops_displaced_keys_and_no_others() -> None:
    policy = SecondTouch(1 << 10)
    policy.admit(keys(0, 500))
    policy.admit(keys(10_000, 100_000))
    assert np.count_nonzero(policy.admit(keys(0, 500))) == 0


def test_the_table_does_not_confuse_keys() -> None:
    policy = SecondTouch(1)
    assert not any(policy.admit(keys(n, 1))[0] for n in range(1000))


def test_the_sketch_ages() -> None:
    policy = Sketch(1 << 12)
    policy.admit(keys(0, 10))
    policy.admit(keys(0, 10))
    for first in range(10_000, 10_000 + (1 << 16), 1 << 12):
        policy.admit(keys(first, 1 << 12))
    admitted = policy.admit(keys(1_000_000, 1000))
    assert np.count_nonzero(admitted) < 900  # the counts are bounded
    assert Sketch(1 << 12, count_min=3).admit(keys(0, 4)).tolist() == [False] * 4


def test_without_reuse_adaptive_admits_nothing() -> None:
    policy = Adaptive(1 << 16, trial=0, pool_hits=lambda: 0)
    admitted = sum(
        int(np.count_nonzero(policy.admit(keys(n, 256)))) for n in range(0, 1 << 17, 256)
    )
    assert admitted == 0


def test_the_trial_of_adaptive_is_bounded() -> None:
    policy = Adaptive(1 << 16, trial=1000, pool_hits=lambda: 0)
    admitted = sum(int(np.count_nonzero(policy.admit(keys(n, 100)))) for n in range(0, 10_000, 100))
    assert admitted == 1000


def test_hits_in_the_pool_enable_adaptive_before_any_eviction() -> None:
    hits = 0
    policy = Adaptive(1 << 16, trial=0, warm_up=10_000, pool_hits=lambda: hits)
    assert not policy.admit(keys(0, 100)).any()
    hits = 50
    assert policy.admit(keys(100, 100)).all()


def test_a_prompt_shared_by_all_does_not_keep_adaptive_enabled() -> None:
    """After the warm-up, hits in the pool do not predict those of a lower tier."""
    hits = 0
    policy = Adaptive(1 << 20, warm_up=10_000, pool_hits=lambda: hits)
    late = 0
    for number in range(1000):
        hits += 32
        admitted = policy.admit(keys(number * 100, 100))
        late += int(np.count_nonzero(admitted)) if number >= 900 else 0
    assert late == 0


@pytest.mark.parametrize("source", ["a lower tier", "commits"])
def test_reuse_keeps_adaptive_enabled(source: str) -> None:
    policy, total = Adaptive(1 << 20), 0
    for number in range(500):
        batch = keys(number * 100, 100)
        if source == "a lower tier":
            policy.hit(10)
        elif number >= 10:
            batch[:10] = keys((number - 10) * 100 + 50, 10)
        total += int(np.count_nonzero(policy.admit(batch)))
    assert total > 0.95 * 50_000


def test_adaptive_below_break_even_still_admits_repeated_blocks() -> None:
    policy = Adaptive(1 << 20, break_even=0.5, trial=0)
    policy.admit(keys(0, 100))
    assert policy.admit(keys(90, 100)).tolist() == [True] * 10 + [False] * 90


@pytest.mark.parametrize("name", ADMISSIONS)
def test_an_empty_batch_has_no_effect(name: str) -> None:
    policy = ADMISSIONS[name]()
    assert policy.admit(np.zeros((0, 2), np.uint64)).shape == (0,)


def test_an_invalid_policy_is_rejected() -> None:
    with pytest.raises(TierError, match="can remember 1 to"):
        SecondTouch(0)
    with pytest.raises(TierError, match="between 0 and 1"):
        Adaptive(break_even=0.0)
