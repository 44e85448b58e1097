# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The policies that ignore caches: random, round-robin, two-choices, least-tokens.

With a pool as close as local memory, no other routing is needed: every worker finds the same
blocks, so workers differ only in their queued work.
"""

from __future__ import annotations

from collections.abc import Sequence

from beluga.router.policies.pick import chosen, generator, lowest, some
from beluga.router.policy import Candidate, Choice, Query


class RandomWorker:
    """Each worker is equally likely."""

    name = "random"
    uses_overlap = False

    def __init__(self, seed: int = 0) -> None:
        self._random = generator(seed)

    def choose(self, query: Query, candidates: Sequence[Candidate]) -> Choice:
        return chosen(query, self._random.choice(some(candidates)))


class RoundRobin:
    """Each worker in turn. It counts requests, not workers: a worker that joins or leaves only
    shifts the order. The seed determines the first worker.
    """

    name = "round-robin"
    uses_overlap = False

    def __init__(self, seed: int = 0) -> None:
        self._turn = seed

    def choose(self, query: Query, candidates: Sequence[Candidate]) -> Choice:
        candidate = some(candidates)[self._turn % len(candidates)]
        self._turn += 1
        return chosen(query, candidate)


class TwoChoices:
    """Of two distinct random workers, the one with fewer outstanding tokens; the first one wins a
    tie. SGLang has it as power_of_two.
    """

    name = "two-choices"
    uses_overlap = False

    def __init__(self, seed: int = 0) -> None:
        self._random = generator(seed)

    def choose(self, query: Query, candidates: Sequence[Candidate]) -> Choice:
        rows = some(candidates)
        tokens = rows.counts("outstanding_tokens")
        drawn = self._random.sample(range(len(rows)), min(2, len(rows)))
        best = min(drawn, key=tokens.__getitem__)
        return chosen(query, rows[best], tokens[best])


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
