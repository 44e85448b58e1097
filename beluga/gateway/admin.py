# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The admin API: adds, removes and drains workers at run time, without moving KV.

::

    GET    /                         list these routes
    GET    /workers                  list all workers with their state
    POST   /workers                  {"url": ..., "models": [...], "events": ..., "replay": ...}
    POST   /workers/{id}/drain       send it no more requests; remove it after the last one
    DELETE /workers/{id}             remove it at once; its running requests continue
    GET    /pool                     show how the index follows the pool's events
    GET    /prefill                  show the rule for remote prefill, with its thresholds
    PUT    /prefill                  {"effective_max": 4096}; others are reset
    GET    /alerts                   alert rules for Prometheus

It has its own listener, by default on the loopback address, because its users can redirect the
requests of all clients. ``acceptor.of_operators`` checks all its
requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import NamedTuple

import msgspec
from aiohttp import web

from beluga.errors import RouterError
from beluga.gateway.cache import Cache
from beluga.gateway.engine import Engine
from beluga.gateway.fleet import Fleet
from beluga.gateway.metrics import Metrics
from beluga.gateway.protocol import Refusal
from beluga.gateway.settings import EngineSpec, read_url
from beluga.http_server import connection_of
from beluga.router import Advice, Decision, Goals, Load, Seen, Worker, advise

log = logging.getLogger(__name__)

ADMIN_BODY_MAX = 1 << 16
"""Largest size in bytes of an operator's request."""

# Errors of a body; the second is raised for too deeply nested JSON, the third for text that is not
# UTF-8.
_REFUSED = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, RouterError)


class _NewWorker(msgspec.Struct, forbid_unknown_fields=True):
    url: str
    models: list[str] = []
    events: str | None = None
    replay: str | None = None
    other_ranks: list[tuple[str, str | None]] = []


class AdminHandlers:
    """The handlers of the admin API."""

    def __init__(self, fleet: Fleet, cache: Cache, decision: Decision) -> None:
        self._fleet, self._cache, self._decision = fleet, cache, decision

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/", self._index),
            web.get("/workers", self._list),
            web.post("/workers", self._add),
            web.post("/workers/{id}/drain", self._drain),
            web.delete("/workers/{id}", self._remove),
            web.get("/pool", self._pool),
            web.get("/prefill", self._rule),
            web.put("/prefill", self._change_rule),
            web.get("/alerts", self._alerts),
        ]

    async def _index(self, _: web.Request) -> web.Response:
        lines = [f"{route.method} {route.path}\n" for route in self.routes()]
        return web.Response(text="".join(lines))

    async def _list(self, _: web.Request) -> web.Response:
        return _json([_described(engine) for engine in self._fleet])

    async def _add(self, request: web.Request) -> web.Response:
        body = await _body(request)
        try:
            fields = msgspec.json.decode(body, type=_NewWorker)
            spec = EngineSpec(
                *(read_url(fields.url), tuple(fields.models), fields.events, fields.replay),
                other_ranks=tuple(fields.other_ranks),
            )
            return _json(_described(self._fleet.add(spec)), status=201)
        except _REFUSED as error:
            raise Refusal(400, str(error)) from None

    async def _drain(self, request: web.Request) -> web.Response:
        engine = self._named(request)
        self._fleet.drain(engine)
        return _json(_described(engine))

    async def _remove(self, request: web.Request) -> web.Response:
        engine = self._named(request)
        self._fleet.remove(engine)
        return _json(_described(engine))

    async def _pool(self, _: web.Request) -> web.Response:
        pool = self._cache.pool
        if pool is None:
            raise Refusal(404, "the router reads no pool's events: set --pool-events")
        spaces = {f"{space:016x}": blocks for space, blocks in pool.feed.spaces.items()}
        return _json({**pool.figures(), "spaces": spaces, "problem": pool.problem})

    async def _rule(self, _: web.Request) -> web.Response:
        return _json({"rule": self._decision.name, "thresholds": self._decision.settings})

    async def _change_rule(self, request: web.Request) -> web.Response:
        try:
            changes = msgspec.json.decode(await _body(request), type=dict[str, float | int | None])
            self._decision.update(changes)
        except _REFUSED as error:
            raise Refusal(400, str(error)) from None
        log.info(
            ("the rule %s now has the thresholds %s"), self._decision.name, self._decision.settings
        )
        return await self._rule(request)

    async def _alerts(self, _: web.Request) -> web.Response:
        return web.Response(text=ALERTS, content_type="application/yaml")

    def _named(self, request: web.Request) -> Engine:
        number = request.match_info["id"]
        try:
            return self._fleet[int(number)]
        except (ValueError, RouterError):
            raise Refusal(404, f"there is no worker {number}") from None


