# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A small simulated cluster: hits of requests, workers that join and leave, and the links.

Every decision of simulated runs is that of the policies in plain Python, on the state of each
tier and each request.
"""

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import pytest
from support.emulation import long
from support.plain_policies import PLAIN, plain_choice

from beluga._ffi import ffi
from beluga.errors import AllWorkersBusyError, SimulateError
from beluga.router import Choice, Goals, Overlap, Query, Worker, costs
from beluga.simulate import (
    MEMORIES,
    Options,
    Scale,
    Trace,
    TraceEntry,
    load_trace,
    make_trace,
    simulate,
)
from beluga.simulate.cluster import Cluster
from beluga.simulate.memory import Network, Request, SimulatedTier

BLOCK = 10  # in tokens, and in bytes
# A token of a prompt takes 1 ms, a step of decoding 10 ms.
MODEL = dataclasses.replace(
    costs.MODELS[costs.DEFAULT_MODEL],
    a=0.0, b=1.0, c=0.0, e=10.0, f=0.0, g=0.0, h=0.0, kv_bytes_per_token=1, hbm_bytes=1000,
)  # fmt: skip


def cluster(*prompts: TraceEntry, memory: str = "pool", policy: str = "round-robin", seed: int = 0,
            **options: Any) -> Cluster:  # fmt: skip
    trace = make_trace("small", BLOCK, prompts, 1.0)
    changed = Options(**{"workers": 1, "model": MODEL, "pool": 1000, **options})
    return Cluster(trace, changed, policy=policy, memory=memory, seed=seed)


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    ran = cluster(*(TraceEntry(at, size, 1, (1, 2)) for at, size in ((0, 20), (1, 20), (2, 21))))
    ran.run()
    assert [request.device for request in ran.requests] == [0, 1, 2]
    assert [request.first_token - request.arrival for request in ran.requests] == pytest.approx(
        [0.020, 0.010, 0.001]
    )


@pytest.mark.parametrize("engine", ["chunked", "serial"])
def test_a_request_that_fills_hbm_is_served_and_a_larger_one_is_not(engine: str) -> None:
    ran = cluster(TraceEntry(0, 45, 5, ()), TraceEntry(1, 45, 6, ()), hbm=50, engine=engine)
    ran.run()
    assert ran.refused == 1
    assert [request.first_token for request in ran.requests[:1]] == pytest.approx([0.045])
    assert ran.requests[1].first_token != ran.requests[1].first_token  # NaN: it was never sent


def test_prefilled_tokens_are_not_outstanding_work() -> None:
    """Otherwise the next request would be expected to wait for it."""
    ran = cluster(TraceEntry(0, 45, 5, (1,)), TraceEntry(1, 45, 5, (2,)), policy="min-ttft")
    calls: list[float] = []
    real = ran.router.tracker.prefill_done

    def prefilled(index: int, now: float = 0.0) -> bool:
        calls.append(ran.router.tracker.load(Worker(0)).prefill_s)
        return real(index, now)

    ran.router.tracker.prefill_done = prefilled  # type: ignore[method-assign,assignment]
    ran.run()
    assert [left > 0 for left in calls] == [True, False, True, False]  # once more when it is freed
    assert ran.router.tracker.load(Worker(0)).prefill_s == 0


def test_a_higher_speed_shortens_the_gaps_between_requests() -> None:
    ran = cluster(TraceEntry(0, 1, 1, ()), TraceEntry(8, 1, 1, ()), speed=4.0)
    assert [request.arrival for request in ran.requests] == [0, 2]


def test_the_seed_orders_requests_of_one_moment_only() -> None:
    prompts = [TraceEntry(at, 10 * n + 1, 1, ()) for at in (0, 1) for n in range(8)]

    def order(seed: int, **options: Any) -> list[int]:
        return [request.index for request in cluster(*prompts, seed=seed, **options).requests]

    assert order(1) == order(1) != order(2)
    assert sorted(order(1)[:8]) == list(range(8))
    assert order(1, shuffle=False) == list(range(16))


def test_policies_get_the_settings_that_they_have() -> None:
    defaults = {"host_credit": 0.2, "shared_credit": 0.3}
    for name, shared in (("linear", 0.3), ("lmetric:shared_credit=0.4", 0.4)):
        made = cluster(TraceEntry(0, 1, 1, ()), policy=name, policy_defaults=defaults)
        assert (made.router.policy.host_credit, made.router.policy.shared_credit) == (0.2, shared)
    ran = cluster(TraceEntry(0, 1, 1, ()), policy="min-ttft", policy_defaults=defaults)
    assert ran.router.policy.estimator is ran.estimator


def ids(*blocks: int) -> object:
    return ffi.new("uint32_t[]", list(blocks))


@pytest.mark.parametrize(("count", "hours"), [(1, 6 + 3 * 4), (-1, 6 + 4)])
def test_worker_seconds_count_from_arrival_to_departure(count: int, hours: int) -> None:
    """Two workers run for three seconds, then three or one for four."""
    prompts = [TraceEntry(at, 1000, 1, ()) for at in range(7)]
    ran = cluster(*prompts, workers=2, scale=Scale(3.0, count), hbm=2000)
    ran.run()
    assert ran.end_s == pytest.approx(7)
    assert ran.worker_s == pytest.approx(hours)
    assert len({request.worker for request in ran.requests[4:]}) == 2 + count


def test_a_removed_worker_returns_before_a_new_one() -> None:
    ran = cluster(TraceEntry(0, 1, 1, ()), workers=3)
    ran._scale(1.0, -2)
    assert ran.router.workers == [Worker(0), Worker(1), Worker(2)]
    ran._scale(2.0, 3)
    assert (len(ran.engines), ran.active) == (4, 4)
    assert ran.worker_s == 3 * 1 + 1 * 1


def test_the_planner_runs_every_thirty_seconds_while_there_is_work() -> None:
    prompts = [TraceEntry(at * 10, 1, 1, ()) for at in range(10)]
    ran = cluster(*prompts, goals=Goals(workers_min=3, workers_max=3))
    looks: list[tuple[float, int]] = []
    ran.planning = SimpleNamespace(  # type: ignore[assignment]
        look=lambda now, engines: looks.append((now, len(engines))) or int(now == 30),
        served=lambda request: None,
    )
    ran.run()
    assert looks == [(30, 1), (60, 2), (90, 2)]
    assert ran.end_s == 120  # the last run has nothing to do


def test_a_rejected_request_is_not_waited_for() -> None:
    ran = cluster(TraceEntry(0, 2000, 1, ()), TraceEntry(1, 10, 1, ()), goals=Goals())
    ran.run()
    assert (ran.refused, ran.end_s) == (1, 30)


def test_requests_that_every_worker_is_too_busy_for_wait_in_line() -> None:
    prompts = [TraceEntry(0.001 * n, 100, 30, ()) for n in range(6)]
    ran = cluster(*prompts, policy="alpha-gamma", slots=1)
    ran.run()
    first = [request.first_token for request in ran.requests]
    assert first == sorted(first)
    assert ran.refused == 0


@pytest.mark.parametrize(("engine", "busy"), [("chunked", [1, 0]), ("serial", [0, 0])])
def test_workers_publish_at_a_first_token_and_at_the_last(
    engine: str, busy: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = cluster(TraceEntry(0, 10, 5, ()), engine=engine)
    received: list[tuple[Worker, int]] = []
    monkeypatch.setattr(
        type(ran.router.tracker),
        "publish",
        lambda _, worker, metrics: received.append((worker, metrics.request_active_slots)),
    )
    ran.run()
    assert received == [(Worker(0), slots) for slots in busy]


def network(memory: str, **options: Any) -> Network:
    return Network(Options(workers=4, pool=1000, **options), memory, BLOCK)


def test_copies_from_the_pool_cross_the_devices_an_adapter_and_a_path() -> None:
    made = network("pool", bandwidth=7.0, devices=3, adapters=2)
    routes = [made.join(SimulatedTier(10, 5)).route_in for _ in range(3)]
    assert routes == [(0, 1, 3), (0, 2, 4), (0, 1, 5)]
    assert made.read.speeds == [3 * costs.DEVICE, *[costs.ADAPTER_READ] * 2, 7, 7, 7]
    assert made.write.speeds == [3 * costs.DEVICE, *[costs.ADAPTER_WRITE] * 2, 7, 7, 7]
    assert network("pool", devices=1000).read.speeds[0] == costs.SWITCH


def test_local_dram_has_a_separate_path() -> None:
    made = network("split", local_bandwidth=9.0)
    routes = [
        (far.route_in, far.route_out) for far in (made.join(SimulatedTier(10, 5)) for _ in range(2))
    ]
    assert routes == [((0,), (0,)), ((1,), (1,))]
    assert made.read.speeds == made.write.speeds == [9, 9]


def test_the_use_of_a_path_is_proportional_to_its_bytes() -> None:
    made = network("pool", bandwidth=10.0)
    for _ in range(2):
        made.join(SimulatedTier(10, 5))
    made.read.moved[-1], made.write.moved[-2] = 100.0, 30.0
    assert made.utilisation(10.0) == (0.5, 0.15)
    assert made.utilisation(0.0) == (0, 0)


@pytest.mark.parametrize("paid", [True, False])
def test_a_prompt_is_in_the_pool_once_it_is_written(paid: bool) -> None:
    made = network("pool", offload=paid)
    far = made.join(SimulatedTier(10, 5))
    request = Request(0, 0.0, (30, 1, BLOCK), ids(0, 1, 2), 3)
    far.tier.put(request.ids, 1)
    far.offload(0.0, request)
    assert far.tier.lead(request.ids, 3) == (1 if paid else 3)
    if paid:
        assert made.write.moved[-1] == 2 * BLOCK
        made.write.end(made.write.finish)
        assert far.tier.lead(request.ids, 3) == 3
    far.offload(1.0, request)  # nothing is missing, so nothing is copied
    assert made.write.copies == []


def test_a_serial_worker_reports_its_queue_length() -> None:
    made = cluster(*[TraceEntry(0, 100, 1, ())] * 3, engine="serial")
    [engine] = made.engines
    assert (engine.metrics().request_active_slots, engine.metrics().num_requests_waiting) == (0, 0)
    for request in made.requests:
        engine.submit(0.0, request)
    assert (engine.metrics().request_active_slots, engine.metrics().num_requests_waiting) == (1, 2)


def test_serial_workers_are_busy_from_the_fetch_to_the_first_token() -> None:
    """The second worker fetches 20 blocks of 10 bytes at 1000 bytes/s, and 10 tokens are left."""
    prompts = [TraceEntry(at, 210, 1, range(21)) for at in (0, 10, 20)]
    ran = cluster(*prompts, workers=2, engine="serial", bandwidth=1000.0, hbm=250)
    ran.run()
    assert [(request.device, request.far) for request in ran.requests] == [(0, 0), (0, 20), (20, 0)]
    assert [engine.busy_s for engine in ran.engines] == pytest.approx([0.210 + 0.010, 0.210])
    assert ran.requests[1].first_token == pytest.approx(10.210)


def test_progress_is_reported_after_every_run() -> None:
    calls: list[tuple[int, int]] = []
    trace = make_trace("small", BLOCK, [TraceEntry(0, 10, 1, ())], 1.0)
    options = Options(workers=1, model=MODEL)
    rows = simulate(
        trace, options, policies=["random", "round-robin"], seeds=2,
        advance=lambda done, total: calls.append((done, total)),
    )  # fmt: skip
    assert calls == [(n, 8) for n in range(1, 9)]
    assert len(rows) == 12
    assert [row.seed for row in rows[:3]] == [0, 1, None]


def test_hbm_has_room_for_one_block_at_least() -> None:
    trace = make_trace("small", BLOCK, [TraceEntry(0, 1, 1, ())], 1.0)
    options = Options(workers=1, model=MODEL, hbm=BLOCK)
    assert simulate(trace, options, policies=["random"])[0].rejects == 0
    with pytest.raises(SimulateError, match="less than a block of 10 bytes"):
        simulate(trace, dataclasses.replace(options, hbm=BLOCK - 1), policies=["random"])
    for nothing in ({"seeds": 0}, {"memories": []}):
        with pytest.raises(SimulateError, match="nothing to simulate"):
            simulate(trace, options, policies=["random"], **nothing)


def test_a_cache_aware_policy_routes_a_prompt_to_its_blocks() -> None:
    chains = [range(n * 20, n * 20 + 20) for n in range(8)]
    prompts = [TraceEntry(100 * again + n, 201, 1, chains[n]) for again in (0, 1) for n in range(8)]
    ran = cluster(*prompts, policy="linear", memory="split", workers=4, hbm=2000)
    ran.run()
    assert len({request.worker for request in ran.requests[:8]}) > 1
    assert [request.device for request in ran.requests] == [0] * 8 + [20] * 8


QUICK = ("least-cost", "two-choices")  # one with costs of caches, and one that draws


@pytest.fixture(scope="module")
def trace() -> Trace:
    return load_trace(None)


class Checked:
    """A policy whose choices are compared."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.policy = cluster, cluster.router.policy
        self.name, self.uses_overlap = self.policy.name, self.policy.uses_overlap
        self.decisions = 0

    def choose(self, query: Query, candidates: Any) -> Choice:
        table = list(candidates)
        for candidate in table:
            self.compare(query, candidate)
        try:
            index, costs, prefill_s = plain_choice(self.policy, query, table)
        except ZeroDivisionError:  # each worker is full
            with pytest.raises(AllWorkersBusyError):
                self.policy.choose(query, candidates)
            raise AllWorkersBusyError("all") from None
        choice = self.policy.choose(query, candidates)
        assert choice.worker == table[index].worker
        assert list(choice.costs) == costs
        assert choice.prefill_s == prefill_s
        self.decisions += 1
        return choice

    def compare(self, query: Query, candidate: Any) -> None:
        """Compare a candidate with its worker's tiers and requests."""
        cluster, number = self.cluster, candidate.worker.worker_id
        tracker, request = cluster.router.tracker, cluster._routed
        assert candidate.load == tracker.load(candidate.worker)
        active = [
            request
            for request in cluster.requests
            if request.worker == number and math.isnan(request.done)
        ]
        assert candidate.load.active_requests == len(active)
        if not self.uses_overlap:
            return
        held = {block for request in active for block in cluster._hashes[request.index]}
        assert candidate.new_blocks == len(set(query.sequence) - held)
        device = cluster._hbm[number].lead(request.ids, request.reusable)
        far = cluster.engines[number].far.tier.lead(request.ids, request.reusable)
        beyond = max(far - device, 0)
        expected = Overlap(device, host=beyond)
        if cluster.memory == "pool":
            expected = Overlap(device, shared=beyond)
        assert candidate.overlap == expected


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("policy", [*QUICK, *(long(name) for name in PLAIN if name not in QUICK)])
def test_simulated_decisions_are_those_of_plain_python(
    policy: str, memory: str, trace: Trace
) -> None:
    options = Options(workers=5, speed=6.0, hbm=12 << 30, scale=Scale(30.0, 2))
    cluster = Cluster(trace, options, policy=policy, memory=memory, seed=1)
    cluster.router.policy = checked = Checked(cluster)
    cluster.run()
    assert checked.decisions == len(trace) - cluster.refused
