# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Serves the routes on the local socket and over TCP, by the HTTP server of all listeners
(``beluga/http_server.py``), on a thread of its own.

A request over TCP only reads, and its Host must be a name of this machine. Routes run on further
threads, a few at a time, so that health is answered whatever they do.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote

from beluga.admin.local_socket import LocalSocket
from beluga.admin.routes import (
    HEALTHZ,
    METRICS,
    READYZ,
    AdminRequest,
    AdminResponse,
    json_response,
)
from beluga.arguments import StrPath, path_of
from beluga.conventions import ADMIN_PORT
from beluga.errors import AdminError, BelugaError
from beluga.listening import KnownHosts, Token, is_loopback
from beluga.threads import Thread

if TYPE_CHECKING:
    from aiohttp import web

    from beluga.admin.routes import Routes

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
BODY_MAX = 1 << 16  # bytes; only the local socket accepts a body
_CONNECTIONS_MAX = 64  # per listener; a further one gets the place of the slowest client
_TURNS = 4  # routes that run at a time, except those of health
_TURN_S = 5.0  # how long a request waits for one of them
_BACKLOG = 1024  # the kernel drops further connections: seconds of delay
_HEALTH = {HEALTHZ, READYZ}
_ANY_NAME = {METRICS, *_HEALTH}  # these are not protected by the check of names
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Server": "beluga",
    "X-Content-Type-Options": "nosniff",
}


def read_address(text: str) -> tuple[str, int]:
    """Return the host and the port of ``[HOST:]PORT``; an IPv6 address stands in brackets.

    Raises AdminError.
    """
    host, _, port = text.rpartition(":")
    if port.isdecimal() and port.isascii() and int(port[:6]) > 65535:
        raise AdminError(f"the port of {text!r} is out of range; give 0 to 65535")
    if not (port.isdecimal() and port.isascii()):
        raise AdminError(f"{text!r} has no port; use [HOST:]PORT, such as {ADMIN_PORT}")
    return host.removeprefix("[").removesuffix("]") or LOOPBACK, int(port)


def _is_ipv6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class _Access:
    """The access rules over TCP. ``loopback``: only this machine can connect."""

    hosts: KnownHosts
    loopback: bool
    token: Token | None


