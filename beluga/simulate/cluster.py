# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A run of the simulator: a trace through a router and its workers. The router, its policies and
its account of loads are the real ones (beluga/router), and so is the code that evicts
(csrc/index/evict.h).
"""

from __future__ import annotations

import dataclasses
from array import array
from collections import deque
from collections.abc import Sequence
from random import Random
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from beluga._ffi import ffi
from beluga.errors import AllWorkersBusyError, ObjectiveError
from beluga.router import (
    Advice,
    Candidates,
    CostEstimator,
    Goals,
    Query,
    Router,
    Seen,
    Worker,
    advise,
    make_policy,
)
from beluga.simulate.engine import ChunkedEngine, SerialEngine
from beluga.simulate.links import Clock
from beluga.simulate.memory import Leads, Network, Request, SimulatedTier
from beluga.simulate.options import Options
from beluga.simulate.trace import Trace


@dataclasses.dataclass(slots=True)
class Caches:
    """The leading blocks in each worker's HBM, and those in each worker's DRAM, or only in the
    pool, which is ``shared``.
    """

    device: NDArray[np.int64]
    far: NDArray[np.int64]
    shared: bool

    def fill(self, candidates: Candidates) -> None:
        """Write the overlaps of the candidates: the first workers of the cluster, in order."""
        count = len(candidates)
        device = candidates.table["device"] = self.device[:count]
        far = self.far[0] if self.shared else self.far[:count]
        column = "shared" if self.shared else "host"
        candidates.table[column] = np.maximum(far - device, 0)


INTERVAL_S = 30.0  # seconds between two decisions


class Planning:
    """Runs the planner at each interval, and records its decisions with their times."""

    def __init__(self, goals: Goals) -> None:
        self.goals = goals
        self.advised: list[tuple[float, Advice]] = []
        self._ttft: list[float] = []

    def served(self, request: Request) -> None:
        """Record a first token."""
        self._ttft.append(request.first_token - request.arrival)

    def look(self, now: float, engines: Sequence[ChunkedEngine | SerialEngine]) -> int:
        """Return how many workers to add: -1, 0 or 1. ``engines`` are the active ones."""
        metrics = [engine.metrics() for engine in engines]
        seen = Seen(
            workers=len(engines),
            queued=sum(worker.num_requests_waiting for worker in metrics),
            usage=fmean(worker.gpu_cache_usage_perc for worker in metrics),
            ttft_s=fmean(self._ttft) if self._ttft else 0.0,
        )
        self._ttft.clear()
        advice = advise(seen, self.goals)
        if advice is None:
            return 0
        self.advised.append((now, advice))
        return advice.change


class Cluster:
    """Workers with ``memory`` behind them (``pool`` or ``split``), and a router with a policy.

    The seed decides between equal workers, and the order of requests that arrive at the same time,
    because the traces' clocks are coarse.
    """

    def __init__(
        self, trace: Trace, options: Options, *, policy: str, memory: str, seed: int = 0
    ) -> None:
        self.trace, self.options, self.memory = trace, options, memory
        self.block_bytes = trace.block_tokens * options.model.kv_bytes_per_token
        self.network = Network(options, memory, self.block_bytes)
        self.clock = Clock((self.network.read, self.network.write))
        self.estimator = CostEstimator(
            costs=dataclasses.replace(options.model, h=1e3 * options.step_s),
            bytes_per_s=options.path_speed,
            host_bytes_per_s=options.local_bandwidth,
            step_tokens=options.step_tokens,
        )
        chosen = make_policy(
            policy, seed=seed, estimator=self.estimator, defaults=options.policy_defaults
        )
        self.router = Router(chosen, find_matches=self._matches)
        self.requests = self._make_requests(seed)
        self.refused = 0  # requests too long for a worker, or over the policy's objective
        self.engines: list[ChunkedEngine | SerialEngine] = []
        self.end_s = 0.0
        self._hbm: list[SimulatedTier] = []
        self._own: list[SimulatedTier] = []  # each worker's DRAM, or only the pool
        self._hashes = [array("Q", blocks) for blocks in trace.blocks()]
        self._held: deque[Request] = deque()  # requests that wait because every worker is busy
        self._routed = self.requests[0]
        self.active = 0  # the first workers, of this number, get requests
        self.worker_s = 0.0  # workers times the seconds that they existed
        self._since = 0.0
        goals = options.goals
        self.planning = Planning(goals) if goals else None
        self._open = len(self.requests)  # requests that are neither refused nor done
        if memory == "pool":
            self._own.append(self._tier(options.pool_bytes))
        self._scale(0.0, options.workers)

    def run(self) -> None:
        """Run until every request is done or refused."""
        scale = self.options.scale
        if scale:
            self.clock.at(scale.at_s, self._scale, scale.count)
        if self.planning:
            self.clock.at(INTERVAL_S, self._plan, self.planning)
        arrivals = ((request.arrival, request) for request in self.requests)
        self.end_s = self.clock.run(arrivals, self._arrive)
        self._scale(self.end_s, 0)
        self.refused += len(self._held)

    def _make_requests(self, seed: int) -> list[Request]:
        trace, speed = self.trace, self.options.speed
        base = ffi.from_buffer("uint32_t[]", trace.ids)
        requests = []
        for index, arrival in enumerate(trace.arrival_s):
            tokens = (trace.input_tokens[index], trace.output_tokens[index], trace.block_tokens)
            ids, count = base + trace.first[index], trace.count[index]
            requests.append(Request(index, arrival / speed, tokens, ids, count))
        chance = Random(seed)  # noqa: S311  the order of equals, not secrets
        if not self.options.shuffle:
            return requests
        return sorted(requests, key=lambda request: (request.arrival, chance.random()))

    def _tier(self, size: int) -> SimulatedTier:
        capacity = min(size // self.block_bytes, 0xFFFFFFFF)
        trace = self.trace
        return SimulatedTier(trace.id_count, capacity, self.options.eviction)

    def _add_worker(self) -> None:
        number, options = len(self.engines), self.options
        if self.memory == "split":
            self._own.append(self._tier(options.local_bytes))
        hbm = self._tier(options.hbm_bytes)
        far = self.network.join(self._own[-1])
        kind: type[ChunkedEngine | SerialEngine]
        kind = ChunkedEngine if options.engine == "chunked" else SerialEngine
        engine = kind(self.clock, options, hbm, far, self.trace.block_tokens)
        engine.first_token, engine.done = self._first_token, self._done
        self.engines.append(engine)
        self._hbm.append(hbm)
        self._leads = Leads([*self._hbm, *self._own])
        self.router.add_worker(Worker(number))
        self._publish(number)

    def _scale(self, now: float, count: int) -> None:
        """Add or remove workers at time ``now``. Workers that left before come back first. The last
        ones leave: they get no more requests and finish those that they have.
        """
        self.worker_s += self.active * (now - self._since)
        self._since = now
        for _ in range(count):
            if self.active == len(self.engines):
                self._add_worker()
            self.router.resume(Worker(self.active))
            self.active += 1
        for _ in range(-count):
            self.active -= 1
            self.router.suspend(Worker(self.active))

    def _plan(self, now: float, planning: Planning) -> None:
        if self._open:
            self._scale(now, planning.look(now, self.engines[: self.active]))
            self.clock.at(now + INTERVAL_S, self._plan, planning)

    def _refuse(self) -> None:
        self.refused += 1
        self._open -= 1

    def _arrive(self, now: float, request: Request) -> None:
        if request.slots > self._hbm[0].capacity:
            self._refuse()
        elif self._held or not self._send(now, request):
            self._held.append(request)

    def _send(self, now: float, request: Request) -> bool:
        """Send a request. Returns False if every worker is busy."""
        hashes = self._hashes[request.index]
        query = Query(request.input, self.trace.block_tokens, hashes, hashes)
        self._routed = request
        try:
            choice = self.router.route(request.index, query, now=now)
        except AllWorkersBusyError:
            return False
        except ObjectiveError:
            self._refuse()
            return True
        request.worker = number = choice.worker.worker_id
        self.engines[number].submit(now, request)
        return True

    def _matches(self, query: Query) -> Caches:
        """Return what each worker holds of the request that is being routed."""
        request = self._routed
        leads = self._leads(request.ids, request.reusable)
        count = len(self.engines)
        return Caches(leads[:count], leads[count:], shared=self.memory == "pool")

    def _first_token(self, now: float, request: Request) -> None:
        self.router.tracker.prefill_done(request.index, now)
        if self.planning:
            self.planning.served(request)
        self._publish(request.worker)

    def _done(self, now: float, request: Request) -> None:
        self._open -= 1
        self.router.tracker.free(request.index, now)
        self._publish(request.worker)
        while self._held and self._send(now, self._held[0]):
            self._held.popleft()

    def _publish(self, number: int) -> None:
        self.router.tracker.publish(Worker(number), self.engines[number].metrics())
