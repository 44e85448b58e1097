# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""E4, ``lmetric``: the product of the prefill left after credits and the decode blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from beluga.router.policies.pick import chosen
from beluga.router.policies.prefill_cost import PrefillCost
from beluga.router.policies.softmax import draw
from beluga.router.policy import Candidate, Choice, Query


@dataclasses.dataclass(kw_only=True)
class LMetric(PrefillCost):
    name = "lmetric"
    uses_overlap = True

    def choose(self, query: Query, candidates: Sequence[Candidate]) -> Choice:
        prefills = self.prefills(query, candidates, self.credits(query, candidates))
        costs = [
            prefill * (candidate.load.active_decode_blocks + candidate.new_blocks + 1)
            for prefill, candidate in zip(prefills, candidates, strict=True)
        ]
        place = draw(costs, self.temperature, self.random)
        return chosen(query, candidates[place], costs[place], costs)
