# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The acceptor takes clients' connections only while enough file descriptors are left for their
requests.

A running request needs two descriptors, one for its client and one for its engine. Example: of 64
descriptors 11 are open at the start, and 6 are for operators. 11 of the other 47 are spare, for
health checks and for clients that get an error because there is no room. So 18 requests can run and
23 clients can be connected. When all places are taken, the slowest clients are disconnected
(``beluga.listening.ConnectionSlots``): those that keep a connection open without a request, send a
request slowly, or do not read their responses. Others wait in the kernel's queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import hdrs, web
from aiohttp.http import HttpProcessingError
from aiohttp.http_exceptions import BadHttpMessage
from aiohttp.typedefs import Handler, Middleware

from beluga.errors import RouterError
from beluga.gateway.protocol import Refusal
from beluga.gateway.settings import Address, Settings
from beluga.listening import (
    ConnectionSlot,
    ConnectionSlots,
    KnownHosts,
    Token,
    from_other_site,
    is_loopback,
)
from beluga.open_files import file_limit, files_left

log = logging.getLogger(__name__)

_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL)
_SPARE_MAX = 64
_OPERATORS_MAX = 64
_CONNECTIONS_MAX = 8192  # each needs memory, and one event loop serves them all
_LOOK_S = 0.02  # interval of checks for closed connections
_OVERDUE_LOOK_S = 1.0
_PAUSE_S = 0.2  # after a system error
_TURNS = 4  # turns of the event loop from the arrival of a request's bytes to its handler
_LAG_MIN_S = 0.25  # minimum lag of a client that may be disconnected: its request may be in transit
_BACKLOG = 1024
# Fields of Linux's struct tcp_info, 32 bits each.
_INFO_UNACKED = 24  # of a listening socket: connections that wait to be accepted
_INFO_LAST_DATA_RECV = 52  # milliseconds
_HANDSHAKE_S = 10.0  # of TLS
_REASON_LENGTH_MAX = 80  # per logged reason
PATIENCE_S = 75.0
"""Seconds that a client may lag while its place is not needed."""
HEAD_SIZE_MAX = 1 << 20
"""Largest size in bytes of a connection's input that no handler has yet: a request's head, requests
that were sent before the response to an earlier one, and what is around a body's bytes, such as the
trailers. The parser's limits are for each line.
"""
HEADS_SIZE_MAX = 64 << 20
"""Largest total size in bytes of this input of all connections. Above it, a connection with more
than HEAD_SIZE_USUAL is closed.
"""
HEAD_SIZE_USUAL = 1 << 13
HEADER_SIZE_MAX = 1 << 16
"""Largest size in bytes of a header; API keys and cookies may exceed aiohttp's default, 8190."""
HEADERS_MAX = 256
"""The same as vLLM's."""


def _in_one_line(record: logging.LogRecord) -> bool:
    """Log invalid HTTP from a client in one line, because it is not an error of the gateway."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError):
        record.levelno, record.levelname = logging.WARNING, "WARNING"
        record.msg = f"{record.getMessage()}: {_reason(error)}"
        record.args, record.exc_info = (), None
    return True


def _reason(error: HttpProcessingError) -> str:
    """Return why HTTP is invalid, without the invalid bytes, which may be of a client's key."""
    first = error.message.partition("\n")[0].rstrip(": ")
    plain = type(error) is BadHttpMessage and len(first) <= _REASON_LENGTH_MAX
    return first if plain and "b'" not in first and 'b"' not in first else type(error).__name__


http_log = logging.getLogger(f"{__name__}.http")
"""The logger of aiohttp's server."""
http_log.addFilter(_in_one_line)


def raise_file_limit() -> None:
    """Raise this process's limit of open files to the system's hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def is_own_shortage(error: BaseException) -> bool:
    """Return whether a connection failed because this process or machine has no descriptor, memory
    or port left, rather than because of the other side.
    """
    return isinstance(error, OSError) and error.errno in _SHORTAGES


def _info(one: Any, field: int) -> int:
    """Return a field of a socket's ``tcp_info``; 0 if the system does not have it."""
    try:
        info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, field + 4)
        return int(struct.unpack_from("=I", info, field)[0])
    except (OSError, struct.error):
        return 0


