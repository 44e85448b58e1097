# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Every policy: its settings, its costs computed by hand, and its choices."""

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from beluga.errors import AllWorkersBusyError, NoWorkersError, ObjectiveError, RouterError
from beluga.router import (
    DEFAULT_POLICY,
    POLICIES,
    Candidate,
    CostEstimator,
    Estimate,
    Load,
    Matches,
    Overlap,
    Query,
    Router,
    Worker,
    costs,
    make_policy,
    read_policies,
    read_policy,
    settings_of,
)
from beluga.router.costs import ModelCosts
from beluga.router.policies.cached import CacheAware, CacheAwareTree, Linear, SentPrefixes
from beluga.router.policies.timed import LeastCost, MinTtft
from beluga.router.policy import Usual

QUERY = Query(isl=160, block_size=16, hashes=range(10), sequence=range(10))


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_draws_by_its_seed_and_reports_the_expected_savings(name: str) -> None:
    states = [Candidate(Worker(number), Load(), Overlap()) for number in range(4)]
    first, second = (make_policy(name, seed=5) for _ in range(2))
    assert first.name == name
    for _ in range(50):
        assert first.choose(QUERY, states) == second.choose(QUERY, states)
    choice = make_policy(name).choose(
        QUERY, [Candidate(Worker(7), Load(), Overlap(device=2, shared=3))]
    )
    assert (choice.worker, choice.hit_rate) == (Worker(7), pytest.approx(5 * 16 / 160))
    assert make_policy(name).choose(Query(isl=0, block_size=16), states).hit_rate == 0
    with pytest.raises(NoWorkersError):
        make_policy(name).choose(QUERY, [])


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_that_uses_overlaps_gets_them(name: str) -> None:
    """The router queries its index only if the policy uses overlaps."""

    def choices(held: int) -> list[Worker]:
        policy = make_policy(name, seed=3)
        states = [
            Candidate(Worker(number), Load(), Overlap(device=held if number == holder else 0))
            for holder in range(4)
            for number in range(4)
        ]
        return [policy.choose(QUERY, states[at : at + 4]).worker for at in range(0, 16, 4)]

    if choices(9) != choices(0):
        assert make_policy(name).uses_overlap
    if name in {"round-robin", "random", "two-choices", "least-tokens"}:
        assert not make_policy(name).uses_overlap


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


BLIND_QUERY = Query(isl=160, block_size=16)
ISL_64 = Query(isl=64, block_size=16)


def candidate(
    number: int = 0, held: int = 0, *, new: int = 0, alone: float = 0.0, at: Overlap | None = None,
    **load: float,
) -> Candidate:  # fmt: skip
    """Make a worker whose device holds ``held`` blocks of the prompt, or with that overlap."""
    state = Load(**load)  # type: ignore[arg-type]
    return Candidate(Worker(number), state, at or Overlap(device=held), new, alone)


def candidates(*tokens: int) -> list[Candidate]:
    """Make one worker for each count of outstanding tokens, with ids from 1."""
    return [candidate(number, outstanding_tokens=count) for number, count in enumerate(tokens, 1)]


def busy(number: int, requests: int = 0, held: int = 0, **load: float) -> Candidate:
    return candidate(number, held, active_requests=requests, **load)


def test_round_robin_selects_each_worker_in_turn() -> None:
    policy = make_policy("round-robin")
    states = candidates(9, 0, 5)
    order = [policy.choose(BLIND_QUERY, states).worker.worker_id for _ in range(6)]
    assert order == [1, 2, 3, 1, 2, 3]


