# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""E4, ``lmetric``: the product of the prefill after credits and the decode blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from beluga.router.policies.pick import chosen, draw, some
from beluga.router.policies.prefill_cost import PrefillCost
from beluga.router.policy import Candidate, Choice, Query


@dataclasses.dataclass(kw_only=True)
class LMetric(PrefillCost):
    name = "lmetric"
    uses_overlap = True

    def choose(self, query: Query, candidates: Sequence[Candidate]) -> Choice:
        rows = some(candidates)
        prefills = self.prefills(query, rows, self.credits(query, rows))
        active, new = rows.counts("active_decode_blocks"), rows.counts("new_blocks")
        costs = [
            prefill * (blocks + more + 1)
            for prefill, blocks, more in zip(prefills, active, new, strict=True)
        ]
        place = draw(costs, self.temperature, self.random)
        return chosen(query, rows[place], costs[place], costs)
