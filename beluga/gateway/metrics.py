# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The gateway's metrics for Prometheus, with Dynamo's names where there are any, and two from its
articles.

``dynamo_kv_hit_rate{worker}`` is the engine's own measurement if its metrics include it, otherwise
the policy's expectation. ``dynamo_routing_latency_seconds`` is the time from reading a request to
the choice. Output tokens are counted by their events.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from beluga.gateway.engine import PROBLEMS, Engine
from beluga.gateway.parsed_request import ParsedRequest
from beluga.metrics import (
    Counter,
    Distribution,
    Gauge,
    Histogram,
    HistogramSeries,
    Registry,
    prometheus_text,
)
from beluga.router import Choice, Indexer, Load, Query

_LATENCY_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0)
_OVERHEAD_MS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 50.0, 100.0)
_FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0)
_NEXT_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
_TOKENS = tuple(float(1 << power) for power in range(4, 21, 2))
_SHARE = tuple(step / 10 for step in range(11))
_PARTS = ("block_hashing", "indexer_find_matches", "seq_hashing", "scheduling")
_POOL = {
    "up_to_date": "1: the index is up to date with the pool's server",
    "blocks": "Blocks of the pool, in all spaces",
    "blocks_without_parent": "Blocks that cannot hit yet, because their parent is unknown",
    "blocks_of_other_sizes": "Blocks announced with another number of tokens",
    "messages_unread": "Malformed messages and events",
    "messages_lost": "Messages that were missed and not replayed",
    "gaps": "Gaps in the sequence of messages",
    "restarts": "Restarts of the pool's server",
    "last_message_age_seconds": "Time since the last message of the pool's server",
}


class Latency(NamedTuple):
    """A sum of seconds, and the number of summands."""

    seconds: float
    times: float


