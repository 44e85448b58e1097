# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The forecast of the time to the first token, which is the estimator of ``min-ttft`` in the
simulator.

It knows the cost model and the prompts that each worker got. It does not know the lengths of
answers, nor the load of the links.
"""

from __future__ import annotations

from beluga.router import Candidate, Estimate, Overlap, Query
from beluga.simulate.options import Options


class Forecast:
    """A forecast that assumes that the prompts before a request are prefilled one after another."""

    def __init__(self, options: Options, block_bytes: int) -> None:
        self._model = options.model
        self._step_s, self._step_tokens = options.step_s, options.step_tokens
        self._shared_s = block_bytes / options.path_speed
        self._host_s = block_bytes / options.local_bandwidth
        self._free_at: dict[int, float] = {}
        self._seconds: dict[int, float] = {}  # of each request before its first token
        self._waiting: dict[int, float] = {}  # sum over the waiting requests of each worker
        self.now = 0.0

    def __call__(self, query: Query, candidate: Candidate, fetched: int) -> Estimate:
        prefill_s, transfer_s = self.work(query, candidate.overlap)
        free_at = self._free_at.get(candidate.worker.worker_id, 0.0)
        return Estimate(max(free_at - self.now, 0.0), prefill_s, transfer_s)

    def work(self, query: Query, overlap: Overlap) -> tuple[float, float]:
        """Return the seconds of prefill and of copies."""
        cached = min(overlap.blocks * query.block_size, query.isl - 1)
        new = query.isl - cached
        steps = -(-new // self._step_tokens)
        prefill_s = self._model.prefill_ms(new, cached) / 1e3 + steps * self._step_s
        return prefill_s, overlap.shared * self._shared_s + overlap.host * self._host_s

    def sent(self, request: int, worker: int, query: Query, overlap: Overlap) -> None:
        """Note that a request is sent now."""
        seconds = self._seconds[request] = sum(self.work(query, overlap))
        self._waiting[worker] = self._waiting.get(worker, 0.0) + seconds
        self._free_at[worker] = max(self._free_at.get(worker, 0.0), self.now) + seconds

    def prefilled(self, request: int, worker: int, now: float) -> None:
        """Correct the forecast when a request's first token has come."""
        self._waiting[worker] -= self._seconds.pop(request)
        self._free_at[worker] = now + self._waiting[worker]
