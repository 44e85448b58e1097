# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Least cost: the request's expected time to its first token, and the delay that it causes others.

Three resources of a worker cost time: its steps (the prefills that wait, and this one), its link
(blocks that it copies from the pool or its own memory), and its HBM, which a request holds until
its answer ends. Every term is in seconds. An example for HBM: a worker has 470 blocks, its requests
hold 440, and this request needs 50. It must wait until 20 blocks are free. On another worker
requests hold 200 blocks. There it need not wait, but a large request that comes next may have to.

Whether the next request loses by this depends on whether it may go elsewhere. It is assumed to be
like this one. If this one needs 50 blocks on every worker, the next one may go anywhere, and loses
nothing. If this one needs 10 blocks on the worker that has its prefix, and 50 on each of the
others, most requests are bound to a worker, and lose what is taken there; on a worker without the
prefix, this one takes 40 blocks more than it has to.

Those who come later do not find the space that is free now, because requests come and go while this
one runs. A worker with 200 free blocks may then be full. So the space that they find is spread
around what is free now, by as much as it changed while recent requests ran.

A prefix that workers hold twice takes space twice, for as long as requests come to both. If one of
them has only one request left that holds it, the space comes free when that one ends, unless this
one goes there. So a request is charged for the part of its time in which it would hold a block
alone: for all of it if no request holds the block, for 0.26 of it if one does.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from random import Random

from beluga.router.load.estimate import CostEstimator
from beluga.router.policies.pick import chosen, generator, lowest, some
from beluga.router.policy import Candidate, Choice, Query, Usual


@dataclasses.dataclass(kw_only=True)
class LeastCost:
    """The lowest cost wins, and a random one of equal costs. The estimator has all constants; the
    rest is learned from the requests of the recent past.
    """

    estimator: CostEstimator = dataclasses.field(default_factory=CostEstimator)
    seed: int = 0
    random: Random = dataclasses.field(init=False, repr=False)

    name = "least-cost"
    uses_overlap = True

    def __post_init__(self) -> None:
        self.random = generator(self.seed)

    def choose(self, query: Query, candidates: Sequence[Candidate]) -> Choice:
        usual = query.usual
        prompt = -(-query.isl // query.block_size)
        typical = usual.blocks or max(prompt, 1)
        answer_s = (usual.ended * usual.decode_s + self.estimator.answer_s()) / (usual.ended + 1)
        active = sum(candidate.load.active_requests for candidate in some(candidates))
        # By Little's law as many requests come while this one runs as are active now, with it.
        followers = active / len(candidates) + 1
        # What is copied into HBM evicts as much, which would have been hit this often.
        reuse = usual.on_device / typical
        tail = prompt - len(query.sequence)
        # Blocks that other requests hold are taken for the time in which it holds them alone.
        taken = [each.new_blocks + tail + each.held_alone for each in candidates]
        fewest = min(taken)
        bound = 1 - fewest * len(taken) / sum(taken) if fewest else 1.0  # share of followers
        costs, estimates = [], []
        for candidate, more in zip(candidates, taken, strict=True):
            load = candidate.load
            estimate = self.estimator(query, candidate, 0)
            blocks = load.kv_total_blocks or self.estimator.device_blocks(query.block_size)
            held = load.held_blocks
            free = blocks - held
            excess = candidate.new_blocks + tail - free
            blocked_s = answer_s * _rounds(excess, blocks, held, load.active_requests)
            ttft_s = max(estimate.queue_s, estimate.transfer_s + blocked_s) + estimate.prefill_s
            spread = _spread(usual, typical, held, load.active_requests)
            after = _missing(free - more, spread)
            by_bound = after - _missing(free, spread)
            by_free = after - _missing(free - fewest, spread)
            missing = bound * by_bound + (1 - bound) * by_free
            others_s = followers * answer_s * missing / blocks
            costs.append(ttft_s + reuse * estimate.transfer_s + others_s)
            estimates.append(estimate)
        place = lowest(costs, self.random)
        choice = chosen(query, candidates[place], costs[place], costs)
        choice.prefill_s = estimates[place].added_s
        return choice


def _rounds(excess: float, blocks: int, held: int, requests: int) -> float:
    """Return the wait for ``excess`` blocks of a worker, as a multiple of the time of an answer.

    In that time all ``blocks`` come free once. Nothing comes free before one of the requests that
    run together ends.
    """
    if excess <= 0 or not requests:
        return 0.0
    together = min(requests, blocks * requests // max(held, 1))
    return max(excess / blocks, 1 / max(together, 1))


def _spread(usual: Usual, typical: float, held: int, requests: int) -> float:
    """Return the standard deviation of what a later request needs beyond the blocks that are free.

    Its prompt contributes ``typical``. The rest is the change of ``held`` while requests come and
    go, as it was over the time of each request that has ended. Before that it is derived: if
    ``requests`` of them with m = held / requests blocks run for T seconds in the mean, which is
    distributed exponentially as their sizes are, then after t seconds the change has the variance
    requests * (1 - exp(-2t / T)) * 2m². Over the time of one request, the mean of 1 - exp(-2t / T)
    is 2/3. So 25 requests with 400 blocks change by 92. This counts like one ended request.
    """
    derived = held**2 * 4 / 3 / max(requests, 1)
    change = (usual.ended * usual.change + derived) / (usual.ended + 1)
    return math.sqrt(typical**2 + change)


def _missing(free: float, spread: float) -> float:
    """Return how many blocks a later request is expected to miss if ``free`` ones are left now.

    What it needs beyond them is assumed to have a Laplace distribution with the standard deviation
    ``spread``, whose tails are heavier than a normal one's: requests come in bursts.
    """
    scale = spread / math.sqrt(2)
    beyond = scale / 2 * math.exp(-abs(free) / scale)
    return beyond if free > 0 else beyond - free
