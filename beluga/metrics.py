# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""One registry of counters, gauges and histograms for tiers, links, engines, connectors and the
gateway.

Names and units follow Prometheus: ``beluga_tier_saved_bytes_total``, seconds, bytes. Each series of
a metric has its labels::

    SAVED = REGISTRY.counter("beluga_tier_saved_bytes_total", "Bytes that a tier has stored.")
    SAVED.add(4096, tier="disk:/mnt/nvme0")
    REGISTRY.snapshot()["beluga_tier_saved_bytes_total"].series[(("tier", "disk:/mnt/nvme0"),)]

Every method may be called by any thread. Nothing here needs another library: an exporter reads
:meth:`Registry.snapshot`, and :func:`prometheus_text` writes it.
"""

from __future__ import annotations

import bisect
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

Labels: TypeAlias = "tuple[tuple[str, str], ...]"
"""The labels of one series: pairs of a name and a value, sorted."""

SECONDS: tuple[float, ...] = (1e-5, 1e-4, 5e-4, 1e-3, 5e-3, 1e-2, 5e-2, 0.1, 0.5, 1.0, 5.0)
"""The bounds of a histogram of times, in seconds."""

_LISTED_MAX = 256  # values that are listed before they are counted


@dataclass(frozen=True, slots=True)
class Distribution:
    """A histogram's series. ``counts[i]`` has the values in (bounds[i - 1], bounds[i]], and the
    last count those above all bounds.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        """How many values there were."""
        return sum(self.counts)

    def quantile(self, share: float) -> float:
        """Return the least bound that at least ``share`` of the values do not exceed; infinity if
        that is none, 0 without values.
        """
        counted, rank = 0, share * self.count
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            counted += count
            if counted >= rank:
                return bound if self.count else 0.0
        return 0.0


@dataclass(frozen=True, slots=True)
class Sample:
    """The state of one metric. ``kind`` is counter, gauge or histogram."""

    kind: str
    help: str
    series: dict[Labels, float | Distribution]


_Series = TypeVar("_Series")


class _Metric(Generic[_Series]):
    """A name, and a series for each set of labels."""

    def __init__(self, name: str, text: str) -> None:
        self.name, self.help = name, text
        self._lock = threading.Lock()
        self._series: dict[Labels, _Series] = {}

    def remove(self, **labels: str) -> None:
        """Remove the series of these labels, if it exists."""
        with self._lock:
            self._series.pop(_labels(labels), None)


class Counter(_Metric[float]):
    """A number that only grows, for each set of labels."""

    kind = "counter"

    def add(self, amount: float = 1, **labels: str) -> None:
        """Add to the series of these labels. Raises ValueError for a negative amount."""
        if amount < 0:
            raise ValueError(f"{self.name} is a counter and cannot fall by {-amount}")
        key = _labels(labels)
        with self._lock:
            self._series[key] = self._series.get(key, 0) + amount

    def value(self, **labels: str) -> float:
        """Return the series of these labels; 0 if there is none."""
        return self._series.get(_labels(labels), 0)

    def sample(self) -> Sample:
        """Return all series."""
        with self._lock:
            return Sample(self.kind, self.help, dict(self._series))


class Gauge(_Metric["float | Callable[[], float]"]):
    """A number that rises and falls, for each set of labels. It may be a function, which is called
    when the gauge is read.
    """

    kind = "gauge"

    def set(self, value: float | Callable[[], float], **labels: str) -> None:
        """Set the series of these labels to a number, or to a function that returns it."""
        with self._lock:
            self._series[_labels(labels)] = value

    def value(self, **labels: str) -> float:
        """Return the series of these labels; 0 if there is none."""
        value = self._series.get(_labels(labels), 0)
        return value() if callable(value) else value

    def sample(self) -> Sample:
        """Return all series."""
        with self._lock:
            series = dict(self._series)
        now = {key: value() if callable(value) else value for key, value in series.items()}
        return Sample(self.kind, self.help, dict(now))


class HistogramSeries:
    """The values of one set of labels. A value is only listed, and many are counted at once, which
    costs a request of the gateway less.
    """

    __slots__ = ("_counts", "_listed", "_lock", "_total", "bounds")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self._lock = threading.Lock()
        self._counts, self._total = [0] * (len(bounds) + 1), 0.0
        self._listed: list[float] = []  # any thread may append

    def observe(self, value: float) -> None:
        """Count one value."""
        self._listed.append(value)
        if len(self._listed) >= _LISTED_MAX:
            self.counted()

    def counted(self) -> Distribution:
        """Return all values."""
        with self._lock:
            values = self._listed[:]  # others may be appended meanwhile
            del self._listed[: len(values)]
            for value in values:
                self._counts[bisect.bisect_left(self.bounds, value)] += 1
            self._total += sum(values)
            return Distribution(self.bounds, tuple(self._counts), self._total)


