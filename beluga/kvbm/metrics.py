# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The metrics of a block manager, its thresholds and its targets.

``beluga_kvbm_moved_blocks_total`` and the like have a series for each ``tier`` (the name of a
:class:`~beluga.kvbm.BlockPool`).
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from beluga.metrics import REGISTRY, SECONDS, Gauge, Histogram, Registry
from beluga.transfer import TransferClass

if TYPE_CHECKING:
    from beluga.kvbm.pool import BlockPool

PREFETCH_ABOVE = 0.7
"""The heat above which an expected key is prefetched."""

_QUANTILE = 0.99
_HEATS = (0.5, 0.6, PREFETCH_ABOVE, 0.8, 0.9, 1.0)

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

_READINGS: dict[str, Callable[[BlockPool], float]] = {
    "blocks": operator.attrgetter("total_blocks"),
    "available_blocks": operator.attrgetter("available_blocks"),
    "inflight_blocks": operator.attrgetter("inflight_blocks"),
    "usage_ratio": operator.attrgetter("usage"),
    "watermark_ratio": operator.attrgetter("watermark"),
    "offload_due": operator.attrgetter("offload_due"),
    "prefetch_heat_ratio": lambda _: PREFETCH_ABOVE,
}
"""The value of each gauge."""


TARGETS = {
    "available_share_min": 0.10,
    "inflight_share_max": 0.90,
    "allocation_s_max": 0.001,
    "release_s_max": 0.0005,
}
"""The targets of a healthy device: shares of its blocks, and 99th percentiles of times."""


@dataclass(frozen=True, slots=True)
class MissedTarget:
    """A missed target: the metric's name, its value, and the target."""

    name: str
    value: float
    target: float

    def __str__(self) -> str:
        return f"{self.name} is {self.value:.4g}, but its target is {self.target:.4g}"


def _name_and_help(name: str) -> tuple[str, str]:
    return f"beluga_kvbm_{name}", METRICS[name][1]


class BlockMetrics:
    """The metrics of one pool and its manager. The gauges hold a weak reference to the pool."""

    def __init__(self, pool: BlockPool, registry: Registry | None = None) -> None:
        self._registry = registry or REGISTRY
        counter, histogram = self._registry.counter, self._registry.histogram
        self.tier = pool.name
        self.allocation = histogram(*_name_and_help("allocation_seconds"), SECONDS)
        self.release = histogram(*_name_and_help("release_seconds"), SECONDS)
        self.heat = histogram(*_name_and_help("heat_ratio"), _HEATS)
        self.hits = counter(*_name_and_help("hit_blocks_total"))
        self.evictions = counter(*_name_and_help("evicted_blocks_total"))
        self.duplicates = counter(*_name_and_help("duplicate_blocks_total"))
        self.ghost_hits = counter(*_name_and_help("ghost_hits_total"))
        self._moved = counter(*_name_and_help("moved_blocks_total"))
        self._dropped = counter(*_name_and_help("dropped_blocks_total"))
        self._gauges: list[tuple[Gauge, dict[str, str]]] = []
        for name, read in _READINGS.items():
            self._show(pool, name, read)
        for target, limit in TARGETS.items():
            self._show(pool, "target", functools.partial(_constant, limit), target=target)
            is_missed = functools.partial(self._is_missed, target)
            self._show(pool, "target_missed", is_missed, target=target)

    def missed(self, pool: BlockPool) -> list[MissedTarget]:
        """Return the targets that the pool misses."""
        values = {
            "available_share_min": pool.available_blocks / pool.total_blocks,
            "inflight_share_max": pool.inflight_blocks / pool.total_blocks,
            "allocation_s_max": self._slow(self.allocation),
            "release_s_max": self._slow(self.release),
        }
        return [
            MissedTarget(name, value, limit)
            for name, limit in TARGETS.items()
            for value in [values[name]]
            if (value < limit if name.endswith("_min") else value > limit)
        ]

    def move(self, count: int, kind: TransferClass) -> None:
        """Count copied blocks."""
        self._moved.add(count, tier=self.tier, kind=kind.name.lower())

    def drop(self, count: int, kind: TransferClass, reason: str) -> None:
        """Count blocks that were dropped instead of copied."""
        if count:
            self._dropped.add(count, tier=self.tier, kind=kind.name.lower(), reason=reason)

    def close(self) -> None:
        """Remove the gauges of a closed pool."""
        for gauge, labels in self._gauges:
            gauge.remove(**labels)

    def _show(
        self, pool: BlockPool, name: str, read: Callable[[BlockPool], float], **labels: str
    ) -> None:
        gauge, labels = self._registry.gauge(*_name_and_help(name)), {**labels, "tier": self.tier}
        seen = weakref.ref(pool)
        gauge.set(lambda: 0.0 if (pool := seen()) is None else float(read(pool)), **labels)
        self._gauges.append((gauge, labels))

    def _is_missed(self, target: str, pool: BlockPool) -> bool:
        return any(missed.name == target for missed in self.missed(pool))

    def _slow(self, histogram: Histogram) -> float:
        return histogram.value(tier=self.tier).quantile(_QUANTILE)


def _constant(value: float, _: BlockPool) -> float:
    return value
