# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""SGLang's cache_aware policy: the longest match while loads are balanced, otherwise the least
load.

``cache-aware`` uses an index of KV events. ``cache-aware-tree`` needs no index: it records which
blocks it sent to which worker, so its matches are estimates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from random import Random

from beluga.router.candidates import Candidates
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
    balance_abs: int = 32  # loads are unbalanced if they differ by more than this
    balance_rel: float = 1.1  # and the greatest exceeds this multiple of the least
    usage_spread: float = 1.0  # or if cache usages differ by more than this; 1 never applies
    usage_ceiling: float = 1.0  # or if one usage exceeds this; 1 never applies
    random: Random = dataclasses.field(init=False, repr=False)

    name = "cache-aware"
    uses_overlap = True

    def __post_init__(self) -> None:
        self.random = generator(self.seed)

    def choose(self, query: Query, candidates: Sequence[Candidate]) -> Choice:
        rows = some(candidates)
        if self.imbalanced(rows):
            return self._least_loaded(query, rows)
        held = rows.held()
        longest = max(held)
        if longest == 0:
            return self._least_loaded(query, rows)
        requests, active = rows.counts("active_requests"), rows.counts("kv_active_blocks")
        best = min(
            (place for place, blocks in enumerate(held) if blocks == longest),
            key=lambda place: (requests[place], active[place]),
        )
        return chosen(query, rows[best], -longest)

    def imbalanced(self, candidates: Sequence[Candidate]) -> bool:
        """Return whether loads are unbalanced. Raises NoWorkersError without candidates."""
        rows = some(candidates)
        requests = rows.counts("active_requests")
        least, most = min(requests), max(requests)
        if most - least > self.balance_abs and most > self.balance_rel * least:
            return True
        usage = rows.amounts("gpu_cache_usage_perc")
        return max(usage) - min(usage) > self.usage_spread or max(usage) > self.usage_ceiling

    def _least_loaded(self, query: Query, rows: Candidates) -> Choice:
        requests = rows.counts("active_requests")
        place = lowest(requests, self.random)
        return chosen(query, rows[place], requests[place], requests)


@dataclasses.dataclass(kw_only=True)
class CacheAwareTree(CacheAware):
    """Sends a request to the worker that already received more than ``cache_threshold`` of it,
    otherwise to the least loaded worker, and remembers it. It remembers at most ``tree_blocks_max``
    blocks per worker, and drops the least recently used ones at once; SGLang does so every 30 s.
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
        choice = self._choose(query, some(candidates))
        self.sent.add(choice.worker, query.hashes)
        return choice

    def forget(self, worker: Worker) -> None:
        self.sent.forget(worker)

    def was_sent(self, worker: Worker, hashes: Sequence[int]) -> None:
        self.sent.add(worker, hashes)

    def _choose(self, query: Query, rows: Candidates) -> Choice:
        if not self.imbalanced(rows) and query.hashes:
            places = {worker: place for place, worker in enumerate(rows.workers)}
            worker, matched = self.sent.longest(query.hashes, places)
            if worker is not None and matched / len(query.hashes) > self.cache_threshold:
                candidate = rows[places[worker]]
                if candidate.overlap.blocks < matched:
                    candidate = dataclasses.replace(candidate, overlap=Overlap(device=matched))
                return chosen(query, candidate, -matched)
        return self._least_loaded(query, rows)