@pytest.mark.parametrize(
    ("name", "states", "chosen"),
    [
        ("random", candidates(9, 0, 5), {1, 2, 3}),
        ("two-choices", candidates(9, 0, 5), {2, 3}),  # never the fullest
        ("two-choices", candidates(7), {1}),
        ("least-tokens", candidates(9, 1, 5), {2}),
        ("least-tokens", candidates(0, 0, 0), {1, 2, 3}),  # ties are drawn, of those
        ("least-tokens", [busy(1, 4), candidate(2), candidate(3)], {2, 3}),  # few requests
        ("logit2", candidates(0, 0, 0), {1, 2, 3}),  # there are no metrics
    ],
)
def test_a_policy_draws_among_the_workers_that_it_may_choose(
    name: str, states: list[Candidate], chosen: set[int]
) -> None:
    policy = make_policy(name, seed=3)
    counts = Counter(policy.choose(BLIND_QUERY, states).worker.worker_id for _ in range(600))
    assert set(counts) == chosen
    assert min(counts.values()) > 300 / len(chosen)


def cost(query: Query, *states: Candidate, **settings) -> list[float]:
    return Linear(**settings).costs(query, states)


ISL_64 = Query(isl=64, block_size=16)


ISL_4 = Query(isl=4, block_size=1)
ISL_128 = Query(isl=128, block_size=16)
POOL = Matches(held={Worker(0): Overlap(device=2)}, shared=4)
CACHED_BEYOND = [candidate(0, 6, new=3, active_prefill_tokens=16, active_decode_blocks=2)]
SERVING = [candidate(0, 4, active_decode_blocks=100, active_requests=4)]
DECODING = [candidate(0, 3, active_decode_blocks=10)]
POOLED = [candidate(number, at=POOL.of(Worker(number))) for number in (0, 1)]
WARM = [candidate(0, 2, active_decode_blocks=3), candidate(1)]
PREFILLING = [candidate(0, 4, active_prefill_tokens=48), candidate(1)]
CREDITED = [candidate(0, 4, active_decode_blocks=5), candidate(1)]


@pytest.mark.parametrize(
    ("query", "states", "chosen", "expected"),
    [
        (ISL_64, CACHED_BEYOND, {"prefill_scale": 2}, [7.0]),
        (ISL_64, CACHED_BEYOND, {"prefill_scale": 2, "track_prefill": False}, [5.0]),
        (ISL_64, SERVING, {}, [100]),
        (ISL_64, SERVING, {"request_cost": 32}, [228]),
        (ISL_64, DECODING, {"decode_router": True, "track_prefill": False}, [7.0]),
        (ISL_64, DECODING, {"decode_router": True, "track_prefill": False, "credit": 0}, [10]),
        (ISL_4, POOLED, {"shared_credit": 0.5}, [1.0, 2.0]),  # the pool counts beyond the device
        (ISL_64, WARM, {"prefill_scale": 2}, [7, 8]),
        (ISL_64, PREFILLING, {}, [3, 4]),
        (ISL_64, PREFILLING, {"decay": 1}, [4.7143, 4]),
        (ISL_128, CREDITED, {}, [9, 8]),
        (ISL_128, CREDITED, {"credit": 1.5}, [7, 8]),
        # 4 blocks, less 1.5 for the host's and 0.5 for the disk's
        (ISL_64, [candidate(at=Overlap(device=0, host=2, disk=2))], {}, [2]),
        # 4, by exp(-tanh(1)) = 0.4669
    ],
)
def test_the_cost_of_linear_follows_its_formula(
    query: Query, states: list[Candidate], chosen: dict[str, Any], expected: list[float]
) -> None:
    assert cost(query, *states, **chosen) == pytest.approx(expected, abs=1e-4)
    choice = make_policy("linear", **chosen).choose(query, states)
    assert choice.worker.worker_id == expected.index(min(expected))


@st.composite
def pool_states(draw: st.DrawFn) -> tuple[Query, list[Candidate]]:
    """Workers with equal overlap on their devices, and the rest of the prompt in the pool."""
    blocks = draw(st.integers(1, 30))
    device = draw(st.integers(0, blocks))
    overlap = Overlap(device=device, shared=draw(st.integers(0, blocks - device)))
    loads = draw(st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 500)), min_size=2))
    states = [
        candidate(number, at=overlap, active_prefill_tokens=tokens, active_decode_blocks=decode)
        for number, (tokens, decode) in enumerate(loads)
    ]
    return Query(isl=blocks * 16, block_size=16), states


