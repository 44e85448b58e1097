# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The metrics of an engine's process, sent to the server's exporter as JSON."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from beluga.metrics import REGISTRY, Distribution, Labels, Sample


class PackedSeries(msgspec.Struct, array_like=True):
    """A series: its labels and its value."""

    labels: list[tuple[str, str]]
    value: float | Distribution


class PackedMetric(msgspec.Struct, array_like=True):
    """A metric, as :class:`beluga.metrics.Sample` has it."""

    name: str
    kind: str
    help: str
    series: list[PackedSeries]


class EngineReport(msgspec.Struct):
    """A line that the server reads: the metrics of an engine by its number."""

    engine: int
    metrics: list[PackedMetric]


def packed(samples: Mapping[str, Sample]) -> list[PackedMetric]:
    """Return samples in the form that JSON has."""
    return [
        PackedMetric(
            name,
            sample.kind,
            sample.help,
            [PackedSeries(list(labels), value) for labels, value in sample.series.items()],
        )
        for name, sample in samples.items()
    ]


def include(line: bytes) -> None:
    """Show an engine's metrics among those of this process, with its number as their label."""
    report = msgspec.json.decode(line, type=EngineReport)
    engine = str(report.engine)
    REGISTRY.include(
        engine,
        {
            metric.name: Sample(
                metric.kind,
                metric.help,
                {_labels(one, engine): one.value for one in metric.series},
            )
            for metric in report.metrics
        },
    )


def _labels(series: PackedSeries, engine: str) -> Labels:
    return tuple(sorted([("engine", engine), *series.labels]))
