# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""SGLang's cache_aware policy: the longest match while loads are level, otherwise the least load.

``cache-aware`` asks an index that is fed by events. ``cache-aware-tree`` needs no index: it
remembers what it sent to which worker, so its matches are guesses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from random import Random

from beluga.router.load.sent import SentPrefixes
from beluga.router.policies.pick import chosen, generator, lowest, some
from beluga.router.policy import Candidate, Choice, Query
from beluga.router.worker import Overlap, Worker


@dataclasses.dataclass(kw_only=True)
class CacheAware:
    """The policy with an index. A worker's load is its number of requests. The constants are
    SGLang's defaults.
    """

    seed: int = 0
    balance_abs: int = 32  # loads are apart if they differ by more than this
    balance_rel: float = 1.1  # and the greatest exceeds this multiple of the least
    usage_spread: float = 1.0  # or if cache usages differ by more than this; 1 never applies
    usage_ceiling: float = 1.0  # or if one usage exceeds this; 1 never applies
    random: Random = dataclasses.field(init=False, repr=False)

    name = "cache-aware"
    uses_overlap = True

    def __post_init__(self) -> None:
        self.random = generator(self.seed)

    def choose(self, query: Query, candidates: Sequence[Candidate]) -> Choice:
        if self.imbalanced(candidates):
            return self._least_loaded(query, candidates)
        held = [candidate.overlap.held for candidate in candidates]
        longest = max(held)
        if longest == 0:
            return self._least_loaded(query, candidates)
        best = [c for c, blocks in zip(candidates, held, strict=True) if blocks == longest]
        return chosen(
            query,
            min(best, key=lambda c: (c.load.active_requests, c.load.kv_active_blocks)),
            -longest,
        )

    def imbalanced(self, candidates: Sequence[Candidate]) -> bool:
        """Return whether loads are apart. Raises NoWorkersError without candidates."""
        requests = [candidate.load.active_requests for candidate in some(candidates)]
        least, most = min(requests), max(requests)
        if most - least > self.balance_abs and most > self.balance_rel * least:
            return True
        usage = [candidate.load.gpu_cache_usage_perc for candidate in candidates]
        return max(usage) - min(usage) > self.usage_spread or max(usage) > self.usage_ceiling

    def _least_loaded(self, query: Query, candidates: Sequence[Candidate]) -> Choice:
        requests = [candidate.load.active_requests for candidate in candidates]
        place = lowest(requests, self.random)
        return chosen(query, candidates[place], requests[place], requests)


@dataclasses.dataclass(kw_only=True)
class CacheAwareTree(CacheAware):
    """Sends a request to the worker that already got more than ``cache_threshold`` of it, or else
    to the least loaded worker, and remembers that. It remembers at most ``tree_blocks_max`` blocks
    of a worker. The least recently used blocks are removed at once; SGLang removes them every 30 s.
    """

    cache_threshold: float = 0.5
    tree_blocks_max: int = 10_000
    sent: SentPrefixes = dataclasses.field(init=False, repr=False)

    name = "cache-aware-tree"
    uses_overlap = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sent = SentPrefixes(self.tree_blocks_max)

    def choose(self, query: Query, candidates: Sequence[Candidate]) -> Choice:
        choice = self._choose(query, candidates)
        self.sent.add(choice.worker, query.hashes)
        return choice

    def forget(self, worker: Worker) -> None:
        self.sent.forget(worker)

    def _choose(self, query: Query, candidates: Sequence[Candidate]) -> Choice:
        if not self.imbalanced(candidates) and query.hashes:
            by_worker = {candidate.worker: candidate for candidate in candidates}
            worker, matched = self.sent.longest(query.hashes, by_worker)
            if worker is not None and matched / len(query.hashes) > self.cache_threshold:
                candidate = by_worker[worker]
                if candidate.overlap.blocks < matched:
                    candidate = dataclasses.replace(candidate, overlap=Overlap(device=matched))
                return chosen(query, candidate, -matched)
        return self._least_loaded(query, candidates)
