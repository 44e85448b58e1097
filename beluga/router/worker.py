# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A worker as a router sees it: one rank of one engine, what it has to do, what it holds."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple


class Worker(NamedTuple):
    """One data-parallel rank of one engine instance, Dynamo's (worker_id, dp_rank)."""

    worker_id: int
    dp_rank: int = 0


@dataclasses.dataclass(slots=True)
class WorkerMetrics:
    """What a worker publishes of itself: the fields of Dynamo's first KvMetricsPublisher, in the
    order of its positional call.
    """

    request_active_slots: int = 0
    request_total_slots: int = 0
    kv_active_blocks: int = 0
    kv_total_blocks: int = 0
    num_requests_waiting: int = 0
    gpu_cache_usage_perc: float = 0.0  # 0..1
    gpu_prefix_cache_hit_rate: float = 0.0  # 0..1


@dataclasses.dataclass(slots=True)
class Load(WorkerMetrics):
    """What a worker has to do: what it last published, 0 until it has, and the router's own account
    of the requests it sent there and has not seen end.
    """

    active_requests: int = 0
    active_prefill_tokens: int = 0  # not yet prefilled, cached ones not counted
    active_decode_blocks: int = 0  # distinct blocks of active requests
    outstanding_tokens: int = 0  # prompt tokens of requests before their first token; cache-blind

    def publish(self, metrics: WorkerMetrics) -> None:
        """Take over what the worker says of itself."""
        for field in dataclasses.fields(WorkerMetrics):
            setattr(self, field.name, getattr(metrics, field.name))


@dataclasses.dataclass(slots=True)
class Overlap:
    """Leading blocks of a request that are held, by tier; each counts the blocks *beyond* those
    of the tiers before it.
    """

    device: int = 0
    host: int = 0
    disk: int = 0
    shared: int = 0  # the pool's, which every worker reaches

    @property
    def held(self) -> int:
        """Leading blocks that the worker itself holds."""
        return self.device + self.host + self.disk

    @property
    def blocks(self) -> int:
        """All leading blocks that need not be computed."""
        return self.device + self.host + self.disk + self.shared
