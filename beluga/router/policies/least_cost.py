# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Least cost: the request's expected time to first token, plus the delay that it causes for others.

Three resources of a worker cost time: its steps (the waiting prefills, and this one), its link
(blocks copied from the pool or from its own memory), and its HBM, which a request holds until its
answer ends. Every term is in seconds. An example for HBM: a worker has 470 blocks, its requests
hold 440, and this request needs 50, so it must wait until 20 blocks are free. On another worker
requests hold 200 blocks. There it need not wait, but a large next request may have to.

Whether the next request suffers depends on whether it can go to another worker. It is assumed to be
like this one. If this one needs 50 blocks on every worker, the next one can go anywhere, and loses
nothing. If this one needs 10 blocks on the worker that has its prefix, and 50 on each of the
others, most requests are bound to a worker, and lose the space that is taken there; on a worker
without the prefix, this one takes 40 blocks more than necessary.

Later requests do not find the space that is free now, because requests come and go while this one
runs. A worker with 200 free blocks may then be full. So the free space is modelled as a
distribution around its current value, with the variance observed while recent requests ran.

A prefix that two workers hold takes space twice, for as long as both receive requests for it. If
only one request on a worker still holds it, its end frees the space, unless this request goes
there. So a request is charged for the part of its time in which it is the only holder of a block:
all of it if no other request holds the block, 0.26 of it if one does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from random import Random

from beluga._ffi import ffi, lib
from beluga.router.load.estimate import CostEstimator, Estimate
from beluga.router.policies.pick import chosen, generator, lowest, some
from beluga.router.policy import Candidate, Choice, Query


@dataclasses.dataclass(kw_only=True)
class LeastCost:
    """The lowest cost wins, and a random one of equal costs. The estimator has all constants; the
    rest is estimated from recent requests.
    """

    estimator: CostEstimator = dataclasses.field(default_factory=CostEstimator)
    seed: int = 0
    random: Random = dataclasses.field(init=False, repr=False)

    name = "least-cost"
    uses_overlap = True

    def __post_init__(self) -> None:
        self.random = generator(self.seed)

    def choose(self, query: Query, candidates: Sequence[Candidate]) -> Choice:
        rows = some(candidates)
        usual, count = query.usual, len(rows)
        prompt = -(-query.isl // query.block_size)
        typical = usual.blocks or max(prompt, 1)
        answer_s = (usual.ended * usual.decode_s + self.estimator.answer_s()) / (usual.ended + 1)
        pressure = ffi.new("bl_pressure *")
        pressure.tail = prompt - len(query.sequence)
        pressure.device_blocks = self.estimator.device_blocks(query.block_size)
        pressure.answer_s = answer_s
        # Blocks copied into HBM evict as many others, which would have been hit this often.
        pressure.reuse = usual.on_device / typical
        pressure.typical_square = typical**2
        pressure.change_sum = usual.ended * usual.change
        pressure.ended = usual.ended + 1
        estimates = self.estimator.rows(query, rows)
        found = ffi.new("double[]", count)
        lib.bl_least_costs(pressure, rows.rows, estimates, count, found)
        costs = ffi.unpack(found, count)
        place = lowest(costs, self.random)
        choice = chosen(query, rows[place], costs[place], costs)
        best = estimates[place]
        choice.prefill_s = Estimate(best.queue_s, best.prefill_s, best.transfer_s).added_s
        return choice