class Metrics:
    """Counts events. Each instance has its own registry, so several routers can run in one
    process.
    """

    def __init__(self) -> None:
        self.registry = Registry()
        self._by_router()
        self._by_worker()

    def _by_router(self) -> None:
        registry, prefix = self.registry, "dynamo_component_router_"

        def of_model(name: str, what: str, bounds: tuple[float, ...]) -> Histogram:
            return registry.histogram(prefix + name, what, bounds)

        def of_all(name: str, what: str, bounds: tuple[float, ...]) -> HistogramSeries:
            return registry.histogram(name, what, bounds).series()

        self._requests = registry.counter(prefix + "requests_total", "Requests by how they ended")
        self._first = of_model("time_to_first_token_seconds", "Sent to first byte", _FIRST_TOKEN_S)
        self._next = of_model("inter_token_latency_seconds", "Between tokens", _NEXT_TOKEN_S)
        self._input = of_model("input_sequence_tokens", "Prompt lengths", _TOKENS)
        self._output = of_model("output_sequence_tokens", "Answer lengths", _TOKENS)
        self._hits = of_model("kv_hit_rate", "Expected share of cached tokens", _SHARE)
        self._cached = of_model("cached_tokens", "Expected cached tokens", _TOKENS)
        self._routing = of_all(
            "dynamo_routing_latency_seconds", "Request read to worker chosen", _LATENCY_S
        )
        overhead = "dynamo_router_overhead_{}_ms"
        self._parts = {
            part: of_all(overhead.format(part), f"Routing: {part.replace('_', ' ')}", _OVERHEAD_MS)
            for part in _PARTS
        }
        self._total = of_all(overhead.format("total"), "Routing", _OVERHEAD_MS)
        self._events = registry.gauge(
            "dynamo_component_kv_cache_events_applied",
            "Blocks of KV events by kind and outcome",
        )
        self.pending = registry.gauge(
            "dynamo_frontend_router_queue_pending_requests", "Waiting requests"
        )
        self.pending.set(0)
        self._refused = registry.counter(
            "beluga_gateway_refused_total", "Requests without a worker"
        )
        self._text = registry.counter(
            "beluga_gateway_text_prompts_total",
            "Prompts hashed by their text, which match no block of KV events",
        )
        self._text.add(0)
        self._prefills = registry.counter(
            "beluga_gateway_prefills_total",
            "Prompts by where they were prefilled: beluga.disagg.PrefillOutcome",
        )

    def _by_worker(self) -> None:
        self._of_worker: list[Counter | Gauge] = []

        def gauge(name: str, what: str) -> Gauge:
            self._of_worker.append(made := self.registry.gauge(name, what))
            return made

        def counter(name: str, what: str) -> Counter:
            made = self.registry.counter(f"beluga_gateway_worker_{name}_total", what)
            self._of_worker.append(made)
            return made

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
        self._problem = self.registry.gauge(
            "beluga_gateway_worker_problem",
            "1: the router cannot follow this worker's cache or load; GET /workers has the reason",
        )

    def routed(
        self, parsed: ParsedRequest, query: Query, choice: Choice, engine: Engine, seconds: float
    ) -> None:
        """Record that a worker was chosen, ``seconds`` after the request was read."""
        self._sent.add(query.isl, worker=engine.url)
        model = parsed.model or ""
        self._routing.observe(seconds)
        self._total.observe(seconds * 1e3)
        self._input.observe(query.isl, model=model)
        self._hits.observe(choice.hit_rate, model=model)
        self._cached.observe(choice.hit_rate * query.isl, model=model)

    def part(self, name: str, seconds: float) -> None:
        """Record the duration of a part of routing."""
        self._parts[name].observe(seconds * 1e3)

    def first_token(self, parsed: ParsedRequest, engine: Engine, seconds: float) -> None:
        """Record the first byte of a response, ``seconds`` after the request was sent."""
        self._first.observe(seconds, model=parsed.model or "")
        if not engine.removed:
            self._last_first.set(seconds, worker=engine.url)

    def tokens(self, parsed: ParsedRequest, engine: Engine, gaps_s: Sequence[float]) -> None:
        """Record the times between tokens of a response, the last one last."""
        self._next.observe_all(gaps_s, model=parsed.model or "")
        if not engine.removed:
            self._last_next.set(gaps_s[-1], worker=engine.url)

    def latencies(self) -> tuple[Latency, Latency]:
        """Return the latencies of first tokens and of later ones, for all models since the
        start.
        """
        return _whole(self._first), _whole(self._next)

    def ended(self, parsed: ParsedRequest, status: str, tokens: int) -> None:
        """Record that a request has ended, with an HTTP status, ``broken``, ``unanswered`` or
        ``cancelled``.
        """
        self._requests.add(model=parsed.model or "", status=status)
        if tokens:
            self._output.observe(tokens, model=parsed.model or "")

    def prefilled(self, parsed: ParsedRequest, course: str) -> None:
        """Record where a prompt was prefilled."""
        self._prefills.add(model=parsed.model or "", course=course)

    def refused(self, status: int) -> None:
        """Record an error response of the router itself."""
        self._refused.add(status=str(status))

    def retried(self, engine: Engine) -> None:
        """Record that an engine did not respond, so another one is tried."""
        if not engine.removed:
            self._retries.add(worker=engine.url)

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
            gauge.set(value, worker=engine.url)

    def hashed_as_text(self) -> None:
        """Count a prompt without the engines' tokens, although their KV events are followed."""
        self._text.add()

    def problem(self, engine: Engine, kind: str, *, present: bool) -> None:
        """Set whether a worker has a problem of this kind."""
        self._problem.set(present, worker=engine.url, problem=kind)

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
            self._events.set(count, event_type=kind, status=status)

    def pool(self, figures: Mapping[str, float | None]) -> None:
        """Set the state of the subscription to the pool's events."""
        for name, figure in figures.items():
            if figure is not None:
                self.registry.gauge(f"beluga_gateway_pool_{name}", _POOL[name]).set(figure)

    def forget(self, engine: Engine) -> None:
        """Remove the metrics of a removed worker."""
        for metric in self._of_worker:
            metric.remove(worker=engine.url)
        for kind in PROBLEMS:
            self._problem.remove(worker=engine.url, problem=kind)

    def text(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return prometheus_text(self.registry.snapshot()).encode()


def _whole(histogram: Histogram) -> Latency:
    """Return the sum of all values, and how many there are."""
    series = [one for one in histogram.sample().series.values() if isinstance(one, Distribution)]
    return Latency(sum(one.total for one in series), sum(one.count for one in series))
