# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Simulated engines, tiers and links: each compared with a naive model, and with the reference's
examples; nothing is lost with many requests. The planner's advice.
"""

import dataclasses
import itertools
from collections import Counter, deque
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from beluga._ffi import ffi
from beluga.router import Goals, WorkerMetrics, costs
from beluga.simulate import Options, Trace, TraceEntry, make_trace
from beluga.simulate.cluster import Cluster, Planning
from beluga.simulate.links import Clock, Links
from beluga.simulate.memory import Leads, SimulatedTier

QWEN = costs.MODELS["qwen3-32b-h200"]
ONE_WORKER = Options(workers=1)


def trace_of(*prompts: TraceEntry) -> Trace:
    return make_trace("made", 512, prompts, 1.0)


def run(trace: Trace, options: Options, memory: str = "pool") -> Cluster:
    cluster = Cluster(trace, options, policy="least-tokens", memory=memory)
    cluster.run()
    return cluster


def decode_s(steps: int, context: int) -> float:
    return sum(QWEN.h + QWEN.decode_ms(1, context + step) for step in range(steps)) / 1e3


def test_a_single_request_takes_the_time_of_the_cost_model() -> None:
    [request] = run(trace_of(TraceEntry(0, 6000, 101, ())), ONE_WORKER).requests
    # The sum of a step's 12 ms, and 7.19 + 459.78 + 27.378 ms; then come 100 steps of about 30.5
    # ms.
    assert request.first_token == pytest.approx(0.506348)
    assert request.done - request.first_token == pytest.approx(3.053996, abs=1e-6)


def test_a_long_prompt_is_prefilled_in_steps_of_bounded_size() -> None:
    [request] = run(trace_of(TraceEntry(0, 20000, 1, ())), ONE_WORKER).requests
    expected = sum(
        QWEN.h + QWEN.prefill_ms(tokens, before)
        for tokens, before in ((8192, 0), (8192, 8192), (3616, 16384))
    )
    assert request.first_token == pytest.approx(expected / 1e3)
    assert request.done == request.first_token


def test_blocks_of_the_pool_are_copied_and_not_computed() -> None:
    blocks = list(range(10))
    first, second = TraceEntry(0, 5200, 1, blocks), TraceEntry(100, 5200, 1, blocks)
    options = dataclasses.replace(ONE_WORKER, workers=2)
    stored, copied = run(trace_of(first, second), options).requests
    if stored.worker == copied.worker:  # by chance; the HBM of that worker has the blocks
        assert copied.device == 10
        return
    assert (copied.device, copied.far) == (0, 10)
    copy_s = 10 * 512 * QWEN.kv_bytes_per_token / 26e9
    expected = copy_s + (QWEN.h + QWEN.prefill_ms(80, 5120)) / 1e3
    assert copied.first_token - 100 == pytest.approx(expected, rel=1e-6)


def test_hbm_hits_are_free_and_local_dram_is_slower() -> None:
    blocks = list(range(10))
    prompts = [TraceEntry(100 * n, 5200, 1, blocks) for n in range(2)]
    _, again = run(trace_of(*prompts), ONE_WORKER, "split").requests
    assert (again.device, again.far) == (10, 0)
    assert again.first_token - 100 == pytest.approx((QWEN.h + QWEN.prefill_ms(80, 5120)) / 1e3)
    others = [TraceEntry(10 + n, 5200, 1, range(100 * n + 10, 100 * n + 20)) for n in range(50)]
    cluster = run(trace_of(prompts[0], *others, prompts[1]), ONE_WORKER, "split")
    assert (cluster.requests[-1].device, cluster.requests[-1].far) == (0, 10)


def test_hbm_bounds_concurrent_requests_and_all_slots_are_released() -> None:
    options = dataclasses.replace(ONE_WORKER, hbm=12 * 512 * QWEN.kv_bytes_per_token)
    prompts = [TraceEntry(0, 4096, 200, range(n * 8, n * 8 + 8)) for n in range(5)]
    cluster = run(trace_of(*prompts), options)
    finished = sorted(request.done for request in cluster.requests)
    begun = sorted(request.first_token for request in cluster.requests)
    assert all(start >= end for start, end in zip(begun[1:], finished, strict=False))
    [engine] = cluster.engines
    assert engine.hbm.used == 0
    assert engine.hbm.stat.present <= 12


def test_serial_workers_fetch_and_then_compute_one_after_another() -> None:
    prompts = [TraceEntry(0, 1024, 9, (1, 2)), TraceEntry(0, 1100, 9, (1, 2))]
    requests = run(trace_of(*prompts), dataclasses.replace(ONE_WORKER, engine="serial")).requests
    begin, end = sorted(requests, key=lambda request: request.first_token)
    assert begin.first_token == pytest.approx(QWEN.prefill_ms(begin.left) / 1e3)
    waited = end.first_token - begin.first_token
    assert waited == pytest.approx(QWEN.prefill_ms(end.left, end.kv) / 1e3)
    assert end.done == end.first_token


def test_blocks_of_a_serial_worker_are_hits_for_another() -> None:
    blocks = list(range(10))
    prompts = [
        TraceEntry(0, 5200, 1, blocks),
        TraceEntry(100, 5200, 1, blocks),
        TraceEntry(200, 5200, 1, blocks),
    ]
    options = dataclasses.replace(ONE_WORKER, engine="serial", workers=2)
    cluster = Cluster(trace_of(*prompts), options, policy="round-robin", memory="pool")
    cluster.run()
    first, other, again = cluster.requests
    assert first.worker != other.worker and first.worker == again.worker
    hits = [(request.device, request.far) for request in cluster.requests]
    assert hits == [(0, 0), (0, 10), (10, 0)]


@pytest.mark.parametrize(("workers", "adapters"), [(1, 1), (2, 1), (3, 1), (4, 2), (8, 4)])
def test_two_workers_share_an_adapter(workers: int, adapters: int) -> None:
    assert Options(workers=workers).adapter_count == adapters
    assert Options(workers=workers, adapters=3).adapter_count == 3


@pytest.mark.parametrize(("size", "devices"), [(1, 1), (256 << 30, 1), ((256 << 30) + 1, 2)])
def test_a_device_has_256_gib(size: int, devices: int) -> None:
    assert Options(pool=size).device_count == devices
    assert Options(pool=size, devices=7).device_count == 7


BLOCK = 16  # tokens
# The costs are in milliseconds, so that no part of a step's cost is lost to rounding.
MODEL = dataclasses.replace(
    costs.MODELS[costs.DEFAULT_MODEL],
    a=3.0, b=0.5, c=0.01, e=2.0, f=0.7, g=0.05, h=1.5, kv_bytes_per_token=1,
)  # fmt: skip


@dataclass
class Naive:
    """A request: its arrival, its tokens, and the times of its first and last token."""

    arrival: float
    input: int
    output: int
    kv: int = 0
    first: float = 0.0
    done: float = 0.0
    made: int = 0  # tokens of the answer so far

    @property
    def slots(self) -> int:
        return -(-(self.input + self.output) // BLOCK)


def step_by_step(requests: list[Naive], options: Options) -> None:
    """Serve all requests."""
    arrivals, queue = deque(requests), deque[Naive]()
    admitted: list[Naive] = []
    now = 0.0
    while arrivals or queue or admitted:
        if not (queue or admitted):
            now = max(now, arrivals[0].arrival)
        while arrivals and arrivals[0].arrival <= now:
            queue.append(arrivals.popleft())
        free = (options.hbm or 0) // BLOCK - sum(job.slots for job in admitted)
        while queue and len(admitted) < options.slots and queue[0].slots <= free:
            free -= queue[0].slots
            admitted.append(queue.popleft())
        now += _step(admitted, now, options) / 1e3
        admitted = [job for job in admitted if job.made < job.output]


def _step(admitted: list[Naive], start: float, options: Options) -> float:
    """Run a step: every decoding request makes a token, and prompts continue. Returns its
    milliseconds.
    """
    decoding = [job for job in admitted if job.made]
    ready = [job for job in admitted if not job.made]
    room = max(1, options.step_tokens - len(decoding))
    took = MODEL.h + (MODEL.a if ready else MODEL.e)
    pieces = []
    for job in ready:
        tokens = min(job.input - job.kv, room)
        if tokens:
            took += MODEL.b * tokens + MODEL.c * tokens * (job.kv + tokens / 2)
            pieces.append((job, tokens))
        room -= tokens
    if decoding:
        took += MODEL.f * len(decoding)
        took += MODEL.g * sum(job.input + job.made for job in decoding)
    end = start + took / 1e3
    for job in decoding:
        job.made += 1
        job.done = end
    for job, tokens in pieces:
        job.kv += tokens
        if job.kv == job.input:
            job.made, job.first, job.done = 1, end, end
    return took


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    "limits", [{}, {"slots": 2}, {"hbm": 20 * BLOCK}, {"step_tokens": 2}], ids=str
)
def test_runs_of_steps_take_as_long_as_their_steps(seed: int, limits: dict[str, int]) -> None:
    chance = Random(seed)
    options = Options(
        workers=1, model=MODEL, **{"hbm": 1 << 20, "step_tokens": 40, "slots": 100, **limits}
    )
    naive = [
        Naive(chance.expovariate(1.0 + 2 * seed), chance.randint(1, 90), chance.randint(1, 60))
        for _ in range(40)
    ]
    for before, job in itertools.pairwise(naive):
        job.arrival += before.arrival
    naive[0].arrival = 0.0  # the trace's first request is at 0
    prompts = [TraceEntry(job.arrival, job.input, job.output, ()) for job in naive]
    cluster = Cluster(
        make_trace("steps", BLOCK, prompts, 1.0), options, policy="random", memory="pool"
    )
    cluster.run()
    step_by_step(naive, options)
    for job, request in zip(naive, cluster.requests, strict=True):
        assert request.first_token == pytest.approx(job.first, abs=1e-6)
        assert request.done == pytest.approx(job.done, abs=1e-6)
    [engine] = cluster.engines
    assert 0 < engine.busy_s <= cluster.end_s


def test_a_prompt_that_arrives_at_the_end_of_a_step_is_in_the_next_one() -> None:
    """Steps of 1 ms per token of context end at 1, 3, 6, 10 and 15 ms."""
    model = dataclasses.replace(MODEL, a=0.0, b=1.0, c=0.0, e=0.0, f=0.0, g=1.0, h=0.0)
    prompts = [TraceEntry(0, 1, 9, ()), TraceEntry(0.006, 2, 1, ())]
    trace = make_trace("two", BLOCK, prompts, 1.0)
    cluster = Cluster(trace, Options(workers=1, model=model), policy="random", memory="pool")
    cluster.run()
    assert cluster.requests[1].first_token == pytest.approx(0.006 + 0.002 + 0.004)
    [engine] = cluster.engines
    assert engine.busy_s == pytest.approx(cluster.end_s)


def test_a_worker_reports_running_and_waiting_requests_and_memory_use() -> None:
    options = Options(workers=1, model=MODEL, hbm=20 * BLOCK, slots=2)
    prompts = [TraceEntry(0, 3 * BLOCK, BLOCK, ())] * 4
    cluster = Cluster(make_trace("four", BLOCK, prompts, 1.0), options, policy="random",
                      memory="pool")  # fmt: skip
    [engine] = cluster.engines
    for request in cluster.requests:
        engine.submit(0.0, request)
    metrics = engine.metrics()
    assert (metrics.request_active_slots, metrics.request_total_slots) == (2, 2)
    assert metrics.num_requests_waiting == 2
    assert (metrics.kv_active_blocks, metrics.kv_total_blocks) == (8, 20)
    assert metrics.gpu_cache_usage_perc == 0.4


def engine(waiting: int, usage: float = 0.7) -> Any:
    metrics = WorkerMetrics(num_requests_waiting=waiting, gpu_cache_usage_perc=usage)
    return SimpleNamespace(metrics=lambda: metrics)


def test_the_planner_gets_all_active_workers() -> None:
    planning = Planning(Goals(queue_high=3, queue_low=1))
    assert planning.look(30.0, [engine(4), engine(2)]) == 0
    assert planning.look(60.0, [engine(4), engine(3)]) == 1
    assert planning.look(90.0, [engine(0, 0.9), engine(1, 0.0)]) == -1
    assert [(now, advice.change) for now, advice in planning.advised] == [
        (60.0, 1),
        (90.0, -1),
    ]


def test_the_planner_gets_first_tokens_since_its_last_run() -> None:
    planning = Planning(Goals(ttft_s=2.0))
    for first in (11.0, 14.0):
        served: Any = SimpleNamespace(arrival=10.0, first_token=first)
        planning.served(served)
    assert planning.look(30.0, [engine(1)]) == 1
    assert planning.look(60.0, [engine(1)]) == 0


# ---- Tiers and links


def ids(*blocks: int) -> object:
    return ffi.new("uint32_t[]", list(blocks))


class NaiveTier:
    """An ordered list, coldest first, with counts of users."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.order, self.users, self.reserved = capacity, [], Counter(), 0

    def has(self, block: int) -> bool:
        return block in self.order or self.users[block] > 0

    def held(self) -> int:
        return sum(1 for count in self.users.values() if count)

    def room(self, extra: int) -> bool:
        while len(self.order) + self.held() + self.reserved + extra > self.capacity:
            if not self.order:
                return False
            self.order.pop(0)
        return True

    def touch(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            if block in self.order:
                self.order.remove(block)
                self.order.append(block)

    def put(self, blocks: list[int]) -> int:
        added = 0
        self.touch(blocks)
        for block in reversed(blocks):
            if self.has(block):
                self.touch([block])
            elif self.room(1):
                self.order.append(block)
                added += 1
        return added

    def hold(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.users[block] += 1
            if block in self.order:
                self.order.remove(block)

    def drop(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.users[block] -= 1
            if not self.users[block]:
                self.order.append(block)
        self.room(0)

    def reserve(self, count: int) -> bool:
        if self.held() + self.reserved + count > self.capacity:
            return False
        self.room(count)
        self.reserved += count
        return True

    def lead(self, blocks: list[int]) -> int:
        return next((n for n, block in enumerate(blocks) if not self.has(block)), len(blocks))


@pytest.mark.parametrize("seed", range(20))
def test_a_tier_matches_a_naive_model(seed: int) -> None:
    random = Random(seed)
    chains = [[tree * 10 + depth for depth in range(random.randint(1, 9))] for tree in range(8)]
    capacity = random.randint(0, 30)
    tier, naive = SimulatedTier(100, capacity), NaiveTier(capacity)
    held: list[list[int]] = []
    for _ in range(400):
        chain = random.choice(chains)
        act = random.randrange(6)
        if act == 0:
            assert tier.put(ids(*chain), len(chain)) == naive.put(chain)
        elif act == 1:
            tier.touch(ids(*chain), len(chain))
            naive.touch(chain)
        elif act == 2 and len(held) < 4:
            held.append(chain)
            tier.hold(ids(*chain), len(chain))
            naive.hold(chain)
        elif act == 3 and held:
            chain = held.pop()
            tier.drop(ids(*chain), len(chain))
            naive.drop(chain)
        elif act == 4:
            count = random.randint(1, 5)
            assert tier.reserve(count) == naive.reserve(count)
        elif naive.reserved:
            tier.release(1)
            naive.reserved -= 1
        for chain in chains:
            assert tier.lead(ids(*chain), len(chain)) == naive.lead(chain)
        assert tier.stat.present == len(naive.order) + naive.held()
        assert tier.used == naive.held() + naive.reserved


def test_hits_do_not_change_the_order_of_fifo() -> None:
    for eviction, retained in (("lru", True), ("fifo", False)):
        tier = SimulatedTier(10, 2, eviction)
        tier.put(ids(0), 1)
        tier.put(ids(1), 1)
        tier.touch(ids(0), 1)
        tier.put(ids(2), 1)
        assert bool(tier.lead(ids(0), 1)) is retained


def test_several_tiers_are_queried_at_once() -> None:
    tiers = [SimulatedTier(10, 5) for _ in range(3)]
    tiers[0].put(ids(0, 1), 2)
    tiers[2].put(ids(0), 1)
    assert Leads(tiers)(ids(0, 1, 2), 3).tolist() == [2, 0, 1]


GB, MB = 1e9, 1e6


def ends(speeds: list[float], copies: list[tuple[float, float, tuple[int, ...]]]) -> list[float]:
    """Return when copies of (start, bytes, links) end, in their order."""
    links = Links(speeds)
    ended = [0.0] * len(copies)

    def start(now: float, number: int) -> None:
        def then(when: float) -> None:
            ended[number] = when

        links.start(now, copies[number][1], copies[number][2], then)

    arrivals = sorted((at, number) for number, (at, _, _) in enumerate(copies))
    Clock((links,)).run(iter(arrivals), start)
    return ended


@pytest.mark.parametrize(
    ("copies", "expected_ms"),
    [
        ([(0.0, MB)], [1]),
        ([(0.0, MB)] * 2, [2, 2]),
        ([(0.0, MB), (0.0005, MB)], [1.5, 2]),
        ([(0.0, MB)] * 10, [10] * 10),
    ],
)
def test_processor_sharing_matches_the_examples(
    copies: list[tuple[float, float]], expected_ms: list[float]
) -> None:
    ends_s = ends([GB], [(at, size, (0,)) for at, size in copies])
    assert [1e3 * at for at in ends_s] == pytest.approx(expected_ms, rel=1e-3)


def test_the_remaining_time_is_the_sum_of_the_others_remaining_bytes() -> None:
    """The deadline of r is the sum over j of min(r_j, r) / B."""
    random = Random(1)
    sizes = [random.uniform(1, 50) * MB for _ in range(12)]
    expected = [sum(min(other, size) for other in sizes) / GB for size in sizes]
    assert ends([GB], [(0.0, size, (0,)) for size in sizes]) == pytest.approx(expected, rel=1e-3)


def test_copies_have_the_speed_of_their_slowest_link() -> None:
    # Two copies use the slow shared link 0. The third has link 1 except for what the second takes
    # of it.
    ends_s = ends([2 * GB, 4 * GB], [(0, GB, (0,)), (0, GB, (0, 1)), (0, 3 * GB, (1,))])
    assert ends_s == pytest.approx([1, 1, 1], rel=1e-3)


def test_links_are_work_conserving() -> None:
    random = Random(2)
    copies = [(random.uniform(0, 0.01), random.uniform(1, 9) * MB, (0,)) for _ in range(200)]
    ends_s = ends([GB], copies)
    assert max(ends_s) == pytest.approx(sum(size for _, size, _ in copies) / GB, abs=0.011)
    assert all(
        end - at >= size / GB * 0.999 for end, (at, size, _) in zip(ends_s, copies, strict=True)
    )


def test_links_report_the_cost_of_sharing() -> None:
    links = Links([GB])
    ended: list[float] = []
    for _ in range(2):
        links.start(1.0, MB, (0,), ended.append)
    links.end(1.001)  # no copy has made progress yet
    assert (ended, links.count) == ([], 0)
    links.end(links.finish)
    assert ended == pytest.approx([1.002] * 2)
    assert (links.count, links.moved) == (2, [2 * MB])
    assert (links.busy_s, links.waited_s) == (pytest.approx(0.004), pytest.approx(0.002))
    assert links.finish == float("inf")


def test_a_single_copy_does_not_wait() -> None:
    links = Links([2 * GB])
    slow = links.add_link(GB / 3)
    links.start(0.0, MB, (0, slow), lambda when: None)
    assert links.finish == pytest.approx(0.003)
    links.end(links.finish)
    assert (links.count, links.waited_s) == (1, 0)
    assert (slow, links.speeds, links.moved) == (1, [2 * GB, GB / 3], [MB, MB])


def test_bandwidth_left_by_a_slow_link_is_shared_by_the_others() -> None:
    links = Links([4 * GB, GB, 3 * GB])
    for route in ((0, 1), (0, 1), (0, 2), (0, 2), (2,)):
        links.start(0.0, GB, route, lambda when: None)
    assert [copy.rate / GB for copy in links.copies] == pytest.approx([0.5, 0.5, 1, 1, 1])


def test_events_are_ordered_by_time_then_by_creation() -> None:
    links = Links([GB])
    clock = Clock((links,))
    seen: list[tuple[str, float]] = []

    def arrive(now: float, name: str) -> None:
        seen.append((name, now))
        if name == "arrival":
            for event in ("event", "later"):
                clock.at(3.0, lambda when, what: seen.append((what, when)), event)
            links.start(now, GB, (0,), lambda when: seen.append(("copy", when)))
            links.start(now, 2 * GB, (0,), lambda when: seen.append(("last copy", when)))

    assert clock.run(iter([(1.0, "arrival"), (3.0, "second")]), arrive) == 4
    assert seen == [("arrival", 1), ("second", 3), ("event", 3), ("later", 3), ("copy", 3),
                    ("last copy", 4)]  # fmt: skip


def test_the_clock_does_not_advance_without_events() -> None:
    assert Clock(()).run(iter(()), lambda now, request: None) == 0
