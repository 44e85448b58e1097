# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Least outstanding tokens: considers load and ignores caches.

With a pool as close as local memory, no other routing is needed: every worker finds the same
blocks, so workers differ only in their queued work.
"""

from __future__ import annotations

from collections.abc import Sequence

from beluga.router.policies.pick import chosen, generator, lowest, some
from beluga.router.policy import Candidate, Choice, Query


class LeastTokens:
    """Chooses the worker with the fewest prompt tokens before their first token; of equal ones the
    one with the fewest requests (so that decoding counts where no prefill waits), then a random
    one.
    """

    name = "least-tokens"
    uses_overlap = False

    def __init__(self, seed: int = 0) -> None:
        self._random = generator(seed)

    def choose(self, query: Query, candidates: Sequence[Candidate]) -> Choice:
        rows = some(candidates)
        tokens, requests = rows.counts("outstanding_tokens"), rows.counts("active_requests")
        fewest = min(tokens)
        tied = [place for place, count in enumerate(tokens) if count == fewest]
        place = tied[lowest([requests[place] for place in tied], self._random)]
        return chosen(query, rows[place], fewest, tokens)
