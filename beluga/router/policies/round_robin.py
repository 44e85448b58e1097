# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Round robin: each worker in turn, independent of load."""

from __future__ import annotations

from collections.abc import Sequence

from beluga.router.policies.pick import chosen, some
from beluga.router.policy import Candidate, Choice, Query


class RoundRobin:
    """Counts requests, not workers: a worker that joins or leaves only shifts the order. The seed
    determines the first worker.
    """

    name = "round-robin"
    uses_overlap = False

    def __init__(self, seed: int = 0) -> None:
        self._turn = seed

    def choose(self, query: Query, candidates: Sequence[Candidate]) -> Choice:
        candidate = some(candidates)[self._turn % len(candidates)]
        self._turn += 1
        return chosen(query, candidate)
