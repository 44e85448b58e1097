# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The router from a request to its account: candidates, filters, choice; its queue, the rules of
remote prefill, and the planner's advice. Any order of calls agrees with a plain model.
"""

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
    RULES,
    BusyThresholds,
    Cleared,
    Constraints,
    Decision,
    Goals,
    Indexer,
    Load,
    Matches,
    Overlap,
    Prompt,
    Query,
    Removed,
    Router,
    RouterEvent,
    RouterQueue,
    Seen,
    Stored,
    Tier,
    Worker,
    WorkerMetrics,
    advise,
    make_policy,
    read_load,
)
from beluga.router.queue import score

QUERY = Query(isl=64, block_size=16, hashes=(1, 2, 3, 4), sequence=(1, 2, 3, 4))
ONE, TWO, THREE = Worker(1), Worker(2), Worker(3, 1)


def router(policy: str = "least-tokens", **settings) -> Router:
    made = Router(make_policy(policy), **settings)
    for worker in (ONE, TWO, THREE):
        made.add_worker(worker)
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
    ],
)
def test_required_workers_are_respected(demand: Constraints, fitting: set[Worker]) -> None:
    assert {candidate.worker for candidate in router().candidates(QUERY, demand)} == fitting


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


def query(isl: int) -> Query:
    return Query(isl, 16)


@pytest.mark.parametrize(
    ("overlap", "expected"),
    [(60, 1 / 64), (1, 1 / 1008), (64, 1.0), (99, 1.0)],
    ids=["best", "pinned", "all", "beyond"],
)
def test_wspt_matches_the_examples(overlap: int, expected: float) -> None:
    assert score("wspt", query(1024), 5.0, overlap) == expected


def drained(queue: RouterQueue[str]) -> list[str]:
    drawn = []
    while (item := queue.pop()) is not None:
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


def test_equal_requests_leave_in_the_order_of_arrival() -> None:
    queue: RouterQueue[int] = RouterQueue("wspt")
    for item in range(20):
        queue.push(item, query(64), 0.0)
    assert [queue.pop() for _ in range(20)] == list(range(20))


def test_a_canceled_request_is_removed() -> None:
    queue: RouterQueue[list[int]] = RouterQueue()
    canceled, stays = [1], [1]
    queue.push(canceled, query(1), 0.0)
    queue.push(stays, query(1), 1.0)
    assert queue.discard(canceled)
    assert not queue.discard(canceled)
    assert queue.pop() is stays


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
    ("rule", "tokens", "cached", "queued", "expected"),
    [
        ("length-and-queue", 1001, 0, 1, "remote"),
        ("length-and-queue", 1000, 0, 0, "local"),
        ("length-and-queue", 1001, 0, 2, "local"),
        ("length-and-queue", 4000, 3000, 0, "local"),
        ("length-and-queue", 4000, 2999, 0, "remote"),
        ("length", 2000, 999, 99, "remote"),  # as in Dynamo's Rust variant
        ("length", 2000, 1000, 99, "local"),
        ("always-remote", 1, 0, 0, "remote"),
    ],
)
def test_rules_of_length_and_queue(
    rule: str, tokens: int, cached: int, queued: int, expected: str
) -> None:
    assert decide(rule, Prompt(tokens=tokens, cached=cached, queue_size=queued)) == expected


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
    assert decide("roomy", Prompt(tokens=16384, cached=16000)) == "local"
    assert decide("roomy", Prompt(tokens=16385, cached=16000)) == "remote"


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
    for name in RULES:
        Decision(name).remote(Prompt(tokens=100))
    with pytest.raises(RouterError, match=r"'mood'.*isl-bounding"):
        Decision("mood")


GOALS = Goals(ttft_s=0.5, between_tokens_s=0.05)


@pytest.mark.parametrize(
    ("state", "goals", "expected"),
    [
        (Seen(workers=2, queued=20), None, "add a worker: 10 prompts wait per worker"),
        (Seen(workers=2, queued=10), None, None),
        (Seen(workers=0, queued=1), None, "add a worker: 1 prompts wait per worker"),
        (Seen(workers=2, queued=20), Goals(workers_max=2), None),
        (Seen(workers=2, usage=0.91), None, "add a worker: 91% of KV memory is in use"),
        (
            Seen(workers=2, ttft_s=0.6),
            GOALS,
            "add a worker: TTFT is 0.6 s, but its objective is 0.5 s",
        ),
        (Seen(workers=2, ttft_s=0.6), None, None),
        (
            Seen(workers=2, usage=0.7, between_tokens_s=0.06),
            GOALS,
            "add a worker: the time between tokens is 0.06 s, but its objective is 0.05 s",
        ),
        (Seen(workers=2, usage=0.7), None, None),
        (
            Seen(workers=2, usage=0.1),
            None,
            "remove one worker: 0 prompts wait per worker; 10% of KV memory is in use",
        ),
        (Seen(workers=1, usage=0.1), None, None),  # the last one
        (Seen(workers=2), None, None),  # the usage of memory is unknown
    ],
)
def test_advice_follows_queues_memory_and_objectives(
    state: Seen, goals: Goals | None, expected: str | None
) -> None:
    advice = advise(state, goals or Goals())
    assert (advice and str(advice)) == expected


# ---- Any order of calls (Hypothesis)


def sequence_of(path: Sequence[int]) -> tuple[int, ...]:
    """Return a hash of each block with all blocks before it."""
    return tuple(hash(tuple(path[: end + 1])) & ((1 << 64) - 1) for end in range(len(path)))


SIZE = 16  # tokens of a block
ALL = [Worker(number, rank) for number in range(2) for rank in range(2)]
WORKERS = st.sampled_from(ALL)
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

    @rule(worker=WORKERS)
    def join(self, worker: Worker) -> None:
        self.router.add_worker(worker)
        if worker not in self.accounts:
            self.count += 1
            self.accounts[worker] = Account(self.count)

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

    @rule(path=PATHS, more=st.integers(0, 3 * SIZE), pin=st.one_of(st.none(), WORKERS))
    def route(self, path: list[int], more: int, pin: Worker | None) -> None:
        query = Query(SIZE * len(path) + more, SIZE, path, sequence_of(path))
        demands = Constraints(pin=pin)
        fitting = self.fitting(pin)
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

    def fitting(self, pin: Worker | None) -> list[Worker]:
        return [
            worker
            for worker, account in self.accounts.items()
            if not account.is_suspended and pin in {None, worker}
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
        fitting = self.fitting(None)
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
