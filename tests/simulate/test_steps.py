# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The chunked engine, which computes several steps at once, compared with one that computes each
step.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from dataclasses import dataclass
from random import Random

import pytest

from beluga.router import costs
from beluga.simulate import Options, TraceEntry, make_trace
from beluga.simulate.cluster import Cluster

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
        free = (options.hbm or 0) // BLOCK - sum(one.slots for one in admitted)
        while queue and len(admitted) < options.slots and queue[0].slots <= free:
            free -= queue[0].slots
            admitted.append(queue.popleft())
        now += _step(admitted, now, options) / 1e3
        admitted = [one for one in admitted if one.made < one.output]


def _step(admitted: list[Naive], start: float, options: Options) -> float:
    """Run a step: every decoding request makes a token, and prompts continue. Returns its
    milliseconds.
    """
    decoding = [one for one in admitted if one.made]
    ready = [one for one in admitted if not one.made]
    room = max(1, options.step_tokens - len(decoding))
    took = MODEL.h + (MODEL.a if ready else MODEL.e)
    pieces = []
    for one in ready:
        tokens = min(one.input - one.kv, room)
        if tokens:
            took += MODEL.b * tokens + MODEL.c * tokens * (one.kv + tokens / 2)
            pieces.append((one, tokens))
        room -= tokens
    if decoding:
        took += MODEL.f * len(decoding)
        took += MODEL.g * sum(one.input + one.made for one in decoding)
    end = start + took / 1e3
    for one in decoding:
        one.made += 1
        one.done = end
    for one, tokens in pieces:
        one.kv += tokens
        if one.kv == one.input:
            one.made, one.first, one.done = 1, end, end
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
    for before, one in itertools.pairwise(naive):
        one.arrival += before.arrival
    naive[0].arrival = 0.0  # the trace's first request is at 0
    prompts = [TraceEntry(one.arrival, one.input, one.output, ()) for one in naive]
    cluster = Cluster(
        make_trace("steps", BLOCK, prompts, 1.0), options, policy="random", memory="pool"
    )
    cluster.run()
    step_by_step(naive, options)
    for one, request in zip(naive, cluster.requests, strict=True):
        assert request.first_token == pytest.approx(one.first, abs=1e-6)
        assert request.done == pytest.approx(one.done, abs=1e-6)
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
