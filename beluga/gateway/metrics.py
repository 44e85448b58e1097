# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The gateway's metrics for Prometheus, with Dynamo's names where there are any, and two from its
articles.

``dynamo_kv_hit_rate{worker}`` is the engine's own measurement if its metrics include it, otherwise
the policy's expectation. ``dynamo_routing_latency_seconds`` is the time from reading a request to
the choice. Output tokens are counted by their events.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.utils import floatToGoString

from beluga.gateway.engine import PROBLEMS, Engine
from beluga.gateway.parsed_request import ParsedRequest
from beluga.router import Choice, Indexer, Load, Query


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
    """A histogram with one label, or none, that costs a request little.

    prometheus_client's own locks, and looks for the bucket, for each value. Here a single value is
    only listed, and many of them are counted at once. A stream has a value for each of its events,
    so a request counts these in a :class:`BucketCounts` of its own.
    """

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
            return sum(figure.total for figure in series), sum(figure.times for figure in series)

    def describe(self) -> list[HistogramMetricFamily]:
        """Return the metric without values, so that the registry has its name."""
        return [HistogramMetricFamily(self._name, self._what)]

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Yield the metric as prometheus_client writes it."""
        family = HistogramMetricFamily(
            self._name, self._what, labels=(self._label,) if self._label else ()
        )
        with self._lock:
            self._count_all()
            series = [
                (name, list(counts.counts), counts.total) for name, counts in self._series.items()
            ]
        for name, counts, total in series:
            below, buckets = 0, []
            for bound, count in zip((*self._bounds, float("inf")), counts, strict=True):
                below += count
                buckets.append((floatToGoString(bound), below))
            family.add_metric((name,) if self._label else (), buckets, total)
        yield family

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
        counts = self._series.get(label)
        if counts is None:
            counts = self._series[label] = BucketCounts(self._bounds)
        return counts


_LATENCY_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0)
_OVERHEAD_MS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 50.0, 100.0)
_FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0)
_NEXT_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
_TOKENS = tuple(float(1 << power) for power in range(4, 21, 2))
_SHARE = tuple(step / 10 for step in range(11))


class Latency(NamedTuple):
    """A sum of seconds, and the number of summands."""

    seconds: float
    times: float


class Metrics:
    """Counts events. Each instance has its own registry, so several routers can run in one
    process.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self._by_router()
        self._by_worker()
        self._pool: dict[str, Gauge] = {}  # created when needed
        self._children: dict[tuple[object, ...], Any] = {}

    def _by_router(self) -> None:
        registry = self.registry
        prefix = "dynamo_component_router_"

        def histogram(name: str, what: str, bounds: tuple[float, ...]) -> RequestHistogram:
            return RequestHistogram(prefix + name, what, bounds, registry=registry, label="model")

        self._requests = Counter(
            prefix + "requests",
            "Requests by how they ended",
            ("model", "status"),
            registry=registry,
        )
        self._first = histogram("time_to_first_token_seconds", "Sent to first byte", _FIRST_TOKEN_S)
        self._next = histogram("inter_token_latency_seconds", "Between tokens", _NEXT_TOKEN_S)
        self._input = histogram("input_sequence_tokens", "Prompt lengths", _TOKENS)
        self._output = histogram("output_sequence_tokens", "Answer lengths", _TOKENS)
        self._hits = histogram("kv_hit_rate", "Expected share of cached tokens", _SHARE)
        self._cached = histogram("cached_tokens", "Expected cached tokens", _TOKENS)
        self._routing = RequestHistogram(
            "dynamo_routing_latency_seconds",
            "Request read to worker chosen",
            _LATENCY_S,
            registry=registry,
        )
        self._parts = {
            part: RequestHistogram(
                f"dynamo_router_overhead_{part}_ms",
                f"Routing: {part.replace('_', ' ')}",
                _OVERHEAD_MS,
                registry=registry,
            )
            for part in ("block_hashing", "indexer_find_matches", "seq_hashing", "scheduling")
        }
        self._total = RequestHistogram(
            "dynamo_router_overhead_total_ms", "Routing", _OVERHEAD_MS, registry=registry
        )
        self._events = Gauge(
            "dynamo_component_kv_cache_events_applied",
            "Blocks of KV events by kind and outcome",
            ("event_type", "status"),
            registry=registry,
        )
        self.pending = Gauge(
            "dynamo_frontend_router_queue_pending_requests", "Waiting requests", registry=registry
        )
        self._refused = Counter(
            "beluga_gateway_refused", "Requests without a worker", ("status",), registry=registry
        )

        self._text = Counter(
            "beluga_gateway_text_prompts",
            "Prompts hashed by their text, which match no block of KV events",
            registry=registry,
        )
        self._prefills = Counter(
            "beluga_gateway_prefills",
            "Prompts by where they were prefilled: beluga.disagg.PrefillOutcome",
            ("model", "course"),
            registry=registry,
        )

    def _of_pool(self) -> None:
        prefix = "beluga_gateway_pool_"
        self._pool = {
            name: Gauge(prefix + name, what, registry=self.registry)
            for name, what in (
                ("up_to_date", "1: the index is up to date with the pool's server"),
                ("blocks", "Blocks of the pool, in all spaces"),
                (
                    "blocks_without_parent",
                    "Blocks that cannot hit yet, because their parent is unknown",
                ),
                ("blocks_of_other_sizes", "Blocks announced with another number of tokens"),
                ("messages_unread", "Malformed messages and events"),
                ("messages_lost", "Messages that were missed and not replayed"),
                ("gaps", "Gaps in the sequence of messages"),
                ("restarts", "Restarts of the pool's server"),
                ("last_message_age_seconds", "Time since the last message of the pool's server"),
            )
        }

    def _by_worker(self) -> None:
        def gauge(name: str, what: str) -> Gauge:
            return Gauge(name, what, ("worker",), registry=self.registry)

        def counter(name: str, what: str) -> Counter:
            return Counter(
                f"beluga_gateway_worker_{name}", what, ("worker",), registry=self.registry
            )

        prefix = "dynamo_frontend_worker_"
        self._last_first = gauge(prefix + "last_time_to_first_token_seconds", "The last one")
        self._last_next = gauge(prefix + "last_inter_token_latency_seconds", "The last one")
        self._blocks = gauge(prefix + "active_decode_blocks", "Blocks of running requests")
        self._prefill = gauge(prefix + "active_prefill_tokens", "Tokens not yet prefilled")
        self._hit_rate = gauge("dynamo_kv_hit_rate", "Share of prompt tokens found in a cache")
        self._cache_usage = gauge(
            "beluga_gateway_worker_kv_usage_ratio", "KV memory in use, from the engine's metrics"
        )
        self._cache_blocks = gauge("beluga_gateway_worker_kv_blocks", "KV blocks of the engine")
        self._retries = counter("retries", "Requests that were then sent to another worker")
        self._sent = counter("prompt_tokens", "Prompt tokens sent to the worker")
        self._up = gauge("beluga_gateway_worker_up", "1: it gets requests")
        self._inflight = gauge("beluga_gateway_worker_requests", "Running requests")
        self._problem = Gauge(
            "beluga_gateway_worker_problem",
            "1: the router cannot follow this worker's cache or load; GET /workers has the reason",
            ("worker", "problem"),
            registry=self.registry,
        )
        self._of_worker = (
            self._last_first,
            self._last_next,
            self._blocks,
            self._prefill,
            self._hit_rate,
            self._cache_usage,
            self._cache_blocks,
            self._retries,
            self._sent,
            self._up,
            self._inflight,
        )

    def _of(self, metric: Any, *labels: str) -> Any:
        """Return a metric's child for these labels. It is cached, because the library's lookup
        costs more than the increment.
        """
        key = (metric, *labels)
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = metric.labels(*labels)
        return child

    def routed(
        self, parsed: ParsedRequest, query: Query, choice: Choice, engine: Engine, seconds: float
    ) -> None:
        """Record that a worker was chosen, ``seconds`` after the request was read."""
        self._of(self._sent, engine.url).inc(query.isl)
        model = parsed.model or ""
        self._routing.observe(seconds)
        self._total.observe(seconds * 1e3)
        self._input.observe(query.isl, model)
        self._hits.observe(choice.hit_rate, model)
        self._cached.observe(choice.hit_rate * query.isl, model)

    def part(self, name: str, seconds: float) -> None:
        """Record the duration of a part of routing."""
        self._parts[name].observe(seconds * 1e3)

    def first_token(self, parsed: ParsedRequest, engine: Engine, seconds: float) -> None:
        """Record the first byte of a response, ``seconds`` after the request was sent."""
        self._first.observe(seconds, parsed.model or "")
        if not engine.removed:
            self._of(self._last_first, engine.url).set(seconds)

    def gaps(self) -> BucketCounts:
        """Return empty counts for the seconds between an answer's tokens; see :meth:`tokens`."""
        return self._next.empty()

    def tokens(
        self, parsed: ParsedRequest, engine: Engine, gaps: BucketCounts, last_s: float
    ) -> None:
        """Record the seconds between tokens of a response; the last two were ``last_s`` apart."""
        self._next.merge(gaps, parsed.model or "")
        if not engine.removed:
            self._of(self._last_next, engine.url).set(last_s)

    def latencies(self) -> tuple[Latency, Latency]:
        """Return the latencies of first tokens and of later ones, for all models since the
        start.
        """
        return Latency(*self._first.whole()), Latency(*self._next.whole())

    def ended(self, parsed: ParsedRequest, status: str, tokens: int) -> None:
        """Record that a request has ended, with an HTTP status, ``broken``, ``unanswered`` or
        ``cancelled``.
        """
        self._of(self._requests, parsed.model or "", status).inc()
        if tokens:
            self._output.observe(tokens, parsed.model or "")

    def prefilled(self, parsed: ParsedRequest, course: str) -> None:
        """Record where a prompt was prefilled."""
        self._prefills.labels(parsed.model or "", course).inc()

    def refused(self, status: int) -> None:
        """Record an error response of the router itself."""
        self._refused.labels(str(status)).inc()

    def retried(self, engine: Engine) -> None:
        """Record that an engine did not respond, so another one is tried."""
        if not engine.removed:
            self._of(self._retries, engine.url).inc()

    def state(self, engine: Engine, load: Load) -> None:
        """Set the gauges of a worker."""
        expected = engine.hit_tokens / engine.prompt_tokens if engine.prompt_tokens else 0.0
        for gauge, value in (
            (self._blocks, load.active_decode_blocks),
            (self._prefill, load.active_prefill_tokens),
            (self._hit_rate, load.gpu_prefix_cache_hit_rate or expected),
            (self._cache_usage, load.gpu_cache_usage_perc),
            (self._cache_blocks, load.kv_total_blocks),
            (self._up, engine.serving),
            (self._inflight, engine.inflight),
        ):
            gauge.labels(engine.url).set(value)

    def hashed_as_text(self) -> None:
        """Count a prompt without the engines' tokens, although their KV events are followed."""
        self._text.inc()

    def problem(self, engine: Engine, kind: str, *, present: bool) -> None:
        """Set whether a worker has a problem of this kind."""
        self._problem.labels(engine.url, kind).set(present)

    def kv_events(self, indexer: Indexer, *, lost: int, unread: int) -> None:
        """Set the counts of blocks in KV events by outcome. ``lost`` messages never arrived, and
        ``unread`` ones were malformed.
        """
        counts = indexer.counts
        for kind, status, count in (
            ("stored", "ok", counts.stored),
            ("stored", "duplicate", counts.repeated),
            ("stored", "parent_block_not_found", counts.parent_not_found),
            ("stored", "invalid_block", counts.invalid),
            ("stored", "no_room", counts.refused),
            ("removed", "ok", counts.removed),
            ("removed", "block_not_found", counts.unknown),
            ("message", "lost", lost),
            ("message", "unreadable", unread),
        ):
            self._events.labels(kind, status).set(count)

    def pool(self, figures: Mapping[str, float | None]) -> None:
        """Set the state of the subscription to the pool's events."""
        if not self._pool:
            self._of_pool()
        for name, figure in figures.items():
            if figure is not None:
                self._pool[name].set(figure)

    def forget(self, engine: Engine) -> None:
        """Remove the metrics of a removed worker."""
        for metric in self._of_worker:
            metric.remove(engine.url)
            self._children.pop((metric, engine.url), None)
        for kind in PROBLEMS:
            self._problem.remove(engine.url, kind)

    def text(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return bytes(generate_latest(self.registry))
