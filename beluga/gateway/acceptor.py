# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The acceptor: it takes clients' connections only while file descriptors are left for what their
requests need.

A request that is under way needs two descriptors, one for its client and one for its engine.
Example: of 64 descriptors 11 are open at the start, and 6 are for operators. 11 of the other 47 are
spare, for health checks and for clients that are told that there is no room. So 18 requests may be
under way and 23 clients connected. When all places are taken, the clients that lag most give theirs
up (``beluga.listening.Places``): those that keep a connection open without asking for anything,
send a request slowly, or do not read their answers. Others wait in the kernel's queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
import socket
import ssl
import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.http import HttpProcessingError
from aiohttp.typedefs import Handler

from beluga.gateway.settings import Address
from beluga.listening import Place, Places

log = logging.getLogger(__name__)

_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL)
_SPARE_MAX = 64
_OPERATORS_MAX = 64
_CONNECTIONS_MAX = 8192  # each needs memory, too, and one event loop serves them all
_USUALLY_OPEN = 16  # where /proc does not tell
_LOOK_S = 0.02  # between looks for a connection that has ended
_OVERDUE_LOOK_S = 1.0
_PAUSE_S = 0.2  # after an error of the system
_TURNS = 4  # of the event loop, from the arrival of a request's bytes to its handler
_LAG_MIN_S = 0.25  # of a client that may be closed for another: its request may be on its way
_BACKLOG = 1024
# Fields of Linux' struct tcp_info, each 32 bits.
_INFO_UNACKED = 24  # of a listening socket: how many connections wait to be accepted
_INFO_LAST_DATA_RECV = 52  # milliseconds
_HANDSHAKE_S = 10.0  # of TLS
PATIENCE_S = 75.0
"""How many seconds a client may lag while nobody needs its place."""
HEAD_SIZE_MAX = 1 << 20
"""How many bytes a connection may send before its request is whole, apart from the body. The
parser's limits are for each line.
"""
HEADS_SIZE_MAX = 64 << 20
"""How many bytes of unfinished heads all connections may have. When there are more, a connection
with more than HEAD_SIZE_USUAL is closed.
"""
HEAD_SIZE_USUAL = 1 << 13


def _in_one_line(record: logging.LogRecord) -> bool:
    """Log what a client sent that is no HTTP in one line: it is not an error of the gateway."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError):
        record.levelno, record.levelname = logging.WARNING, "WARNING"
        record.msg = f"{record.getMessage()}: {' '.join(error.message.split())[:200]}"
        record.args, record.exc_info = (), None
    return True


http_log = logging.getLogger(f"{__name__}.http")
"""The log of aiohttp's server."""
http_log.addFilter(_in_one_line)


def raise_file_limit() -> None:
    """Let this process open as many files as the system's hard limit allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def file_limit() -> int:
    """Return how many files this process may open."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit if limit != resource.RLIM_INFINITY else 1 << 30


def is_own_shortage(error: BaseException) -> bool:
    """Return whether a connection failed because this process or machine has no descriptor, memory
    or port for it, so that the other side is not to blame.
    """
    return isinstance(error, OSError) and error.errno in _SHORTAGES


def _info(one: Any, field: int) -> int:
    """Return a field of a socket's ``tcp_info``; 0 where the system has none."""
    try:
        info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, field + 4)
        return int(struct.unpack_from("=I", info, field)[0])
    except (OSError, struct.error):
        return 0


