# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The admin API: adds, removes and drains workers at run time, without moving KV.

::

    GET    /workers                  list all workers with their state
    POST   /workers                  {"url": ..., "models": [...], "events": ..., "replay": ...}
    POST   /workers/{id}/drain       send it no more requests; remove it after the last one
    DELETE /workers/{id}             remove it at once; its running requests continue
    GET    /pool                     show how the index follows the pool's events
    GET    /prefill                  show the rule for remote prefill, with its thresholds
    PUT    /prefill                  {"effective_max": 4096}; others are reset
    GET    /alerts                   alert rules for Prometheus

It has its own listener, by default on the loopback address, because its users can redirect the
requests of all clients. ``callers.py`` has the checks of all its requests.
"""

from __future__ import annotations

import logging

import msgspec
from aiohttp import web

from beluga.errors import RouterError
from beluga.gateway.acceptor import connection_of
from beluga.gateway.alerts import ALERTS
from beluga.gateway.answers import Refusal
from beluga.gateway.cache import Cache
from beluga.gateway.engine import Engine
from beluga.gateway.fleet import Fleet
from beluga.gateway.settings import EngineSpec, read_url
from beluga.router import Decision

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
            web.get("/workers", self._list),
            web.post("/workers", self._add),
            web.post("/workers/{id}/drain", self._drain),
            web.delete("/workers/{id}", self._remove),
            web.get("/pool", self._pool),
            web.get("/prefill", self._rule),
            web.put("/prefill", self._change_rule),
            web.get("/alerts", self._alerts),
        ]

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
    connection.place.work()
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
