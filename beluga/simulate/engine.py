# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The simulated engines.

A chunked engine batches as vLLM does: its steps have a limited size, all running requests decode
one token in each, and waiting prompts are prefilled in pieces, first come, first served. A request
gets HBM slots for all its blocks, with its answer, when it is admitted, so none is ever preempted.
Copies from the pool run concurrently with the steps; a prompt is prefilled once they have ended.

The serial engine is that of the reference's feasibility replay: it fetches and then computes one
prompt after another and does not decode. The blocks that a prompt finds and leaves are determined
when it is sent, as in that replay, so later prompts find its blocks although it still waits.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush

from beluga.router import WorkerMetrics
from beluga.simulate.links import Clock
from beluga.simulate.memory import Far, Request, SimulatedTier
from beluga.simulate.options import Options

EventCallback = Callable[[float, Request], None]


class ChunkedEngine:
    """A chunked engine. ``tokens`` is the number of tokens in a block. While nothing is prefilled,
    steps differ only by the growth of the context, so any number of them is one event, which ends
    early if a prompt arrives.
    """

    def __init__(
        self, clock: Clock, options: Options, hbm: SimulatedTier, far: Far, tokens: int
    ) -> None:
        self.clock, self.options, self.hbm, self.far = clock, options, hbm, far
        self.block_tokens = tokens
        self.first_token: EventCallback = ignore_event
        self.done: EventCallback = ignore_event
        self.busy_s = 0.0
        self.queue: deque[Request] = deque()  # requests that are not admitted
        self.active = 0  # the number of admitted requests
        self._ready: deque[Request] = deque()  # requests to be prefilled
        self._decoding: list[tuple[int, int, Request]] = []  # sorted by each request's last step
        self._step = 0  # steps with decoding so far
        self._context = 0  # tokens of all decoding requests
        self._pieces: list[tuple[Request, int]] = []  # pieces in the current step
        self._planned = 0  # steps until the next event; 0 when idle
        self._from = 0.0  # when these steps started
        self._version = 0  # the version of the plan
        model = options.model
        self._a, self._b, self._c = model.a / 1e3, model.b / 1e3, model.c / 1e3
        self._e, self._f, self._g = model.e / 1e3, model.f / 1e3, model.g / 1e3
        self._h = options.step_s

    def submit(self, now: float, request: Request) -> None:
        """Accept a request from the router."""
        self.queue.append(request)
        if len(self.queue) == 1:
            self._admit(now)
            self._wake(now)

    def metrics(self) -> WorkerMetrics:
        """Return the metrics that the worker would publish."""
        used, capacity = self.hbm.used, self.hbm.capacity
        return WorkerMetrics(
            request_active_slots=self.active,
            request_total_slots=self.options.slots,
            kv_active_blocks=used,
            kv_total_blocks=capacity,
            num_requests_waiting=len(self.queue),
            gpu_cache_usage_perc=used / capacity if capacity else 0.0,
        )

    def _admit(self, now: float) -> None:
        """Admit the first requests for which HBM has space. Their hits determine what they wait
        for.
        """
        hbm, tier = self.hbm, self.far.tier
        while self.queue and self.active < self.options.slots:
            request = self.queue[0]
            ids = request.ids
            request.device = device = hbm.lead(ids, request.reusable)
            hbm.hold(ids, device)
            if not hbm.reserve(request.slots - device):
                hbm.drop(ids, device)
                return
            self.queue.popleft()
            self.active += 1
            request.far = max(tier.lead(ids, request.reusable) - device, 0)
            tier.touch(ids, request.blocks)
            request.begin(self.block_tokens)
            if request.far:
                self.far.onboard(now, request.far, partial(self._loaded, request))
            else:
                self._ready.append(request)

    def _loaded(self, request: Request, now: float) -> None:
        self._settle(request, request.device, request.far)
        self._ready.append(request)
        self._wake(now)

    def _settle(self, request: Request, start: int, count: int) -> None:
        """Turn reserved slots into blocks that lie in HBM."""
        self.hbm.release(count)
        self.hbm.hold(request.ids + start, count)

    def _wake(self, now: float) -> None:
        """Begin a step if the engine is idle, or end the run of decode steps early for a prompt."""
        if not self._planned:
            self._begin(now)
        elif self._ready and not self._pieces:
            # The current step ends first.
            steps = self._steps_until(now - self._from)
            if steps < self._planned:
                self._plan(self._from, steps, self._decode_s(steps))

    def _begin(self, now: float) -> None:
        """Begin the next step, or run of decode steps."""
        batch = len(self._decoding)
        self._planned = 0
        self._pieces = pieces = []
        if self._ready:
            room = max(self.options.step_tokens - batch, 1)
            seconds = self._a + self._h
            for request in self._ready:
                tokens = min(request.left, room)
                seconds += tokens * (self._b + self._c * (request.kv + tokens / 2))
                pieces.append((request, tokens))
                room -= tokens
                if not room:
                    break
            if batch:
                seconds += self._f * batch + self._g * self._context
            self._plan(now, 1, seconds)
        elif batch:
            steps = self._decoding[0][0] - self._step
            self._plan(now, steps, self._decode_s(steps))

    def _plan(self, start: float, steps: int, seconds: float) -> None:
        self._from, self._planned = start, steps
        self._version += 1
        self.clock.at(start + seconds, self._end, self._version)

    def _decode_s(self, steps: int) -> float:
        """Return the seconds of that many consecutive steps, each of which adds a token to each
        context.
        """
        batch = len(self._decoding)
        alike = self._h + self._e + self._f * batch + self._g * self._context
        return steps * alike + self._g * batch * steps * (steps - 1) / 2

    def _steps_until(self, seconds: float) -> int:
        """Return the least number of steps, at least 1, that take this long."""
        batch = len(self._decoding)
        square = self._g * batch / 2
        line = self._h + self._e + self._f * batch + self._g * self._context - square
        root = math.sqrt(line * line + 4 * square * max(seconds, 0.0))
        return max(1, math.ceil(2 * seconds / (line + root) - 1e-9))

    def _end(self, now: float, version: int) -> None:
        if version != self._version:
            return
        self.busy_s += now - self._from
        decoding = self._decoding
        if decoding:
            self._step += self._planned
            self._context += self._planned * len(decoding)
            while decoding and decoding[0][0] <= self._step:
                self._finish(now, heappop(decoding)[2])
        for request, tokens in self._pieces:
            request.kv += tokens
            request.left -= tokens
            if not request.left:
                self._ready.popleft()
                self._prefilled(now, request)
        self._admit(now)
        self._begin(now)

    def _prefilled(self, now: float, request: Request) -> None:
        hits = request.device + request.far
        self._settle(request, hits, request.blocks - hits)
        self.far.offload(now, request)
        request.first_token = now
        self.first_token(now, request)
        if request.output == 1:
            self._leave(now, request)
        else:
            self._context += request.input + 1
            heappush(self._decoding, (self._step + request.output - 1, request.index, request))

    def _finish(self, now: float, request: Request) -> None:
        self._context -= request.input + request.output
        self._leave(now, request)

    def _leave(self, now: float, request: Request) -> None:
        self.hbm.drop(request.ids, request.blocks)
        self.hbm.release(request.slots - request.blocks)
        self.active -= 1
        request.done = now
        self.done(now, request)


