# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The metrics of several processes as those of one gateway.

Counters and histograms are added. A gauge is added if it counts what a process itself has: waiting
requests, for example. Every process observes the same workers and the same pool, so the maximum of
other gauges is used, and the minimum of a state for which 1 is good.

A process that has ended leaves its counts, so totals never decrease from one scrape to the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric

_ADDED = frozenset(
    (
        "dynamo_frontend_router_queue_pending_requests",
        "dynamo_frontend_worker_active_decode_blocks",
        "dynamo_frontend_worker_active_prefill_tokens",
        "beluga_gateway_worker_requests",
    )
)
_LEAST = frozenset(("beluga_gateway_pool_up_to_date",))


class Series(msgspec.Struct, array_like=True):
    """One number of a metric."""

    name: str
    labels: dict[str, str]
    value: float


class Family(msgspec.Struct, array_like=True):
    """A metric with all its series."""

    name: str
    kind: str
    text: str
    series: list[Series]

    @property
    def adds(self) -> bool:
        """Whether its series of several processes are added."""
        return self.kind in ("counter", "histogram") or self.name in _ADDED


def families_of(registry: CollectorRegistry) -> list[Family]:
    """Return all metrics of this process."""
    return [
        Family(
            metric.name,
            metric.type,
            metric.documentation,
            [
                Series(one.name, one.labels, one.value)
                for one in metric.samples
                if math.isfinite(one.value)  # JSON has no others
            ],
        )
        for metric in registry.collect()
    ]


def merged(processes: Iterable[Sequence[Family]]) -> list[Family]:
    """Return the metrics of several processes as one list."""
    found: dict[str, Family] = {}
    values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], Series]] = {}
    for families in processes:
        for family in families:
            own = values.setdefault(family.name, {})
            found.setdefault(family.name, family)
            for one in family.series:
                key = (one.name, tuple(sorted(one.labels.items())))
                before = own.get(key)
                if before is None:
                    own[key] = Series(one.name, one.labels, one.value)
                else:
                    before.value = _rule(family, one.name)((before.value, one.value))
    return [
        Family(name, family.kind, family.text, list(values[name].values()))
        for name, family in found.items()
    ]


def _rule(family: Family, name: str) -> Callable[[tuple[float, float]], float]:
    if name.endswith("_created") or family.name in _LEAST:
        return min
    return sum if family.adds else max


def counts_of(families: Iterable[Family], workers: Collection[str] | None = None) -> list[Family]:
    """Return the metrics that only grow, which outlive their process. With ``workers``, series of
    other workers are dropped.
    """
    kept = {"", *(workers or ())}
    return [
        Family(
            *(family.name, family.kind, family.text),
            [
                one
                for one in family.series
                if workers is None or one.labels.get("worker", "") in kept
            ],
        )
        for family in families
        if family.kind in ("counter", "histogram")
    ]


class _Merged:
    """Metrics for ``generate_latest``, which reads nothing else of a registry."""

    def __init__(self, families: Iterable[Family]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        for family in self._families:
            metric = Metric(family.name, family.text, family.kind)
            for one in family.series:
                metric.add_sample(one.name, one.labels, one.value)
            yield metric


def text_of(families: Iterable[Family]) -> bytes:
    """Return metrics in Prometheus's text format."""
    return bytes(generate_latest(_Merged(families)))
