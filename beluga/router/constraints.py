# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Constraints: which workers may take a request at all, before any policy compares them.

They are Dynamo's hard filters in its order. The request's own demands come first, then workers over
the busy thresholds are excluded. A request pinned to an excluded worker is refused and never sent
to another one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from beluga.router.worker import Load, Worker


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """The requirements of a request; by default there are none."""

    pin: Worker | None = None
    allowed: frozenset[int] | None = None  # worker ids
    ranks: range | None = None  # dp ranks
    required_taints: frozenset[str] = frozenset()  # a worker must have each of these
    # each taint's weight
    preferred_taints: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def admit(self, worker: Worker, taints: frozenset[str]) -> bool:
        """Return whether the request may go to a worker with these taints."""
        return (
            (self.pin is None or worker == self.pin)
            and (self.allowed is None or worker.worker_id in self.allowed)
            and (self.ranks is None or worker.dp_rank in self.ranks)
            and self.required_taints <= taints
        )

    def taint_weight(self, taints: frozenset[str]) -> float:
        """Return the sum of the weights of the preferred taints that a worker has."""
        return math.fsum(
            weight for taint, weight in self.preferred_taints.items() if taint in taints
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BusyThresholds:
    """The thresholds above which a worker is overloaded; None disables a test. To change them at
    run time, replace the whole object.
    """

    decode_blocks: float | None = None  # share of kv_total_blocks, if the worker publishes it
    prefill_tokens: int | None = None
    prefill_batches: float | None = None  # in multiples of max_num_batched_tokens
    max_num_batched_tokens: int = 8192

    def overloaded(self, load: Load) -> bool:
        """Return whether a worker with this load exceeds any threshold."""
        tokens = load.active_prefill_tokens
        total = load.kv_total_blocks
        return (
            (self.prefill_tokens is not None and tokens > self.prefill_tokens)
            or (
                self.prefill_batches is not None
                and tokens > self.prefill_batches * self.max_num_batched_tokens
            )
            or (
                self.decode_blocks is not None
                and total > 0
                and load.active_decode_blocks > self.decode_blocks * total
            )
        )
