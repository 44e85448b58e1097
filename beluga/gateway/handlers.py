# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The clients' listener: its paths (proxied ones, models, health, readiness, metrics), the memory
of requests' bodies, and the conversion of errors to responses.

A body is kept until its engine has started to respond, because the request may have to go to
another engine. A body for which there is no room is refused at once. It does not wait, because the
bodies that occupy the room may themselves be waiting. The first bytes of each body are not counted,
so large bodies do not block ordinary requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec
from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from beluga.gateway.fleet import Fleet
from beluga.gateway.metrics import Metrics
from beluga.gateway.protocol import Refusal
from beluga.gateway.proxy import Proxy
from beluga.gateway.settings import Limits
from beluga.http_server import connection_of
from beluga.listening import plain_path
from beluga.open_files import file_limit

log = logging.getLogger(__name__)

FREE_SIZE = 1 << 16
"""Bytes of each body that are not counted."""


class Held:
    """The memory of one body."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._size = 0

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def grow(self, size: int) -> None:
        """Reserve memory for ``size`` bytes in total. Raises Refusal."""
        more = max(0, size - FREE_SIZE) - self._size
        self._bodies.take(more)
        self._size += more

    def release(self) -> None:
        """Release the memory."""
        self._bodies.give(self._size)
        self._size = 0


class Bodies:
    """The bodies of all requests of a gateway."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.size = 0  # bytes

    def hold(self) -> Held:
        """Return an empty reservation for a body."""
        return Held(self)

    def take(self, size: int) -> None:
        """Reserve memory. Raises Refusal."""
        if size > 0 and self.size + size > self._limits.bodies_size_max:
            text = (
                f"the bodies of other requests use {self.size >> 20} MiB of the "
                f"{self._limits.bodies_size_max >> 20} MiB that this router allows (--max-bodies)"
            )
            raise Refusal(503, text, retry_after_s=1)
        self.size += size

    def give(self, size: int) -> None:
        """Release memory."""
        self.size -= size

    async def read(self, request: web.Request, held: Held) -> bytes:
        """Read and return a request's body. Raises Refusal."""
        if not request.body_exists:
            return b""
        limit = self._limits.body_size_max
        if request.content_length is not None and request.content_length > limit:
            raise Refusal(413, f"the request's body has more than {limit} bytes")
        if request.content.is_eof():  # the body arrived with the headers
            body = await request.content.readany()
            if len(body) > limit:
                raise Refusal(413, f"the request's body has more than {limit} bytes")
            held.grow(len(body))
            return body
        # A timer that ends the content costs less than asyncio.wait_for, which needs a task.
        late = asyncio.TimeoutError()
        timer = asyncio.get_running_loop().call_later(
            self._limits.body_s, request.content.set_exception, late
        )
        try:
            return await self._pieces(request, held)
        except asyncio.TimeoutError:
            text = f"the request's body has not arrived within {self._limits.body_s:g} s"
            raise Refusal(408, text) from None
        except ConnectionError:  # the client has disconnected; aiohttp cancels this task
            raise asyncio.CancelledError from None
        finally:
            timer.cancel()

    async def _pieces(self, request: web.Request, held: Held) -> bytes:
        connection, limit = connection_of(request), self._limits.body_size_max
        pieces: list[bytes] = []
        size = 0
        connection.wait()
        try:
            while piece := await request.content.readany():
                size += len(piece)
                if size > limit:
                    raise Refusal(413, f"the request's body has more than {limit} bytes")
                held.grow(size)
                connection.slot.move(len(piece))
                pieces.append(piece)
        except BaseException:
            pieces.clear()  # the error's traceback keeps this frame alive during the response
            raise
        connection.slot.work()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


# Paths of vLLM outside /v1/* that any engine may serve. Its other paths (metrics, sleep, profiling)
# concern a single engine and are for its operator.
_WITHOUT_V1 = (
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
            *(web.post(path, self._proxied) for path in _WITHOUT_V1),
            web.route("*", "/v1/{rest:.*}", self._proxied),
        ]

    async def _proxied(self, request: web.Request) -> web.StreamResponse:
        if self.stopping:
            refusal = Refusal(503, "this router is shutting down", retry_after_s=1).response()
            refusal.force_close()
            return refusal
        _check_path(request)
        if request.headers.get(hdrs.UPGRADE, "").lower() == "websocket":
            raise Refusal(
                501, f"this router forwards no WebSockets; open {request.path} on an engine itself"
            )
        self._check_room()
        with self._bodies.hold() as held:
            body = await self._bodies.read(request, held)
            self._check_room()  # requests whose bodies have not arrived do not count
            self._under_way += 1
            try:
                return await self._proxy.handle(request, body, held.release)
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
