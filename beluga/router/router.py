# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The router: it collects candidates from index and loads, lets a policy choose, and keeps the
account.

The proxy and the simulator both route with this object. It does no I/O and reads no clock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable

from beluga.errors import AllWorkersBusyError, NoWorkersError, WorkersOverloadedError
from beluga.router.candidates import Candidates
from beluga.router.constraints import BusyThresholds, Constraints
from beluga.router.load.tracker import LoadTracker
from beluga.router.policy import Choice, Policy, Query, Remembers
from beluga.router.prefix.matches import FindMatches, Matches, Overlaps
from beluga.router.worker import Worker

log = logging.getLogger(__name__)

_NO_DEMANDS = Constraints()


class Router:
    """Routes the requests of one model.

    ``find_matches`` is called if the policy uses overlap, or always with ``always_match`` (a
    disaggregation decision needs the hit rate under every policy). If it raises, the request is
    routed as if nothing were cached: ``index_errors`` counts that and ``on_index_error`` gets the
    error. While every suitable worker is over ``wait_above`` (Dynamo: 16 prefill batches) the
    request must wait. A single worker that is over ``thresholds`` is excluded.
    Each decision is one line of the log at debug level, in which ``name_of`` names workers.
    """

    def __init__(  # noqa: PLR0913  its parts, by name
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
        self.index_errors = 0
        self._find_matches = find_matches
        self._always_match = always_match
        self._on_index_error = on_index_error
        self._name_of = name_of
        self._taints: dict[Worker, frozenset[str]] = {}
        self._suspended: set[Worker] = set()
        self._well: list[Worker] | None = None  # those not suspended; None: to be listed

    @property
    def workers(self) -> list[Worker]:
        """All workers that were added, with the suspended ones."""
        return list(self._taints)

    def add_worker(self, worker: Worker, taints: Iterable[str] = ()) -> None:
        """Add a worker, or give new taints to a worker that was already added."""
        self._taints[worker] = frozenset(taints)
        self._well = None
        self.tracker.add_worker(worker)

    def remove_worker(self, worker: Worker) -> None:
        """Forget a worker and its load. A policy that remembers workers forgets it, too."""
        if isinstance(self.policy, Remembers):
            self.policy.forget(worker)
        self._taints.pop(worker, None)
        self._suspended.discard(worker)
        self._well = None
        self.tracker.remove_worker(worker)

    def suspend(self, worker: Worker) -> None:
        """Send a worker no more requests but keep its account (it is draining or down)."""
        if worker in self._taints:
            self._suspended.add(worker)
            self._well = None

    def resume(self, worker: Worker) -> None:
        """Send a suspended worker requests again."""
        self._suspended.discard(worker)
        self._well = None

    def candidates(
        self, query: Query, constraints: Constraints = _NO_DEMANDS, now: float = 0.0
    ) -> Candidates:
        """Return the workers that may take a request, with what they hold of it.

        Raises NoWorkersError if none meets its demands, AllWorkersBusyError if the request must
        wait, and WorkersOverloadedError if each suitable worker is over the thresholds.
        """
        self.tracker.refresh(now)
        query.usual = self.tracker.usual
        workers = self._eligible(constraints)
        blind = not self.policy.uses_overlap
        found = self.tracker.states(workers, () if blind else query.sequence)
        if not blind or self._always_match:
            self._matches(query).fill(found)
        if constraints.preferred_taints:
            for place, worker in enumerate(workers):
                weight = constraints.taint_weight(self._taints[worker])
                found.rows[place].taint_weight = weight
        return found

    def choose(
        self, query: Query, constraints: Constraints = _NO_DEMANDS, now: float = 0.0
    ) -> Choice:
        """Choose a worker without an account. Raises the errors of candidates() and of the
        policy.
        """
        candidates = self.candidates(query, constraints, now)
        choice = self.policy.choose(query, candidates)
        if log.isEnabledFor(logging.DEBUG):
            log.debug("%s", self._explained(choice, candidates))
        return choice

    def route(  # noqa: PLR0913  a request's particulars, by name
        self,
        request: Hashable,
        query: Query,
        constraints: Constraints = _NO_DEMANDS,
        *,
        now: float = 0.0,
        expected_output: int = 0,
        prefill_s: float | None = None,
    ) -> Choice:
        """Choose a worker, and account for the request until tracker.free(request).

        Raises the errors of choose() and LoadTracker.add(); then nothing is accounted for.
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
            self._well = [worker for worker in self._taints if worker not in self._suspended]
        workers = self._well
        if constraints is not _NO_DEMANDS:
            workers = [w for w in workers if constraints.admit(w, self._taints[w])]
        if not workers:
            raise NoWorkersError(
                f"none of the {len(self._taints)} workers is well and fits the request"
            )
        load, waiting = self.tracker.load, self.wait_above
        if waiting is not None and all(waiting.overloaded(load(worker)) for worker in workers):
            raise AllWorkersBusyError(
                f"each of {len(workers)} workers has a full queue of prefills; wait for one"
            )
        thresholds = self.thresholds
        if thresholds is not None:
            well = [worker for worker in workers if not thresholds.overloaded(load(worker))]
            if not well:
                raise WorkersOverloadedError(
                    f"each of {len(workers)} workers is over the busy thresholds; try again later"
                )
            workers = well
        return workers

    def _matches(self, query: Query) -> Overlaps:
        if self._find_matches is None:
            return Matches()
        try:
            return self._find_matches(query)
        except Exception as error:  # any failure of the index still lets the request be served
            self.index_errors += 1
            if self._on_index_error is not None:
                self._on_index_error(error)
            return Matches()

    def _explained(self, choice: Choice, candidates: Candidates) -> str:
        """Return a line with the choice, and what speaks for each candidate."""
        costs = [f"{cost:.4g}" for cost in choice.costs] or ["none"] * len(candidates)
        seen = (
            f"{self._name_of(each.worker)} cost {cost}, cached {each.overlap.blocks} blocks, "
            f"requests {each.load.active_requests}"
            for each, cost in zip(candidates, costs, strict=True)
        )
        return f"{self.policy.name} chose {self._name_of(choice.worker)} of: {'; '.join(seen)}"
