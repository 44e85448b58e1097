# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""SGLang's cache_aware and Mooncake's min-TTFT."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from beluga.errors import ObjectiveError
from beluga.router import (
    Candidate,
    CostEstimator,
    Estimate,
    Load,
    Overlap,
    Query,
    Router,
    Worker,
    make_policy,
)
from beluga.router.costs import ModelCosts
from beluga.router.policies.cached import CacheAware, CacheAwareTree, SentPrefixes
from beluga.router.policies.timed import MinTtft

QUERY = Query(isl=64, block_size=16, hashes=(1, 2, 3, 4))


def candidate(place: int, requests: int = 0, held: int = 0, **load: float) -> Candidate:
    state = Load(active_requests=requests, **load)  # type: ignore[arg-type]
    return Candidate(Worker(place), state, Overlap(device=held))


def test_cache_aware_selects_the_longest_match_while_loads_are_balanced() -> None:
    states = [candidate(0, 30, held=1), candidate(1, 40, held=3), candidate(2, 20)]
    assert CacheAware().choose(QUERY, states).worker == Worker(1)


@pytest.mark.parametrize(
    ("requests", "apart"), [((0, 32), False), ((0, 33), True), ((400, 440), False)]
)
def test_loads_are_unbalanced_by_both_bounds(requests: tuple[int, int], apart: bool) -> None:
    states = [candidate(0, requests[0]), candidate(1, requests[1], held=4)]
    assert CacheAware().imbalanced(states) is apart
    assert CacheAware().choose(QUERY, states).worker == Worker(0 if apart else 1)


def test_cache_usage_may_cause_an_imbalance() -> None:
    states = [candidate(0, gpu_cache_usage_perc=0.95, held=4), candidate(1, 1)]
    assert not CacheAware().imbalanced(states)
    assert CacheAware(usage_spread=0.5).imbalanced(states)
    assert CacheAware(usage_ceiling=0.9).imbalanced(states)
    assert CacheAware(usage_ceiling=0.9).choose(QUERY, states).worker == Worker(0)  # least requests


def test_equal_matches_are_decided_by_load_and_then_by_the_smaller_tree() -> None:
    states = [
        candidate(0, 2, held=2),
        candidate(1, 1, held=2, kv_active_blocks=9),
        candidate(2, 1, held=2, kv_active_blocks=5),
    ]
    assert CacheAware().choose(QUERY, states).worker == Worker(2)


def test_without_a_match_the_least_load_wins() -> None:
    assert CacheAware().choose(QUERY, [candidate(0, 2), candidate(1, 1)]).worker == Worker(1)


def test_the_tree_records_sent_prompts() -> None:
    policy = CacheAwareTree()
    assert policy.choose(QUERY, [candidate(0, 1), candidate(1)]).worker == Worker(1)
    longer = Query(isl=80, block_size=16, hashes=(1, 2, 3, 4, 5))
    choice = policy.choose(longer, [candidate(0), candidate(1, 1)])
    assert choice.worker == Worker(1)
    assert choice.hit_rate == pytest.approx(4 / 5)


def test_the_tree_requires_a_match_of_more_than_half() -> None:
    policy = CacheAwareTree()
    policy.choose(Query(isl=32, block_size=16, hashes=(1, 2)), [candidate(1)])
    states = [candidate(0), candidate(1, 1)]
    assert policy.choose(QUERY, states).worker == Worker(0)
    longer = Query(isl=48, block_size=16, hashes=(1, 2, 9))
    assert policy.choose(longer, states).worker == Worker(1)


def test_sent_prompts_are_evicted_from_the_tail_of_the_least_recent() -> None:
    sent = SentPrefixes(blocks_max=4)
    first, second = Worker(1), Worker(2)
    sent.add(first, (1, 2))
    sent.add(first, (7, 8, 9))
    assert sent.longest((1, 2), {first}) == (first, 1)
    assert sent.longest((7, 8, 9), {first}) == (first, 3)
    sent.add(second, (7,))
    assert sent.longest((7, 8), {second}) == (second, 1)
    assert len(sent) == 5
    sent.forget(first)
    assert sent.longest((7, 8), {first, second}) == (second, 1)
    assert sent.longest((8,), {first, second}) == (None, 0)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 6))))
def test_the_tree_of_sent_prompts_matches_a_naive_model(
    requests: list[tuple[int, int, int]],
) -> None:
    sent, naive = SentPrefixes(blocks_max=1000), {Worker(place): set() for place in range(3)}
    for place, root, length in requests:
        blocks = tuple(range(root, root + length))
        sent.add(Worker(place), blocks)
        naive[Worker(place)] |= {blocks[:end] for end in range(1, length + 1)}
    for root in range(3):
        blocks = tuple(range(root, root + 7))
        held = {
            w: max((len(p) for p in all_ if p == blocks[: len(p)]), default=0)
            for w, all_ in naive.items()
        }
        worker, matched = sent.longest(blocks, naive)
        assert matched == max(held.values())
        assert worker is None if matched == 0 else held[worker] == matched


