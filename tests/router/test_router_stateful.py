# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Routers of every policy compared with a plain model, in any order of calls (Hypothesis): workers
join, leave, are suspended and return; engines send KV events and load reports, some of them
hostile; requests are placed, answered and end, also after their worker has left.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from models.prefix import NaiveIndex
from support.emulation import fewer

from beluga.errors import (
    AllWorkersBusyError,
    EventError,
    NoWorkersError,
    RouterError,
    WorkersOverloadedError,
)
from beluga.router import (
    POLICIES,
    BusyThresholds,
    Cleared,
    Constraints,
    Indexer,
    Overlap,
    Query,
    Removed,
    Router,
    RouterEvent,
    Stored,
    Tier,
    Worker,
    WorkerMetrics,
    make_policy,
    read_load,
)


def sequence_of(path: Sequence[int]) -> tuple[int, ...]:
    """Return a hash of each block with all blocks before it."""
    return tuple(hash(tuple(path[: end + 1])) & ((1 << 64) - 1) for end in range(len(path)))


SIZE = 16  # tokens of a block
ALL = [Worker(number, rank) for number in range(2) for rank in range(2)]
WORKERS = st.sampled_from(ALL)
TAINTS = st.frozensets(st.sampled_from("xyz"), max_size=2)
INDICES = st.integers(0, 1 << 16)
LARGEST = (1 << 64) - 1
PATHS = st.builds(
    lambda path, length: path[:length],
    st.sampled_from([[0, 0, 0, 0], [0, 0, LARGEST, 0]]),
    st.integers(0, 4),
)
NAMES = st.lists(st.sampled_from([0, 1, LARGEST, *sequence_of([0, 0])]), min_size=1, max_size=3)
PARENTS = st.one_of(st.none(), st.sampled_from([0, 1, *sequence_of([0, 0])]))
TIERS = st.sampled_from(list(Tier))
# Figures of reports: the limits of what an engine may report, and what is not a figure
FIGURES = st.sampled_from(
    ["0", "1", "7.5", "64", "1e15", "1e16", "1e400", "-1", "nan", "inf", "None", "0x10", "1_0", ""]
)
REPEATS = st.sampled_from([1, 1, 2, 9300])  # ranks in a report; the sum of 9300 may exceed 64 bits
DURATION_POLICIES = {"least-cost", "min-ttft"}  # which predict the duration of a prefill


@dataclasses.dataclass
class Running:
    worker: Worker
    joined: int  # the worker's term, in which its counts have the request
    isl: int
    computed: int  # tokens that its worker must compute
    blocks: tuple[int, ...]
    is_prefilled: bool = False


@dataclasses.dataclass
class Account:
    """A worker, from its join until it leaves."""

    joined: int
    taints: frozenset[str]
    is_suspended: bool = False
    metrics: WorkerMetrics | None = None


