# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The policies that do not look at caches, and the registry they are made by."""

from __future__ import annotations

from collections import Counter

import pytest

from beluga.errors import NoWorkersError, RouterError
from beluga.router import POLICIES, Candidate, Load, Overlap, Query, Worker, make_policy

QUERY = Query(isl=160, block_size=16)


def candidates(*tokens: int) -> list[Candidate]:
    """One worker for each count of outstanding tokens, ids from 1."""
    return [
        Candidate(Worker(place), Load(outstanding_tokens=count), Overlap())
        for place, count in enumerate(tokens, 1)
    ]


def chosen_ids(name: str, states: list[Candidate], times: int = 200) -> Counter[int]:
    policy = make_policy(name, seed=3)
    return Counter(policy.choose(QUERY, states).worker.worker_id for _ in range(times))


@pytest.mark.parametrize("name", ["round-robin", "random", "two-choices", "least-tokens"])
def test_cache_oblivious_policies_ask_no_index(name: str) -> None:
    policy = make_policy(name)
    assert policy.name == name
    assert not policy.uses_overlap
    with pytest.raises(NoWorkersError):
        policy.choose(QUERY, [])


def test_round_robin_gives_each_its_turn() -> None:
    policy = make_policy("round-robin")
    states = candidates(9, 0, 5)
    order = [policy.choose(QUERY, states).worker.worker_id for _ in range(6)]
    assert order == [1, 2, 3, 1, 2, 3]


def test_random_reaches_everyone() -> None:
    counts = chosen_ids("random", candidates(9, 0, 5), 600)
    assert set(counts) == {1, 2, 3}
    assert min(counts.values()) > 150


def test_two_choices_never_takes_the_fullest() -> None:
    assert set(chosen_ids("two-choices", candidates(9, 0, 5))) == {2, 3}
    assert set(chosen_ids("two-choices", candidates(7))) == {1}


def test_least_tokens_takes_the_emptiest() -> None:
    assert set(chosen_ids("least-tokens", candidates(9, 1, 5))) == {2}


def test_least_tokens_among_equals_goes_by_requests_and_then_by_chance() -> None:
    states = candidates(0, 0, 0)
    assert set(chosen_ids("least-tokens", states)) == {1, 2, 3}
    states[0].load.active_requests = 4
    assert set(chosen_ids("least-tokens", states)) == {2, 3}


@pytest.mark.parametrize("name", POLICIES)
def test_the_same_seed_makes_the_same_choices(name: str) -> None:
    states = candidates(0, 0, 0, 0)
    first, second = (make_policy(name, seed=5) for _ in range(2))
    for _ in range(50):
        assert first.choose(QUERY, states) == second.choose(QUERY, states)


@pytest.mark.parametrize("name", POLICIES)
def test_a_choice_says_what_the_cache_will_save(name: str) -> None:
    only = Candidate(Worker(7), Load(), Overlap(device=2, shared=3))
    choice = make_policy(name).choose(QUERY, [only])
    assert choice.worker == Worker(7)
    assert choice.hit_rate == pytest.approx(5 * 16 / 160)


def test_a_wrong_name_or_setting_is_named() -> None:
    with pytest.raises(RouterError, match=r"'fastest'.*least-tokens"):
        make_policy("fastest")
    with pytest.raises(RouterError, match=r"least-tokens has no setting 'decay'"):
        make_policy("least-tokens", decay=1)
