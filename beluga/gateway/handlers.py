# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The handlers of the clients' listener: proxied paths, the list of models, health, readiness,
metrics.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from beluga.gateway.answers import Refusal
from beluga.gateway.bodies import Bodies
from beluga.gateway.fleet import Fleet
from beluga.gateway.metrics import Metrics
from beluga.gateway.proxy import Proxy
from beluga.listening import plain_path
from beluga.open_files import file_limit

log = logging.getLogger(__name__)

# Paths of vLLM outside /v1/* that any engine may serve. Its other paths (metrics, sleep, profiling)
# concern a single engine and are for its operator.
_BESIDE_V1 = (
    "/tokenize",
    "/detokenize",
    "/pooling",
    "/classify",
    "/score",
    "/rerank",
    "/v2/rerank",
    "/invocations",
    "/inference/v1/generate",
)
# Paths of vLLM in /v1 that change a single engine. They are for its operator, too.
_OF_OPERATORS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")


class ClientHandlers:
    """The handlers of the clients' listener."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        proxy: Proxy,
        scrape: Callable[[], bytes],
        requests_max: int,
        bodies: Bodies,
    ) -> None:
        """``scrape`` returns the metrics. ``requests_max`` is the largest number of concurrent
        requests, which this process's limit of open files allows.
        """
        self._fleet = fleet
        self._proxy = proxy
        self._scrape = scrape
        self._requests_max = requests_max
        self._bodies = bodies
        self._under_way = 0
        self.stopping = False

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/health", self._health),
            web.get("/ready", self._ready),
            web.get("/metrics", self._scraped),
            web.get("/v1/models", self._models, allow_head=False),
            web.get("/v1/models/{name:.+}", self._model, allow_head=False),
            *(web.post(path, self._proxied) for path in _BESIDE_V1),
            web.route("*", "/v1/{rest:.*}", self._proxied),
        ]

    async def _proxied(self, request: web.Request) -> web.StreamResponse:
        if self.stopping:
            refusal = Refusal(503, "this router is shutting down", retry_after_s=1).response()
            refusal.force_close()
            return refusal
        _check_path(request)
        self._check_room()
        with self._bodies.hold() as held:
            body = await self._bodies.read(request, held)
            self._check_room()  # requests whose bodies have not arrived do not count
            self._under_way += 1
            try:
                return await self._proxy.handle(request, body, held)
            finally:
                self._under_way -= 1

    def _check_room(self) -> None:
        """Raise Refusal if the limit of concurrent requests is reached."""
        if self._under_way >= self._requests_max:
            raise Refusal(
                503,
                f"{self._under_way} requests are running, as many as this router's limit of "
                f"{file_limit()} open files allows; raise it (ulimit -n)",
                retry_after_s=1,
            )

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _ready(self, _: web.Request) -> web.Response:
        """Return 200 while requests can be served: an engine is up and the router is not
        stopping.
        """
        if self.stopping:
            raise Refusal(503, "this router is shutting down")
        if not any(engine.serving for engine in self._fleet):
            raise Refusal(503, f"none of {len(self._fleet)} workers is up", retry_after_s=1)
        return web.Response()

    async def _scraped(self, _: web.Request) -> web.Response:
        return web.Response(body=self._scrape(), content_type="text/plain", charset="utf-8")

    async def _models(self, request: web.Request) -> web.StreamResponse:
        unread = any(engine.serving and not engine.cards for engine in self._fleet)
        if unread and len({engine.models for engine in self._fleet}) == 1:
            return await self._proxied(request)  # the engines list their models only for a key
        cards = list(self._fleet.models().values())
        return _for_browsers(request, _json({"object": "list", "data": cards}))

    async def _model(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        card = self._fleet.models().get(name)
        if card is None:
            raise Refusal(404, f"The model `{name}` does not exist.", param="model")
        return _for_browsers(request, _json(card))


def _check_path(request: web.Request) -> None:
    """Raise Refusal for a path that is not for clients, or that an engine or another proxy may
    interpret as a different one.
    """
    path = plain_path(request.rel_url.raw_path)
    if path is None:
        raise Refusal(400, "the path has //, a dot segment, or an encoded slash; send a plain path")
    if path.lower() in _OF_OPERATORS:
        raise Refusal(404, f"{path} changes a single engine; send it to that engine")


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def _for_browsers(request: web.Request, answer: web.Response) -> web.Response:
    """Allow pages of any site to read the router's own responses, as vLLM does by default.
    Responses of engines have their own headers, and preflights go to engines, so their
    --allowed-origins apply.
    """
    if "Origin" in request.headers:
        answer.headers["Access-Control-Allow-Origin"] = "*"
    return answer


def refusals(metrics: Metrics, *, browsers: bool) -> Middleware:
    """Return a middleware that converts all errors to OpenAI's format, including aiohttp's. With
    ``browsers``, pages of any site may read them.
    """

    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except Refusal as refusal:
            given = refusal
        except web.HTTPException as error:
            given = Refusal(error.status, f"{request.method} {request.path}: {error.reason}")
        except Exception:
            log.exception("%s %s", request.method, request.path)
            given = Refusal(500, "the router has failed; see its log")
        metrics.refused(given.status)
        response = given.response()
        if browsers:
            _for_browsers(request, response)
        if (name := request.headers.get("X-Request-Id")) is not None:
            response.headers["X-Request-Id"] = name
        return response

    return answer