@settings(deadline=None)
@given(pool_states())
def test_on_a_pool_as_good_as_local_memory_linear_only_balances_load(
    drawn: tuple[Query, list[Candidate]],
) -> None:
    query, states = drawn
    costs = cost(query, *states, shared_credit=1.0)
    blind = cost(query, *states, credit=0, host_credit=0, disk_credit=0)
    loads = [c.load.active_prefill_tokens / 16 + c.load.active_decode_blocks for c in states]
    lowest = min(costs)
    assert [c - lowest for c in costs] == pytest.approx([c - min(blind) for c in blind], abs=1e-6)
    assert [c - lowest for c in costs] == pytest.approx([x - min(loads) for x in loads], abs=1e-6)


ARTICLE = {1: 3, 2: 2, 3: 1}  # the scores of find_matches in the Dynamo KV router article


@pytest.mark.parametrize("name", ["logit2", "alpha-gamma", "linear", "lmetric", "cache-aware"])
def test_the_scores_of_the_article_select_worker_1(name: str) -> None:
    states = [candidate(number, held, kv_total_blocks=100) for number, held in ARTICLE.items()]
    choice = make_policy(name).choose(ISL_64, states)
    assert (choice.worker, choice.hit_rate) == (Worker(1), 0.75)


def used(number: int, held: int, blocks: int, **load: float) -> Candidate:
    return candidate(number, held, kv_active_blocks=blocks, kv_total_blocks=100, **load)


FULLER = {"gpu_cache_usage_perc": 0.5, "num_requests_waiting": 4}
SLOTS = {"request_active_slots": 1, "request_total_slots": 4}
QUEUED = candidate(1, gpu_cache_usage_perc=0.1, num_requests_waiting=1)


@pytest.mark.parametrize(
    ("name", "states", "worker", "expected"),
    [
        # 3 blocks to prefill, times 2 + 3 + 1 decode blocks
        ("lmetric", [candidate(0, 1, new=3, active_decode_blocks=2)], 0, 18),
        # twice the hits less usage and queue: 2 * 0.5 - 0.5 - 1 = -0.5 against -0.1 - 0.25
        ("logit2", [candidate(0, 2, **FULLER), QUEUED], 1, 0.35),
        ("logit2", [candidate(0, 3, **FULLER), QUEUED], 0, 0.0),
        # Load weighs more if loads differ: 0.7 * -0.4 + 0.3 * 1 = 0.02 against 0.7 * 0.4 = 0.28.
        ("alpha-gamma", [used(0, 4, 90), used(1, 0, 10)], 1, 0.02),
        ("alpha-gamma", [used(0, 2, 50), used(1, 0, 50)], 0, 0.7 * 0.5),
        ("alpha-gamma", [used(0, 2, 50, **SLOTS), used(1, 0, 50)], 0, 0.7 * 0.5 + 0.1 * 0.25),
    ],
)
def test_the_cost_of_the_chosen_worker_is_as_computed_by_hand(
    name: str, states: list[Candidate], worker: int, expected: float
) -> None:
    choice = make_policy(name).choose(ISL_64, states)
    assert (choice.worker, choice.cost) == (Worker(worker), pytest.approx(expected))


def test_alpha_gamma_skips_full_workers() -> None:
    full = used(0, 4, 100)
    slots = candidate(1, request_active_slots=8, request_total_slots=8)
    policy = make_policy("alpha-gamma")
    assert policy.choose(ISL_64, [full, slots, candidate(2)]).worker == Worker(2)
    with pytest.raises(AllWorkersBusyError, match="2 workers"):
        policy.choose(ISL_64, [full, slots])


