# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The policies that estimate times: Mooncake's min-ttft, and least-cost, the default."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from beluga._ffi import ffi, lib
from beluga.errors import ObjectiveError
from beluga.router.costs import CostEstimator, Estimate, first_tokens_s
from beluga.router.policies.base import SeededPolicy, as_table, choice_of, lowest, setting
from beluga.router.policy import Candidate, Choice, Query


class Estimator(Protocol):
    def __call__(self, query: Query, candidate: Candidate, fetched: int, /) -> Estimate:
        """Estimate the times if the candidate gets the request. ``fetched`` blocks, beyond the
        candidate's own ones, are copied to it from the worker with the longest prefix.
        """
        ...


@dataclasses.dataclass(kw_only=True)
class MinTtft(SeededPolicy):
    """Mooncake's policy (FAST '25 paper, algorithm 1): the lowest estimated time to the first token
    wins, and a random one of equal estimates.

    With a ``fetch_threshold``, a worker whose own prefix is shorter than the best one by more than
    that ratio is assumed to fetch the rest from that worker. Raises ObjectiveError if the winner
    would miss ``ttft_objective_s`` or ``between_tokens_objective_s``: Mooncake rejects such a
    request early.
    """

    estimator: Estimator = dataclasses.field(default_factory=CostEstimator)
    fetch_threshold: float | None = setting(
        None,
        "A worker fetches a prefix that is longer than its own by this ratio from another worker.",
    )
    ttft_objective_s: float | None = setting(
        None, "Refuse requests whose first token would take more seconds.", above_min=True
    )
    between_tokens_objective_s: float | None = setting(
        None, "Refuse requests if more seconds would pass between tokens.", above_min=True
    )

    name = "min-ttft"
    uses_overlap = True
    uses_estimator = True

    def choose(self, query: Query, candidates: Sequence[Candidate]) -> Choice:
        rows = as_table(candidates)
        hits = rows.hits()
        longest = max(hits)
        fetched = [self._fetched(blocks, longest) for blocks in hits]
        if isinstance(self.estimator, CostEstimator):
            table = self.estimator.table(query, rows, fetched)
            ttft_s = first_tokens_s(table)
            index = lowest(ttft_s, self.random)
            best = Estimate(*table[index].tolist())
        else:
            pairs = zip(rows, fetched, strict=True)
            estimates = [self.estimator(query, candidate, more) for candidate, more in pairs]
            ttft_s = [estimate.ttft_s for estimate in estimates]
            index = lowest(ttft_s, self.random)
            best = estimates[index]
        self._keep_objectives(best)
        choice = choice_of(query, rows[index], best.ttft_s, ttft_s)
        choice.prefill_s = best.added_s
        return choice

    def _fetched(self, own: int, longest: int) -> int:
        if self.fetch_threshold is None or longest <= own * self.fetch_threshold:
            return 0
        return longest - own

    def _keep_objectives(self, best: Estimate) -> None:
        for what, value, limit in (
            ("first token", best.ttft_s, self.ttft_objective_s),
            ("each token", best.between_tokens_s, self.between_tokens_objective_s),
        ):
            if limit is not None and value > limit:
                raise ObjectiveError(
                    f"the {what} would take at least {value:.3g} s, but the objective is "
                    f"{limit:.3g} s; send less, or add workers"
                )


@dataclasses.dataclass(kw_only=True)
class LeastCost(SeededPolicy):
    """The lowest cost wins, and a random one of equal costs: the request's expected time to first
    token, plus the delay that it causes for others. The estimator has all constants; the rest is
    estimated from recent requests.

    Three resources of a worker cost time: its steps (the waiting prefills, and this one), its link
    (blocks copied from the pool or from its own memory), and its HBM, which a request holds until
    its answer ends. Every term is in seconds. An example for HBM: a worker has 470 blocks, its
    requests hold 440, and this request needs 50, so it must wait until 20 blocks are free. On
    another worker requests hold 200 blocks. There it need not wait, but a large next request may
    have to.

    Whether the next request suffers depends on whether it can go to another worker. It is assumed
    to be like this one. If this one needs 50 blocks on every worker, the next one can go anywhere,
    and loses nothing. If this one needs 10 blocks on the worker that has its prefix, and 50 on each
    of the others, most requests are bound to a worker, and lose the space that is taken there; on a
    worker without the prefix, this one takes 40 blocks more than necessary.

    Later requests do not find the space that is free now, because requests come and go while this
    one runs. A worker with 200 free blocks may then be full. So the free space is modelled as a
    distribution around its current value, with the variance observed while recent requests ran.

    A prefix that two workers hold takes space twice, for as long as both receive requests for it.
    If only one request on a worker still holds it, its end frees the space, unless this request
    goes there. So a request is charged for the part of its time in which it is the only holder of a
    block: all of it if no other request holds the block, 0.26 of it if one does.
    """

    estimator: CostEstimator = dataclasses.field(default_factory=CostEstimator)

    name = "least-cost"
    uses_overlap = True
    uses_estimator = True

    def choose(self, query: Query, candidates: Sequence[Candidate]) -> Choice:
        rows = as_table(candidates)
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
        cost_row = ffi.new("double[]", count)
        lib.bl_least_costs(pressure, rows.rows, estimates, count, cost_row)
        costs = ffi.unpack(cost_row, count)
        index = lowest(costs, self.random)
        choice = choice_of(query, rows[index], costs[index], costs)
        best = estimates[index]
        choice.prefill_s = Estimate(best.queue_s, best.prefill_s, best.transfer_s).added_s
        return choice
