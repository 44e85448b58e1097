# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The policies in plain Python, one worker after another. The results of C and numpy must be the
same to the last bit.
"""

import copy
import math
import operator
from collections.abc import Sequence
from functools import reduce
from itertools import accumulate
from random import Random
from typing import Any, NamedTuple

from beluga.router import Candidate, CostEstimator, Query
from beluga.router.policy import Usual

Plain = tuple[int, list[float], float | None]


class PlainEstimate(NamedTuple):
    queue_s: float
    prefill_s: float
    transfer_s: float
    between_tokens_s: float

    @property
    def added_s(self) -> float:
        return max(self.transfer_s - self.queue_s, 0.0) + self.prefill_s

    @property
    def ttft_s(self) -> float:
        return self.queue_s + self.added_s


def estimate(
    estimator: CostEstimator, query: Query, candidate: Candidate, fetched: int = 0
) -> PlainEstimate:
    costs, load, overlap = estimator.costs, candidate.load, candidate.overlap

    def step_s(batch: int, context: int) -> float:
        return (costs.e + costs.f * batch + costs.g * context + costs.h) / 1e3

    size = query.block_size
    cached = min((overlap.blocks + fetched) * size, max(query.isl - 1, 0))
    new = query.isl - cached
    steps = -(-new // estimator.step_tokens)
    held = max(load.active_decode_blocks, load.kv_active_blocks) * size
    batch = load.active_requests
    prefill_ms = 0.0
    if new > 0:
        prefill_ms = costs.a + costs.b * new + costs.c * new * (cached + new / 2)
    own, shared = overlap.host + overlap.disk, overlap.shared + fetched
    return PlainEstimate(
        load.prefill_s + (step_s(batch, held) / 2 if batch else 0.0),
        (prefill_ms + steps * costs.h) / 1e3 + steps * (costs.f * batch + costs.g * held) / 1e3,
        size
        * costs.kv_bytes_per_token
        * (own / estimator.host_bytes_per_s + shared / estimator.bytes_per_s),
        step_s(batch + 1, held),
    )


def rounds(excess: float, blocks: int, held: int, requests: int) -> float:
    if excess <= 0 or not requests:
        return 0.0
    together = min(requests, blocks * requests // max(held, 1))
    return max(excess / blocks, 1 / max(together, 1))


def spread_of(usual: Usual, typical: float, held: int, requests: int) -> float:
    derived = held**2 * 4 / 3 / max(requests, 1)
    change = (usual.ended * usual.change + derived) / (usual.ended + 1)
    return math.sqrt(typical**2 + change)


def missing_of(free: float, spread: float) -> float:
    scale = spread / math.sqrt(2)
    beyond = scale / 2 * math.exp(-abs(free) / scale)
    return beyond if free > 0 else beyond - free


def lowest(costs: Sequence[float], random: Random) -> int:
    best = min(costs)
    cheapest = [index for index, cost in enumerate(costs) if cost == best]
    return cheapest[0] if len(cheapest) == 1 else random.choice(cheapest)


def draw(costs: Sequence[float], temperature: float, random: Random) -> int:
    if temperature <= 0:
        return lowest(costs, random)
    low, high = min(costs), max(costs)
    if low == high:
        return random.randrange(len(costs))
    scale = (high - low) * temperature
    sums = list(accumulate(math.exp((low - cost) / scale) for cost in costs))
    sample = random.random() * sums[-1]
    return next(index for index, reached in enumerate(sums) if reached >= sample)


def least_cost(policy: Any, query: Query, candidates: Sequence[Candidate], random: Random) -> Plain:
    usual, estimator = query.usual, policy.estimator
    prompt = -(-query.isl // query.block_size)
    typical = usual.blocks or max(prompt, 1)
    answer_s = (usual.ended * usual.decode_s + estimator.answer_s()) / (usual.ended + 1)
    followers = sum(each.load.active_requests for each in candidates) / len(candidates) + 1
    reuse = usual.on_device / typical
    tail = prompt - len(query.sequence)
    taken = [each.new_blocks + tail + each.held_alone for each in candidates]
    fewest = min(taken)
    in_all = reduce(operator.add, taken)  # sum() is more exact from Python 3.12 on
    bound = 1 - fewest * len(taken) / in_all if fewest else 1.0
    costs, estimates = [], []
    for candidate, more in zip(candidates, taken, strict=True):
        load = candidate.load
        estimated = estimate(estimator, query, candidate)
        blocks = load.kv_total_blocks or estimator.device_blocks(query.block_size)
        held, requests = load.held_blocks, load.active_requests
        free = blocks - held
        excess = candidate.new_blocks + tail - free
        blocked_s = answer_s * rounds(excess, blocks, held, requests)
        ttft_s = max(estimated.queue_s, estimated.transfer_s + blocked_s) + estimated.prefill_s
        spread = spread_of(usual, typical, held, requests)
        after = missing_of(free - more, spread)
        by_bound = after - missing_of(free, spread)
        by_free = after - missing_of(free - fewest, spread)
        missing = bound * by_bound + (1 - bound) * by_free
        others_s = followers * answer_s * missing / blocks
        costs.append(ttft_s + reuse * estimated.transfer_s + others_s)
        estimates.append(estimated)
    index = lowest(costs, random)
    return index, costs, estimates[index].added_s


def min_ttft(policy: Any, query: Query, candidates: Sequence[Candidate], random: Random) -> Plain:
    longest = max(candidate.overlap.blocks for candidate in candidates)
    estimates = []
    for candidate in candidates:
        own, ratio = candidate.overlap.blocks, policy.fetch_threshold
        more = 0 if ratio is None or longest <= own * ratio else longest - own
        estimates.append(estimate(policy.estimator, query, candidate, more))
    costs = [estimated.ttft_s for estimated in estimates]
    index = lowest(costs, random)
    return index, costs, estimates[index].added_s


def credit(policy: Any, query: Query, candidate: Candidate, tokens_min: int) -> float:
    overlap = candidate.overlap
    credited: float = (
        policy.credit * overlap.device
        + policy.host_credit * overlap.host
        + policy.disk_credit * overlap.disk
        + policy.shared_credit * overlap.shared
    )
    if policy.decay:
        prompt = max(-(-query.isl // query.block_size), 1)
        per_token = policy.decay / query.block_size / prompt
        share = 1 / (1 + per_token * (candidate.load.active_prefill_tokens - tokens_min))
        credited -= policy.credit * overlap.device * (1 - share)
    return credited


def prefill(policy: Any, query: Query, candidate: Candidate, credited: float) -> float:
    if not policy.track_prefill:
        return 0.0
    tokens = max(query.isl, candidate.overlap.blocks * query.block_size)
    raw = candidate.load.active_prefill_tokens + tokens
    return max(raw / query.block_size - credited, 0.0)


def linear(policy: Any, query: Query, candidates: Sequence[Candidate], random: Random) -> Plain:
    tokens_min = min(candidate.load.active_prefill_tokens for candidate in candidates)
    costs = []
    for candidate in candidates:
        decode = candidate.load.active_decode_blocks + candidate.new_blocks
        credited = credit(policy, query, candidate, tokens_min)
        if policy.decode_router and policy.credit > 0 and not policy.track_prefill:
            cost = max(decode - credited, 0.0)
        else:
            cost = policy.prefill_scale * prefill(policy, query, candidate, credited) + decode
        cost += policy.request_cost * candidate.load.active_requests
        costs.append(cost)
    return draw(costs, policy.temperature, random), costs, None


def lmetric(policy: Any, query: Query, candidates: Sequence[Candidate], random: Random) -> Plain:
    tokens_min = min(candidate.load.active_prefill_tokens for candidate in candidates)
    costs = [
        prefill(policy, query, candidate, credit(policy, query, candidate, tokens_min))
        * (candidate.load.active_decode_blocks + candidate.new_blocks + 1)
        for candidate in candidates
    ]
    return draw(costs, policy.temperature, random), costs, None


def logit2(policy: Any, query: Query, candidates: Sequence[Candidate], random: Random) -> Plain:
    longest = max(candidate.load.num_requests_waiting for candidate in candidates) or 1
    costs = [
        candidate.load.gpu_cache_usage_perc
        + candidate.load.num_requests_waiting / longest
        - 2 * query.block_size / max(query.isl, 1) * candidate.overlap.held
        for candidate in candidates
    ]
    return lowest(costs, random), costs, None


def least_tokens(
    policy: Any, query: Query, candidates: Sequence[Candidate], random: Random
) -> Plain:
    tokens = [candidate.load.outstanding_tokens for candidate in candidates]
    tied = [index for index, count in enumerate(tokens) if count == min(tokens)]
    requests = [candidates[index].load.active_requests for index in tied]
    return tied[lowest(requests, random)], list(tokens), None


def two_choices(
    policy: Any, query: Query, candidates: Sequence[Candidate], random: Random
) -> Plain:
    drawn = random.sample(range(len(candidates)), min(2, len(candidates)))
    return min(drawn, key=lambda index: candidates[index].load.outstanding_tokens), [], None


def cache_aware(
    policy: Any, query: Query, candidates: Sequence[Candidate], random: Random
) -> Plain:
    loads = [candidate.load for candidate in candidates]
    requests = [load.active_requests for load in loads]
    usage = [load.gpu_cache_usage_perc for load in loads]
    held = [candidate.overlap.held for candidate in candidates]
    apart = max(requests) - min(requests) > policy.balance_abs
    if (
        (apart and max(requests) > policy.balance_rel * min(requests))
        or max(usage) - min(usage) > policy.usage_spread
        or max(usage) > policy.usage_ceiling
        or max(held) == 0
    ):
        return lowest(requests, random), list(requests), None
    best = [index for index, blocks in enumerate(held) if blocks == max(held)]
    index = min(best, key=lambda at: (requests[at], loads[at].kv_active_blocks))
    return index, [], None


def alpha_gamma(
    policy: Any, query: Query, candidates: Sequence[Candidate], random: Random
) -> Plain:
    def share(used: int, total: int) -> float:
        return used / total if total else 0.0

    free = []
    for index, candidate in enumerate(candidates):
        load = candidate.load
        pairs = (
            (load.request_active_slots, load.request_total_slots),
            (load.kv_active_blocks, load.kv_total_blocks),
        )
        if not any(0 < total <= used for used, total in pairs):
            free.append(index)
    shares = [
        share(candidates[at].load.kv_active_blocks, candidates[at].load.kv_total_blocks)
        for at in free
    ]
    mean = sum(shares) / len(shares)
    spread = math.sqrt(sum((share - mean) ** 2 for share in shares) / len(shares))
    alpha = 0.7 if spread > 0.1 * mean else 0.3
    isl = max(query.isl, 1)
    costs = []
    for index, used_share in zip(free, shares, strict=True):
        load, held = candidates[index].load, candidates[index].overlap.held
        left = max(isl - held * query.block_size, 0)
        slots = share(load.request_active_slots, load.request_total_slots)
        costs.append(alpha * (used_share - mean) + (1 - alpha) * left / isl + 0.1 * slots)
    return free[costs.index(min(costs))], [], None


PLAIN = {
    "least-tokens": least_tokens,
    "two-choices": two_choices,
    "logit2": logit2,
    "alpha-gamma": alpha_gamma,
    "linear": linear,
    "lmetric": lmetric,
    "cache-aware": cache_aware,
    "min-ttft": min_ttft,
    "least-cost": least_cost,
}


def plain_choice(policy: Any, query: Query, candidates: Sequence[Candidate]) -> Plain:
    """Return the place of the choice, the costs of all candidates if the policy returns them, and
    the predicted prefill. Random choices are those that the policy would make next.
    """
    random = copy.deepcopy(getattr(policy, "random", None) or getattr(policy, "_random", None))
    return PLAIN[policy.name](policy, query, candidates, random or Random(0))
