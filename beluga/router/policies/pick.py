# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Helpers of all policies: the seeded generator, the lowest cost with random ties, the choice."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from beluga.errors import NoWorkersError
from beluga.router.candidates import Candidates
from beluga.router.policy import Candidate, Choice, Query


def generator(seed: int) -> Random:
    """Return a policy's random generator. The same seed gives the same choices."""
    return Random(seed)  # noqa: S311  ties between workers, not secrets


def some(candidates: Sequence[Candidate]) -> Candidates:
    """Convert candidates to a table. Raises NoWorkersError if there are none."""
    if not candidates:
        raise NoWorkersError(
            "no worker may take the request; add one, or wait until one is healthy"
        )
    return Candidates.of(candidates)


def lowest(costs: Sequence[float], random: Random) -> int:
    """Return the index of the lowest cost; equal costs are equally likely."""
    best = min(costs)
    if costs.count(best) == 1:
        return costs.index(best)
    return random.choice([place for place, cost in enumerate(costs) if cost == best])


def chosen(
    query: Query, candidate: Candidate, cost: float = 0.0, costs: Sequence[float] = ()
) -> Choice:
    """Return the choice of a candidate, with the share of the request that its cached blocks save.
    ``costs`` are those of all candidates.
    """
    cached = min(candidate.overlap.blocks * query.block_size, query.isl)
    hit_rate = cached / query.isl if cached else 0.0
    return Choice(candidate.worker, candidate.overlap, hit_rate, cost, costs=costs)
