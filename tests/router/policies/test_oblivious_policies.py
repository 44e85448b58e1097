# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The policies that ignore caches, and the registry that makes them."""

from __future__ import annotations

from collections import Counter

import pytest

from beluga.errors import NoWorkersError
from beluga.router import (
    Candidate,
    Load,
    Overlap,
    Query,
    Worker,
    make_policy,
)

QUERY = Query(isl=160, block_size=16)


def candidates(*tokens: int) -> list[Candidate]:
    """Make one worker for each count of outstanding tokens, with ids from 1."""
    return [
        Candidate(Worker(place), Load(outstanding_tokens=count), Overlap())
        for place, count in enumerate(tokens, 1)
    ]


def chosen_ids(name: str, states: list[Candidate], times: int = 200) -> Counter[int]:
    policy = make_policy(name, seed=3)
    return Counter(policy.choose(QUERY, states).worker.worker_id for _ in range(times))


@pytest.mark.parametrize("name", ["round-robin", "random", "two-choices", "least-tokens"])
def test_cache_oblivious_policies_do_no_index_lookup(name: str) -> None:
    policy = make_policy(name)
    assert policy.name == name
    assert not policy.uses_overlap
    with pytest.raises(NoWorkersError):
        policy.choose(QUERY, [])


def test_round_robin_selects_each_worker_in_turn() -> None:
    policy = make_policy("round-robin")
    states = candidates(9, 0, 5)
    order = [policy.choose(QUERY, states).worker.worker_id for _ in range(6)]
    assert order == [1, 2, 3, 1, 2, 3]


def test_random_reaches_every_worker() -> None:
    counts = chosen_ids("random", candidates(9, 0, 5), 600)
    assert set(counts) == {1, 2, 3}
    assert min(counts.values()) > 150


def test_two_choices_never_selects_the_fullest_worker() -> None:
    assert set(chosen_ids("two-choices", candidates(9, 0, 5))) == {2, 3}
    assert set(chosen_ids("two-choices", candidates(7))) == {1}


def test_least_tokens_selects_the_least_loaded_worker() -> None:
    assert set(chosen_ids("least-tokens", candidates(9, 1, 5))) == {2}


def test_least_tokens_breaks_ties_by_requests_and_then_at_random() -> None:
    states = candidates(0, 0, 0)
    assert set(chosen_ids("least-tokens", states)) == {1, 2, 3}
    states[0].load.active_requests = 4
    assert set(chosen_ids("least-tokens", states)) == {2, 3}
