# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""E3, ``linear``: current Dynamo's cost: prefill after credits, plus decode blocks, plus
requests.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Sequence

from beluga.router.policies.pick import chosen, draw, some
from beluga.router.policies.prefill_cost import PrefillCost
from beluga.router.policy import Candidate, Choice, Query


@dataclasses.dataclass(kw_only=True)
class Linear(PrefillCost):
    """cost = s * prefill + decode blocks + a * requests, lowered by preferred taints.

    Without tracked prefills (a decode router) the credit is subtracted from the decode blocks
    instead. ``overlap_score_weight`` w is the deprecated form of s = w, with c = 0 if w is 0.
    """

    prefill_scale: float = 1.0  # s
    request_cost: float = 0.0  # a
    decode_router: bool = False
    overlap_score_weight: float | None = None

    name = "linear"
    uses_overlap = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.overlap_score_weight is not None:
            warnings.warn(
                "overlap_score_weight is deprecated; set prefill_scale",
                DeprecationWarning,
                stacklevel=3,
            )
            self.prefill_scale = self.overlap_score_weight
            if self.overlap_score_weight == 0:
                self.credit = 0.0

    def choose(self, query: Query, candidates: Sequence[Candidate]) -> Choice:
        rows = some(candidates)
        costs = self.costs(query, rows)
        place = draw(costs, self.temperature, self.random)
        return chosen(query, rows[place], costs[place], costs)

    def costs(self, query: Query, candidates: Sequence[Candidate]) -> list[float]:
        """Return the cost of each candidate in blocks. Raises NoWorkersError without candidates."""
        rows = some(candidates)
        found = self.credits(query, rows)
        active, new = rows.counts("active_decode_blocks"), rows.counts("new_blocks")
        decodes = [blocks + more for blocks, more in zip(active, new, strict=True)]
        if self.decode_router and self.credit > 0 and not self.track_prefill:
            costs = [max(d - credit, 0.0) for d, credit in zip(decodes, found, strict=True)]
        else:
            scale = self.prefill_scale
            prefills = self.prefills(query, rows, found)
            costs = [scale * p + d for p, d in zip(prefills, decodes, strict=True)]
        for place, requests in enumerate(rows.counts("active_requests")):
            costs[place] += self.request_cost * requests
        for place, weight in enumerate(rows.amounts("taint_weight")):
            if weight:
                costs[place] *= math.exp(-math.tanh(weight))
        return costs
