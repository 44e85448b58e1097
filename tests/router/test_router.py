# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The router from a request to its account: candidates, filters, choice."""

from __future__ import annotations

import pytest

from beluga.errors import AllWorkersBusyError, NoWorkersError, WorkersOverloadedError
from beluga.router import (
    BusyThresholds,
    Constraints,
    Matches,
    Overlap,
    Query,
    Router,
    Worker,
    make_policy,
)

QUERY = Query(isl=64, block_size=16, hashes=(1, 2, 3, 4), sequence=(1, 2, 3, 4))
ONE, TWO, THREE = Worker(1), Worker(2), Worker(3, 1)


def router(policy: str = "least-tokens", **settings) -> Router:
    made = Router(make_policy(policy), **settings)
    made.add_worker(ONE, ["gpu-a", "east"])
    made.add_worker(TWO, ["gpu-a"])
    made.add_worker(THREE)
    return made


def index(query: Query) -> Matches:
    return Matches(held={TWO: Overlap(device=2, host=1)}, shared=4)


def test_matches_include_pool_blocks_beyond_the_workers_own() -> None:
    found = index(QUERY)
    assert found.of(TWO) == Overlap(device=2, host=1, shared=1)
    assert found.of(ONE) == Overlap(shared=4)
    assert Matches(held={ONE: Overlap(device=9)}, shared=4).of(ONE) == Overlap(device=9)
    assert Matches(held={ONE: Overlap(device=9)}).of(ONE) == Overlap(device=9)
    behind = Overlap(device=1, shared=2)  # an index that has the length of the pool's continuation
    assert Matches(held={ONE: behind}, shared=9).of(ONE) == behind
    assert Matches(held={ONE: Overlap()}, shared=9).of(ONE) == Overlap(shared=9)


def test_a_request_is_chosen_for_and_accounted_for() -> None:
    made = router("linear", find_matches=index)
    choice = made.route("x", QUERY)
    assert choice.worker == TWO
    assert choice.hit_rate == 1.0
    load = made.tracker.load(TWO)
    assert (load.active_requests, load.active_prefill_tokens, load.active_decode_blocks) == (
        1,
        0,
        4,
    )
    assert made.choose(QUERY) == made.choose(QUERY)
    assert load.active_requests == 1
    made.tracker.free("x")
    assert load.active_requests == 0


def test_a_failed_index_costs_only_the_overlap() -> None:
    def broken(query: Query) -> Matches:
        raise ConnectionError("index is down")

    received: list[Exception] = []
    made = router("linear", find_matches=broken, on_index_error=received.append)
    assert made.route("x", QUERY).hit_rate == 0
    assert made.index_errors == 1
    assert str(received[0]) == "index is down"


def test_oblivious_policies_query_the_index_only_if_configured() -> None:
    requests: list[Query] = []

    def counting(query: Query) -> Matches:
        requests.append(query)
        return index(query)

    assert router(find_matches=counting).choose(QUERY).hit_rate == 0
    assert requests == []
    assert router(find_matches=counting, always_match=True).choose(QUERY).hit_rate == 1
    assert len(requests) == 1


def test_workers_can_be_added_removed_and_paused() -> None:
    made = router()
    for worker in (ONE, TWO):
        made.suspend(worker)
    assert {made.choose(QUERY).worker for _ in range(9)} == {THREE}
    made.remove_worker(THREE)
    with pytest.raises(NoWorkersError, match="none of the 2 workers"):
        made.choose(QUERY)
    made.resume(ONE)
    assert made.choose(QUERY).worker == ONE
    assert made.workers == [ONE, TWO]


@pytest.mark.parametrize(
    ("demand", "fitting"),
    [
        (Constraints(), {ONE, TWO, THREE}),
        (Constraints(pin=TWO), {TWO}),
        (Constraints(allowed=frozenset({1, 3})), {ONE, THREE}),
        (Constraints(ranks=range(1, 2)), {THREE}),
        (Constraints(required_taints=frozenset({"gpu-a"})), {ONE, TWO}),
        (Constraints(required_taints=frozenset({"gpu-a", "east"})), {ONE}),
    ],
)
def test_required_workers_and_taints_are_respected(
    demand: Constraints, fitting: set[Worker]
) -> None:
    assert {found.worker for found in router().candidates(QUERY, demand)} == fitting


def test_a_requirement_that_no_worker_satisfies_is_an_error() -> None:
    with pytest.raises(NoWorkersError):
        router().choose(QUERY, Constraints(pin=Worker(9)))


def test_preferred_taints_decide_among_equals() -> None:
    made = router("linear")
    demand = Constraints(preferred_taints={"east": 1.0, "gpu-a": 0.5})
    weights = {found.worker: found.taint_weight for found in made.candidates(QUERY, demand)}
    assert weights == {ONE: 1.5, TWO: 0.5, THREE: 0.0}
    assert {made.choose(QUERY, demand).worker for _ in range(9)} == {ONE}


def test_overloaded_workers_are_skipped_and_a_pin_is_not_rerouted() -> None:
    made = router(thresholds=BusyThresholds(prefill_tokens=63))
    assert {made.route(n, QUERY).worker for n in range(3)} == {ONE, TWO, THREE}
    with pytest.raises(WorkersOverloadedError, match="3 workers"):
        made.choose(QUERY)
    made.tracker.prefill_done(0)
    freed = made.choose(QUERY).worker
    busy = next(worker for worker in made.workers if worker != freed)
    with pytest.raises(AllWorkersBusyError, match="1 workers"):
        made.choose(QUERY, Constraints(pin=busy))
    made.thresholds = None
    assert made.choose(QUERY, Constraints(pin=busy)).worker == busy


def test_each_busy_threshold_counts() -> None:
    made = router()
    made.route("x", QUERY, Constraints(pin=ONE))
    load = made.tracker.load(ONE)
    load.kv_total_blocks = 10
    assert BusyThresholds(decode_blocks=0.3).overloaded(load)
    assert not BusyThresholds(decode_blocks=0.4).overloaded(load)
    assert BusyThresholds(prefill_batches=0.5, max_num_batched_tokens=100).overloaded(load)
    assert not BusyThresholds(prefill_batches=0.5, max_num_batched_tokens=128).overloaded(load)
    load.kv_total_blocks = 0
    assert not BusyThresholds(decode_blocks=0.3).overloaded(load)