class Admin:
    """Serves the routes, and ``GET /endpoint`` with the page's address, between :meth:`start` and
    :meth:`stop`.

    ``directory`` is the pool's runtime directory: its socket serves all requests. ``address`` is a
    host and a port for TCP, which serves only read requests; port 0 takes a free one. Over TCP all
    but health needs the ``token`` if there is one, and ``context`` is that of TLS. Socket and port
    are bound on construction, before a server takes its pool over. Raises AdminError if the address
    cannot be bound. A directory without support for sockets is only logged, because the server
    works without the socket.
    """

    def __init__(
        self,
        routes: Routes,
        *,
        directory: StrPath | None = None,
        address: tuple[str, int] | None = None,
        token: Token | None = None,
        context: ssl.SSLContext | None = None,
    ) -> None:
        directory = None if directory is None else path_of("directory", directory)
        self._context = context
        self._routes = {("GET", "/endpoint"): lambda _: json_response({"url": self.url})} | dict(
            routes
        )
        self._access: _Access | None = None
        self._tcp: socket.socket | None = None
        if address is not None:
            self._host = address[0]
            self._tcp = _bound(*address)
            self._access = _Access(KnownHosts(self._host), is_loopback(self._host), token)
            if token is None and not is_loopback(self._host):
                log.warning(
                    "other machines reach the admin port at %s, and need no token to read; "
                    "give --admin-token FILE",
                    self.url,
                )
        self._local: LocalSocket | None = None
        try:
            self._local = LocalSocket(directory) if directory else None
        except OSError as error:
            log.warning("no admin socket in %s: %s", directory, error)
        self._thread: threading.Thread | None = None
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def url(self) -> str:
        """The URL of the page over TCP; "" without TCP."""
        if self._tcp is None:
            return ""
        scheme = "http" if self._context is None else "https"
        host = f"[{self._host}]" if _is_ipv6(self._host) else self._host
        return f"{scheme}://{host}:{self._tcp.getsockname()[1]}/"

    @property
    def metrics_url(self) -> str:
        """The URL of the metrics over TCP; "" without TCP."""
        return self.url and self.url.rstrip("/") + METRICS

    def start(self) -> None:
        """Start the thread. Connections that arrive before wait in the kernel."""
        self._thread = Thread(target=self._run, name="beluga-admin", daemon=True)
        self._thread.start()

    def claim(self) -> None:
        """Give the local socket the name of the active server."""
        if (local := self._local) is not None:
            try:
                local.claim()
            except OSError as error:
                log.warning("the admin socket: %s", error)

    def stop(self) -> None:
        """End the thread, close all connections, and release the port and the socket."""
        if (local := self._local) is not None:
            local.remove()
        if self._thread is not None:
            self._ready.wait()
            if self._loop is not None:
                with suppress(RuntimeError):  # it has failed, and is closed
                    self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join()
            self._thread = None
        for listening in self._sockets():
            listening.close()

    def _sockets(self) -> list[socket.socket]:
        local = self._local.socket if self._local is not None else None
        return [listening for listening in (self._tcp, local) if listening is not None]

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception as error:  # blocks are served without this endpoint
            log.error("the admin endpoint does not work: %s: %s", type(error).__name__, error)
            if self._local is not None:
                self._local.remove()
            for listening in self._sockets():  # clients are refused, and do not wait
                listening.close()
            self._tcp = self._local = None
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        self._turns = asyncio.Semaphore(_TURNS)
        self._ready.set()
        from aiohttp import web  # imports ssl, which a machine's OpenSSL can fail

        from beluga.http_server import Share, accept

        async with AsyncExitStack() as stack:
            for listening in self._sockets():
                listening.setblocking(False)
                tcp = listening is self._tcp
                runner = web.ServerRunner(
                    web.Server(partial(self._handle, self._access if tcp else None)),
                    shutdown_timeout=0.1,
                )
                await runner.setup()
                stack.push_async_callback(runner.cleanup)
                assert runner.server is not None  # noqa: S101  for mypy
                share, tls = Share(_CONNECTIONS_MAX), self._context if tcp else None
                accept(stack, [listening], runner.server, share, tls)
            await self._stopping.wait()

    async def _handle(self, access: _Access | None, request: web.BaseRequest) -> web.Response:
        """Answer a request; ``access`` is None on the local socket, where changes are allowed."""
        from aiohttp import web

        from beluga.http_server import connection_of

        connection = connection_of(request)
        connection.begins(request)
        try:
            answer, closes = await self._answer(access, request)
        finally:
            connection.ends()
        headers = _HEADERS | dict(answer.headers) | {"Content-Type": answer.kind}
        response = web.Response(body=answer.body, status=answer.status, headers=headers)
        if closes:  # the request's body is not read
            response.force_close()
        return response

    async def _answer(
        self, access: _Access | None, request: web.BaseRequest
    ) -> tuple[AdminResponse, bool]:
        """Return an answer, and whether it ends the connection."""
        method = "GET" if request.method == "HEAD" else request.method
        target, _, query = request.raw_path.partition("?")
        authority: tuple[str, ...] = ()
        if not target.startswith("/"):  # a whole URL; its path has one spelling, too
            scheme, mark, authority_and_path = target.partition("://")
            host, slash, path = authority_and_path.partition("/")
            if not mark or scheme.lower() not in ("http", "https"):
                return _refusal(HTTPStatus.BAD_REQUEST, "the request has no path"), True
            authority, target = (host,), slash + path
        refusal = self._refuse(access, request, method, target, authority)
        if refusal is not None:
            return refusal, True
        route = self._routes[method, target]
        fields = {unquote(name): value for name, value in parse_qsl(query)}
        admin_request = AdminRequest(target, fields, await _body(request))
        if target in _HEALTH:  # served regardless of the number of other requests
            return _by_route(route, admin_request), False
        try:
            await asyncio.wait_for(self._turns.acquire(), _TURN_S)
        except asyncio.TimeoutError:
            text = "too many requests; send fewer"
            return _refusal(HTTPStatus.SERVICE_UNAVAILABLE, text), False
        return await self._in_thread(partial(_by_route, route, admin_request)), False

    async def _in_thread(self, work: Callable[[], AdminResponse]) -> AdminResponse:
        """Run a route that has a turn. Its thread ends the turn, even if the client leaves."""
        loop = asyncio.get_running_loop()
        future = loop.create_future()

        def finish(answer: AdminResponse) -> None:
            self._turns.release()
            if not future.done():
                future.set_result(answer)

        def run() -> None:
            answer = work()
            if not loop.is_closed():
                loop.call_soon_threadsafe(finish, answer)

        Thread(target=run, name="beluga-admin-route", daemon=True).start()
        answer: AdminResponse = await future
        return answer

    def _refuse(
        self,
        access: _Access | None,
        request: web.BaseRequest,
        method: str,
        path: str,
        authority: tuple[str, ...],
    ) -> AdminResponse | None:
        """Return the answer to a request that reaches no route, or None."""
        if access is not None:
            refusal = _refuse_caller(access, request, path, authority)
            if refusal is not None:
                return refusal
            if method != "GET":
                return _refusal(
                    HTTPStatus.FORBIDDEN, "over TCP nothing can be changed; use the admin socket"
                )
        if (method, path) not in self._routes:
            routes = ", ".join(f"{kind} {path}" for kind, path in sorted(self._routes))
            text = f"no route {method} {path[:80]}; routes: {routes}"
            return _refusal(HTTPStatus.NOT_FOUND, text)
        length = request.content_length or 0
        if "Transfer-Encoding" in request.headers:
            return _refusal(HTTPStatus.LENGTH_REQUIRED, "give one Content-Length")
        limit = BODY_MAX if method == "POST" else 0
        if length > limit:
            return _refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"at most {limit} bytes")
        return None


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if _is_ipv6(host) else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except (OSError, UnicodeError) as error:
        number = error.errno or 0 if isinstance(error, OSError) else 0
        reason = os.strerror(number) if number > 0 else None  # strerror repeats the address
        raise AdminError(
            f"the admin endpoint cannot have {host} port {port} ({reason or error}); name another "
            "with --admin, or 0 for a free port"
        ) from error


