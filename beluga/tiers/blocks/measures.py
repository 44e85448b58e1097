# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The metrics of a block pool, and the targets that they are held against."""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass
from typing import Protocol

from beluga.metrics import REGISTRY, Histogram, Registry

_QUANTILE = 0.99


@dataclass(frozen=True, slots=True)
class Targets:
    """What a healthy pool keeps. Shares are of the pool's blocks, latencies those of 99 % of the
    calls.
    """

    available_share_min: float = 0.10
    inflight_share_max: float = 0.90
    allocation_s_max: float = 0.001
    release_s_max: float = 0.0005


@dataclass(frozen=True, slots=True)
class Alert:
    """A target that is missed: the metric's name, its value, and the target."""

    name: str
    value: float
    target: float

    def __str__(self) -> str:
        return f"{self.name} is {self.value:.4g}, its target is {self.target:.4g}"


class Counted(Protocol):
    """What the gauges read of a pool."""

    @property
    def available_blocks(self) -> int:
        """Blocks that are free or may be evicted."""

    @property
    def inflight_blocks(self) -> int:
        """Blocks that have a user."""

    @property
    def total_blocks(self) -> int:
        """All blocks."""


class PoolMetrics:
    """Gauges, counters and histograms of one pool, under the label ``tier``."""

    def __init__(self, name: str, pool: Counted, registry: Registry | None = None) -> None:
        registry = REGISTRY if registry is None else registry
        self.tier = name
        self.allocation = registry.histogram(
            "beluga_tier_allocation_latency_seconds", "Time from a reserve call to its blocks."
        )
        self.release = registry.histogram(
            "beluga_tier_release_latency_seconds", "Duration of a release call."
        )
        self.evictions = registry.counter(
            "beluga_tier_evictions_total", "Registered blocks that were evicted."
        )
        self.duplicates = registry.counter(
            "beluga_tier_duplicate_blocks_total", "Blocks that were registered under a known key."
        )
        self.ghost_hits = registry.counter(
            "beluga_tier_ghost_hits_total", "Misses of keys that were evicted not long ago."
        )
        self._gauges = [
            (registry.gauge(f"beluga_tier_{gauge}", text), gauge)
            for gauge, text in (
                ("available_blocks", "Blocks that are free or may be evicted."),
                ("inflight_blocks", "Blocks that have a user."),
                ("total_blocks", "Blocks of the tier."),
                ("utilization", "The share of blocks in flight among those and the available."),
            )
        ]
        seen = weakref.ref(pool)
        for gauge, attribute in self._gauges:
            gauge.set(functools.partial(_reading, seen, attribute), tier=name)

    def missed(self, pool: Counted, targets: Targets) -> list[Alert]:
        """Return the targets that the pool misses."""
        available = pool.available_blocks / pool.total_blocks
        inflight = pool.inflight_blocks / pool.total_blocks
        allocation, release = self._slow(self.allocation), self._slow(self.release)
        least, most = targets.available_share_min, targets.inflight_share_max
        checks = (
            ("available_blocks / total_blocks", available, least, available > least),
            ("inflight_blocks / total_blocks", inflight, most, inflight < most),
            (
                "allocation_latency",
                allocation,
                targets.allocation_s_max,
                allocation <= targets.allocation_s_max,
            ),
            ("release_latency", release, targets.release_s_max, release <= targets.release_s_max),
        )
        return [Alert(name, value, target) for name, value, target, met in checks if not met]

    def close(self) -> None:
        """Remove the gauges, whose pool has ended."""
        for gauge, _ in self._gauges:
            gauge.remove(tier=self.tier)

    def _slow(self, histogram: Histogram) -> float:
        return histogram.value(tier=self.tier).quantile(_QUANTILE)


def _reading(seen: weakref.ref[Counted], attribute: str) -> float:
    pool = seen()
    return 0.0 if pool is None else float(getattr(pool, attribute))
