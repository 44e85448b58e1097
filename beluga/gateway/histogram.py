# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A histogram for prometheus_client that costs a request little.

prometheus_client's own histogram locks, and looks for the bucket, for each value. Here a single
value is only listed, and many of them are counted at once. A stream has a value for each of its
events, so a request counts these in a :class:`BucketCounts` of its own.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.utils import floatToGoString


class BucketCounts:
    """Counts of values by bucket, for one thread. ``counts[i]`` has those in (bounds[i - 1],
    bounds[i]], and the last count those above all bounds.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def times(self) -> int:
        """How many values there were."""
        return sum(self.counts)


LISTED_MAX = 256
"""How many values of a series are listed before they are counted."""


class RequestHistogram:
    """A histogram with one label, or none."""

    def __init__(
        self,
        name: str,
        what: str,
        bounds: tuple[float, ...],
        *,
        registry: CollectorRegistry,
        label: str = "",
    ) -> None:
        self._name, self._what, self._bounds, self._label = name, what, bounds, label
        self._lock = threading.Lock()
        self._series: dict[str, BucketCounts] = {} if label else {"": BucketCounts(bounds)}
        self._listed: dict[str, list[float]] = {}  # any thread may append
        registry.register(self)

    def empty(self) -> BucketCounts:
        """Return counts without values, for a request to fill and then to :meth:`merge`."""
        return BucketCounts(self._bounds)

    def observe(self, value: float, label: str = "") -> None:
        """Note a value."""
        listed = self._listed.get(label)
        if listed is None:
            listed = self._listed.setdefault(label, [])
        listed.append(value)
        if len(listed) >= LISTED_MAX:
            with self._lock:
                self._count(label, listed)

    def merge(self, counts: BucketCounts, label: str = "") -> None:
        """Add the values that a request has counted."""
        with self._lock:
            own = self._of(label)
            own.counts = [a + b for a, b in zip(own.counts, counts.counts, strict=True)]
            own.total += counts.total

    def whole(self) -> tuple[float, int]:
        """Return the sum of all values, and how many there are."""
        with self._lock:
            self._count_all()
            series = list(self._series.values())
            return sum(each.total for each in series), sum(each.times for each in series)

    def describe(self) -> list[HistogramMetricFamily]:
        """Return the metric without values, so that the registry has its name."""
        return [HistogramMetricFamily(self._name, self._what)]

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Yield the metric as prometheus_client writes it."""
        found = HistogramMetricFamily(
            self._name, self._what, labels=(self._label,) if self._label else ()
        )
        with self._lock:
            self._count_all()
            series = [(name, list(one.counts), one.total) for name, one in self._series.items()]
        for name, counts, total in series:
            below, buckets = 0, []
            for bound, count in zip((*self._bounds, float("inf")), counts, strict=True):
                below += count
                buckets.append((floatToGoString(bound), below))
            found.add_metric((name,) if self._label else (), buckets, total)
        yield found

    def _count_all(self) -> None:
        for label, listed in list(self._listed.items()):
            self._count(label, listed)

    def _count(self, label: str, listed: list[float]) -> None:
        """Count the listed values. Others may be appended meanwhile."""
        values = listed[:]
        del listed[: len(values)]
        counts = self._of(label)
        for value in values:
            counts.add(value)

    def _of(self, label: str) -> BucketCounts:
        found = self._series.get(label)
        if found is None:
            found = self._series[label] = BucketCounts(self._bounds)
        return found
