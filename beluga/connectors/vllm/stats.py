# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The connector's counters as vLLM logs them, and as Prometheus metrics ``beluga_vllm_*``."""

from __future__ import annotations

import dataclasses
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client import Counter as PrometheusCounter
from prometheus_client import Gauge as PrometheusGauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from beluga.connectors.vllm.counters import NAMES, PREFIX, metric_name

SPACE = "space"  # the only entry that is not a count: 16 hexadecimal digits


def forget_collectors() -> None:
    """Unregister the metrics of an earlier engine of this process. vLLM does so only with its own
    ones, which have a colon in their names.
    """
    for collector in list(REGISTRY._collector_to_names):
        if getattr(collector, "_name", "").startswith(PREFIX):
            REGISTRY.unregister(collector)


@dataclasses.dataclass
class BelugaStats(KVConnectorStats):
    """Sums since the last report, with the names of ``counters``."""

    data: dict[str, Any] = dataclasses.field(default_factory=dict)

    def reset(self) -> None:
        """Set all sums to zero."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another process's stats."""
        for name, amount in other.data.items():
            self.data[name] = amount if name == SPACE else self.data.get(name, 0) + amount
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return what a log line shows."""
        return {name: round(self.data[name], 4) for name in NAMES if self.data.get(name)}

    def is_empty(self) -> bool:
        """Return whether all sums are zero."""
        return not any(self.data.values())


class BelugaMetrics(KVConnectorPromMetrics):
    """A Prometheus counter for each name and engine. ``beluga_vllm_space_info`` gives routers the
    space of the engine's blocks in the pool's events.
    """

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        forget_collectors()
        kind = metric_types[PrometheusCounter]
        self._counters: dict[str, dict[int, Any]] = {}
        for name, meaning in NAMES.items():
            counter = kind(
                name=metric_name(name),
                documentation=f"Beluga: {meaning}.",
                labelnames=labelnames,
            )
            self._counters[name] = {
                engine: counter.labels(*values) for engine, values in per_engine_labelvalues.items()
            }

        self._labels = per_engine_labelvalues
        self._space = metric_types[PrometheusGauge](
            name=f"{PREFIX}space_info",
            documentation="Beluga: the space of this engine's block names in the pool.",
            labelnames=[*labelnames, SPACE],
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add an engine's report."""
        for name, amount in transfer_stats_data.items():
            if name == SPACE:
                self._space.labels(*self._labels[engine_idx], amount).set(1)
            elif name in self._counters and amount > 0:
                self._counters[name][engine_idx].inc(amount)