def test_choices_at_a_temperature_match_the_softmax() -> None:
    states = [candidate(number, active_decode_blocks=number) for number in range(3)]
    policy = make_policy("linear", seed=2, temperature=1.0)
    drawn = [policy.choose(ISL_64, states).worker.worker_id for _ in range(4000)]
    for number, share in enumerate((0.506, 0.307, 0.186)):  # e ** 0 : e ** -0.5 : e ** -1
        assert drawn.count(number) / 4000 == pytest.approx(share, abs=0.04)


def test_equal_costs_are_drawn_uniformly() -> None:
    states = [candidate(number) for number in range(4)]
    for temperature in (0.0, 0.5):
        policy = make_policy("linear", seed=2, temperature=temperature)
        drawn = [policy.choose(ISL_64, states).worker.worker_id for _ in range(2000)]
        assert min(drawn.count(number) for number in range(4)) > 400


FOUR_BLOCKS = Query(isl=64, block_size=16, hashes=(1, 2, 3, 4))


@pytest.mark.parametrize(
    ("states", "chosen"),
    [
        ([busy(0, 30, 1), busy(1, 40, 3), busy(2, 20)], 1),  # the longest match, if balanced
        # of equal matches the least load, then the smaller tree
        ([busy(0, 2, 2), used(1, 2, 9, active_requests=1), used(2, 2, 5, active_requests=1)], 2),
        ([busy(0, 2), busy(1, 1)], 1),  # the least load, without a match
    ],
)
def test_cache_aware_selects_by_match_load_and_tree(states: list[Candidate], chosen: int) -> None:
    assert CacheAware().choose(FOUR_BLOCKS, states).worker == Worker(chosen)


@pytest.mark.parametrize(
    ("chosen", "states", "apart"),
    [
        ({}, [busy(0, 0), busy(1, 32, 4)], False),
        ({}, [busy(0, 0), busy(1, 33, 4)], True),
        ({}, [busy(0, 400), busy(1, 440, 4)], False),
        ({}, [busy(0, 1), busy(1, gpu_cache_usage_perc=0.95, held=4)], False),
        ({"usage_spread": 0.5}, [busy(0, 1), busy(1, 2, 4, gpu_cache_usage_perc=0.95)], True),
        ({"usage_ceiling": 0.9}, [busy(0, 1), busy(1, 2, 4, gpu_cache_usage_perc=0.95)], True),
    ],
)
def test_the_least_load_is_chosen_if_loads_or_cache_usage_are_unbalanced(
    chosen: dict[str, float], states: list[Candidate], apart: bool
) -> None:
    policy = CacheAware(**chosen)
    assert policy.imbalanced(states) is apart
    assert policy.choose(FOUR_BLOCKS, states).worker == Worker(0 if apart else 1)


def test_the_tree_records_sent_prompts() -> None:
    policy = CacheAwareTree()
    assert policy.choose(FOUR_BLOCKS, [busy(0, 1), busy(1)]).worker == Worker(1)
    longer = Query(isl=80, block_size=16, hashes=(1, 2, 3, 4, 5))
    choice = policy.choose(longer, [busy(0), busy(1, 1)])
    assert choice.worker == Worker(1)
    assert choice.hit_rate == pytest.approx(4 / 5)


def test_the_tree_requires_a_match_of_more_than_half() -> None:
    policy = CacheAwareTree()
    policy.choose(Query(isl=32, block_size=16, hashes=(1, 2)), [busy(1)])
    states = [busy(0), busy(1, 1)]
    assert policy.choose(FOUR_BLOCKS, states).worker == Worker(0)
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
    sent, naive = SentPrefixes(blocks_max=1000), {Worker(number): set() for number in range(3)}
    for number, root, length in requests:
        blocks = tuple(range(root, root + length))
        sent.add(Worker(number), blocks)
        naive[Worker(number)] |= {blocks[:end] for end in range(1, length + 1)}
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
    router.route("first", FOUR_BLOCKS)
    assert router.choose(FOUR_BLOCKS).hit_rate == 1
    router.remove_worker(Worker(0))
    router.add_worker(Worker(0))
    assert router.choose(FOUR_BLOCKS).hit_rate == 0


