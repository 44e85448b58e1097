# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""E2, ``alpha-gamma``: the Dynamo KV router article's cost of load, new tokens and busy slots."""

from __future__ import annotations

import math
from collections.abc import Sequence

from beluga.errors import AllWorkersBusyError
from beluga.router.policies.pick import chosen, some
from beluga.router.policy import Candidate, Choice, Query
from beluga.router.worker import Load

# the weight of load when loads are apart, and when they are not
ALPHA_BALANCE, ALPHA_REUSE = 0.7, 0.3
APART = 0.1  # loads are apart if their standard deviation exceeds this share of the mean
GAMMA = 0.1


class AlphaGamma:
    """The lowest cost wins, and of equal costs the first. Workers without free slots or blocks are
    excluded. The policy knows what workers hold but does not know a pool.
    """

    name = "alpha-gamma"
    uses_overlap = True

    def __init__(self, seed: int = 0) -> None:
        """The policy is deterministic and ignores the seed."""

    def choose(self, query: Query, candidates: Sequence[Candidate]) -> Choice:
        free = [candidate for candidate in some(candidates) if not _full(candidate.load)]
        if not free:
            raise AllWorkersBusyError(
                f"each of {len(candidates)} workers has its slots or blocks used up; wait for one"
            )
        loads = [_share(c.load.kv_active_blocks, c.load.kv_total_blocks) for c in free]
        mean = sum(loads) / len(loads)
        spread = math.sqrt(sum((load - mean) ** 2 for load in loads) / len(loads))
        alpha = ALPHA_BALANCE if spread > APART * mean else ALPHA_REUSE
        isl = max(query.isl, 1)
        costs = [
            alpha * (load - mean)
            + (1 - alpha) * max(isl - candidate.overlap.held * query.block_size, 0) / isl
            + GAMMA
            * _share(candidate.load.request_active_slots, candidate.load.request_total_slots)
            for candidate, load in zip(free, loads, strict=True)
        ]
        place = costs.index(min(costs))
        return chosen(query, free[place], costs[place])


def _share(used: int, total: int) -> float:
    return used / total if total else 0.0


def _full(load: Load) -> bool:
    """Return whether slots or blocks are used up. A total that was not published limits nothing."""
    slots, blocks = load.request_total_slots, load.kv_total_blocks
    return (0 < slots <= load.request_active_slots) or (0 < blocks <= load.kv_active_blocks)
