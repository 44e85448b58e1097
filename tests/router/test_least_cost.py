# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The default policy: the cost of each resource of a worker, with values computed by hand.

The cost constants, compared with the values of the reference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from beluga.errors import RouterError
from beluga.router import (
    DEFAULT_POLICY,
    Candidate,
    CostEstimator,
    Load,
    Overlap,
    Query,
    Router,
    Usual,
    Worker,
    costs,
    make_policy,
)
from beluga.router.costs import ModelCosts
from beluga.router.policies.timed import LeastCost

# A token takes 1 ms of prefill, a block (10 tokens of 1 byte) 0.1 s from the pool, a step 2 ms. HBM
# has 100 blocks. An answer is assumed to take 512 steps until answers have ended.
COSTS = ModelCosts("flat", 0, 1, 0, 0, 0, 0, 2, 1, 1000, "made up")
ESTIMATOR = CostEstimator(costs=COSTS, bytes_per_s=100, step_tokens=10_000)
LEARNED = Usual(blocks=20.0, on_device=0.0, ended=1_000_000, decode_s=8.0)


def query(blocks: int = 20, usual: Usual = LEARNED) -> Query:
    hashes = tuple(range(blocks))
    return Query(10 * blocks, 10, hashes, hashes, usual=usual)


def worker(
    number: int, overlap: Overlap | None = None, new: int = 20, alone: float = 0.0, **load: float
) -> Candidate:
    state = Load(**load)  # type: ignore[arg-type]
    return Candidate(Worker(number), state, overlap or Overlap(), new, held_alone=alone)


def cost(
    state: Candidate, requested: Query | None = None, *, others: Sequence[Candidate] = ()
) -> float:
    """Return the cost of a worker that is chosen because all others have much to compute."""
    return LeastCost(estimator=ESTIMATOR).choose(requested or query(), [state, *others]).cost


def busy(number: int, new: int = 20, **load: float) -> Candidate:
    return worker(number, new=new, prefill_s=1000.0, **load)


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


def test_an_idle_worker_costs_the_prefill() -> None:
    assert cost(worker(0)) == pytest.approx(0.202)


def test_a_request_for_any_worker_is_not_delayed() -> None:
    """A request that needs the same space on every worker does not delay later ones, however full a
    worker is.
    """
    full = worker(0, active_decode_blocks=80)
    assert cost(full, others=[busy(1)]) == pytest.approx(0.202)


def test_a_request_bound_to_workers_is_delayed() -> None:
    state = worker(0, new=10, active_decode_blocks=70)
    # A request needs 10 blocks here and 20 there, 15 on average: a third is bound to its worker.
    expected = 0.202 + delay(30, 10, 1) / 3
    assert cost(state, others=[busy(1)]) == pytest.approx(expected, rel=1e-4)
    # There it takes 10 blocks more than necessary, which are also missing for requests that fit any
    # worker.
    expected = 0.202 + delay(30, 20, 1) / 3 + delay(20, 10, 1) * 2 / 3
    dearer = worker(0, active_decode_blocks=70)
    assert cost(dearer, others=[busy(1, new=10)]) == pytest.approx(expected, rel=1e-4)


def test_as_many_requests_follow_as_run() -> None:
    state = worker(0, new=10, active_decode_blocks=70)
    crowd = busy(1, active_requests=6)
    expected = 0.202 + delay(30, 10, 1 + 6 / 2) / 3
    assert cost(state, others=[crowd]) == pytest.approx(expected, rel=1e-4)


def test_space_that_is_free_now_may_be_used_by_later_requests() -> None:
    """The more the free space varied while recent requests ran, the higher is the cost of blocks
    even if much is free.
    """
    for change in (0.0, 30.0):
        usual = Usual(20.0, 0.0, 1_000_000, 8.0, change**2)
        state = worker(0, new=10, kv_active_blocks=70)
        expected = 0.202 + delay(30, 10, 1, change) / 3
        assert cost(state, query(usual=usual), others=[busy(1)]) == pytest.approx(expected, 1e-4)
    assert delay(30, 10, 1, 30.0) > 1.2 * delay(30, 10, 1)


def test_the_change_of_space_is_derived_before_any_request_has_ended() -> None:
    """The fewer requests hold the same blocks, the more the free space may vary."""
    fresh = Usual(20.0, 0.0, 0, 0.0)
    answer_s = ESTIMATOR.answer_s()
    for runs in (2, 8):
        state = worker(0, new=10, kv_active_blocks=50, active_requests=runs)
        change = math.sqrt(4 / 3 * 50**2 / runs)
        others_s = delay(50, 10, 1 + runs / 2, change) / 3 * answer_s / 8.0
        cost_s = cost(state, query(usual=fresh), others=[busy(1)])
        assert cost_s == pytest.approx(0.203 + others_s, rel=1e-4)


