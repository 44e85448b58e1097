# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The router from a request to its account: candidates, filters, choice.

The router's queue: scores, order, refreshed overlap, and requests that are not ready.

Local or remote prefill: the reference's examples of every rule, and settings that change at run
time.

The planner's advice: thresholds, targets, and workers that change their role.
"""

from __future__ import annotations

import pytest

from beluga.errors import AllWorkersBusyError, NoWorkersError, RouterError, WorkersOverloadedError
from beluga.router import (
    RULES,
    BusyThresholds,
    Choice,
    Constraints,
    Decision,
    Goals,
    Load,
    Matches,
    Overlap,
    Prompt,
    Query,
    Role,
    Router,
    RouterQueue,
    Seen,
    Worker,
    advise,
    make_policy,
)
from beluga.router.queue import score

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
    matches = index(QUERY)
    assert matches.of(TWO) == Overlap(device=2, host=1, shared=1)
    assert matches.of(ONE) == Overlap(shared=4)
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
    assert {candidate.worker for candidate in router().candidates(QUERY, demand)} == fitting


def test_a_requirement_that_no_worker_satisfies_is_an_error() -> None:
    with pytest.raises(NoWorkersError):
        router().choose(QUERY, Constraints(pin=Worker(9)))


def test_preferred_taints_decide_among_equals() -> None:
    made = router("linear")
    demand = Constraints(preferred_taints={"east": 1.0, "gpu-a": 0.5})
    weights = {
        candidate.worker: candidate.taint_weight for candidate in made.candidates(QUERY, demand)
    }
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


def query(isl: int, jump: float = 0.0) -> Query:
    return Query(isl, 16, priority_jump=jump)


@pytest.mark.parametrize(
    ("overlap", "expected"),
    [(60, 1 / 64), (1, 1 / 1008), (64, 1.0), (99, 1.0)],
    ids=["best", "pinned", "all", "beyond"],
)
def test_wspt_matches_the_examples(overlap: int, expected: float) -> None:
    assert score("wspt", query(1024), 5.0, overlap) == expected


def drained(queue: RouterQueue[str], now: float = 0.0) -> list[str]:
    drawn = []
    while (item := queue.pop(now)) is not None:
        drawn.append(item)
    return drawn


def filled(order: str) -> RouterQueue[str]:
    queue: RouterQueue[str] = RouterQueue(order)
    queue.push("first", query(1600), 1.0)
    queue.push("second", query(3200), 2.0, overlap=199)
    queue.push("third", query(160), 3.0)
    return queue


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("fcfs", ["first", "second", "third"]),
        ("lcfs", ["third", "second", "first"]),
        ("wspt", ["second", "third", "first"]),
    ],
)
def test_each_policy_has_its_order(order: str, expected: list[str]) -> None:
    queue = filled(order)
    assert len(queue) == 3
    assert drained(queue) == expected
    assert len(queue) == 0


def test_a_priority_is_in_seconds_or_weight() -> None:
    queue = filled("fcfs")
    queue.push("jumps", query(16, jump=1.5), 3.1)
    assert drained(queue) == ["first", "jumps", "second", "third"]
    queue = filled("wspt")
    queue.push("jumps", query(1600, jump=15.0), 4.0)
    assert drained(queue) == ["second", "jumps", "third", "first"]


def test_strict_priority_precedes_any_score() -> None:
    queue = filled("fcfs")
    queue.push("strict", query(99999), 9.0, strict_priority=1)
    assert drained(queue)[0] == "strict"


def test_equal_requests_leave_in_the_order_of_arrival() -> None:
    queue: RouterQueue[int] = RouterQueue("wspt")
    for item in range(20):
        queue.push(item, query(64), 0.0)
    assert [queue.pop(0.0) for _ in range(20)] == list(range(20))


def test_a_stale_overlap_is_recomputed() -> None:
    requests: list[str] = []

    def overlap_of(item: str) -> int:
        requests.append(item)
        return {"second": 0, "third": 0, "first": 100}[item]

    queue = filled("wspt")
    assert queue.pop(10.0, overlap_of=overlap_of) == "second"
    assert requests == []
    queue = filled("wspt")
    assert queue.pop(13.5, overlap_of=overlap_of) == "third"  # `second` has lost its position
    assert requests == ["second", "third"]
    assert queue.pop(14.0, overlap_of=overlap_of) == "first"


def test_a_request_that_is_not_ready_keeps_its_position() -> None:
    queue = filled("fcfs")
    assert queue.pop(9.0, ready=lambda item: item == "second") == "second"
    assert queue.pop(9.0, ready=lambda item: False) is None
    assert drained(queue) == ["first", "third"]


def test_a_canceled_request_is_removed() -> None:
    queue: RouterQueue[list[int]] = RouterQueue()
    canceled, stays = [1], [1]
    queue.push(canceled, query(1), 0.0)
    queue.push(stays, query(1), 1.0)
    assert queue.discard(canceled)
    assert not queue.discard(canceled)
    assert queue.pop(2.0) is stays


def test_requests_wait_only_while_every_worker_is_over_the_threshold() -> None:
    limits = BusyThresholds(prefill_batches=16.0, max_num_batched_tokens=64)
    router = Router(make_policy("least-tokens"), wait_above=limits)
    first, second = Worker(1), Worker(2)
    router.add_worker(first)
    router.add_worker(second)
    router.route("a", query(16 * 64 + 1), Constraints(pin=first))
    assert router.choose(query(1)).worker == second
    with pytest.raises(AllWorkersBusyError, match="1 workers"):
        router.choose(query(1), Constraints(pin=first))
    router.route("b", query(16 * 64), Constraints(pin=second))
    router.choose(query(1))  # the second worker is at the threshold, not over it
    router.route("c", query(1), Constraints(pin=second))
    with pytest.raises(AllWorkersBusyError, match="2 workers"):
        router.choose(query(1))
    router.tracker.prefill_done("c")
    router.choose(query(1))


def test_an_unknown_order_is_rejected() -> None:
    with pytest.raises(RouterError, match=r"'sjf'.*fcfs, lcfs, wspt"):
        RouterQueue("sjf")


def decide(rule: str, prompt: Prompt, **settings: float) -> str:
    return "remote" if Decision(rule, **settings).remote(prompt) else "local"


@pytest.mark.parametrize(
    ("tokens", "cached", "queued", "expected"),
    [
        (1001, 0, 1, "remote"),
        (1000, 0, 0, "local"),
        (1001, 0, 2, "local"),
        (4000, 3000, 0, "local"),
        (4000, 2999, 0, "remote"),
    ],
)
def test_the_rule_of_the_article(tokens: int, cached: int, queued: int, expected: str) -> None:
    prompt = Prompt(tokens=tokens, cached=cached, queue_size=queued)
    assert decide("length-and-queue", prompt) == expected


@pytest.mark.parametrize(("cached", "expected"), [(999, "remote"), (1000, "local")])
def test_the_rust_variant_ignores_the_queue(cached: int, expected: str) -> None:
    prompt = Prompt(tokens=2000, cached=cached, queue_size=99)
    assert decide("length", prompt) == expected


def test_without_a_router_every_prefill_is_remote() -> None:
    assert decide("always-remote", Prompt(tokens=1)) == "remote"


@pytest.mark.parametrize(
    ("tokens", "cached", "expected"),
    [
        (1000, 14 * 64, "local"),
        (100_000, 1000 * 64, "remote"),
        (200, 0, "remote"),
        (10_000, 10_000 - 2048, "remote"),
        (10_000, 10_000 - 2047, "local"),
        (1000, 300, "remote"),
        (1000, 301, "local"),
        (0, 0, "local"),
        (100, 128, "local"),
    ],
)
def test_the_rule_bounds_the_input_length(tokens: int, cached: int, expected: str) -> None:
    prompt = Prompt(tokens=tokens, cached=cached)
    assert decide("isl-bounding", prompt) == expected
    assert decide("isl-or-load", prompt) == expected


BUSY = Load(active_prefill_tokens=16 * 8192 + 1)


@pytest.mark.parametrize("rule", ["prefill-load", "isl-or-load"])
def test_a_busy_prefill_worker_is_bypassed(rule: str) -> None:
    assert decide(rule, Prompt(tokens=200, prefill=BUSY)) == "local"
    at_it = Load(active_prefill_tokens=16 * 8192)
    assert decide(rule, Prompt(tokens=200, prefill=at_it)) == "remote"
    assert decide(rule, Prompt(tokens=200)) == "remote"  # an unknown load is not busy


@pytest.mark.parametrize("rule", ["isl-bounding", "prefill-load", "isl-or-load"])
def test_a_full_decode_worker_never_prefills(rule: str) -> None:
    full = Load(active_decode_blocks=91, kv_total_blocks=100)
    prompt = Prompt(tokens=1000, cached=900, prefill=BUSY, decode=full)
    assert decide(rule, prompt) == "local"
    assert decide(rule, prompt, decode_blocks_max=0.9) == "remote"
    assert decide(rule, prompt, decode_blocks_max=0.91) == "local"


def test_the_earlier_rule_requires_space() -> None:
    half = Load(active_decode_blocks=50, kv_total_blocks=100)
    fuller = Load(active_decode_blocks=51, kv_total_blocks=100)
    assert decide("roomy", Prompt(tokens=5000, decode=half)) == "local"
    assert decide("roomy", Prompt(tokens=5001, decode=half)) == "remote"
    assert decide("roomy", Prompt(tokens=5000, decode=fuller)) == "remote"
    assert decide("roomy", Prompt(tokens=5000, decode=half, decode_queue_blocks=1)) == "remote"
    assert decide("roomy", Prompt(tokens=16384, cached=16000)) == "local"
    assert decide("roomy", Prompt(tokens=16385, cached=16000)) == "remote"


def test_a_prompt_is_made_of_a_choice() -> None:
    choice = Choice(Worker(1), Overlap(device=10, shared=4), 0.896)
    prompt = Prompt.of(Query(1000, 64), choice, queue_size=3)
    assert (prompt.effective, prompt.queue_size) == (104, 3)


def test_settings_can_be_changed_and_restored_at_run_time() -> None:
    decision = Decision("length-and-queue", max_prefill_queue_size=9)
    prompt = Prompt(tokens=500, queue_size=5)
    assert not decision.remote(prompt)
    decision.update({"max_local_prefill_length": 100})
    assert decision.remote(prompt)
    with pytest.raises(RouterError, match="has no setting 'typo'"):
        decision.update({"typo": 1})
    with pytest.raises(RouterError, match="is '7'; give a number"):
        decision.update({"max_local_prefill_length": "7"})
    with pytest.raises(RouterError, match="is None; give a number"):
        decision.update({"max_local_prefill_length": None})
    assert decision.remote(prompt)
    decision.update(None)
    assert not decision.remote(prompt)


def test_rules_are_selected_by_name() -> None:
    for rule in RULES:
        Decision(rule).remote(Prompt(tokens=100))
    with pytest.raises(RouterError, match=r"'mood'.*isl-bounding"):
        Decision("mood")


CALM = {"prefill": Seen(workers=2, queued=2.0), "decode": Seen(workers=2, usage=0.7)}


def actions(goals: Goals | None = None, **roles: Seen) -> list[tuple[str, str]]:
    seen: dict[Role, Seen] = {**CALM, **roles}  # type: ignore[dict-item]
    return [(advice.action, advice.role) for advice in advise(seen, goals or Goals())]


def test_a_balanced_fleet_gets_no_advice() -> None:
    assert actions() == []


def test_long_queues_and_full_memory_add_workers() -> None:
    assert actions(prefill=Seen(workers=2, queued=11)) == [("grow", "prefill")]
    assert actions(prefill=Seen(workers=2, queued=10)) == []
    assert actions(decode=Seen(workers=2, usage=0.91)) == [("grow", "decode")]


def test_missed_objectives_add_workers() -> None:
    goals = Goals(ttft_s=0.5, between_tokens_s=0.05)
    late = Seen(workers=2, queued=2.0, ttft_s=0.6)
    assert actions(goals, prefill=late) == [("grow", "prefill")]
    assert actions(prefill=late) == []
    slow = Seen(workers=2, usage=0.7, between_tokens_s=0.06)
    assert actions(goals, decode=slow) == [("grow", "decode")]


def test_idle_roles_shrink_but_not_to_nothing() -> None:
    assert actions(prefill=Seen(workers=2)) == [("shrink", "prefill")]
    assert actions(decode=Seen(workers=2, usage=0.4)) == [("shrink", "decode")]
    assert actions(prefill=Seen(workers=1)) == []
    assert actions(decode=Seen(workers=2)) == []  # the usage of memory is unknown


def test_spare_workers_of_one_role_are_advised_for_the_other() -> None:
    advised = actions(prefill=Seen(workers=2, queued=20), decode=Seen(workers=2, usage=0.1))
    assert advised == [("re-role", "prefill")]
    seen: dict[Role, Seen] = {
        "prefill": Seen(workers=2, queued=20),
        "decode": Seen(workers=2, usage=0.1),
    }
    expected = "turn one into a prefill worker: 10 prompts wait per worker; decode can spare one"
    assert [str(advice) for advice in advise(seen, Goals())] == [expected]
    both = actions(prefill=Seen(workers=2), decode=Seen(workers=2, usage=0.95))
    assert both == [("re-role", "decode")]


def test_advice_is_bounded_by_the_size_of_the_fleet() -> None:
    goals = Goals(workers_max=5)
    full = {"prefill": Seen(workers=2, queued=20), "decode": Seen(workers=2, usage=0.95)}
    assert actions(goals, **full) == [("grow", "prefill")]
    assert actions(Goals(workers_max=4), **full) == []


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (Seen(workers=2, queued=20), ["add a worker: 10 prompts wait per worker"]),
        (Seen(workers=2, queued=0, usage=0.7), []),
        (
            Seen(workers=2, queued=0, usage=0.1),
            ["remove one worker: 0 prompts wait per worker; 10% of KV memory is in use"],
        ),
        (Seen(workers=0, queued=1), ["add a worker: 1 prompts wait per worker"]),
    ],
)
def test_workers_that_do_both_are_one_role(state: Seen, expected: list[str]) -> None:
    assert [str(advice) for advice in advise({"both": state}, Goals())] == expected
