# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A worker as a router sees it (one rank of one engine), with its load and its overlap."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple


class Worker(NamedTuple):
    """One data-parallel rank of one engine instance: Dynamo's (worker_id, dp_rank)."""

    worker_id: int
    dp_rank: int = 0


@dataclasses.dataclass(slots=True)
class WorkerMetrics:
    """The metrics that a worker publishes: the fields of Dynamo's first KvMetricsPublisher, in the
    order of its positional call.
    """

    request_active_slots: int = 0
    request_total_slots: int = 0
    kv_active_blocks: int = 0
    kv_total_blocks: int = 0
    num_requests_waiting: int = 0
    gpu_cache_usage_perc: float = 0.0  # 0..1
    gpu_prefix_cache_hit_rate: float = 0.0  # 0..1


_PUBLISHED = tuple(field.name for field in dataclasses.fields(WorkerMetrics))


@dataclasses.dataclass(slots=True)
class Load(WorkerMetrics):
    """The load of a worker: its last published metrics (0 before the first), and the router's own
    account of the requests that it sent there and that have not ended.
    """

    active_requests: int = 0
    active_prefill_tokens: int = 0  # tokens not yet prefilled, without cached ones
    prefill_s: float = 0.0  # seconds that these prefills should still take, where predicted
    active_decode_blocks: int = 0  # distinct blocks of active requests
    # prompt tokens of requests before their first token, with cached ones
    outstanding_tokens: int = 0

    @property
    def held_blocks(self) -> int:
        """The blocks of HBM that requests hold. The worker's count has those of answers, too, and
        the router's those of waiting prompts.
        """
        return max(self.active_decode_blocks, self.kv_active_blocks)

    def publish(self, metrics: WorkerMetrics) -> None:
        """Take the metrics that the worker published."""
        for name in _PUBLISHED:
            setattr(self, name, getattr(metrics, name))


@dataclasses.dataclass(slots=True)
class Overlap:
    """The leading blocks of a request that are held, by tier. Each tier counts only the blocks
    *beyond* those of the tiers before it.
    """

    device: int = 0
    host: int = 0
    disk: int = 0
    shared: int = 0  # blocks of the pool, which every worker can read

    @property
    def held(self) -> int:
        """The leading blocks that the worker itself holds."""
        return self.device + self.host + self.disk

    @property
    def blocks(self) -> int:
        """All leading blocks that need not be computed."""
        return self.device + self.host + self.disk + self.shared
