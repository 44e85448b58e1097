# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The exporter's metrics at one moment, and the rates between two moments."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from beluga.live.snapshot import Rates
from beluga.metrics import Distribution

if TYPE_CHECKING:
    from collections.abc import Mapping

    from beluga.metrics import Sample

WINDOW_S = 5.0
REPORTED_WINDOW_S = 10.5  # two reports of every client


class Figures:
    """Metrics at ``at_s``, on the monotonic clock."""

    def __init__(self, samples: Mapping[str, Sample]) -> None:
        self.at_s = time.monotonic()
        self._samples = samples

    def series(self, name: str) -> list[tuple[dict[str, str], float]]:
        """Return the labels and values of a metric, given without a prefix; there may be none."""
        sample = self._samples.get(f"beluga_{name}") or self._samples.get(name)
        if sample is None:
            return []
        return [
            (dict(labels), value)
            for labels, value in sample.series.items()
            if not isinstance(value, Distribution)
        ]

    def total(self, name: str) -> float:
        """Return the sum of all series of a metric."""
        return sum(value for _, value in self.series(name))

    def count(self, name: str) -> int:
        """Return the sum as a whole number."""
        return int(self.total(name))

    def by(self, name: str, label: str) -> dict[str, float]:
        """Return the sums by the value of a label."""
        found: dict[str, float] = {}
        for labels, value in self.series(name):
            found[labels[label]] = found.get(labels[label], 0.0) + value
        return found


class RecentFigures:
    """The figures of the last seconds, and at least the latest ones."""

    def __init__(self) -> None:
        self._figures: deque[Figures] = deque()

    def add(self, now: Figures) -> None:
        """Add the current figures. Those of another epoch are dropped: the new server's counters
        began at 0.
        """
        if self._figures and self._figures[-1].total("server_epoch") != now.total("server_epoch"):
            self._figures.clear()
        self._figures.append(now)
        while len(self._figures) > 2 and now.at_s - self._figures[1].at_s > REPORTED_WINDOW_S:
            self._figures.popleft()

    def before(self, now: Figures, window_s: float) -> Figures | None:
        """Return the oldest figures of the window before ``now``, or the ones before it if there
        are none. Figures from before a pause between requests are not returned: a rate over the
        pause would not be a current rate.
        """
        others = [
            one
            for one in self._figures
            if one is not now and now.at_s - one.at_s <= max(window_s, REPORTED_WINDOW_S)
        ]
        inside = [one for one in others if now.at_s - one.at_s <= window_s]
        return inside[0] if inside else others[-1] if others else None


def rates_between(now: Figures, before: Figures, reported: Figures) -> Rates:
    """Return the rates since ``before``, and those of the clients' reports since ``reported``."""
    over_s = max(now.at_s - before.at_s, 1e-3)
    reported_over_s = max(now.at_s - reported.at_s, 1e-3)

    def rate(name: str) -> float:
        return max(now.total(name) - before.total(name), 0.0) / over_s

    def reported_rate(name: str) -> float:
        return max(now.total(name) - reported.total(name), 0.0) / reported_over_s

    lookups, hits = rate("lookup_keys_total"), rate("lookup_hits_total")
    earlier = before.by("rpc_calls_total", "method")
    methods = {
        name: (count - earlier.get(name, 0.0)) / over_s
        for name, count in now.by("rpc_calls_total", "method").items()
    }
    return Rates(
        over_s=over_s,
        reported_over_s=reported_over_s,
        calls=rate("rpc_calls_total"),
        errors=rate("rpc_errors_total"),
        keys=rate("rpc_keys_total"),
        lookups=lookups,
        hits=hits,
        hit_rate=hits / lookups if lookups else None,
        commits=rate("commits_total"),
        evictions=rate("evictions_total"),
        refusals=rate("refusals_total"),
        read_bytes=reported_rate("client_read_bytes_total"),
        written_bytes=reported_rate("client_written_bytes_total"),
        saved_tokens=reported_rate("saved_tokens_total"),
        processor=rate("process_cpu_seconds_total"),
        methods={name: value for name, value in methods.items() if value > 0},
    )
