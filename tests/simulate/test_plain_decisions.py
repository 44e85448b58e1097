# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Every decision of simulated runs is that of the policies in plain Python, on the state of each
tier and each request.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
from support.emulation import long
from support.plain_policies import PLAIN, plain_choice

from beluga.errors import AllWorkersBusyError
from beluga.router import Choice, Overlap, Query
from beluga.simulate import MEMORIES, Options, Scale, Trace, load_trace
from beluga.simulate.cluster import Cluster

QUICK = ("least-cost", "two-choices")  # one with costs of caches, and one that draws


@pytest.fixture(scope="module")
def trace() -> Trace:
    return load_trace(None)


class Checked:
    """A policy whose choices are compared."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.policy = cluster, cluster.router.policy
        self.name, self.uses_overlap = self.policy.name, self.policy.uses_overlap
        self.decisions = 0

    def choose(self, query: Query, candidates: Any) -> Choice:
        each = list(candidates)
        for candidate in each:
            self.compare(query, candidate)
        try:
            place, costs, prefill_s = plain_choice(self.policy, query, each)
        except ZeroDivisionError:  # each worker is full
            with pytest.raises(AllWorkersBusyError):
                self.policy.choose(query, candidates)
            raise AllWorkersBusyError("all") from None
        choice = self.policy.choose(query, candidates)
        assert choice.worker == each[place].worker
        assert list(choice.costs) == costs
        assert choice.prefill_s == prefill_s
        self.decisions += 1
        return choice

    def compare(self, query: Query, candidate: Any) -> None:
        """Compare a candidate with its worker's tiers and requests."""
        cluster, number = self.cluster, candidate.worker.worker_id
        tracker, request = cluster.router.tracker, cluster._routed
        assert candidate.load == tracker.load(candidate.worker)
        active = [one for one in cluster.requests if one.worker == number and math.isnan(one.done)]
        assert candidate.load.active_requests == len(active)
        if not self.uses_overlap:
            return
        held = {block for one in active for block in cluster._hashes[one.index]}
        assert candidate.new_blocks == len(set(query.sequence) - held)
        device = cluster._hbm[number].lead(request.ids, request.reusable)
        far = cluster.engines[number].far.tier.lead(request.ids, request.reusable)
        beyond = max(far - device, 0)
        expected = Overlap(device, host=beyond)
        if cluster.memory == "pool":
            expected = Overlap(device, shared=beyond)
        assert candidate.overlap == expected


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("policy", [*QUICK, *(long(name) for name in PLAIN if name not in QUICK)])
def test_simulated_decisions_are_those_of_plain_python(
    policy: str, memory: str, trace: Trace
) -> None:
    options = Options(workers=5, speed=6.0, hbm=12 << 30, scale=Scale(30.0, 2))
    cluster = Cluster(trace, options, policy=policy, memory=memory, seed=1)
    cluster.router.policy = checked = Checked(cluster)
    cluster.run()
    assert checked.decisions == len(trace) - cluster.refused
