# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The policies that ignore caches: random, round-robin, two-choices, least-tokens.

With a pool as close as local memory, no other routing is needed: every worker finds the same
blocks, so workers differ only in their queued work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from beluga.router.policies.base import SeededPolicy, as_table, choice_of, lowest
from beluga.router.policy import Candidate, Choice, Query


class RandomWorker(SeededPolicy):
    """Each worker is equally likely."""

    name = "random"
    uses_overlap = False

    def choose(self, query: Query, candidates: Sequence[Candidate]) -> Choice:
        return choice_of(query, self.random.choice(as_table(candidates)))


@dataclasses.dataclass(kw_only=True)
class RoundRobin(SeededPolicy):
    """Each worker in turn. It counts requests, not workers: a worker that joins or leaves only
    shifts the order. The seed determines the first worker.
    """

    _turn: int = dataclasses.field(init=False, repr=False)

    name = "round-robin"
    uses_overlap = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._turn = self.seed

    def choose(self, query: Query, candidates: Sequence[Candidate]) -> Choice:
        candidate = as_table(candidates)[self._turn % len(candidates)]
        self._turn += 1
        return choice_of(query, candidate)


class TwoChoices(SeededPolicy):
    """Of two distinct random workers, the one with fewer outstanding tokens; the first one wins a
    tie. SGLang has it as power_of_two.
    """

    name = "two-choices"
    uses_overlap = False

    def choose(self, query: Query, candidates: Sequence[Candidate]) -> Choice:
        rows = as_table(candidates)
        tokens = rows.counts("outstanding_tokens")
        drawn = self.random.sample(range(len(rows)), min(2, len(rows)))
        best = min(drawn, key=tokens.__getitem__)
        return choice_of(query, rows[best], tokens[best])


class LeastTokens(SeededPolicy):
    """Chooses the worker with the fewest prompt tokens before their first token; of equal ones the
    one with the fewest requests (so that decoding counts where no prefill waits), then a random
    one.
    """

    name = "least-tokens"
    uses_overlap = False

    def choose(self, query: Query, candidates: Sequence[Candidate]) -> Choice:
        rows = as_table(candidates)
        tokens, requests = rows.counts("outstanding_tokens"), rows.counts("active_requests")
        fewest = min(tokens)
        tied = [index for index, count in enumerate(tokens) if count == fewest]
        best = tied[lowest([requests[index] for index in tied], self.random)]
        return choice_of(query, rows[best], fewest, tokens)