def by_tokens(query: Query, state: Candidate, fetched: int) -> Estimate:
    """Estimate 1 s per token to prefill, 2 s per block to fetch, and 3 s between tokens."""
    cached = (state.overlap.blocks + fetched) * query.block_size
    return Estimate(state.load.outstanding_tokens, query.isl - cached, 2 * fetched, 3)


def test_min_ttft_adds_queue_and_prefill() -> None:
    states = [busy(0, held=4, outstanding_tokens=50), busy(1, outstanding_tokens=0)]
    choice = MinTtft(estimator=by_tokens).choose(FOUR_BLOCKS, states)
    assert (choice.worker, choice.cost) == (Worker(0), 50)
    states[0].load.outstanding_tokens = 70
    choice = MinTtft(estimator=by_tokens).choose(FOUR_BLOCKS, states)
    assert (choice.worker, choice.cost) == (Worker(1), 64)


def test_min_ttft_may_fetch_the_best_prefix_from_its_holder() -> None:
    states = [busy(0, held=4, outstanding_tokens=50), busy(1, held=1)]
    fetching = MinTtft(estimator=by_tokens, fetch_threshold=2.0)
    choice = fetching.choose(FOUR_BLOCKS, states)
    assert (choice.worker, choice.cost) == (Worker(1), 2 * 3)
    not_worth_it = MinTtft(estimator=by_tokens, fetch_threshold=4.0)
    assert not_worth_it.choose(FOUR_BLOCKS, states).cost == 48


def test_min_ttft_rejects_what_would_miss_an_objective() -> None:
    states = [busy(0)]
    with pytest.raises(ObjectiveError, match="first token would take at least 64 s"):
        MinTtft(estimator=by_tokens, ttft_objective_s=60).choose(FOUR_BLOCKS, states)
    with pytest.raises(ObjectiveError, match="each token"):
        MinTtft(estimator=by_tokens, between_tokens_objective_s=2).choose(FOUR_BLOCKS, states)
    limited = make_policy("min-ttft", estimator=by_tokens, ttft_objective_s=64)
    assert limited.choose(FOUR_BLOCKS, states).worker == Worker(0)


def test_the_default_estimate_is_based_on_published_costs() -> None:
    costs = ModelCosts("flat", 0, 1000, 0, 5000, 10, 1, 5, 100, 1, "made up")
    estimator = CostEstimator(costs=costs, bytes_per_s=100 * 16)
    state = busy(0, 2, held=1, prefill_s=7.0, active_decode_blocks=4)
    state.overlap.shared = 2
    step = 5.099  # seconds: 5000 ms, 10 for each of 3 requests, 1 for each of 64 tokens, and 5
    queue = 7 + 5.089 / 2  # half a step of the 2 requests that decode
    # a step's addition to its 16 s of prefill: 5 ms, 2 requests, 64 tokens
    step_s = 0.005 + 0.084
    assert estimator(FOUR_BLOCKS, state, 0) == pytest.approx((queue, 16.0 + step_s, 2.0, step))
    # All 4 blocks are found; the last token is always computed.
    assert estimator(FOUR_BLOCKS, state, 1) == pytest.approx((queue, 1.0 + step_s, 3.0, step))
    assert MinTtft().choose(FOUR_BLOCKS, [busy(0), busy(1, held=4)]).worker == Worker(1)


def test_an_estimate_counts_steps_and_each_memory_at_its_speed() -> None:
    costs = ModelCosts("flat", 0, 1000, 0, 0, 0, 0, 2, 100, 1, "made up")
    estimator = CostEstimator(costs=costs, bytes_per_s=1000, host_bytes_per_s=500, step_tokens=10)
    state = busy(0)
    state.overlap = Overlap(device=1, host=1, shared=1)
    estimate = estimator(FOUR_BLOCKS, state, 0)
    assert estimate.prefill_s == pytest.approx(16 + 2 * 0.002)  # 16 tokens in 2 steps
    assert estimate.transfer_s == pytest.approx(16 * 100 / 500 + 16 * 100 / 1000)
    assert estimate.added_s == pytest.approx(estimate.prefill_s + estimate.transfer_s)
    state.load.prefill_s = 4.0  # the copies end before the earlier prefills do
    assert estimator(FOUR_BLOCKS, state, 0).added_s == pytest.approx(estimate.prefill_s + 0.8)


