# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The prefill cost: the blocks that a worker would have to prefill, minus a credit for cached
blocks.

Dynamo's ``linear`` and ``lmetric`` share this part. For every worker a block in the pool counts
``shared_credit`` of a block on the device. At 1, with equal device overlap, all workers have the
same credit, and only load decides.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from random import Random

from beluga.router.policies.pick import generator, some
from beluga.router.policy import Candidate, Query


@dataclasses.dataclass(kw_only=True)
class PrefillCost:
    """The settings with Dynamo's defaults; the comments have the letters of its formula."""

    seed: int = 0
    credit: float = 1.0  # c, per block on the device
    host_credit: float = 0.75
    disk_credit: float = 0.25
    shared_credit: float = 0.0  # m; Dynamo uses 0.5 when its shared cache is on
    decay: float = 0.0  # d: how fast device credit decreases as a worker's prefills accumulate
    track_prefill: bool = True
    temperature: float = 0.0  # the temperature of the softmax draw; 0 takes the lowest cost
    random: Random = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.random = generator(self.seed)

    def credits(self, query: Query, candidates: Sequence[Candidate]) -> list[float]:
        """Return the blocks credited to each candidate. Raises NoWorkersError without
        candidates.
        """
        rows = some(candidates)
        device, host, disk = self.credit, self.host_credit, self.disk_credit
        shared = self.shared_credit
        tiers = [rows.counts(name) for name in ("device", "host", "disk", "shared")]
        found = [
            device * on_device + host * on_host + disk * on_disk + shared * in_pool
            for on_device, on_host, on_disk, in_pool in zip(*tiers, strict=True)
        ]
        if self.decay:
            tokens = rows.counts("active_prefill_tokens")
            least = min(tokens)
            per_token = self.decay / query.block_size / max(-(-query.isl // query.block_size), 1)
            for place, on_device in enumerate(tiers[0]):
                kept = 1 / (1 + per_token * (tokens[place] - least))
                found[place] -= device * on_device * (1 - kept)
        return found

    def prefills(
        self, query: Query, candidates: Sequence[Candidate], credits_: Sequence[float]
    ) -> list[float]:
        """Return max(raw - credit, 0) of each candidate in blocks; raw is the sum of its waiting
        prompts and this one.
        """
        if not self.track_prefill:
            return [0.0] * len(candidates)
        size, isl, rows = query.block_size, query.isl, some(candidates)
        raw = [
            tokens + max(isl, blocks * size)
            for tokens, blocks in zip(
                rows.counts("active_prefill_tokens"), rows.found(), strict=True
            )
        ]
        return [max(tokens / size - c, 0.0) for tokens, c in zip(raw, credits_, strict=True)]