class Share:
    """The number of connections that a listener may have, and the places of the present ones."""

    def __init__(self, connections_max: int, requests_max: int | None = None) -> None:
        self.connections_max = connections_max
        self.requests_max = connections_max if requests_max is None else requests_max
        self.places: ConnectionSlots[AcceptedConnection] = ConnectionSlots(PATIENCE_S)
        self.heads_size = 0  # total bytes of input that no handler has yet

    @property
    def crowded(self) -> bool:
        """Whether more clients are connected than requests can run."""
        return len(self.places) > self.requests_max

    @web.middleware
    async def follow(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Track whether the server works on a connection's request, or waits for its client."""
        connection = connection_of(request)
        connection.begins(request)
        try:
            return await handler(request)
        finally:
            connection.ends()

    async def close_if_crowded(self, _: web.Request, answer: web.StreamResponse) -> None:
        """Close a connection after its response if clients are waiting for a place."""
        if self.crowded:
            answer.force_close()
            answer.headers["Connection"] = "close"  # aiohttp has already prepared the other headers


def shares(kept: int = 0) -> tuple[Share, Share]:
    """Divide the process's descriptors into the shares of clients and operators. ``kept`` further
    files will be opened for other purposes.
    """
    left = max(2, files_left() - kept)
    operators = min(_OPERATORS_MAX, max(1, left // 8))
    left = max(2, left - operators)
    spare = min(_SPARE_MAX, left // 4)
    requests_max = min(_CONNECTIONS_MAX, max(1, (left - spare) // 2))
    return Share(requests_max + max(1, spare // 2), requests_max), Share(operators)


class AcceptedConnection(web.RequestHandler):
    """A connection with a place in a share."""

    __slots__ = (
        *("_arrived", "_expects_head", "_body_size", "_handled", "_head_size", "_queued"),
        *("_share", "_unparsed_size", "place"),
    )

    def __init__(self, server: web.Server, share: Share, **options: Any) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), **options)
        self._share = share
        self._expects_head = True  # whether a request's head is expected, or has started to arrive
        self._head_size = 0  # of HEAD_SIZE_MAX: the queued requests' sizes, and _unparsed_size
        self._queued: deque[tuple[int, int]] = deque()  # requests: their number and size
        self._unparsed_size = 0  # bytes behind the last request's head, and no body's
        self._arrived = 0  # number of requests whose heads have arrived
        self._handled: web.BaseRequest | None = None
        self._body_size = 0  # bytes of its body that have arrived
        self.place: ConnectionSlot[AcceptedConnection] = ConnectionSlot(self, "", 0.0)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        peer = transport.get_extra_info("peername") or ("",)
        self.place = self._share.places.take(self, str(peer[0]))
        super().connection_made(transport)
        self.wait()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._share.places.leave(self)
        self._count_head(-self._head_size)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._count_head(len(data))
        self._unparsed_size += len(data)
        waiting = len(self._messages)
        super().data_received(data)
        if (more := len(self._messages) - waiting) > 0:
            self._arrived += more
            self._queued.append((self._arrived, self._unparsed_size))
            self._unparsed_size = 0
        elif self._handled is not None and not self._messages:
            size = self._handled.content.total_bytes
            if size != self._body_size:  # the body has its own limits, and the client moves on
                self._body_size = size
                self._count_head(-self._unparsed_size)
                self._unparsed_size = 0
        many = self._share.heads_size > HEADS_SIZE_MAX and self._head_size > HEAD_SIZE_USUAL
        if many or self._head_size > HEAD_SIZE_MAX:
            log.warning("a client was disconnected because its request's head is too large")
            self.abort()

    def pause_writing(self) -> None:
        """Wait for a client that does not read."""
        super().pause_writing()
        self.place.wait()

    def resume_writing(self) -> None:
        """Continue after the client has read."""
        super().resume_writing()
        if not self._expects_head:
            self.place.work()

    def begins(self, request: web.BaseRequest) -> None:
        """Record that a handler has a request."""
        self._expects_head = False
        self._handled, self._body_size = request, 0
        number = self._arrived - len(self._messages)
        while self._queued and self._queued[0][0] <= number:
            self._count_head(-self._queued.popleft()[1])
        self.place.work()

    def ends(self) -> None:
        """Record that a response has been sent, except for what the client has yet to read."""
        self._expects_head = True
        self._handled = None
        self.place.wait()

    def wait(self) -> None:
        """Wait for the client since its last bytes arrived, or since it connected, which may be
        long before the connection was accepted.
        """
        self.place.wait()
        if self.transport is not None:
            silent_ms = _info(self.transport.get_extra_info("socket"), _INFO_LAST_DATA_RECV)
            self.place.since = time.monotonic() - silent_ms / 1000

    def abort(self) -> None:
        """Close the connection at once, without sending the rest."""
        if self.transport is not None:
            self.transport.abort()

    def _count_head(self, size: int) -> None:
        self._head_size += size
        self._share.heads_size += size


async def listen(
    stack: contextlib.AsyncExitStack,
    address: Address,
    app: web.Application,
    share: Share,
    tls: ssl.SSLContext | None,
) -> Address:
    """Serve an application on an address until the stack is closed. Returns the address with its
    actual port. Raises RouterError.
    """
    sockets = await _bound_sockets(address)
    app.on_response_prepare.append(share.close_if_crowded)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    options = {
        "access_log": None,
        "logger": http_log,
        "auto_decompress": False,  # bodies are forwarded unchanged, with their Content-Encoding
        "max_field_size": HEADER_SIZE_MAX,
        "max_line_size": HEADER_SIZE_MAX,
        "max_headers": HEADERS_MAX,
        "keepalive_timeout": PATIENCE_S,
    }
    server = runner.server
    assert server is not None  # noqa: S101  for mypy
    acceptor = Acceptor(server, sockets, share, options, tls)
    stack.push_async_callback(acceptor.close)
    return Address(*sockets[0].getsockname()[:2])


def connection_of(request: web.Request) -> AcceptedConnection:
    """Return the connection of a request."""
    connection = request.protocol
    assert isinstance(connection, AcceptedConnection)  # noqa: S101  the acceptor makes no others
    return connection


async def _bound_sockets(address: Address) -> list[socket.socket]:
    """Listen on an address, which may be several of a host. Raises RouterError."""
    loop = asyncio.get_running_loop()
    try:
        infos = await loop.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        with contextlib.ExitStack() as stack:
            sockets: list[socket.socket] = []
            for family, bound in dict.fromkeys((info[0], info[4]) for info in infos):
                listening = socket.create_server(bound, family=family, backlog=_BACKLOG)
                listening.setblocking(False)
                sockets.append(stack.enter_context(listening))
            stack.pop_all()
    except OSError as error:
        number = error.errno or 0  # the errno of getaddrinfo() is negative
        why = os.strerror(number) if number > 0 else error.strerror
        raise RouterError(
            f"the gateway cannot listen on {address.host} port {address.port} ({why}); give "
            "another --host or --port, or another --admin address"
        ) from None
    return sockets


class Acceptor:
    """Accepts connections for an aiohttp server in its own tasks, until it is closed. ``options``
    are those of its connections.
    """

    def __init__(
        self,
        server: web.Server,
        sockets: Sequence[socket.socket],
        share: Share,
        options: Mapping[str, Any],
        context: ssl.SSLContext | None,
    ) -> None:
        self._server = server
        self._sockets = sockets
        self._share = share
        self._options = options
        self._context = context
        self._shaking: dict[asyncio.Task[None], float] = {}  # TLS handshakes, and their start times
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._accept(one)) for one in sockets]
        self._tasks.append(loop.create_task(self._end_overdue()))

    async def close(self) -> None:
        """Accept no more connections. Open ones stay."""
        tasks = [*self._tasks, *self._shaking]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for one in self._sockets:
            one.close()

    def _made(self) -> AcceptedConnection:
        return AcceptedConnection(self._server, self._share, **self._options)

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._room(listening)
            try:
                client, _ = await loop.sock_accept(listening)
            except OSError as error:
                if is_own_shortage(error):
                    log.warning("no connection can be accepted: %s", error)
                    await asyncio.sleep(_PAUSE_S)
                continue
            if self._context is None:
                await self._connect(client)
            else:  # only a handshake waits for its client
                task = loop.create_task(self._connect(client))
                self._shaking[task] = time.monotonic()
                task.add_done_callback(self._shaking.pop)

    async def _connect(self, client: socket.socket) -> None:
        more = {} if self._context is None else {"ssl_handshake_timeout": _HANDSHAKE_S}
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._made, client, ssl=self._context, **more
            )
        except OSError as error:  # the client has disconnected, or does not use TLS
            log.debug("a connection failed during its setup: %s", error)
            client.close()

    async def _end_overdue(self) -> None:
        """Close connections of clients that lag too long, periodically."""
        while True:
            await asyncio.sleep(_OVERDUE_LOOK_S)
            for place in self._share.places.overdue():
                place.connection.abort()

    async def _room(self, listening: socket.socket) -> None:
        """Wait until another client may connect."""
        warned, places, loop = False, self._share.places, asyncio.get_running_loop()
        while (count := len(places) + len(self._shaking)) >= self._share.connections_max:
            if not warned:
                log.warning(
                    "%d clients are connected, as many as the limit of %d open files allows; slow "
                    "ones are disconnected, others wait; raise the limit (ulimit -n)",
                    count,
                    file_limit(),
                )
            warned = True
            # As many as there are waiting, because a harmless client may be the last of them.
            most = 1 + min(_info(listening, _INFO_UNACKED), count // 2)
            slowest = places.slowest(most, _LAG_MIN_S)
            await asyncio.sleep(_LOOK_S)
            for _ in range(_TURNS):  # pending input is read meanwhile, and its requests start
                await asyncio.sleep(0)
            for place in slowest:
                if place.lag_s(loop.time()) >= _LAG_MIN_S:
                    place.connection.abort()
            late = time.monotonic() - _LAG_MIN_S
            for task, begin in [*self._shaking.items()][: most - len(slowest)]:
                if begin <= late:
                    task.cancel()


# ---- Who may call


_READS = ("GET", "HEAD", "OPTIONS")
_HEALTH = ("/health", "/ready")
# Content types that a browser sends to another site without a preflight (a "simple" request).
_FORMS = ("text/plain", "application/x-www-form-urlencoded")
_SIMPLE = (*_FORMS, "multipart/form-data", "")
_NOT_OURS = (
    "this router does not accept the host name %s; use its address, or allow the name with "
    "--allow-host"
)


def of_clients(settings: Settings) -> Middleware:
    """Return the check of the clients' listener. If only this machine can connect, the Host must be
    one of its names, otherwise one of the allowed names if there are any. Health checks accept any
    name. A page of another site may only send requests for which its browser makes a preflight,
    because engines' CORS settings decide about those.
    """
    listening, allowed = settings.listen.host, settings.callers.hosts
    checked = is_loopback(listening) or bool(allowed)
    hosts = KnownHosts(listening, allowed, single_labels=True) if checked else None

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if hosts is not None and request.path not in _HEALTH:
            _check_host(request, hosts)
        if request.method not in _READS:
            _check_kind(request, settings.callers.origins)
        return await handler(request)

    return check


def of_operators(settings: Settings, address: Address) -> Middleware:
    """Return the check of the operators' listener: a Host that is this machine's, no page of
    another site, JSON, and the token if there is one. Raises RouterError if other machines can
    connect, and need no token.
    """
    token = settings.callers.admin_token
    if token is None and not is_loopback(address.host):
        raise RouterError(
            f"the admin address {address.host}:{address.port} is reachable from other machines; "
            "give --admin-token FILE, or listen on 127.0.0.1"
        )
    hosts = KnownHosts(address.host, settings.callers.hosts)

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        _check_host(request, hosts)
        if request.method not in _READS:
            if from_other_site(request.headers):
                raise Refusal(403, "a page of another site must not change anything here")
            if request.body_exists and request.content_type != "application/json":
                raise Refusal(415, "the body must be JSON; send Content-Type: application/json")
        if token is not None:
            _check_token(request, token)
        return await handler(request)

    return check


def _check_host(request: web.Request, hosts: KnownHosts) -> None:
    """Raise Refusal unless a request has at most one Host, an accepted one. Browsers always send
    it. The same holds for the host of a whole URL as the target, which replaces the header's.
    """
    named = request.headers.getall(hdrs.HOST, [])
    if len(named) > 1:
        raise Refusal(400, "a request must have one Host header")
    if not request.raw_path.startswith("/"):
        named = [*named, request.url.raw_authority]
    for name in named:
        if name not in hosts:
            raise Refusal(421, _NOT_OURS % repr(name[:80]))


def _check_token(request: web.Request, token: Token) -> None:
    if not token.shown_by(request.headers.get(hdrs.AUTHORIZATION, "")):
        raise Refusal(
            401, ("this needs the token of --admin-token; send Authorization: Bearer TOKEN")
        )


def _check_kind(request: web.Request, origins: tuple[str, ...]) -> None:
    """Raise Refusal for a content type that no engine accepts, and for one that another site's page
    can send without a preflight. Audio is a form even from legitimate pages, which then send their
    API key.
    """
    if not request.body_exists and request.method != hdrs.METH_POST:
        return  # browsers make a preflight for these methods
    kind = request.content_type if hdrs.CONTENT_TYPE in request.headers else ""
    if kind in _FORMS and request.body_exists:
        raise Refusal(415, f"no engine accepts {kind}; send Content-Type: application/json")
    has_preflight = kind not in _SIMPLE or hdrs.AUTHORIZATION in request.headers
    if not has_preflight and from_other_site(request.headers, origins):
        raise Refusal(
            403,
            (
                "a page of another site must send JSON or its API key, or be allowed "
                "(--allow-origin)"
            ),
        )