# ---- The default policy and its cost model

# A token takes 1 ms of prefill, a block (10 tokens of 1 byte) 0.1 s from the pool, a step 2 ms. HBM
# has 100 blocks. An answer is assumed to take 512 steps until answers have ended.
COSTS = ModelCosts("flat", 0, 1, 0, 0, 0, 0, 2, 1, 1000, "made up")
ESTIMATOR = CostEstimator(costs=COSTS, bytes_per_s=100, step_tokens=10_000)
LEARNED = Usual(blocks=20.0, on_device=0.0, ended=1_000_000, decode_s=8.0)


def query_of(blocks: int = 20, usual: Usual = LEARNED) -> Query:
    hashes = tuple(range(blocks))
    return Query(10 * blocks, 10, hashes, hashes, usual=usual)


def at_worker(number: int, at: Overlap | None = None, new: int = 20, **load: float) -> Candidate:
    return candidate(number, at=at, new=new, **load)


def least_cost(
    state: Candidate, requested: Query | None = None, *, others: Sequence[Candidate] = ()
) -> float:
    """Return the cost of a worker that is chosen because all others have much to compute."""
    return LeastCost(estimator=ESTIMATOR).choose(requested or query_of(), [state, *others]).cost


def crowded(number: int, new: int = 20, **load: float) -> Candidate:
    return at_worker(number, new=new, prefill_s=1000.0, **load)


def missing(free: float, spread: float) -> float:
    """Return the mean of max(x - free, 0), integrated over the density of x."""
    scale, step = spread / math.sqrt(2), spread / 1000
    needed = [free + step * (index + 0.5) for index in range(15_000)]
    density = [math.exp(-abs(x) / scale) / (2 * scale) for x in needed]
    beyond = sum((x - free) * d for x, d in zip(needed, density, strict=True))
    return beyond * step


def delay(free: float, new: float, followers: float, change: float = 0.0) -> float:
    """Return the seconds by which holding ``new`` of ``free`` blocks for 8 s delays later requests,
    which need 20 blocks on average while the free space varies by ``change`` blocks (standard
    deviation).
    """
    spread = math.hypot(20, change)
    return followers * 8.0 / 100 * (missing(free - new, spread) - missing(free, spread))


POOL_10 = Overlap(shared=10)


@pytest.mark.parametrize(
    ("state", "others", "expected"),
    [
        (at_worker(0), [], 0.202),  # the prefill
        # A request that needs the same space on every worker does not delay later ones, however
        # full a worker is.
        (at_worker(0, active_decode_blocks=80), [crowded(1)], 0.202),
        (at_worker(0, Overlap(device=10)), [], 0.102),
        (at_worker(0, POOL_10), [], 1.0 + 0.102),  # blocks of the pool take the link,
        (at_worker(0, POOL_10, prefill_s=3.0), [], 3.0 + 0.102),  # during earlier prefills
        # A running request holds the prefix, which needs no more HBM: half a step, and the prefill.
        (at_worker(0, new=0, active_decode_blocks=95, active_requests=1), [], 0.001 + 0.202),
    ],
)
def test_a_request_that_delays_no_other_costs_its_own_time(
    state: Candidate, others: list[Candidate], expected: float
) -> None:
    assert least_cost(state, others=others) == pytest.approx(expected)


