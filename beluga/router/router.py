# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The router: gathers a request's matches and loads, applies a policy, and tracks the request.

The proxy and the simulator both use this object. It does no I/O and reads no clock. Constraints
decide which workers may take a request at all, before any policy compares them. They are Dynamo's
hard filters in its order. The request's own demands come first, then workers over the busy
thresholds are excluded. A request pinned to an excluded worker is refused and never sent to another
one.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Hashable

from beluga.errors import AllWorkersBusyError, NoWorkersError, WorkersOverloadedError
from beluga.router.policy import (
    Candidates,
    Choice,
    FindMatches,
    Matches,
    Overlaps,
    Policy,
    Query,
    Remembers,
)
from beluga.router.tracker import LoadTracker
from beluga.router.worker import Load, Worker


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """The requirements of a request; by default there are none."""

    pin: Worker | None = None
    allowed: frozenset[int] | None = None  # worker ids
    ranks: range | None = None  # dp ranks

    def admit(self, worker: Worker) -> bool:
        """Return whether the request may go to a worker."""
        return (
            (self.pin is None or worker == self.pin)
            and (self.allowed is None or worker.worker_id in self.allowed)
            and (self.ranks is None or worker.dp_rank in self.ranks)
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BusyThresholds:
    """The thresholds above which a worker is overloaded; None disables a test. To change them at
    run time, replace the whole object.
    """

    decode_blocks: float | None = None  # share of kv_total_blocks, if the worker publishes it
    prefill_tokens: int | None = None
    prefill_batches: float | None = None  # in multiples of max_num_batched_tokens
    max_num_batched_tokens: int = 8192

    def overloaded(self, load: Load) -> bool:
        """Return whether a worker with this load exceeds any threshold."""
        tokens = load.active_prefill_tokens
        total = load.kv_total_blocks
        return (
            (self.prefill_tokens is not None and tokens > self.prefill_tokens)
            or (
                self.prefill_batches is not None
                and tokens > self.prefill_batches * self.max_num_batched_tokens
            )
            or (
                self.decode_blocks is not None
                and total > 0
                and load.active_decode_blocks > self.decode_blocks * total
            )
        )


log = logging.getLogger(__name__)

_NO_DEMANDS = Constraints()


class Router:
    """Routes the requests of one model.

    ``find_matches`` is called if the policy uses overlap, or always with ``always_match`` (a
    disaggregation decision needs the hit rate under every policy). If it raises, the request is
    routed without cache information, and ``on_index_error`` gets the error. While every
    suitable worker is over ``wait_above`` (Dynamo: 16 prefill batches), requests must wait. A
    single worker over ``thresholds`` is excluded. Each decision is logged at debug level, with
    workers named by ``name_of``.
    """

    def __init__(  # noqa: PLR0913  keyword-only
        self,
        policy: Policy,
        *,
        tracker: LoadTracker | None = None,
        find_matches: FindMatches | None = None,
        always_match: bool = False,
        thresholds: BusyThresholds | None = None,
        wait_above: BusyThresholds | None = None,
        on_index_error: Callable[[Exception], None] | None = None,
        name_of: Callable[[Worker], str] = str,
    ) -> None:
        self.policy = policy
        self.tracker = tracker or LoadTracker()
        self.thresholds = thresholds
        self.wait_above = wait_above
        self._find_matches = find_matches
        self._always_match = always_match
        self._on_index_error = on_index_error
        self._name_of = name_of
        self._workers: dict[Worker, None] = {}
        self._suspended: set[Worker] = set()
        self._well: list[Worker] | None = None  # workers that are not suspended; None: to be listed

    @property
    def workers(self) -> list[Worker]:
        """All added workers, including suspended ones."""
        return list(self._workers)

    def add_worker(self, worker: Worker) -> None:
        """Add a worker."""
        self._workers[worker] = None
        self._well = None
        self.tracker.add_worker(worker)

    def remove_worker(self, worker: Worker) -> None:
        """Remove a worker and its load, also from a policy that remembers workers."""
        if isinstance(self.policy, Remembers):
            self.policy.forget(worker)
        self._workers.pop(worker, None)
        self._suspended.discard(worker)
        self._well = None
        self.tracker.remove_worker(worker)

    def suspend(self, worker: Worker) -> None:
        """Send a worker no more requests, but keep its load (it is draining or down)."""
        if worker in self._workers:
            self._suspended.add(worker)
            self._well = None

    def resume(self, worker: Worker) -> None:
        """Send requests to a suspended worker again."""
        self._suspended.discard(worker)
        self._well = None

    def candidates(
        self, query: Query, constraints: Constraints = _NO_DEMANDS, now: float = 0.0
    ) -> Candidates:
        """Return the workers that may take a request, with the blocks of it that they hold.

        Raises NoWorkersError if none meets its requirements, AllWorkersBusyError if the request
        must wait, and WorkersOverloadedError if each suitable worker is over the thresholds.
        """
        self.tracker.refresh(now)
        query.usual = self.tracker.usual
        workers = self._eligible(constraints)
        blind = not self.policy.uses_overlap
        states = self.tracker.states(workers, () if blind else query.sequence)
        if not blind or self._always_match:
            self._matches(query).fill(states)
        return states

    def choose(
        self, query: Query, constraints: Constraints = _NO_DEMANDS, now: float = 0.0
    ) -> Choice:
        """Choose a worker without tracking the request. Raises the errors of candidates() and of
        the policy.
        """
        candidates = self.candidates(query, constraints, now)
        choice = self.policy.choose(query, candidates)
        if log.isEnabledFor(logging.DEBUG):
            log.debug("%s", self._explained(choice, candidates))
        return choice

    def route(  # noqa: PLR0913  keyword-only
        self,
        request: Hashable,
        query: Query,
        constraints: Constraints = _NO_DEMANDS,
        *,
        now: float = 0.0,
        expected_output: int = 0,
        prefill_s: float | None = None,
    ) -> Choice:
        """Choose a worker, and track the request until tracker.free(request).

        Raises the errors of choose() and LoadTracker.add(); the request is then not tracked.
        """
        choice = self.choose(query, constraints, now)
        self.tracker.add(
            request,
            choice.worker,
            query,
            choice.overlap,
            now=now,
            expected_output=expected_output,
            prefill_s=choice.prefill_s if prefill_s is None else prefill_s,
        )
        return choice

    def _eligible(self, constraints: Constraints) -> list[Worker]:
        if self._well is None:
            self._well = [worker for worker in self._workers if worker not in self._suspended]
        workers = self._well
        if constraints is not _NO_DEMANDS:
            workers = [w for w in workers if constraints.admit(w)]
        if not workers:
            raise NoWorkersError(
                f"none of the {len(self._workers)} workers is healthy and meets the request's "
                "requirements"
            )
        load, waiting = self.tracker.load, self.wait_above
        if waiting is not None and all(waiting.overloaded(load(worker)) for worker in workers):
            raise AllWorkersBusyError(
                f"all {len(workers)} workers have a full queue of prefills; wait for one"
            )
        thresholds = self.thresholds
        if thresholds is not None:
            spare = [worker for worker in workers if not thresholds.overloaded(load(worker))]
            if not spare:
                raise WorkersOverloadedError(
                    f"all {len(workers)} workers are over the busy thresholds; try again later"
                )
            workers = spare
        return workers

    def _matches(self, query: Query) -> Overlaps:
        if self._find_matches is None:
            return Matches()
        try:
            return self._find_matches(query)
        except Exception as error:  # serve the request even if the index fails
            if self._on_index_error is not None:
                self._on_index_error(error)
            return Matches()

    def _explained(self, choice: Choice, candidates: Candidates) -> str:
        """Format a choice and the values of each candidate as one line."""
        costs = [f"{cost:.4g}" for cost in choice.costs] or ["none"] * len(candidates)
        seen = (
            f"{self._name_of(candidate.worker)} cost {cost}, "
            f"cached {candidate.overlap.blocks} blocks, requests {candidate.load.active_requests}, "
            f"prefill {candidate.load.active_prefill_tokens} tokens, "
            f"decode {candidate.load.active_decode_blocks} blocks"
            for candidate, cost in zip(candidates, costs, strict=True)
        )
        return f"{self.policy.name} chose {self._name_of(choice.worker)} of: {'; '.join(seen)}"