class RouterMachine(RuleBasedStateMachine):
    policy = "round-robin"

    @initialize(seed=st.integers(0, 99), blocked=st.booleans())
    def begin(self, seed: int, blocked: bool) -> None:
        self.index = Indexer(workers=len(ALL), blocks=1 << 12)
        self.thresholds = BusyThresholds(prefill_tokens=200) if blocked else None
        self.router = Router(
            make_policy(self.policy, seed=seed),
            find_matches=self.index.matches,
            always_match=True,
            thresholds=self.thresholds,
        )
        self.naive = NaiveIndex()
        self.accounts: dict[Worker, Account] = {}
        self.running: dict[int, Running] = {}
        self.count = 0
        self.now = 0.0
        self.path: list[int] = []  # of the last event

    # ---- Workers

    @rule(worker=WORKERS, taints=TAINTS)
    def join(self, worker: Worker, taints: frozenset[str]) -> None:
        self.router.add_worker(worker, taints)
        if worker in self.accounts:
            self.accounts[worker].taints = taints
            return
        self.count += 1
        self.accounts[worker] = Account(self.count, taints)

    @rule(worker=WORKERS)
    def leave(self, worker: Worker) -> None:
        """The ranks of a worker leave together, as their engine does."""
        for rank in ALL:
            if rank.worker_id == worker.worker_id:
                self.router.remove_worker(rank)
                self.accounts.pop(rank, None)
                self.naive.names.pop(rank, None)
                self.naive.held.pop(rank, None)
        self.index.remove_worker(worker.worker_id)

    @rule(worker=WORKERS, suspended=st.booleans())
    def suspend(self, worker: Worker, suspended: bool) -> None:
        (self.router.suspend if suspended else self.router.resume)(worker)
        if worker in self.accounts:
            self.accounts[worker].is_suspended = suspended

    # ---- Events and reports, which also come from workers that have left

    @rule(worker=WORKERS, tier=TIERS, path=PATHS, start=st.integers(0, 4), held=st.booleans())
    def compute(self, worker: Worker, tier: Tier, path: list[int], start: int, held: bool) -> None:
        """An engine's event: blocks are stored or removed under the names of their paths."""
        names, start = list(sequence_of(path)), min(start, len(path))
        self.path = path
        parent = names[start - 1] if start else None
        self.apply(
            RouterEvent(worker, Stored(names[start:], path[start:], parent), tier=tier)
            if held
            else RouterEvent(worker, Removed(names[start:]), tier=tier)
        )

    @rule(worker=WORKERS, tier=TIERS, names=NAMES, contents=st.booleans(), parent=PARENTS)
    def store(
        self, worker: Worker, tier: Tier, names: list[int], contents: bool, parent: int | None
    ) -> None:
        """A hostile event: names collide, parents are unknown, contents contradict each other."""
        known = names if contents else None
        self.apply(RouterEvent(worker, Stored(names, known, parent), tier=tier))

    @rule(worker=WORKERS, tier=TIERS, names=NAMES)
    def remove(self, worker: Worker, tier: Tier, names: list[int]) -> None:
        self.apply(RouterEvent(worker, Removed(names), tier=tier))

    @rule(worker=WORKERS)
    def clear(self, worker: Worker) -> None:
        self.apply(RouterEvent(worker, Cleared()))

    def apply(self, event: RouterEvent) -> None:
        try:
            self.index.apply(event)
            applied = True
        except EventError:
            applied = False
        assert self.naive.apply(event) == applied

    @rule(worker=WORKERS, repeats=REPEATS, running=FIGURES, waiting=FIGURES, usage=FIGURES,
          blocks=FIGURES)  # fmt: skip
    def report(  # noqa: PLR0917  the figures of a report
        self, worker: Worker, repeats: int, running: str, waiting: str, usage: str, blocks: str
    ) -> None:
        """A report is stored, or is refused as a whole: the gateway then has no figures."""
        text = "\n".join(
            f'sglang:num_running_reqs{{dp_rank="{rank}"}} {running}\n'
            f'sglang:num_queue_reqs{{dp_rank="{rank}"}} {waiting}\n'
            f'sglang:token_usage{{dp_rank="{rank}"}} {usage}\n'
            f'sglang:num_pages{{dp_rank="{rank}"}} {blocks}'
            for rank in range(repeats)
        )
        metrics: WorkerMetrics | None = None
        try:
            load = read_load(text)
            assert load is not None
            metrics = load.metrics
        except RouterError:
            pass
        self.router.tracker.publish(worker, metrics)
        if worker in self.accounts:
            self.accounts[worker].metrics = metrics and dataclasses.replace(metrics)

    # ---- Requests

    @rule(path=PATHS, more=st.integers(0, 3 * SIZE), pin=st.one_of(st.none(), WORKERS),
          taints=TAINTS)  # fmt: skip
    def route(self, path: list[int], more: int, pin: Worker | None, taints: frozenset[str]) -> None:
        query = Query(SIZE * len(path) + more, SIZE, path, sequence_of(path))
        demands = Constraints(pin=pin, required_taints=taints)
        fitting = self.fitting(pin, taints)
        well = [worker for worker in fitting if not self.is_overloaded(worker)]
        self.count += 1
        try:
            choice = self.router.route(self.count, query, demands, now=self.now)
        except NoWorkersError:
            assert not fitting
            return
        except WorkersOverloadedError:
            assert fitting and not well
            return
        except AllWorkersBusyError:
            assert self.policy == "alpha-gamma" and all(map(self.is_full, well))
            return
        assert choice.worker in well
        if self.policy != "cache-aware-tree":  # it estimates the overlap from what it sent
            assert choice.overlap == self.overlap_of(choice.worker, path)
        assert 0 <= choice.hit_rate <= 1
        assert all(map(math.isfinite, choice.costs))
        if choice.costs and self.policy not in {"two-choices", "cache-aware-tree"}:
            assert choice.cost == min(choice.costs)
        computed = max(query.isl - choice.overlap.blocks * SIZE, 0)
        self.running[self.count] = Running(
            choice.worker,
            self.accounts[choice.worker].joined,
            query.isl,
            computed,
            tuple(query.sequence),
        )
        metrics = self.accounts[choice.worker].metrics
        if metrics is not None:
            metrics.num_requests_waiting += 1
            metrics.request_active_slots += 1
            metrics.kv_active_blocks += max(-(-query.isl // SIZE) - choice.overlap.blocks, 0)

    def overlap_of(self, worker: Worker, path: list[int]) -> Overlap:
        held, shared = self.naive.find(path)
        # The pool continues what the worker has, also where it lacks the leading blocks itself.
        return held.get(worker, Overlap(shared=shared))

    def fitting(self, pin: Worker | None, taints: frozenset[str]) -> list[Worker]:
        return [
            worker
            for worker, account in self.accounts.items()
            if not account.is_suspended and pin in {None, worker} and taints <= account.taints
        ]

    def is_overloaded(self, worker: Worker) -> bool:
        load = self.router.tracker.load(worker)
        return self.thresholds is not None and self.thresholds.overloaded(load)

    def is_full(self, worker: Worker) -> bool:
        load = self.router.tracker.load(worker)
        return 0 < load.kv_total_blocks <= load.kv_active_blocks

    @precondition(lambda self: self.running)
    @rule(index=INDICES, passed_s=st.sampled_from([0.0, 0.5, 100.0]))
    def answer(self, index: int, passed_s: float) -> None:
        name = self.pick(index)
        self.now += passed_s
        request = self.running[name]
        assert self.router.tracker.prefill_done(name, self.now) is not request.is_prefilled
        request.is_prefilled = True

    @precondition(lambda self: self.running)
    @rule(index=INDICES)
    def end(self, index: int) -> None:
        name = self.pick(index)
        assert self.router.tracker.free(name, self.now)
        assert not self.router.tracker.free(name, self.now)
        del self.running[name]

    def pick(self, index: int) -> int:
        return list(self.running)[index % len(self.running)]

    # ---- What must be true

    @invariant()
    def loads_are_those_of_the_running_requests(self) -> None:
        tracker = self.router.tracker
        tracker.refresh(self.now)
        assert tracker.loads.keys() == self.accounts.keys()
        for worker, load in tracker.loads.items():
            account = self.accounts[worker]
            mine = [
                request
                for request in self.running.values()
                if (request.worker, request.joined) == (worker, account.joined)
            ]
            waiting = [request for request in mine if not request.is_prefilled]
            assert load.active_requests == len(mine)
            assert load.outstanding_tokens == sum(request.isl for request in waiting)
            assert load.active_decode_blocks == len(
                {block for request in mine for block in request.blocks}
            )
            total = sum(request.computed for request in waiting)
            assert 0 <= load.active_prefill_tokens <= total
            assert self.policy in DURATION_POLICIES or load.active_prefill_tokens == total
            metrics = account.metrics or WorkerMetrics()
            for field in dataclasses.fields(WorkerMetrics):
                assert getattr(load, field.name) == getattr(metrics, field.name)

    @invariant()
    def candidates_are_the_workers_that_fit(self) -> None:
        query = Query(SIZE * len(self.path), SIZE, self.path, sequence_of(self.path))
        fitting = self.fitting(None, frozenset())
        well = [worker for worker in fitting if not self.is_overloaded(worker)]
        try:
            candidates = self.router.candidates(query, now=self.now)
        except (NoWorkersError, WorkersOverloadedError):
            assert not well
            return
        assert {candidate.worker: candidate.overlap for candidate in candidates} == {
            worker: self.overlap_of(worker, self.path) for worker in well
        }

    def teardown(self) -> None:
        for name in list(getattr(self, "running", ())):
            self.router.tracker.free(name, self.now)
            del self.running[name]
        if hasattr(self, "router"):
            self.loads_are_those_of_the_running_requests()


@pytest.mark.parametrize("policy", POLICIES)
def test_any_order_of_calls_agrees_with_a_model(policy: str) -> None:
    machine = type("Machine", (RouterMachine,), {"policy": policy})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=fewer(40),
            stateful_step_count=60,
            deadline=None,
            phases=(Phase.generate,),
            suppress_health_check=list(HealthCheck),
        ),
    )
