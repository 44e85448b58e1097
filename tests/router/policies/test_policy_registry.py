# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Properties of every policy, and the registry that makes them."""

from __future__ import annotations

import re

import pytest

from beluga.errors import NoWorkersError, RouterError
from beluga.router import (
    DEFAULT_POLICY,
    POLICIES,
    Candidate,
    Load,
    Overlap,
    Query,
    Worker,
    make_policy,
    read_policies,
    read_policy,
    settings_of,
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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fastest", "there is no policy 'fastest'; choose one of round-robin,"),
        ("", "there is no policy ''"),
        ("least-tokens:decay=1", "least-tokens has no setting 'decay'; it has no settings"),
        ("min-ttft:estimator=1", "min-ttft has no setting 'estimator'"),
        ("linear:decay", "policy linear: 'decay' is not KEY=VALUE; its settings: credit=1 (0 or"),
        ("linear:decay=1,decay=2", "policy linear: 'decay=1,decay=2' has a setting twice"),
        ("linear:decay=-1", "decay of policy linear is -1; give 0 or more; its settings: "),
        ("linear:decay=inf", "decay of policy linear is inf; give 0 or more"),
        ("linear:decay=none", "decay of policy linear is none; give 0 or more"),
        ("linear:shared_credit=2", "shared_credit of policy linear is 2; give 0 to 1"),
        ("linear:track_prefill=2", "track_prefill of policy linear is 2; give true or false"),
        ("cache-aware:usage_ceiling=5", "usage_ceiling of policy cache-aware is 5; give 0 to 1"),
        ("cache-aware:balance_abs=1.5", "is 1.5; give a whole number, 0 or more"),
        ("cache-aware-tree:tree_blocks_max=0", "is 0; give a whole number, 1 to 4294967296"),
        ("min-ttft:ttft_objective_s=0", "ttft_objective_s of policy min-ttft is 0; give above 0"),
    ],
)
def test_a_wrong_policy_is_refused_with_its_settings_and_their_ranges(
    text: str, message: str
) -> None:
    for read in (read_policy, make_policy):
        with pytest.raises(RouterError, match=re.escape(message)):
            read(text)


def test_settings_stand_in_the_text_or_are_named_or_are_defaults() -> None:
    policy = make_policy(
        "linear:decay=2, track_prefill=False", credit=0.25, defaults={"decay": 9, "host_credit": 1}
    )
    assert (policy.decay, policy.track_prefill, policy.credit, policy.host_credit) == (
        2.0,
        False,
        0.25,
        1.0,
    )
    assert make_policy("random", defaults={"decay": 9}).name == "random"
    assert make_policy("min-ttft:ttft_objective_s=None").ttft_objective_s is None
    with pytest.raises(RouterError, match="shared_credit of policy linear is 2; give 0 to 1"):
        make_policy("linear", shared_credit=2)


def test_a_list_has_settings_after_the_policy_that_they_belong_to() -> None:
    text = "linear:decay=1,credit=2, random,default,lmetric:decay=3"
    assert read_policies(text) == [
        "linear:decay=1,credit=2",
        "random",
        DEFAULT_POLICY,
        "lmetric:decay=3",
    ]


@pytest.mark.parametrize("name", POLICIES)
def test_defaults_are_in_the_range_of_their_setting(name: str) -> None:
    policy = make_policy(name)
    for key, declared in settings_of(name).items():
        assert declared.read(declared.default_text) == getattr(policy, key) == declared.default