def _refuse_caller(
    access: _Access, request: web.BaseRequest, path: str, authority: tuple[str, ...]
) -> AdminResponse | None:
    """Return the answer to a caller over TCP without access to this path, or None. Where other
    machines may connect, their scrapers and probes use any host name, such as a service's.
    """
    hosts = request.headers.getall("Host", [""])
    any_name = path in _ANY_NAME and not access.loopback
    own = all(host in access.hosts for host in (hosts[0], *authority))
    if len(hosts) > 1 or not (any_name or own):
        return _refusal(
            HTTPStatus.MISDIRECTED_REQUEST,
            "the Host header is not allowed; use the machine's address or name",
        )
    shown = request.headers.get("Authorization", "")
    if access.token is None or path in _HEALTH or access.token.shown_by(shown):
        return None
    return AdminResponse(
        b"this needs the token of --admin-token\n",
        status=HTTPStatus.UNAUTHORIZED,
        headers={"WWW-Authenticate": 'Basic realm="beluga: any user, the token as password"'},
    )


async def _body(request: web.BaseRequest) -> bytes:
    """Return a request's body. A client that does not send it loses its place."""
    from beluga.http_server import connection_of

    if not request.body_exists:
        return b""
    connection = connection_of(request)
    connection.wait()
    body = await request.read()
    connection.slot.work()
    return body


def _by_route(route: Callable[[AdminRequest], AdminResponse], request: AdminRequest) -> Any:
    try:
        return route(request)
    except BelugaError as error:
        return _refusal(HTTPStatus.CONFLICT, str(error))
    except ValueError as error:
        return _refusal(HTTPStatus.BAD_REQUEST, str(error))
    except Exception:
        log.exception("answering %s", request.path)
        return _refusal(HTTPStatus.INTERNAL_SERVER_ERROR, "see the server's log")


def _refusal(status: HTTPStatus, text: str) -> AdminResponse:
    return AdminResponse(f"{text}\n".encode(), status=status)
