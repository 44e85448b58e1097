# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Least outstanding tokens: this policy considers load and ignores caches.

With a pool as near as local memory no other routing is needed: every worker finds the same blocks,
so workers differ only in the work that waits before their prefill.
"""

from __future__ import annotations

from collections.abc import Sequence

from beluga.router.policies.pick import chosen, generator, lowest, some
from beluga.router.policy import Candidate, Choice, Query


class LeastTokens:
    """The worker with the fewest prompt tokens that wait for their first token wins. Of equal
    workers the one with the fewest requests wins (so decoding counts where no prefill waits), then
    a random one.
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
        return chosen(query, tied[lowest(requests, self._random)], fewest, tokens)
