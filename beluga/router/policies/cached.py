# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The policies that weigh cached blocks against load by constants: Dynamo's logit2, alpha-gamma,
linear and lmetric (E1 to E4), and SGLang's cache-aware and cache-aware-tree.
"""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict
from collections.abc import Container, Sequence

from beluga.errors import AllWorkersBusyError
from beluga.router.policies.base import SeededPolicy, as_table, choice_of, draw, lowest, setting
from beluga.router.policy import Candidate, Candidates, Choice, Query
from beluga.router.tracker import leading
from beluga.router.worker import Overlap, Worker

# The weight of load in alpha-gamma when loads are unequal, and when they are not.
ALPHA_BALANCE, ALPHA_REUSE = 0.7, 0.3
APART = 0.1  # loads are unequal if their standard deviation exceeds this share of the mean
GAMMA = 0.1


class Logit2(SeededPolicy):
    """E1, Dynamo's first router: twice the hit rate minus cache usage minus waiting requests. The
    highest logit wins, and a random one of equal logits, also if all are 0, where the original
    leaves the random choice to its caller. The policy uses the workers' own caches and ignores the
    pool.

    It follows the Python original. Two defects of the Rust version (at most 1 required block, no
    worker when every queue is empty) are not reproduced.
    """

    name = "logit2"
    uses_overlap = True

    def choose(self, query: Query, candidates: Sequence[Candidate]) -> Choice:
        rows = as_table(candidates)
        waiting, usage = rows.counts("num_requests_waiting"), rows.amounts("gpu_cache_usage_perc")
        longest = max(waiting) or 1
        per_block = 2 * query.block_size / max(query.isl, 1)
        costs = [
            used + count / longest - per_block * held
            for used, count, held in zip(usage, waiting, rows.held(), strict=True)
        ]
        index = lowest(costs, self.random)
        return choice_of(query, rows[index], costs[index], costs)


class AlphaGamma(SeededPolicy):
    """E2, the Dynamo KV router article's cost of load, new tokens and busy slots. The lowest cost
    wins; of equal costs the first, so the seed has no effect. Workers without free slots or blocks
    are excluded. The policy uses the workers' own caches and ignores the pool.
    """

    name = "alpha-gamma"
    uses_overlap = True

    def choose(self, query: Query, candidates: Sequence[Candidate]) -> Choice:
        rows = as_table(candidates)
        slots, slots_max = rows.counts("request_active_slots"), rows.counts("request_total_slots")
        blocks, blocks_max = rows.counts("kv_active_blocks"), rows.counts("kv_total_blocks")
        free = [
            index
            for index in range(len(rows))
            if not _full(slots[index], slots_max[index])
            and not _full(blocks[index], blocks_max[index])
        ]
        if not free:
            raise AllWorkersBusyError(
                f"all {len(rows)} workers have used up their slots or blocks; wait for one"
            )
        loads = [_share(blocks[index], blocks_max[index]) for index in free]
        mean = sum(loads) / len(loads)
        spread = math.sqrt(sum((load - mean) ** 2 for load in loads) / len(loads))
        alpha = ALPHA_BALANCE if spread > APART * mean else ALPHA_REUSE
        isl, held = max(query.isl, 1), rows.held()
        costs = [
            alpha * (load - mean)
            + (1 - alpha) * max(isl - held[index] * query.block_size, 0) / isl
            + GAMMA * _share(slots[index], slots_max[index])
            for index, load in zip(free, loads, strict=True)
        ]
        best = costs.index(min(costs))
        return choice_of(query, rows[free[best]], costs[best])


def _share(used: int, total: int) -> float:
    return used / total if total else 0.0


def _full(used: int, total: int) -> bool:
    """Return whether all is used up. Without a published total there is no limit."""
    return 0 < total <= used


@dataclasses.dataclass(kw_only=True)
class _PrefillCost(SeededPolicy):
    """The blocks that a worker would have to prefill, minus a credit for cached blocks, with
    Dynamo's defaults.

    For every worker a block in the pool counts ``shared_credit`` of a block on the device. At 1,
    with equal device overlap, all workers have the same credit, and only load decides. The letters
    in comments are those of Dynamo's formula.
    """

    credit: float = setting(1.0, "The weight of a block in a worker's own GPU memory.")  # c
    host_credit: float = setting(0.75, "The weight of a block in a worker's own DRAM.")
    disk_credit: float = setting(0.25, "The weight of a block on a worker's own disk.")
    shared_credit: float = setting(0.5, "The weight of a block in the pool.", value_max=1)  # m
    decay: float = setting(  # d
        0.0, "How fast the credit decreases as a worker's prefills accumulate."
    )
    track_prefill: bool = setting(True, "Whether waiting prefills count.")
    temperature: float = setting(0.0, "The temperature of a random choice; 0 takes the best.")

    def credits(self, query: Query, candidates: Sequence[Candidate]) -> list[float]:
        """Return the blocks credited to each candidate. Raises NoWorkersError without
        candidates.
        """
        rows = as_table(candidates)
        device, host, disk = self.credit, self.host_credit, self.disk_credit
        shared = self.shared_credit
        tiers = [rows.counts(name) for name in ("device", "host", "disk", "shared")]
        credited = [
            device * on_device + host * on_host + disk * on_disk + shared * in_pool
            for on_device, on_host, on_disk, in_pool in zip(*tiers, strict=True)
        ]
        if self.decay:
            tokens = rows.counts("active_prefill_tokens")
            tokens_min = min(tokens)
            per_token = self.decay / query.block_size / max(-(-query.isl // query.block_size), 1)
            for index, on_device in enumerate(tiers[0]):
                remaining = 1 / (1 + per_token * (tokens[index] - tokens_min))
                credited[index] -= device * on_device * (1 - remaining)
        return credited

    def prefills(
        self, query: Query, candidates: Sequence[Candidate], credited: Sequence[float]
    ) -> list[float]:
        """Return max(raw - credit, 0) of each candidate in blocks; raw is the sum of its waiting
        prompts and this one.
        """
        if not self.track_prefill:
            return [0.0] * len(candidates)
        size, isl, rows = query.block_size, query.isl, as_table(candidates)
        raw = [
            tokens + max(isl, blocks * size)
            for tokens, blocks in zip(
                rows.counts("active_prefill_tokens"), rows.hits(), strict=True
            )
        ]
        return [max(tokens / size - c, 0.0) for tokens, c in zip(raw, credited, strict=True)]


@dataclasses.dataclass(kw_only=True)
class Linear(_PrefillCost):
    """E3, current Dynamo's cost = s * prefill + decode blocks + a * requests. Without tracked
    prefills (a decode router) the credit is subtracted from the decode blocks instead.
    """

    prefill_scale: float = setting(1.0, "The weight of prefills relative to decode blocks.")  # s
    request_cost: float = setting(0.0, "The cost of each request of a worker, in blocks.")  # a
    decode_router: bool = setting(
        False, "Whether workers only decode; credits then reduce decode blocks."
    )

    name = "linear"
    uses_overlap = True

    def choose(self, query: Query, candidates: Sequence[Candidate]) -> Choice:
        rows = as_table(candidates)
        costs = self.costs(query, rows)
        index = draw(costs, self.temperature, self.random)
        return choice_of(query, rows[index], costs[index], costs)

    def costs(self, query: Query, candidates: Sequence[Candidate]) -> list[float]:
        """Return the cost of each candidate in blocks. Raises NoWorkersError without candidates."""
        rows = as_table(candidates)
        credited = self.credits(query, rows)
        active, new = rows.counts("active_decode_blocks"), rows.counts("new_blocks")
        decodes = [blocks + more for blocks, more in zip(active, new, strict=True)]
        if self.decode_router and self.credit > 0 and not self.track_prefill:
            costs = [max(d - credit, 0.0) for d, credit in zip(decodes, credited, strict=True)]
        else:
            scale = self.prefill_scale
            prefills = self.prefills(query, rows, credited)
            costs = [scale * p + d for p, d in zip(prefills, decodes, strict=True)]
        for index, requests in enumerate(rows.counts("active_requests")):
            costs[index] += self.request_cost * requests
        return costs


@dataclasses.dataclass(kw_only=True)
class LMetric(_PrefillCost):
    """E4, the product of the prefill after credits and the decode blocks."""

    name = "lmetric"
    uses_overlap = True

    def choose(self, query: Query, candidates: Sequence[Candidate]) -> Choice:
        rows = as_table(candidates)
        prefills = self.prefills(query, rows, self.credits(query, rows))
        active, new = rows.counts("active_decode_blocks"), rows.counts("new_blocks")
        costs = [
            prefill * (blocks + more + 1)
            for prefill, blocks, more in zip(prefills, active, new, strict=True)
        ]
        index = draw(costs, self.temperature, self.random)
        return choice_of(query, rows[index], costs[index], costs)


@dataclasses.dataclass(kw_only=True)
class CacheAware(SeededPolicy):
    """SGLang's cache_aware with an index of KV events: the longest match while loads are balanced,
    otherwise the least load. A worker's load is its number of requests. The constants are SGLang's
    defaults.
    """

    balance_abs: int = setting(32, "Loads are unbalanced if they differ by more requests.")
    balance_rel: float = setting(1.1, "Loads are unbalanced only above this ratio.")
    usage_spread: float = setting(
        1.0, "Loads are unbalanced if cache usages differ by more; 1 never applies.", value_max=1
    )
    usage_ceiling: float = setting(
        1.0, "Loads are unbalanced if a cache usage is greater; 1 never applies.", value_max=1
    )

    name = "cache-aware"
    uses_overlap = True

    def choose(self, query: Query, candidates: Sequence[Candidate]) -> Choice:
        rows = as_table(candidates)
        if self.imbalanced(rows):
            return self._least_loaded(query, rows)
        held = rows.held()
        longest = max(held)
        if longest == 0:
            return self._least_loaded(query, rows)
        requests, active = rows.counts("active_requests"), rows.counts("kv_active_blocks")
        best = min(
            (index for index, blocks in enumerate(held) if blocks == longest),
            key=lambda index: (requests[index], active[index]),
        )
        return choice_of(query, rows[best], -longest)

    def imbalanced(self, candidates: Sequence[Candidate]) -> bool:
        """Return whether loads are unbalanced. Raises NoWorkersError without candidates."""
        rows = as_table(candidates)
        requests = rows.counts("active_requests")
        fewest, busiest = min(requests), max(requests)
        if busiest - fewest > self.balance_abs and busiest > self.balance_rel * fewest:
            return True
        usage = rows.amounts("gpu_cache_usage_perc")
        return max(usage) - min(usage) > self.usage_spread or max(usage) > self.usage_ceiling

    def _least_loaded(self, query: Query, rows: Candidates) -> Choice:
        requests = rows.counts("active_requests")
        index = lowest(requests, self.random)
        return choice_of(query, rows[index], requests[index], requests)


@dataclasses.dataclass(kw_only=True)
class CacheAwareTree(CacheAware):
    """SGLang's cache_aware without an index: it sends a request to the worker that already received
    more than ``cache_threshold`` of it, otherwise to the least loaded worker, and remembers it. Its
    matches are estimates. It drops the least recently used blocks at once; SGLang does so every
    30 s.
    """

    cache_threshold: float = setting(
        0.5, "The share of a prompt that must match what was sent to a worker.", value_max=1
    )
    tree_blocks_max: int = setting(
        10_000, "How many sent blocks to remember per worker.", value_min=1, value_max=1 << 32
    )
    sent: SentPrefixes = dataclasses.field(init=False, repr=False)

    name = "cache-aware-tree"
    uses_overlap = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sent = SentPrefixes(self.tree_blocks_max)

    def choose(self, query: Query, candidates: Sequence[Candidate]) -> Choice:
        choice = self._choose(query, as_table(candidates))
        self.sent.add(choice.worker, query.hashes)
        return choice

    def forget(self, worker: Worker) -> None:
        self.sent.forget(worker)

    def _choose(self, query: Query, rows: Candidates) -> Choice:
        if not self.imbalanced(rows) and query.hashes:
            indices = {worker: index for index, worker in enumerate(rows.workers)}
            worker, matched = self.sent.longest(query.hashes, indices)
            if worker is not None and matched / len(query.hashes) > self.cache_threshold:
                candidate = rows[indices[worker]]
                if candidate.overlap.blocks < matched:
                    candidate = dataclasses.replace(candidate, overlap=Overlap(device=matched))
                return choice_of(query, candidate, -matched)
        return self._least_loaded(query, rows)


class SentPrefixes:
    """The prefixes that were sent to each worker, in bounded memory.

    A chain of blocks is identified by Python's hash of (id of the chain before it, local hash). An
    ordered dictionary has a worker's blocks, and drops the least recently sent ones first. A prefix
    is always more recent than its continuation, so the remembered set is closed under prefixes.
    """

    def __init__(self, blocks_max: int) -> None:
        self._blocks_max = blocks_max
        self._sent: dict[Worker, OrderedDict[int, None]] = {}

    def __len__(self) -> int:
        """Return the number of remembered blocks of all workers."""
        return sum(len(blocks) for blocks in self._sent.values())

    def add(self, worker: Worker, hashes: Sequence[int]) -> None:
        blocks = self._sent.setdefault(worker, OrderedDict())
        # Reversed, so that the end of a chain is dropped before its prefix
        for chain in reversed(_chains(hashes)):
            blocks[chain] = None
            blocks.move_to_end(chain)
        while len(blocks) > self._blocks_max:
            blocks.popitem(last=False)

    def longest(
        self, hashes: Sequence[int], workers: Container[Worker]
    ) -> tuple[Worker | None, int]:
        """Return the worker among these that received the longest prefix of a request, and its
        length in blocks.
        """
        chains = _chains(hashes)
        best, matched = None, 0
        for worker, blocks in self._sent.items():
            if worker in workers and matched < len(chains) and chains[matched] in blocks:
                best, matched = worker, leading(chains, blocks)
        return best, matched

    def forget(self, worker: Worker) -> None:
        self._sent.pop(worker, None)


def _chains(hashes: Sequence[int]) -> list[int]:
    chains, chain = [], 0
    for block in hashes:
        chain = hash((chain, block))
        chains.append(chain)
    return chains