def test_long_residence_of_blocks_adds_to_the_cost() -> None:
    """Blocks that other requests hold need no more space now, but are held longer."""
    joined = worker(0, new=10, alone=2.5, active_decode_blocks=70)
    # 12.5 blocks here and 20 there: 16.25 on average.
    expected = 0.202 + delay(30, 12.5, 1) * (1 - 12.5 / 16.25)
    assert cost(joined, others=[busy(1)]) == pytest.approx(expected, rel=1e-4)
    # They need no space: 10 blocks are free. For 12, one of 4 requests has to end, which takes 2 s
    # and not half a step.
    fits = worker(0, new=10, alone=2.5, active_decode_blocks=90, active_requests=4)
    full = worker(0, new=12, active_decode_blocks=90, active_requests=4)
    assert cost(full) - cost(fits) == pytest.approx(2.0 - 0.001, rel=1e-4)


def test_blocks_on_the_device_are_free_and_those_of_the_pool_take_the_link() -> None:
    assert cost(worker(0, Overlap(device=10))) == pytest.approx(0.102)
    assert cost(worker(0, Overlap(shared=10))) == pytest.approx(1.0 + 0.102)


def test_copies_run_during_earlier_prefills() -> None:
    waiting = worker(0, Overlap(shared=10), prefill_s=3.0)
    assert cost(waiting) == pytest.approx(3.0 + 0.102)


def test_a_copy_costs_the_hits_that_it_evicts() -> None:
    reused = Usual(20.0, 15.0, 1_000_000, 8.0)
    state = worker(0, Overlap(shared=10))
    assert cost(state, query(usual=reused)) - cost(state) == pytest.approx(0.75 * 1.0)


def test_a_request_that_does_not_fit_waits_until_blocks_are_free() -> None:
    # 4 requests of 22 blocks run. 8 blocks are missing, and one of the 4 ends each 2 s.
    full = worker(0, active_decode_blocks=88, active_requests=4)
    fits = worker(0, active_decode_blocks=80, active_requests=4)
    assert cost(full) - cost(fits) == pytest.approx(2.0, rel=1e-3)
    # 8 requests of 22 blocks were sent, of which 4 run: 96 blocks must become free first.
    longer = worker(0, active_decode_blocks=176, active_requests=8)
    assert cost(longer) == pytest.approx(0.96 * 8.0 + 0.202, rel=1e-4)


def test_the_reported_count_of_a_worker_includes_output_blocks() -> None:
    full = worker(0, active_decode_blocks=40, kv_active_blocks=95, active_requests=4)
    fits = worker(0, active_decode_blocks=40, active_requests=4)
    assert cost(full) - cost(fits) == pytest.approx(2.0, rel=1e-2)


def test_the_decode_time_is_assumed_before_any_request_has_ended() -> None:
    crowded = worker(0, active_decode_blocks=95, active_requests=1)
    assert cost(crowded, query(usual=Usual())) > ESTIMATOR.answer_s() == pytest.approx(1.024)


def test_a_prefix_that_a_running_request_holds_needs_no_more_hbm() -> None:
    sharing = worker(0, new=0, active_decode_blocks=95, active_requests=1)
    assert cost(sharing) == pytest.approx(0.001 + 0.202)  # half a step, and the prefill


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
    assert QWEN.prefill_ms(1000, 9000) == pytest.approx(98.2695)


def test_a_fully_cached_prompt_costs_nothing() -> None:
    assert QWEN.prefill_ms(0, 5000) == 0


def test_a_prompt_in_two_chunks_costs_one_more_constant() -> None:
    whole = QWEN.prefill_ms(4096)
    assert QWEN.prefill_ms(2048) + QWEN.prefill_ms(2048, 2048) == pytest.approx(whole + QWEN.a)


def test_a_block_of_512_tokens_of_qwen3_is_128_mib() -> None:
    assert QWEN.kv_bytes_per_token * 512 == 128 << 20
    assert QWEN.hbm_bytes == 470 * (128 << 20)


@pytest.mark.parametrize(("path", "gain"), [(26e9, 7.6), (5e9, 1.5), (3.42e9, 1.0)])
def test_onboarding_pays_off_at_the_lengths_of_the_reference(path: float, gain: float) -> None:
    onboard_ms = QWEN.kv_bytes_per_token / path * 1e3
    assert QWEN.b / onboard_ms == pytest.approx(gain, rel=0.05)


def test_every_model_has_a_source_and_fits_its_device() -> None:
    for name, model in costs.MODELS.items():
        assert model.name == name
        assert model.source
        assert model.hbm_bytes > 1e9
        assert model.decode_ms(1, 1000) > model.e > 0


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(
        RouterError, match="no costs for the model 'gpt'; choose one of qwen3-32b-h200"
    ):
        costs.model_costs("gpt")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"bytes_per_s": 0.0}, "bandwidth is 0.0, but must be greater than 0"),
        ({"host_bytes_per_s": float("nan")}, "local_bandwidth is nan, but must be greater than 0"),
        ({"step_tokens": 0}, "step_tokens is 0, but must be at least 1"),
    ],
)
def test_an_estimate_needs_speeds(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(RouterError, match=message):
        CostEstimator(**wrong)
