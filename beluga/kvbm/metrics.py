# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The metrics of a block manager, its thresholds and its targets.

``beluga_kvbm_moved_blocks_total`` and the like have a series for each ``tier`` (the name of a
:class:`~beluga.kvbm.BlockPool`).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from beluga.metrics import REGISTRY, SECONDS, Counter, Gauge, Histogram, Registry
from beluga.transfer import TransferClass

PREFETCH_ABOVE = 0.7
"""The heat above which an expected key is prefetched."""

_QUANTILE = 0.99
_HEATS = (0.5, 0.6, PREFETCH_ABOVE, 0.8, 0.9, 1.0)


@dataclass(frozen=True, slots=True)
class Targets:
    """The targets of a healthy pool. Ratios are of the pool's blocks, latencies are 99th
    percentiles.
    """

    available_share_min: float = 0.10
    inflight_share_max: float = 0.90
    allocation_s_max: float = 0.001
    release_s_max: float = 0.0005


@dataclass(frozen=True, slots=True)
class MissedTarget:
    """A missed target: the metric's name, its value, and the target."""

    name: str
    value: float
    target: float

    def __str__(self) -> str:
        return f"{self.name} is {self.value:.4g}, but its target is {self.target:.4g}"


class MeasuredPool(Protocol):
    """The properties of a pool that the gauges read."""

    @property
    def available_blocks(self) -> int:
        """The number of blocks that are free or evictable."""

    @property
    def inflight_blocks(self) -> int:
        """The number of blocks in use."""

    @property
    def total_blocks(self) -> int:
        """The number of all blocks."""


METRICS = {
    "blocks": ("gauge", "Blocks of the device."),
    "available_blocks": ("gauge", "Blocks that are free or evictable."),
    "inflight_blocks": ("gauge", "Blocks in use by requests."),
    "usage_ratio": ("gauge", "Share of blocks that are in use or have content."),
    "watermark_ratio": ("gauge", "Usage above which blocks are offloaded."),
    "offload_due": ("gauge", "1 if the usage is above the watermark."),
    "prefetch_heat_ratio": ("gauge", "The heat above which keys are prefetched."),
    "target": ("gauge", "Targets of a healthy device, by name."),
    "target_missed": ("gauge", "1 if the target is missed now."),
    "heat_ratio": ("histogram", "Heat of keys when they were requested, from 0 to 1."),
    "allocation_seconds": ("histogram", "Time from a reserve call to its result."),
    "release_seconds": ("histogram", "Duration of a release call."),
    "hit_blocks_total": ("counter", "Leading blocks of prompts that the device had."),
    "evicted_blocks_total": ("counter", "Registered blocks that were evicted."),
    "duplicate_blocks_total": ("counter", "Blocks whose key was registered already."),
    "ghost_hits_total": ("counter", "Misses of recently evicted keys."),
    "moved_blocks_total": (
        "counter",
        "Copied blocks, by kind: offload to the pool, onboard or prefetch from it.",
    ),
    "dropped_blocks_total": ("counter", "Blocks that were not copied, by kind and reason."),
}
"""Type and help of each metric; the names are prefixed with ``beluga_kvbm_``."""

_READINGS = {
    "blocks": "total_blocks",
    "available_blocks": "available_blocks",
    "inflight_blocks": "inflight_blocks",
    "usage_ratio": "usage",
    "watermark_ratio": "watermark",
    "offload_due": "offload_due",
}
"""The attribute of a pool that each gauge exports."""


class _Declared:
    """Registers the metrics of the table."""

    def __init__(self, registry: Registry | None) -> None:
        self._registry = REGISTRY if registry is None else registry

    def counter(self, name: str) -> Counter:
        return self._registry.counter(f"beluga_kvbm_{name}", METRICS[name][1])

    def gauge(self, name: str) -> Gauge:
        return self._registry.gauge(f"beluga_kvbm_{name}", METRICS[name][1])

    def histogram(self, name: str, bounds: Sequence[float] = SECONDS) -> Histogram:
        return self._registry.histogram(f"beluga_kvbm_{name}", METRICS[name][1], bounds)