def test_a_request_bound_to_workers_is_delayed() -> None:
    state = at_worker(0, new=10, active_decode_blocks=70)
    # A request needs 10 blocks here and 20 there, 15 on average: a third is bound to its worker.
    expected = 0.202 + delay(30, 10, 1) / 3
    assert least_cost(state, others=[crowded(1)]) == pytest.approx(expected, rel=1e-4)
    # There it takes 10 blocks more than necessary, which are also missing for requests that fit any
    # worker.
    expected = 0.202 + delay(30, 20, 1) / 3 + delay(20, 10, 1) * 2 / 3
    dearer = at_worker(0, active_decode_blocks=70)
    assert least_cost(dearer, others=[crowded(1, new=10)]) == pytest.approx(expected, rel=1e-4)


def test_as_many_requests_follow_as_run() -> None:
    state = at_worker(0, new=10, active_decode_blocks=70)
    crowd = crowded(1, active_requests=6)
    expected = 0.202 + delay(30, 10, 1 + 6 / 2) / 3
    assert least_cost(state, others=[crowd]) == pytest.approx(expected, rel=1e-4)


def test_space_that_is_free_now_may_be_used_by_later_requests() -> None:
    """The more the free space varied while recent requests ran, the higher is the cost of blocks
    even if much is free.
    """
    for change in (0.0, 30.0):
        usual = Usual(20.0, 0.0, 1_000_000, 8.0, change**2)
        state = at_worker(0, new=10, kv_active_blocks=70)
        expected = 0.202 + delay(30, 10, 1, change) / 3
        assert least_cost(state, query_of(usual=usual), others=[crowded(1)]) == pytest.approx(
            expected, 1e-4
        )
    assert delay(30, 10, 1, 30.0) > 1.2 * delay(30, 10, 1)


def test_the_change_of_space_is_derived_before_any_request_has_ended() -> None:
    """The fewer requests hold the same blocks, the more the free space may vary."""
    fresh = Usual(20.0, 0.0, 0, 0.0)
    answer_s = ESTIMATOR.answer_s()
    for runs in (2, 8):
        state = at_worker(0, new=10, kv_active_blocks=50, active_requests=runs)
        change = math.sqrt(4 / 3 * 50**2 / runs)
        others_s = delay(50, 10, 1 + runs / 2, change) / 3 * answer_s / 8.0
        cost_s = least_cost(state, query_of(usual=fresh), others=[crowded(1)])
        assert cost_s == pytest.approx(0.203 + others_s, rel=1e-4)


def test_long_residence_of_blocks_adds_to_the_cost() -> None:
    """Blocks that other requests hold need no more space now, but are held longer."""
    joined = candidate(0, new=10, alone=2.5, active_decode_blocks=70)
    # 12.5 blocks here and 20 there: 16.25 on average.
    expected = 0.202 + delay(30, 12.5, 1) * (1 - 12.5 / 16.25)
    assert least_cost(joined, others=[crowded(1)]) == pytest.approx(expected, rel=1e-4)
    # They need no space: 10 blocks are free. For 12, one of 4 requests has to end, which takes 2 s
    # and not half a step.
    fits = candidate(0, new=10, alone=2.5, active_decode_blocks=90, active_requests=4)
    full = at_worker(0, new=12, active_decode_blocks=90, active_requests=4)
    assert least_cost(full) - least_cost(fits) == pytest.approx(2.0 - 0.001, rel=1e-4)


FULL = {"active_decode_blocks": 88, "active_requests": 4}


@pytest.mark.parametrize(
    ("state", "roomier", "expected"),
    [
        # 4 requests of 22 blocks run. 8 blocks are missing, and one of the 4 ends each 2 s.
        (at_worker(0, **FULL), at_worker(0, active_decode_blocks=80, active_requests=4), 2.0),
        # The reported count includes blocks of outputs.
        (
            at_worker(0, active_decode_blocks=40, kv_active_blocks=95, active_requests=4),
            at_worker(0, active_decode_blocks=40, active_requests=4),
            2.0,
        ),
        # 8 requests of 22 blocks were sent, of which 4 run: 96 blocks must become free first.
        (
            at_worker(0, active_decode_blocks=176, active_requests=8),
            at_worker(0),
            0.96 * 8.0,
        ),
    ],
)
def test_a_request_that_does_not_fit_waits_until_blocks_are_free(
    state: Candidate, roomier: Candidate, expected: float
) -> None:
    assert least_cost(state) - least_cost(roomier) == pytest.approx(expected, rel=1e-3)