class Share:
    """How many connections a listener may have, and the places of those that it has."""

    def __init__(self, connections_max: int, requests_max: int | None = None) -> None:
        self.connections_max = connections_max
        self.requests_max = connections_max if requests_max is None else requests_max
        self.places: Places[AcceptedConnection] = Places(PATIENCE_S)
        self.heads_size = 0  # bytes of all unfinished heads

    @property
    def crowded(self) -> bool:
        """Whether more clients are connected than requests may be under way."""
        return len(self.places) > self.requests_max

    @web.middleware
    async def follow(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Note whether the server works for a connection, or waits for its client."""
        connection = connection_of(request)
        connection.begins()
        try:
            return await handler(request)
        finally:
            connection.ends()

    async def close_if_crowded(self, _: web.Request, answer: web.StreamResponse) -> None:
        """Let a connection end with its answer, so that idle ones do not keep others out."""
        if self.crowded:
            answer.force_close()
            answer.headers["Connection"] = "close"  # aiohttp has made the other headers already


def shares(kept: int = 0) -> tuple[Share, Share]:
    """Divide the process's descriptors into the share of clients and that of operators. ``kept``
    files, beside those that are open now, will be open for other purposes.
    """
    listed = Path("/proc/self/fd")
    opened = len(list(listed.iterdir())) if listed.is_dir() else _USUALLY_OPEN
    left = max(2, file_limit() - opened - kept)
    operators = min(_OPERATORS_MAX, max(1, left // 8))
    left = max(2, left - operators)
    spare = min(_SPARE_MAX, left // 4)
    requests_max = min(_CONNECTIONS_MAX, max(1, (left - spare) // 2))
    return Share(requests_max + max(1, spare // 2), requests_max), Share(operators)


class AcceptedConnection(web.RequestHandler):
    """A connection that has a place in a share."""

    __slots__ = ("_asking", "_head_size", "_share", "place")

    def __init__(self, server: web.Server, share: Share, **options: Any) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), **options)
        self._share = share
        self._asking = True  # whether a request's head is expected, or has begun to come
        self._head_size = 0
        self.place: Place[AcceptedConnection] = Place(self, "", 0.0)

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
        if self._asking:
            self._count_head(len(data))
            many = self._share.heads_size > HEADS_SIZE_MAX and self._head_size > HEAD_SIZE_USUAL
            if many or self._head_size > HEAD_SIZE_MAX:
                log.warning("a client was closed whose request has a head of too many bytes")
                self.abort()
                return
        super().data_received(data)

    def pause_writing(self) -> None:
        """Wait for the client, which does not read."""
        super().pause_writing()
        self.place.wait()

    def resume_writing(self) -> None:
        """Go on, because the client has read."""
        super().resume_writing()
        if not self._asking:
            self.place.work()

    def begins(self) -> None:
        """Note that a request has come."""
        self._asking = False
        self._count_head(-self._head_size)
        self.place.work()

    def ends(self) -> None:
        """Note that a request has been answered, up to what its client reads."""
        self._asking = True
        self.place.wait()

    def wait(self) -> None:
        """Wait for the client since its last bytes came, or since it connected: that may be long
        before the connection was accepted.
        """
        self.place.wait()
        if self.transport is not None:
            silent_ms = _info(self.transport.get_extra_info("socket"), _INFO_LAST_DATA_RECV)
            self.place.since = time.monotonic() - silent_ms / 1000

    def abort(self) -> None:
        """End the connection at once, with what it has not sent yet."""
        if self.transport is not None:
            self.transport.abort()

    def _count_head(self, size: int) -> None:
        self._head_size += size
        self._share.heads_size += size


def connection_of(request: web.Request) -> AcceptedConnection:
    """Return the connection of a request."""
    connection = request.protocol
    assert isinstance(connection, AcceptedConnection)  # noqa: S101  the acceptor makes no others
    return connection


class Acceptor:
    """Accepts connections for a server of aiohttp in tasks of its own, until it is closed.
    ``options`` are those of its connections.
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
        self._shaking: dict[asyncio.Task[None], float] = {}  # handshakes of TLS, and their begin
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._accept(one)) for one in sockets]
        self._tasks.append(loop.create_task(self._end_overdue()))

    @classmethod
    async def open(
        cls,
        runner: web.AppRunner,
        address: Address,
        share: Share,
        options: Mapping[str, Any],
        context: ssl.SSLContext | None = None,
    ) -> Acceptor:
        """Listen on an address for a runner that is set up. Raises OSError."""
        server = runner.server
        assert server is not None  # noqa: S101  for mypy: it is set up
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        with contextlib.ExitStack() as stack:
            sockets = []
            for family, place in dict.fromkeys((one[0], one[4]) for one in found):
                made = socket.create_server(place, family=family, backlog=_BACKLOG)
                made.setblocking(False)
                sockets.append(stack.enter_context(made))
            stack.pop_all()
        return cls(server, sockets, share, options, context)

    @property
    def address(self) -> Address:
        """The real address."""
        return Address(*self._sockets[0].getsockname()[:2])

    async def close(self) -> None:
        """Accept no more connections. Those that are open stay."""
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
            else:  # a handshake waits for its client, and others do not
                task = loop.create_task(self._connect(client))
                self._shaking[task] = time.monotonic()
                task.add_done_callback(self._shaking.pop)

    async def _connect(self, client: socket.socket) -> None:
        more = {} if self._context is None else {"ssl_handshake_timeout": _HANDSHAKE_S}
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._made, client, ssl=self._context, **more
            )
        except OSError as error:  # the client has gone, or does not speak TLS
            log.debug("a connection failed at once: %s", error)
            client.close()

    async def _end_overdue(self) -> None:
        """End the connections of clients that lag too long, again and again."""
        while True:
            await asyncio.sleep(_OVERDUE_LOOK_S)
            for place in self._share.places.overdue():
                place.connection.abort()

    async def _room(self, listening: socket.socket) -> None:
        """Wait until one more client may be connected."""
        told, places, loop = False, self._share.places, asyncio.get_running_loop()
        while (count := len(places) + len(self._shaking)) >= self._share.connections_max:
            if not told:
                log.warning(
                    "%d clients are connected, as many as the limit of %d open files allows; "
                    "slow ones are closed, others wait; raise it (ulimit -n)",
                    count,
                    file_limit(),
                )
            told = True
            # As many as wait, since a client without harm may be the last of them.
            most = 1 + min(_info(listening, _INFO_UNACKED), count // 2)
            slowest = places.slowest(most, _LAG_MIN_S)
            await asyncio.sleep(_LOOK_S)
            for _ in range(_TURNS):  # what has come meanwhile is read, and its request begins
                await asyncio.sleep(0)
            for place in slowest:
                if place.lag_s(loop.time()) >= _LAG_MIN_S:
                    place.connection.abort()
            late = time.monotonic() - _LAG_MIN_S
            for task, begin in [*self._shaking.items()][: most - len(slowest)]:
                if begin <= late:
                    task.cancel()
