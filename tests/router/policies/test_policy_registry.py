# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Properties of every policy, and the registry that makes them."""

from __future__ import annotations

import pytest

from beluga.errors import NoWorkersError, RouterError
from beluga.router import (
    POLICIES,
    Candidate,
    Load,
    Overlap,
    Query,
    Worker,
    make_policy,
)

QUERY = Query(isl=160, block_size=16, hashes=range(10), sequence=range(10))


@pytest.mark.parametrize("name", POLICIES)
def test_the_same_seed_makes_the_same_choices(name: str) -> None:
    states = [Candidate(Worker(place), Load(), Overlap()) for place in range(4)]
    first, second = (make_policy(name, seed=5) for _ in range(2))
    assert first.name == name
    for _ in range(50):
        assert first.choose(QUERY, states) == second.choose(QUERY, states)


@pytest.mark.parametrize("name", POLICIES)
def test_a_choice_has_the_expected_cache_savings(name: str) -> None:
    only = Candidate(Worker(7), Load(), Overlap(device=2, shared=3))
    choice = make_policy(name).choose(QUERY, [only])
    assert choice.worker == Worker(7)
    assert choice.hit_rate == pytest.approx(5 * 16 / 160)


@pytest.mark.parametrize("name", POLICIES)
def test_an_empty_list_of_candidates_raises_a_typed_error(name: str) -> None:
    with pytest.raises(NoWorkersError):
        make_policy(name).choose(QUERY, [])


@pytest.mark.parametrize("name", POLICIES)
def test_an_empty_prompt_is_routed(name: str) -> None:
    states = [Candidate(Worker(place), Load(), Overlap()) for place in range(2)]
    assert make_policy(name).choose(Query(isl=0, block_size=16), states).hit_rate == 0


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_that_uses_overlaps_gets_them(name: str) -> None:
    """The router queries its index only if the policy uses overlaps."""

    def choices(held: int) -> list[Worker]:
        policy = make_policy(name, seed=3)
        states = [
            Candidate(Worker(place), Load(), Overlap(device=held if place == holder else 0))
            for holder in range(4)
            for place in range(4)
        ]
        return [policy.choose(QUERY, states[at : at + 4]).worker for at in range(0, 16, 4)]

    if choices(9) != choices(0):
        assert make_policy(name).uses_overlap


def test_an_unknown_policy_or_setting_is_reported() -> None:
    with pytest.raises(RouterError, match=r"'fastest'.*least-tokens"):
        make_policy("fastest")
    with pytest.raises(RouterError, match=r"least-tokens has no setting 'decay'"):
        make_policy("least-tokens", decay=1)