async def _body(request: web.Request) -> bytes:
    """Return a request's body. A client that does not send its body loses its place."""
    connection = connection_of(request)
    connection.wait()
    body = await request.read()
    connection.slot.work()
    return body


def _described(engine: Engine) -> dict[str, object]:
    """Return an engine as JSON."""
    return {
        "id": engine.worker.worker_id,
        "url": engine.url,
        "models": list(engine.models),
        "health": engine.health.value,
        "why": engine.why,
        "draining": engine.draining,
        "requests": engine.inflight,
        "cooling_s": round(engine.cooling_s, 3),
        "engine": engine.kind or None,
        "events": engine.spec.events,
        "ranks": engine.ranks,
        "block_size": engine.block_size or None,
        "space": None if engine.space is None else f"{engine.space:016x}",
        "problems": engine.problems,
    }


def _json(value: object, status: int = 200) -> web.Response:
    """Return a value as a response."""
    body = msgspec.json.encode(value)
    return web.Response(status=status, body=body, content_type="application/json")


# ---- Alert rules

# The defaults are the targets of the Dynamo KV router article: hit rate over 30 %, routing under
# 5 ms, imbalance under 0.2.
ALERTS = """\
groups:
  - name: beluga-gateway
    rules:
      - alert: KVHitRateLow
        expr: avg(dynamo_kv_hit_rate) < 0.30
        for: 15m
        annotations: {summary: "Less than 30 % of prompt tokens are found in a cache"}
      - alert: RoutingSlow
        expr: >-
          histogram_quantile(0.99, sum by (le) (rate(dynamo_routing_latency_seconds_bucket[5m])))
          > 0.005
        for: 5m
        annotations: {summary: "Choosing a worker takes more than 5 ms (p99)"}
      - alert: LoadImbalanced
        expr: >-
          stddev(rate(beluga_gateway_worker_prompt_tokens_total[5m]))
          / avg(rate(beluga_gateway_worker_prompt_tokens_total[5m])) > 0.2
        for: 15m
        annotations: {summary: "Prompt tokens go unevenly to workers (deviation / mean)"}
      - alert: WorkerDown
        expr: beluga_gateway_worker_up == 0
        for: 1m
        annotations: {summary: "{{ $labels.worker }} does not pass its health check"}
"""


# ---- Advice


SAMPLES = 18  # samples of queue and memory per interval: every 10 s by default, as in Dynamo


class _Sample(NamedTuple):
    workers: int
    queued: int
    usage: float | None


class Adviser:
    """Averages its samples over an interval, then logs the planner's advice on the number of
    engines. Applying it is up to the operator. With a pool, no KV moves when engines are added or
    removed.
    """

    def __init__(
        self,
        *,
        fleet: Fleet,
        metrics: Metrics,
        loads: Callable[[], Mapping[Worker, Load]],
        pending: Callable[[], int],
        goals: Goals,
    ) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._loads = loads
        self._pending = pending
        self._goals = goals
        self._samples: list[_Sample] = []
        self._before = metrics.latencies()

    async def run(self, interval_s: float) -> None:
        """Advise forever."""
        while True:
            for _ in range(SAMPLES):
                await asyncio.sleep(interval_s / SAMPLES)
                self.sample()
            if advice := self.advise():
                log.info("advice: %s", advice)

    def sample(self) -> None:
        """Take a sample of the serving engines and of the waiting requests."""
        loads = self._loads()
        serving = [loads[engine.worker] for engine in self._fleet if engine.serving]
        usages = [load.gpu_cache_usage_perc for load in serving if load.kv_total_blocks]
        queued = self._pending() + sum(load.num_requests_waiting for load in serving)
        self._samples.append(_Sample(len(serving), queued, fmean(usages) if usages else None))

    def advise(self) -> Advice | None:
        """Return the planner's advice from the samples since the last call."""
        samples, self._samples = self._samples, []
        before, self._before = self._before, self._metrics.latencies()
        if not samples:
            return None
        usages = [sample.usage for sample in samples if sample.usage is not None]
        first, following = (
            (now.seconds - then.seconds) / max(now.times - then.times, 1)
            for now, then in zip(self._before, before, strict=True)
        )
        seen = Seen(
            workers=samples[-1].workers,
            queued=fmean(sample.queued for sample in samples),
            usage=fmean(usages) if usages else None,
            ttft_s=first,
            between_tokens_s=following,
        )
        return advise(seen, self._goals)