class PoolMetrics:
    """The metrics of one pool."""

    def __init__(self, name: str, pool: MeasuredPool, registry: Registry | None = None) -> None:
        declared = _Declared(registry)
        self.tier = name
        self._targets = Targets()
        self.allocation = declared.histogram("allocation_seconds")
        self.release = declared.histogram("release_seconds")
        self.heat = declared.histogram("heat_ratio", _HEATS)
        self.hits = declared.counter("hit_blocks_total")
        self.evictions = declared.counter("evicted_blocks_total")
        self.duplicates = declared.counter("duplicate_blocks_total")
        self.ghost_hits = declared.counter("ghost_hits_total")
        seen = weakref.ref(pool)
        self._gauges: list[tuple[Gauge, dict[str, str]]] = []
        for gauge, attribute in _READINGS.items():
            self._show(declared.gauge(gauge), functools.partial(_reading, seen, attribute))
        self._show(declared.gauge("prefetch_heat_ratio"), lambda: PREFETCH_ABOVE)
        values, missed = declared.gauge("target"), declared.gauge("target_missed")
        for target, (_, value, _) in self._checks(pool, self._targets).items():
            self._show(values, functools.partial(float, value), target=target)
            self._show(missed, functools.partial(self._is_missed, seen, target), target=target)

    def missed(self, pool: MeasuredPool, targets: Targets) -> list[MissedTarget]:
        """Return the targets that the pool misses."""
        checks = self._checks(pool, targets).items()
        return [
            MissedTarget(name, value, target) for name, (value, target, met) in checks if not met
        ]

    def close(self) -> None:
        """Remove the gauges of a closed pool."""
        for gauge, labels in self._gauges:
            gauge.remove(**labels)

    def _show(self, gauge: Gauge, reading: Callable[[], float], **labels: str) -> None:
        labels["tier"] = self.tier
        gauge.set(reading, **labels)
        self._gauges.append((gauge, labels))

    def _checks(self, pool: MeasuredPool, targets: Targets) -> dict[str, tuple[float, float, bool]]:
        """Return, by name, the value of each target, the target, and whether it is met."""
        available = pool.available_blocks / pool.total_blocks
        inflight = pool.inflight_blocks / pool.total_blocks
        allocation, release = self._slow(self.allocation), self._slow(self.release)
        least, most = targets.available_share_min, targets.inflight_share_max
        longest, slowest = targets.allocation_s_max, targets.release_s_max
        return {
            "available_share_min": (available, least, available > least),
            "inflight_share_max": (inflight, most, inflight < most),
            "allocation_s_max": (allocation, longest, allocation <= longest),
            "release_s_max": (release, slowest, release <= slowest),
        }

    def _is_missed(self, seen: weakref.ref[MeasuredPool], target: str) -> float:
        pool = seen()
        return 0.0 if pool is None else float(not self._checks(pool, self._targets)[target][2])

    def _slow(self, histogram: Histogram) -> float:
        return histogram.value(tier=self.tier).quantile(_QUANTILE)


class MoveMetrics:
    """Counters of a block manager, by the ``kind`` of a move: offload, onboard or prefetch."""

    def __init__(self, tier: str, registry: Registry | None = None) -> None:
        self._tier, declared = tier, _Declared(registry)
        self._moved = declared.counter("moved_blocks_total")
        self._dropped = declared.counter("dropped_blocks_total")

    def move(self, count: int, kind: TransferClass) -> None:
        """Count copied blocks."""
        self._moved.add(count, tier=self._tier, kind=kind.name.lower())

    def drop(self, count: int, kind: TransferClass, reason: str) -> None:
        """Count blocks that were dropped instead of copied."""
        if count:
            self._dropped.add(count, tier=self._tier, kind=kind.name.lower(), reason=reason)


def _reading(seen: weakref.ref[MeasuredPool], attribute: str) -> float:
    pool = seen()
    return 0.0 if pool is None else float(getattr(pool, attribute))