def ignore_event(now: float, request: Request) -> None:
    """Ignore the event."""


class SerialEngine:
    """A first-come, first-served engine. ``tokens`` is the number of tokens in a block."""

    def __init__(
        self, clock: Clock, options: Options, hbm: SimulatedTier, far: Far, tokens: int
    ) -> None:
        self.clock, self.model, self.hbm, self.far = clock, options.model, hbm, far
        self.block_tokens = tokens
        self.first_token: EventCallback = ignore_event
        self.done: EventCallback = ignore_event
        self.busy_s = 0.0
        self._queue: deque[Request] = deque()
        self._current: Request | None = None
        self._from = 0.0

    def submit(self, now: float, request: Request) -> None:
        """Accept a request from the router."""
        hbm, tier, ids, blocks = self.hbm, self.far.tier, request.ids, request.blocks
        request.device = hbm.lead(ids, request.reusable)
        request.far = max(tier.lead(ids, request.reusable) - request.device, 0)
        request.begin(self.block_tokens)
        hbm.put(ids, blocks)
        self.far.offload(now, request)
        self._queue.append(request)
        if self._current is None:
            self._next(now)

    def metrics(self) -> WorkerMetrics:
        """Return the metrics that the worker would publish: how many requests wait."""
        return WorkerMetrics(
            request_active_slots=int(self._current is not None),
            num_requests_waiting=len(self._queue),
        )

    def _next(self, now: float) -> None:
        self._from = now
        request = self._current = self._queue.popleft()
        if request.far:
            self.far.onboard(now, request.far, partial(self._loaded, request))
        else:
            self._loaded(request, now)

    def _loaded(self, request: Request, now: float) -> None:
        seconds = self.model.prefill_ms(request.left, request.kv) / 1e3
        self.clock.at(now + seconds, self._prefilled, request)

    def _prefilled(self, now: float, request: Request) -> None:
        self.busy_s += now - self._from
        self._current = None
        request.first_token = request.done = now
        self.first_token(now, request)
        self.done(now, request)
        if self._queue and self._current is None:
            self._next(now)
