# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Dynamo's four costs against the reference's examples, and their choices on a shared pool."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from beluga.errors import AllWorkersBusyError
from beluga.router import Candidate, Load, Matches, Overlap, Query, Worker, make_policy
from beluga.router.policies.cached import Linear, LMetric


def candidate(
    place: int = 0, *, new: int = 0, overlap: Overlap | None = None, **load: float
) -> Candidate:
    state = Load(**load)  # type: ignore[arg-type]
    return Candidate(Worker(place), state, overlap or Overlap(), new)


def cost(query: Query, *states: Candidate, **settings) -> list[float]:
    return Linear(**settings).costs(query, states)


ISL_64 = Query(isl=64, block_size=16)


def test_example_a_cached_beyond_the_prompt() -> None:
    state = candidate(
        new=3, overlap=Overlap(device=6), active_prefill_tokens=16, active_decode_blocks=2
    )
    assert cost(ISL_64, state, prefill_scale=2) == [7.0]
    assert cost(ISL_64, state, prefill_scale=2, track_prefill=False) == [5.0]


def test_example_b_requests_cost() -> None:
    state = candidate(overlap=Overlap(device=4), active_decode_blocks=100, active_requests=4)
    assert cost(ISL_64, state) == [100]
    assert cost(ISL_64, state, request_cost=32) == [228]


def test_example_c_a_decode_router_credits_decode_blocks() -> None:
    state = candidate(overlap=Overlap(device=3), active_decode_blocks=10)
    assert cost(ISL_64, state, decode_router=True, track_prefill=False) == [7.0]
    assert cost(ISL_64, state, decode_router=True, track_prefill=False, credit=0) == [10]


def test_example_d_the_pool_counts_beyond_the_device() -> None:
    matches = Matches(held={Worker(0): Overlap(device=2)}, shared=4)
    query = Query(isl=4, block_size=1)
    states = [candidate(place, overlap=matches.of(Worker(place))) for place in (0, 1)]
    assert cost(query, *states, shared_credit=0.5) == [1.0, 2.0]


def test_example_e_overlap_beats_decode_blocks() -> None:
    warm = candidate(0, overlap=Overlap(device=2), active_decode_blocks=3)
    assert cost(ISL_64, warm, candidate(1), prefill_scale=2) == [7, 8]


def test_example_f_credit_decays_as_prefills_pile_up() -> None:
    warm = candidate(0, overlap=Overlap(device=4), active_prefill_tokens=48)
    assert cost(ISL_64, warm, candidate(1)) == [3, 4]
    decayed = cost(ISL_64, warm, candidate(1), decay=1)
    assert decayed == [pytest.approx(4.714, abs=1e-3), 4]
    choice = make_policy("linear", decay=1).choose(ISL_64, [warm, candidate(1)])
    assert choice.worker == Worker(1)


def test_example_g_credit_above_one() -> None:
    warm = candidate(0, overlap=Overlap(device=4), active_decode_blocks=5)
    query = Query(isl=128, block_size=16)
    assert cost(query, warm, candidate(1)) == [9, 8]
    assert cost(query, warm, candidate(1), credit=1.5) == [7, 8]


def test_tiers_below_the_device_have_their_own_credit() -> None:
    state = candidate(overlap=Overlap(device=0, host=2, disk=2))
    assert cost(ISL_64, state) == [2]  # 4 blocks, less 1.5 for the host's and 0.5 for the disk's


def test_a_preferred_taint_lowers_the_cost() -> None:
    state = candidate()
    state.taint_weight = 1.0
    assert cost(ISL_64, state) == [pytest.approx(1.8677, abs=1e-4)]  # 4, by exp(-tanh(1)) = 0.4669


@st.composite
def pool_states(draw: st.DrawFn) -> tuple[Query, list[Candidate], int]:
    """Workers with equal overlap on their devices, and the rest of the prompt in the pool."""
    blocks = draw(st.integers(1, 30))
    device = draw(st.integers(0, blocks))
    shared = draw(st.integers(0, blocks - device))
    loads = draw(st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 500)), min_size=2))
    states = [
        candidate(
            place,
            overlap=Overlap(device=device, shared=shared),
            active_prefill_tokens=tokens,
            active_decode_blocks=decode,
        )
        for place, (tokens, decode) in enumerate(loads)
    ]
    return Query(isl=blocks * 16, block_size=16), states, device + shared


@settings(deadline=None)
@given(pool_states())
def test_on_a_pool_as_good_as_local_memory_linear_only_balances_load(
    drawn: tuple[Query, list[Candidate], int],
) -> None:
    query, states, _ = drawn
    costs = cost(query, *states, shared_credit=1.0)
    blind = cost(query, *states, credit=0, host_credit=0, disk_credit=0)
    loads = [c.load.active_prefill_tokens / 16 + c.load.active_decode_blocks for c in states]
    least = min(costs)
    assert [c - least for c in costs] == pytest.approx([c - min(blind) for c in blind], abs=1e-6)
    assert [c - least for c in costs] == pytest.approx([x - min(loads) for x in loads], abs=1e-6)


