# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""E1, ``logit2``: Dynamo's first router: twice the hit rate minus cache usage minus waiting
requests.

It follows the Python original. Two defects of the Rust version (at most 1 required block, no worker
when every queue is empty) are not reproduced.
"""

from __future__ import annotations

from collections.abc import Sequence

from beluga.router.policies.pick import chosen, generator, lowest, some
from beluga.router.policy import Candidate, Choice, Query


class Logit2:
    """The highest logit wins, and a random one of equal logits, also if all are 0, where the
    original leaves the random choice to its caller. The policy uses the workers' own caches and
    ignores the pool.
    """

    name = "logit2"
    uses_overlap = True

    def __init__(self, seed: int = 0) -> None:
        self._random = generator(seed)

    def choose(self, query: Query, candidates: Sequence[Candidate]) -> Choice:
        rows = some(candidates)
        waiting, usage = rows.counts("num_requests_waiting"), rows.amounts("gpu_cache_usage_perc")
        longest = max(waiting) or 1
        per_block = 2 * query.block_size / max(query.isl, 1)
        costs = [
            used + count / longest - per_block * held
            for used, count, held in zip(usage, waiting, rows.held(), strict=True)
        ]
        place = lowest(costs, self._random)
        return chosen(query, rows[place], costs[place], costs)
