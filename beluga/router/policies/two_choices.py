# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Power of two choices: of two random workers, the one with fewer outstanding tokens.

Like SGLang's power_of_two: two distinct workers, compared by tokens; the first one wins a tie.
"""

from __future__ import annotations

from collections.abc import Sequence

from beluga.router.policies.pick import chosen, generator, some
from beluga.router.policy import Candidate, Choice, Query


class TwoChoices:
    name = "two-choices"
    uses_overlap = False

    def __init__(self, seed: int = 0) -> None:
        self._random = generator(seed)

    def choose(self, query: Query, candidates: Sequence[Candidate]) -> Choice:
        rows = some(candidates)
        tokens = rows.counts("outstanding_tokens")
        drawn = self._random.sample(range(len(rows)), min(2, len(rows)))
        best = min(drawn, key=tokens.__getitem__)
        return chosen(query, rows[best], tokens[best])