def test_lmetric_multiplies_prefill_and_decode() -> None:
    state = candidate(new=3, overlap=Overlap(device=1), active_decode_blocks=2)
    choice = LMetric().choose(ISL_64, [state])
    assert choice.cost == 18  # 3 blocks to prefill, times 2 + 3 + 1 decode blocks


def test_logit2_is_twice_the_hits_less_usage_and_queue() -> None:
    states = [
        candidate(0, overlap=Overlap(device=2), gpu_cache_usage_perc=0.5, num_requests_waiting=4),
        candidate(1, gpu_cache_usage_perc=0.1, num_requests_waiting=1),
    ]
    choice = make_policy("logit2").choose(ISL_64, states)
    assert choice.worker == Worker(1)  # 2 * 0.5 - 0.5 - 1 = -0.5 against -0.1 - 0.25 = -0.35
    assert choice.cost == pytest.approx(0.35)
    states[0].overlap.device = 3
    assert make_policy("logit2").choose(ISL_64, states).worker == Worker(0)


def test_logit2_without_any_metrics_draws_at_random() -> None:
    policy = make_policy("logit2", seed=1)
    states = [candidate(place) for place in range(3)]
    assert {policy.choose(ISL_64, states).worker.worker_id for _ in range(60)} == {0, 1, 2}


ARTICLE = {1: 3, 2: 2, 3: 1}  # the scores of find_matches in the Dynamo KV router article


@pytest.mark.parametrize("name", ["logit2", "alpha-gamma", "linear", "lmetric", "cache-aware"])
def test_the_scores_of_the_article_select_worker_1(name: str) -> None:
    states = [
        candidate(worker_id, overlap=Overlap(device=blocks), kv_total_blocks=100)
        for worker_id, blocks in ARTICLE.items()
    ]
    choice = make_policy(name).choose(ISL_64, states)
    assert choice.worker == Worker(1)
    assert choice.hit_rate == 0.75


def test_alpha_gamma_weighs_load_more_when_loads_differ() -> None:
    states = [
        candidate(0, overlap=Overlap(device=4), kv_active_blocks=90, kv_total_blocks=100),
        candidate(1, kv_active_blocks=10, kv_total_blocks=100),
    ]
    choice = make_policy("alpha-gamma").choose(ISL_64, states)
    assert choice.worker == Worker(1)  # 0.7 * -0.4 + 0.3 * 1 = 0.02 against 0.7 * 0.4 = 0.28
    assert choice.cost == pytest.approx(0.02)
    states[0].load.kv_active_blocks = states[1].load.kv_active_blocks = 50
    states[0].overlap.device = 2
    level = make_policy("alpha-gamma").choose(ISL_64, states)
    assert (level.worker, level.cost) == (Worker(0), pytest.approx(0.7 * 0.5))
    states[0].load.request_active_slots, states[0].load.request_total_slots = 1, 4
    slots = make_policy("alpha-gamma").choose(ISL_64, states)
    assert slots.cost == pytest.approx(0.7 * 0.5 + 0.1 * 0.25)


def test_alpha_gamma_skips_full_workers() -> None:
    full = candidate(0, overlap=Overlap(device=4), kv_active_blocks=100, kv_total_blocks=100)
    slots = candidate(1, request_active_slots=8, request_total_slots=8)
    policy = make_policy("alpha-gamma")
    assert policy.choose(ISL_64, [full, slots, candidate(2)]).worker == Worker(2)
    with pytest.raises(AllWorkersBusyError, match="2 workers"):
        policy.choose(ISL_64, [full, slots])


def test_choices_at_a_temperature_match_the_softmax() -> None:
    states = [candidate(place, active_decode_blocks=place) for place in range(3)]
    policy = make_policy("linear", seed=2, temperature=1.0)
    drawn = [policy.choose(ISL_64, states).worker.worker_id for _ in range(4000)]
    for place, share in enumerate((0.506, 0.307, 0.186)):  # e ** 0 : e ** -0.5 : e ** -1
        assert drawn.count(place) / 4000 == pytest.approx(share, abs=0.04)


def test_equal_costs_are_drawn_uniformly() -> None:
    states = [candidate(place) for place in range(4)]
    for temperature in (0.0, 0.5):
        policy = make_policy("linear", seed=2, temperature=temperature)
        drawn = [policy.choose(ISL_64, states).worker.worker_id for _ in range(2000)]
        assert min(drawn.count(place) for place in range(4)) > 400
