# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The serial engine of the reference's feasibility replay: it fetches and then computes one prompt
after another and does not decode. The blocks that a prompt finds and leaves are determined when it
is sent, as in that replay, so later prompts find its blocks although it still waits.
"""

from __future__ import annotations

from collections import deque
from functools import partial

from beluga.router import WorkerMetrics
from beluga.simulate.clock import Clock
from beluga.simulate.engine import EventCallback, ignore_event
from beluga.simulate.memory import Far
from beluga.simulate.options import Options
from beluga.simulate.request import Request
from beluga.simulate.tier import SimulatedTier


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
