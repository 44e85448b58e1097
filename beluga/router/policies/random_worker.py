# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The random policy: each worker is equally likely."""

from __future__ import annotations

from collections.abc import Sequence

from beluga.router.policies.pick import chosen, generator, some
from beluga.router.policy import Candidate, Choice, Query


class RandomWorker:
    name = "random"
    uses_overlap = False

    def __init__(self, seed: int = 0) -> None:
        self._random = generator(seed)

    def choose(self, query: Query, candidates: Sequence[Candidate]) -> Choice:
        return chosen(query, self._random.choice(some(candidates)))