def test_a_copy_costs_the_hits_that_it_evicts() -> None:
    reused, state = query_of(usual=Usual(20.0, 15.0, 1_000_000, 8.0)), at_worker(0, POOL_10)
    assert least_cost(state, reused) - least_cost(state) == pytest.approx(0.75 * 1.0)


def test_the_decode_time_is_assumed_before_any_request_has_ended() -> None:
    state, unknown = at_worker(0, **FULL | {"active_requests": 1}), query_of(usual=Usual())
    assert least_cost(state, unknown) > ESTIMATOR.answer_s() == pytest.approx(1.024)


def test_the_policy_gets_typical_loads_and_its_prediction_is_stored() -> None:
    router = Router(make_policy("default", estimator=ESTIMATOR))
    router.add_worker(Worker(0))
    assert router.policy.name == DEFAULT_POLICY
    requested = Query(200, 10, (), tuple(range(20)))
    router.route("first", requested, now=5.0)
    assert router.tracker.load(Worker(0)).prefill_s == pytest.approx(0.202)
    [candidate] = router.candidates(requested, now=5.1)
    assert (candidate.new_blocks, candidate.held_alone) == (0, pytest.approx(20 * 0.2642, rel=1e-3))
    assert router.tracker.load(Worker(0)).prefill_s == pytest.approx(0.102)
    assert requested.usual.blocks == 20


QWEN = costs.MODELS["qwen3-32b-h200"]


def test_prefill_is_linear_with_a_quadratic_tail() -> None:
    """The cost is 7.19 ms, 76.63 ms per 1000 tokens, and attention among these and to earlier
    tokens.
    """
    assert QWEN.prefill_ms(1000) == pytest.approx(84.5805)
    assert QWEN.prefill_ms(0, 5000) == 0
    assert QWEN.prefill_ms(1000, 9000) == pytest.approx(98.2695)


def test_a_prompt_in_two_chunks_costs_one_more_constant() -> None:
    whole = QWEN.prefill_ms(4096)
    assert QWEN.prefill_ms(2048) + QWEN.prefill_ms(2048, 2048) == pytest.approx(whole + QWEN.a)


@pytest.mark.parametrize(("path", "gain"), [(26e9, 7.6), (5e9, 1.5), (3.42e9, 1.0)])
def test_onboarding_pays_off_at_the_lengths_of_the_reference(path: float, gain: float) -> None:
    onboard_ms = QWEN.kv_bytes_per_token / path * 1e3
    assert QWEN.hbm_bytes == 470 * 512 * QWEN.kv_bytes_per_token == 470 * (128 << 20)
    assert QWEN.b / onboard_ms == pytest.approx(gain, rel=0.05)


def test_every_model_has_a_source_and_fits_its_device() -> None:
    for name, model in costs.MODELS.items():
        assert model.name == name
        assert model.source
        assert model.hbm_bytes > 1e9
        assert model.decode_ms(1, 1000) > model.e > 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: costs.model_costs("gpt"),
            "no costs for the model 'gpt'; choose one of qwen3-32b-h200",
        ),
        (lambda: CostEstimator(bytes_per_s=0.0), "bandwidth is 0.0, but must be greater than 0"),
        (
            lambda: CostEstimator(host_bytes_per_s=float("nan")),
            "local_bandwidth is nan, but must be greater than 0",
        ),
        (lambda: CostEstimator(step_tokens=0), "step_tokens is 0, but must be at least 1"),
    ],
)
def test_an_estimate_needs_a_known_model_and_speeds(
    call: Callable[[], object], message: str
) -> None:
    with pytest.raises(RouterError, match=message):
        call()
