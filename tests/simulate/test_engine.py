# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Simulated engines: the cost of a single request, and that nothing is lost with many.

The chunked engine, which computes several steps at once, compared with one that computes each
step.

The planner's advice in the simulator, in numbers that were computed by hand.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import deque
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from beluga.router import Goals, WorkerMetrics, costs
from beluga.simulate import Options, Trace, TraceEntry, make_trace
from beluga.simulate.cluster import Cluster, Planning

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


def test_a_prompt_waits_only_for_the_current_decode_step() -> None:
    alone = run(trace_of(TraceEntry(0, 100, 1000, ())), ONE_WORKER).requests[0]
    first, second = run(
        trace_of(TraceEntry(0, 100, 1000, ()), TraceEntry(5, 2000, 1, ())), ONE_WORKER
    ).requests
    step = (QWEN.h + QWEN.decode_ms(1, 1100)) / 1e3
    prefill = (QWEN.h + QWEN.prefill_ms(2000) + QWEN.f + QWEN.g * 1100) / 1e3
    assert prefill * 0.99 <= second.first_token - 5 <= step + prefill
    # The prompt's step delays the decoding request, but does not skip its steps.
    assert first.done - alone.done == pytest.approx(prefill - step, abs=1e-3)


def test_the_time_of_a_decode_step_depends_on_the_sum_of_contexts() -> None:
    prompts = [TraceEntry(0, 8192, 1, ()), *[TraceEntry(0.01, 512, 50, ())] * 4]
    requests = run(trace_of(*prompts), ONE_WORKER).requests[1:]
    assert len({request.done for request in requests}) == 1
    steps = sum(QWEN.h + QWEN.decode_ms(4, 4 * (513 + step)) for step in range(49)) / 1e3
    assert requests[0].done - requests[0].first_token == pytest.approx(steps)


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


def test_a_request_that_fits_no_worker_is_refused() -> None:
    options = dataclasses.replace(ONE_WORKER, hbm=4 * 512 * QWEN.kv_bytes_per_token)
    cluster = run(trace_of(TraceEntry(0, 2048, 10, ()), TraceEntry(1, 100, 10, ())), options)
    assert cluster.refused == 1
    assert [math.isnan(request.done) for request in cluster.requests] == [True, False]


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
    assert [(now, advice.action) for now, advice in planning.advised] == [
        (60.0, "grow"),
        (90.0, "shrink"),
    ]


def test_the_planner_gets_first_tokens_since_its_last_run() -> None:
    planning = Planning(Goals(ttft_s=2.0))
    for first in (11.0, 14.0):
        served: Any = SimpleNamespace(arrival=10.0, first_token=first)
        planning.served(served)
    assert planning.look(30.0, [engine(1)]) == 1
    assert planning.look(60.0, [engine(1)]) == 0