class Histogram(_Metric[HistogramSeries]):
    """A distribution of values over fixed bounds, for each set of labels."""

    kind = "histogram"

    def __init__(self, name: str, text: str, bounds: Sequence[float] = SECONDS) -> None:
        super().__init__(name, text)
        self.bounds = tuple(bounds)

    def series(self, **labels: str) -> HistogramSeries:
        """Return the series of these labels."""
        key = _labels(labels)
        series = self._series.get(key)
        if series is None:
            with self._lock:
                series = self._series.setdefault(key, HistogramSeries(self.bounds))
        return series

    def observe(self, value: float, **labels: str) -> None:
        """Count one value in the series of these labels."""
        self.series(**labels).observe(value)

    def observe_all(self, values: Iterable[float], **labels: str) -> None:
        """Count values in the series of these labels."""
        series = self.series(**labels)
        for value in values:
            series.observe(value)

    def value(self, **labels: str) -> Distribution:
        """Return the series of these labels, which may be empty."""
        series = self._series.get(_labels(labels)) or HistogramSeries(self.bounds)
        return series.counted()

    def sample(self) -> Sample:
        """Return all series."""
        with self._lock:
            series = dict(self._series)
        return Sample(self.kind, self.help, {key: own.counted() for key, own in series.items()})


Metric: TypeAlias = "Counter | Gauge | Histogram"
_M = TypeVar("_M", Counter, Gauge, Histogram)


@dataclass(slots=True)
class Registry:
    """Metrics by name. Asking twice for a name returns the same metric."""

    _metrics: dict[str, Metric] = field(default_factory=dict)
    _included: dict[str, Mapping[str, Sample]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def counter(self, name: str, text: str) -> Counter:
        """Return the counter of this name. Raises ValueError if the name is of another kind."""
        return self._get(name, Counter, lambda: Counter(name, text))

    def gauge(self, name: str, text: str) -> Gauge:
        """Return the gauge of this name. Raises ValueError if the name is of another kind."""
        return self._get(name, Gauge, lambda: Gauge(name, text))

    def histogram(self, name: str, text: str, bounds: Sequence[float] = SECONDS) -> Histogram:
        """Return the histogram of this name. Raises ValueError if the name is of another kind."""
        return self._get(name, Histogram, lambda: Histogram(name, text, bounds))

    def include(self, source: str, samples: Mapping[str, Sample]) -> None:
        """Add the series of another process to each snapshot, until the next ones of ``source``."""
        with self._lock:
            self._included[source] = samples

    def snapshot(self) -> dict[str, Sample]:
        """Return the state of all metrics by name."""
        with self._lock:
            metrics, included = dict(self._metrics), list(self._included.values())
        samples = {name: metric.sample() for name, metric in metrics.items()}
        for more in included:
            for name, sample in more.items():
                own = samples.setdefault(name, Sample(sample.kind, sample.help, {}))
                own.series.update(sample.series)
        return dict(sorted(samples.items()))

    def _get(self, name: str, kind: type[_M], make: Callable[[], _M]) -> _M:
        with self._lock:
            metric = self._metrics.get(name)
            if metric is None:
                metric = self._metrics[name] = make()
        if not isinstance(metric, kind):
            raise ValueError(f"{name} is a {metric.kind} already")
        return metric


def _labels(labels: dict[str, str]) -> Labels:
    return tuple(sorted(labels.items()) if len(labels) > 1 else labels.items())


def prometheus_text(samples: Mapping[str, Sample]) -> str:
    """Return samples in Prometheus's text format, version 0.0.4."""
    return "".join(f"{line}\n" for name, sample in samples.items() for line in _lines(name, sample))


def _lines(name: str, sample: Sample) -> Iterator[str]:
    text = sample.help.replace("\\", "\\\\").replace("\n", "\\n")
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {sample.kind}"
    for labels, value in sample.series.items():
        if not isinstance(value, Distribution):
            yield f"{name}{_braced(labels)} {_number(value)}"
            continue
        counted = 0
        for bound, count in zip((*value.bounds, math.inf), value.counts, strict=True):
            counted += count
            yield f"{name}_bucket{_braced((*labels, ('le', _number(bound))))} {counted}"
        yield f"{name}_sum{_braced(labels)} {_number(value.total)}"
        yield f"{name}_count{_braced(labels)} {counted}"


def _braced(labels: Labels) -> str:
    pairs = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels)
    return f"{{{pairs}}}" if pairs else ""


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isfinite(value):
        return str(int(value)) if value == int(value) else repr(float(value))
    return {math.inf: "+Inf", -math.inf: "-Inf"}.get(value, "NaN")


REGISTRY = Registry()
"""The registry of this process."""
