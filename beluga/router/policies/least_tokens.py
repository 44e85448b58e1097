# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Least outstanding tokens: cache-oblivious routing, aware of load and blind to caches.

With a pool as near as local memory this is all the routing there need be: every worker finds the
same blocks, so the work that waits before its prefill is what tells workers apart.
"""

from __future__ import annotations

from collections.abc import Sequence

from beluga.router.policies.pick import chosen, generator, lowest, some
from beluga.router.policy import Candidate, Choice, Query


class LeastTokens:
    """Fewest prompt tokens that still wait for their first token; of those with as many, the one
    with the fewest requests (so decoding counts where no prefill waits), then chance.
    """

    name = "least-tokens"
    uses_overlap = False

    def __init__(self, seed: int = 0) -> None:
        self._random = generator(seed)

    def choose(self, query: Query, candidates: Sequence[Candidate]) -> Choice:
        tokens = [candidate.load.outstanding_tokens for candidate in some(candidates)]
        fewest = min(tokens)
        tied = [
            candidate
            for candidate, count in zip(candidates, tokens, strict=True)
            if count == fewest
        ]
        requests = [candidate.load.active_requests for candidate in tied]
        return chosen(query, tied[lowest(requests, self._random)], fewest)
