# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Helpers of all policies: the seeded generator, the index of a low cost, the choice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
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


def draw(costs: Sequence[float], temperature: float, random: Random) -> int:
    """Return the index of a random cost. At temperature 0 it is the lowest, with random ties;
    otherwise Dynamo's softmax over costs scaled to 0..1: p_i ~ exp(-(cost_i - min) / ((max - min) *
    temperature)).
    """
    if temperature <= 0:
        return lowest(costs, random)
    least, most = min(costs), max(costs)
    if least == most:
        return random.randrange(len(costs))
    scale = (most - least) * temperature
    sums = list(accumulate(math.exp((least - cost) / scale) for cost in costs))
    sample = random.random() * sums[-1]
    return next(place for place, reached in enumerate(sums) if reached >= sample)


def chosen(
    query: Query, candidate: Candidate, cost: float = 0.0, costs: Sequence[float] = ()
) -> Choice:
    """Return the choice of a candidate, with the share of the request that its cached blocks save.
    ``costs`` are those of all candidates.
    """
    cached = min(candidate.overlap.blocks * query.block_size, query.isl)
    hit_rate = cached / query.isl if cached else 0.0
    return Choice(candidate.worker, candidate.overlap, hit_rate, cost, costs=costs)
