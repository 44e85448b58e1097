# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""E2, ``alpha-gamma``: the Dynamo KV router article's cost of load, new tokens and busy slots."""

from __future__ import annotations

import math
from collections.abc import Sequence

from beluga.errors import AllWorkersBusyError
from beluga.router.policies.pick import chosen, some
from beluga.router.policy import Candidate, Choice, Query

# The weight of load when loads are unequal, and when they are not.
ALPHA_BALANCE, ALPHA_REUSE = 0.7, 0.3
APART = 0.1  # loads are unequal if their standard deviation exceeds this share of the mean
GAMMA = 0.1


class AlphaGamma:
    """The lowest cost wins; of equal costs the first. Workers without free slots or blocks are
    excluded. The policy uses the workers' own caches and ignores the pool.
    """

    name = "alpha-gamma"
    uses_overlap = True

    def __init__(self, seed: int = 0) -> None:
        """The policy is deterministic and ignores ``seed``."""

    def choose(self, query: Query, candidates: Sequence[Candidate]) -> Choice:
        rows = some(candidates)
        slots, slots_max = rows.counts("request_active_slots"), rows.counts("request_total_slots")
        blocks, blocks_max = rows.counts("kv_active_blocks"), rows.counts("kv_total_blocks")
        free = [
            place
            for place in range(len(rows))
            if not _full(slots[place], slots_max[place])
            and not _full(blocks[place], blocks_max[place])
        ]
        if not free:
            raise AllWorkersBusyError(
                f"all {len(rows)} workers have used up their slots or blocks; wait for one"
            )
        loads = [_share(blocks[place], blocks_max[place]) for place in free]
        mean = sum(loads) / len(loads)
        spread = math.sqrt(sum((load - mean) ** 2 for load in loads) / len(loads))
        alpha = ALPHA_BALANCE if spread > APART * mean else ALPHA_REUSE
        isl, held = max(query.isl, 1), rows.held()
        costs = [
            alpha * (load - mean)
            + (1 - alpha) * max(isl - held[place] * query.block_size, 0) / isl
            + GAMMA * _share(slots[place], slots_max[place])
            for place, load in zip(free, loads, strict=True)
        ]
        at = costs.index(min(costs))
        return chosen(query, rows[free[at]], costs[at])


def _share(used: int, total: int) -> float:
    return used / total if total else 0.0


def _full(used: int, total: int) -> bool:
    """Return whether all is used up. Without a published total there is no limit."""
    return 0 < total <= used
