# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""What the policies share: their seeded generator, the lowest cost with fair ties, the choice."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from beluga.errors import NoWorkersError
from beluga.router.policy import Candidate, Choice, Query


def generator(seed: int) -> Random:
    """A policy's own source of chance: the same seed gives the same choices."""
    return Random(seed)  # noqa: S311  ties between workers, not secrets


def some(candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """The candidates. Raises NoWorkersError if there are none."""
    if not candidates:
        raise NoWorkersError("no worker may take the request; add one, or wait until one is well")
    return candidates


def lowest(costs: Sequence[float], random: Random) -> int:
    """The place of the lowest cost; of several, each is as likely as the others."""
    best = min(costs)
    if costs.count(best) == 1:
        return costs.index(best)
    return random.choice([place for place, cost in enumerate(costs) if cost == best])


def chosen(query: Query, candidate: Candidate, cost: float = 0.0) -> Choice:
    """The choice of a candidate, with what its overlap saves of the request."""
    cached = min(candidate.overlap.blocks * query.block_size, query.isl)
    return Choice(candidate.worker, candidate.overlap, cached / query.isl if cached else 0.0, cost)
