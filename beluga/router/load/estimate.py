# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The estimate of a worker's time to the first token, from a model's published costs.

min-ttft uses it if its caller has no better one. It is a router's guess, which knows neither the
engine's batches nor the load of the link.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from beluga.router.load.costs import DEFAULT_MODEL, GPU_PATHS, MODELS, ModelCosts
from beluga.router.policy import Candidate, Query


class Estimate(NamedTuple):
    """The seconds until a first token, in parts, and between the later tokens."""

    queue_s: float
    prefill_s: float
    transfer_s: float
    between_tokens_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        return self.queue_s + self.prefill_s + self.transfer_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostEstimator:
    """An estimator in which each waiting prompt costs the linear part of its tokens. Blocks that
    are not on the device, and those fetched from another worker, are copied over one link of the
    given speed.
    """

    costs: ModelCosts = MODELS[DEFAULT_MODEL]
    bytes_per_s: float = GPU_PATHS["root-complex"]

    def __call__(self, query: Query, candidate: Candidate, fetched: int) -> Estimate:
        costs, load, overlap = self.costs, candidate.load, candidate.overlap
        size = query.block_size
        cached = min((overlap.blocks + fetched) * size, query.isl)
        moved = (overlap.blocks - overlap.device + fetched) * size
        context = load.active_decode_blocks * size
        return Estimate(
            queue_s=costs.b * load.active_prefill_tokens / 1e3,
            prefill_s=costs.prefill_ms(query.isl - cached, cached) / 1e3,
            transfer_s=moved * costs.kv_bytes_per_token / self.bytes_per_s,
            between_tokens_s=(costs.decode_ms(load.active_requests + 1, context) + costs.h) / 1e3,
        )
