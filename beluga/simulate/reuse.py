# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The hit rate of one cache on a trace, by its size and without a cluster."""

from __future__ import annotations

from collections.abc import Sequence

from beluga._ffi import ffi
from beluga.simulate.tier import SimulatedTier
from beluga.simulate.trace import Trace


def found_shares(trace: Trace, capacities: Sequence[int]) -> list[float]:
    """Return the share of all blocks of the prompts, tails included, that a cache of each capacity
    (in blocks of the trace) finds. Requests run one after another, and the block that was used
    least recently is evicted first.
    """
    if not trace.id_count:
        return [0.0] * len(capacities)
    base = ffi.from_buffer("uint32_t[]", trace.ids)
    blocks = sum(-(-tokens // trace.block_tokens) for tokens in trace.input_tokens)
    shares = []
    for capacity in capacities:
        tier, found = SimulatedTier(trace.id_count, capacity, "lru", trace.block_tokens), 0
        for first, count in zip(trace.first, trace.count, strict=True):
            found += tier.lead(base + first, count)
            tier.put(base + first, count)
        shares.append(found / blocks)
    return shares
