# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Mooncake's min-TTFT (FAST '25 paper, algorithm 1): the worker with the earliest first token.

The times come from an estimator: the caller's own model, or the router's estimate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from random import Random
from typing import Protocol

from beluga.errors import ObjectiveError
from beluga.router.load.estimate import CostEstimator, Estimate, first_tokens_s
from beluga.router.policies.pick import chosen, generator, lowest, some
from beluga.router.policy import Candidate, Choice, Query


class Estimator(Protocol):
    def __call__(self, query: Query, candidate: Candidate, fetched: int, /) -> Estimate:
        """Estimate the times if the candidate gets the request. ``fetched`` blocks, beyond the
        candidate's own ones, are copied to it from the worker with the longest prefix.
        """
        ...


@dataclasses.dataclass(kw_only=True)
class MinTtft:
    """The lowest estimated TTFT wins, and a random one of equal estimates.

    With a ``fetch_threshold``, a worker whose own prefix is shorter than the best one by more than
    that ratio is assumed to fetch the rest from that worker. None means that workers do not copy
    from each other. Raises ObjectiveError if the winner would miss ``ttft_objective_s`` or
    ``between_tokens_objective_s``: Mooncake rejects such a request early.
    """

    estimator: Estimator = dataclasses.field(default_factory=CostEstimator)
    seed: int = 0
    fetch_threshold: float | None = None
    ttft_objective_s: float | None = None
    between_tokens_objective_s: float | None = None
    random: Random = dataclasses.field(init=False, repr=False)

    name = "min-ttft"
    uses_overlap = True

    def __post_init__(self) -> None:
        self.random = generator(self.seed)

    def choose(self, query: Query, candidates: Sequence[Candidate]) -> Choice:
        rows = some(candidates)
        found = rows.found()
        longest = max(found)
        fetched = [self._fetched(blocks, longest) for blocks in found]
        if isinstance(self.estimator, CostEstimator):
            table = self.estimator.table(query, rows, fetched)
            ttft_s = first_tokens_s(table)
            place = lowest(ttft_s, self.random)
            best = Estimate(*table[place].tolist())
        else:
            each = zip(rows, fetched, strict=True)
            estimates = [self.estimator(query, candidate, more) for candidate, more in each]
            ttft_s = [estimate.ttft_s for estimate in estimates]
            place = lowest(ttft_s, self.random)
            best = estimates[place]
        self._keep_objectives(best)
        choice = chosen(query, rows[place], best.ttft_s, ttft_s)
        choice.prefill_s = best.added_s
        return choice

    def _fetched(self, own: int, longest: int) -> int:
        if self.fetch_threshold is None or longest <= own * self.fetch_threshold:
            return 0
        return longest - own

    def _keep_objectives(self, best: Estimate) -> None:
        for what, value, limit in (
            ("first token", best.ttft_s, self.ttft_objective_s),
            ("each token", best.between_tokens_s, self.between_tokens_objective_s),
        ):
            if limit is not None and value > limit:
                raise ObjectiveError(
                    f"the {what} would take at least {value:.3g} s, but the objective is "
                    f"{limit:.3g} s; send less, or add workers"
                )