def test_a_worker_that_is_added_again_has_an_empty_cache() -> None:
    router = Router(make_policy("cache-aware-tree"))
    router.add_worker(Worker(0))
    router.route("first", QUERY)
    assert router.choose(QUERY).hit_rate == 1
    router.remove_worker(Worker(0))
    router.add_worker(Worker(0))
    assert router.choose(QUERY).hit_rate == 0


def by_tokens(query: Query, state: Candidate, fetched: int) -> Estimate:
    """Estimate 1 s per token to prefill, 2 s per block to fetch, and 3 s between tokens."""
    cached = (state.overlap.blocks + fetched) * query.block_size
    return Estimate(state.load.outstanding_tokens, query.isl - cached, 2 * fetched, 3)


def test_min_ttft_adds_queue_and_prefill() -> None:
    states = [candidate(0, held=4, outstanding_tokens=50), candidate(1, outstanding_tokens=0)]
    choice = MinTtft(estimator=by_tokens).choose(QUERY, states)
    assert (choice.worker, choice.cost) == (Worker(0), 50)
    states[0].load.outstanding_tokens = 70
    choice = MinTtft(estimator=by_tokens).choose(QUERY, states)
    assert (choice.worker, choice.cost) == (Worker(1), 64)


def test_min_ttft_may_fetch_the_best_prefix_from_its_holder() -> None:
    states = [candidate(0, held=4, outstanding_tokens=50), candidate(1, held=1)]
    fetching = MinTtft(estimator=by_tokens, fetch_threshold=2.0)
    choice = fetching.choose(QUERY, states)
    assert (choice.worker, choice.cost) == (Worker(1), 2 * 3)
    not_worth_it = MinTtft(estimator=by_tokens, fetch_threshold=4.0)
    assert not_worth_it.choose(QUERY, states).cost == 48


def test_min_ttft_rejects_what_would_miss_an_objective() -> None:
    states = [candidate(0)]
    with pytest.raises(ObjectiveError, match="first token would take at least 64 s"):
        MinTtft(estimator=by_tokens, ttft_objective_s=60).choose(QUERY, states)
    with pytest.raises(ObjectiveError, match="each token"):
        MinTtft(estimator=by_tokens, between_tokens_objective_s=2).choose(QUERY, states)
    kept = make_policy("min-ttft", estimator=by_tokens, ttft_objective_s=64)
    assert kept.choose(QUERY, states).worker == Worker(0)


def test_the_default_estimate_is_based_on_published_costs() -> None:
    costs = ModelCosts("flat", 0, 1000, 0, 5000, 10, 1, 5, 100, 1, "made up")
    estimator = CostEstimator(costs=costs, bytes_per_s=100 * 16)
    state = candidate(0, 2, held=1, prefill_s=7.0, active_decode_blocks=4)
    state.overlap.shared = 2
    step = 5.099  # seconds: 5000 ms, 10 for each of 3 requests, 1 for each of 64 tokens, and 5
    queue = 7 + 5.089 / 2  # half a step of the 2 requests that decode
    # a step's addition to its 16 s of prefill: 5 ms, 2 requests, 64 tokens
    one_step = 0.005 + 0.084
    assert estimator(QUERY, state, 0) == pytest.approx((queue, 16.0 + one_step, 2.0, step))
    # All 4 blocks are found; the last token is always computed.
    assert estimator(QUERY, state, 1) == pytest.approx((queue, 1.0 + one_step, 3.0, step))
    assert MinTtft().choose(QUERY, [candidate(0), candidate(1, held=4)]).worker == Worker(1)


def test_an_estimate_counts_steps_and_each_memory_at_its_speed() -> None:
    costs = ModelCosts("flat", 0, 1000, 0, 0, 0, 0, 2, 100, 1, "made up")
    estimator = CostEstimator(costs=costs, bytes_per_s=1000, host_bytes_per_s=500, step_tokens=10)
    state = candidate(0)
    state.overlap = Overlap(device=1, host=1, shared=1)
    found = estimator(QUERY, state, 0)
    assert found.prefill_s == pytest.approx(16 + 2 * 0.002)  # 16 tokens in 2 steps
    assert found.transfer_s == pytest.approx(16 * 100 / 500 + 16 * 100 / 1000)
    assert found.added_s == pytest.approx(found.prefill_s + found.transfer_s)
    state.load.prefill_s = 4.0  # the copies end before the earlier prefills do
    assert estimator(QUERY, state, 0).added_s == pytest.approx(found.prefill_s + 0.8)
