# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The HTTP server of all listeners: aiohttp's, with a bounded number of connections, bounded input,
and no patience with slow clients.

The listener *waits for* a client while it expects a request, receives the body, or sends an answer.
The client's lag is how many seconds it is behind a client that moves RATE bytes per second; the lag
is never negative then. Example: one that has sent nothing for 10 s lags 10 s; one that has sent 100
bytes, one per second, lags 99.9 s; one that has sent 5 MiB and then nothing for 10 s lags 10 s. A
client that lags too long is disconnected. When all slots are taken, a new connection gets that of
the client that lags most, so idle connections, however many, exclude no client. While the server
works for a client, it does not lag.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import heapq
import logging
import socket
import ssl
import struct
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from aiohttp import web
from aiohttp.http import HttpProcessingError
from aiohttp.http_exceptions import BadHttpMessage
from aiohttp.typedefs import Handler

log = logging.getLogger(__name__)

RATE = 1024  # bytes per second
_LAGS_S = 1.0
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL)
_LOOK_S = 0.02  # interval of checks for closed connections
_OVERDUE_LOOK_S = 1.0
_PAUSE_S = 0.2  # after a system error
_TURNS = 4  # turns of the event loop from the arrival of a request's bytes to its handler
_LAG_MIN_S = 0.25  # minimum lag of a client that may be disconnected: its request may be in transit
# Fields of Linux's struct tcp_info, 32 bits each.
_INFO_UNACKED = 24  # of a listening socket: connections that wait to be accepted
_INFO_LAST_DATA_RECV = 52  # milliseconds
_INFO_BYTES_ACKED = 120  # the lower 32 bits: what the other side has received of the sent bytes
_HANDSHAKE_S = 10.0  # of TLS
_REASON_LENGTH_MAX = 80  # per logged reason
PATIENCE_S = 75.0
"""Seconds that a client may lag while its slot is not needed."""
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


ConnectionT = TypeVar("ConnectionT")


class ConnectionSlot(Generic[ConnectionT]):
    """The slot of one connection. At first it waits for the client."""

    __slots__ = ("connection", "lost", "patience_s", "peer", "since")

    def __init__(self, connection: ConnectionT, peer: str, now: float) -> None:
        self.connection = connection
        self.peer = peer
        # When a client of RATE would have moved as many bytes; None while not waiting for it.
        self.since: float | None = now
        self.lost = False  # whether the connection was ended
        # The longest lag now, if it is not that of the other connections
        self.patience_s: Callable[[], float] | None = None

    def wait(self) -> None:
        """Wait for the client from now on."""
        self.since = time.monotonic()

    def move(self, size: int) -> None:
        """Record that this many bytes have moved."""
        if self.since is not None:
            self.since = min(time.monotonic(), self.since + size / RATE)

    def work(self) -> None:
        """Work for the client from now on."""
        self.since = None

    def lag_s(self, now: float) -> float:
        """Return how many seconds the client lags; below 0 while it is not waited for."""
        return -1.0 if self.since is None else now - self.since


class ConnectionSlots(Generic[ConnectionT]):
    """The slots of all connections. Not thread-safe: the caller locks, or uses one thread."""

    def __init__(
        self, patience_s: float = PATIENCE_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._patience_s, self._clock = patience_s, clock
        self._slots: dict[ConnectionT, ConnectionSlot[ConnectionT]] = {}

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[ConnectionSlot[ConnectionT]]:
        return iter(self._slots.values())

    def take(self, connection: ConnectionT, peer: str) -> ConnectionSlot[ConnectionT]:
        """Return a new connection's slot."""
        slot = ConnectionSlot(connection, peer, self._clock())
        self._slots[connection] = slot
        return slot

    def leave(self, connection: ConnectionT) -> None:
        """Note that a connection has ended."""
        self._slots.pop(connection, None)

    def of(self, connection: ConnectionT) -> ConnectionSlot[ConnectionT] | None:
        """Return a connection's slot, or None if the connection has ended."""
        return self._slots.get(connection)

    def slowest(self, count: int = 1, lag_min_s: float = 0.0) -> list[ConnectionSlot[ConnectionT]]:
        """Return at most ``count`` slots for new connections: of clients that lag a second or
        more, those of the peer with the most of them first, and of these the slowest. Clients that
        do not lag come last. Clients for whom the server works, or that lag less than
        ``lag_min_s``, are excluded.
        """
        now = self._clock()
        waited_for = [slot for slot in self if slot.lag_s(now) >= lag_min_s]
        counts = Counter(slot.peer for slot in waited_for)

        def rank(slot: ConnectionSlot[ConnectionT]) -> tuple[bool, int, float]:
            lag_s = slot.lag_s(now)
            return lag_s >= _LAGS_S, counts[slot.peer], lag_s

        return heapq.nlargest(count, waited_for, key=rank)

    def overdue(self) -> list[ConnectionSlot[ConnectionT]]:
        """Return the slots of clients that lag too long."""
        now, usual_s = self._clock(), self._patience_s
        return [
            slot
            for slot in self
            if (lag_s := slot.lag_s(now)) > 0
            and lag_s > (slot.patience_s() if slot.patience_s else usual_s)
        ]


class Share:
    """The number of connections that a listener may have, and the slots of the present ones."""

    def __init__(
        self, connections_max: int, requests_max: int | None = None, *, limited_by: str = ""
    ) -> None:
        """``limited_by`` explains the limit in the log."""
        self.limited_by = limited_by
        self.connections_max = connections_max
        self.requests_max = connections_max if requests_max is None else requests_max
        self.slots: ConnectionSlots[AcceptedConnection] = ConnectionSlots(PATIENCE_S)
        self.heads_size = 0  # total bytes of input that no handler has yet

    def is_crowded_by(self, peer: str) -> bool:
        """Return whether more clients are connected than requests can run, and no other peer has
        more connections than this one.
        """
        if len(self.slots) <= self.requests_max:
            return False
        counts = Counter(slot.peer for slot in self.slots)
        return counts[peer] == max(counts.values())

    @web.middleware
    async def follow(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Track whether the server works on a connection's request, or waits for its client."""
        connection = connection_of(request)
        connection.begins(request)
        try:
            return await handler(request)
        finally:
            connection.ends()

    async def close_if_crowded(self, request: web.Request, answer: web.StreamResponse) -> None:
        """Close a connection after its response if clients may be waiting for a slot. Those of
        peers with fewer connections stay.
        """
        if self.is_crowded_by(connection_of(request).slot.peer):
            answer.force_close()
            answer.headers["Connection"] = "close"  # aiohttp has already prepared the other headers


class AcceptedConnection(web.RequestHandler):
    """A connection with a slot of a share."""

    __slots__ = (
        *("_arrived", "_expects_head", "_body_size", "_handled", "_head_size", "_queued"),
        *("_acknowledged", "_share", "_unparsed_size", "slot"),
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
        self._acknowledged = 0  # bytes that the client had received at the last look
        self.slot: ConnectionSlot[AcceptedConnection] = ConnectionSlot(self, "", 0.0)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        peer = transport.get_extra_info("peername") or ("",)
        self.slot = self._share.slots.take(self, str(peer[0]))
        super().connection_made(transport)
        self.wait()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._share.slots.leave(self)
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
        too_large = self._share.heads_size > HEADS_SIZE_MAX and self._head_size > HEAD_SIZE_USUAL
        if too_large or self._head_size > HEAD_SIZE_MAX:
            log.warning("a client was disconnected because its request's head is too large")
            self.abort()

    def pause_writing(self) -> None:
        """Wait for a client that does not read."""
        super().pause_writing()
        self.slot.wait()

    def look(self) -> None:
        """Record what a client has received that reads too slowly."""
        if self._paused and self.transport is not None:
            last = self._acknowledged
            own = self.transport.get_extra_info("socket")
            self._acknowledged = _info(own, _INFO_BYTES_ACKED)
            self.slot.move(self._acknowledged - last & 0xFFFFFFFF)

    def resume_writing(self) -> None:
        """Continue after the client has read."""
        super().resume_writing()
        if not self._expects_head:
            self.slot.work()

    def begins(self, request: web.BaseRequest) -> None:
        """Record that a handler has a request."""
        self._expects_head = False
        self._handled, self._body_size = request, 0
        number = self._arrived - len(self._messages)
        while self._queued and self._queued[0][0] <= number:
            self._count_head(-self._queued.popleft()[1])
        self.slot.work()

    def ends(self) -> None:
        """Record that a response has been sent, except for what the client has yet to read."""
        self._expects_head = True
        self.slot.patience_s = None
        if self._handled is not None and self._handled.content.is_eof():
            self._handled = None  # otherwise aiohttp drops what follows of its body for a while
        self.slot.wait()

    def wait(self) -> None:
        """Wait for the client since its last bytes arrived, or since it connected, which may be
        long before the connection was accepted.
        """
        self.slot.wait()
        if self.transport is not None:
            silent_ms = _info(self.transport.get_extra_info("socket"), _INFO_LAST_DATA_RECV)
            self.slot.since = time.monotonic() - silent_ms / 1000

    def abort(self) -> None:
        """Close the connection at once, without sending the rest."""
        if self.transport is not None:
            self.transport.abort()

    def _count_head(self, size: int) -> None:
        self._head_size += size
        self._share.heads_size += size


def connection_of(request: web.BaseRequest) -> AcceptedConnection:
    """Return the connection of a request."""
    connection = request.protocol
    assert isinstance(connection, AcceptedConnection)  # noqa: S101  the acceptor makes no others
    return connection


def accept(
    stack: contextlib.AsyncExitStack,
    sockets: Sequence[socket.socket],
    server: web.Server,
    share: Share,
    tls: ssl.SSLContext | None,
) -> None:
    """Accept connections for an aiohttp server on listening sockets until the stack is closed."""
    options = {
        "access_log": None,
        "logger": http_log,
        "auto_decompress": False,  # bodies are forwarded unchanged, with their Content-Encoding
        "max_field_size": HEADER_SIZE_MAX,
        "max_line_size": HEADER_SIZE_MAX,
        "max_headers": HEADERS_MAX,
        "keepalive_timeout": PATIENCE_S,
    }
    acceptor = Acceptor(server, sockets, share, options, tls)
    stack.push_async_callback(acceptor.close)


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
        self._tasks = [loop.create_task(self._accept(listening)) for listening in sockets]
        self._tasks.append(loop.create_task(self._end_overdue()))

    async def close(self) -> None:
        """Accept no more connections. Open ones stay."""
        tasks = [*self._tasks, *self._shaking]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for listening in self._sockets:
            listening.close()

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
            for slot in self._share.slots:
                slot.connection.look()
            for slot in self._share.slots.overdue():
                slot.connection.abort()

    async def _room(self, listening: socket.socket) -> None:
        """Wait until another client may connect."""
        warned, slots, loop = False, self._share.slots, asyncio.get_running_loop()
        while (count := len(slots) + len(self._shaking)) >= self._share.connections_max:
            if not warned:
                log.warning(
                    "%d clients are connected, as many as may be%s; slow ones are disconnected, "
                    "others wait",
                    count,
                    self._share.limited_by,
                )
            warned = True
            # As many as there are waiting, because a harmless client may be the last of them.
            close_max = 1 + min(_info(listening, _INFO_UNACKED), count // 2)
            slowest = slots.slowest(close_max, _LAG_MIN_S)
            await asyncio.sleep(_LOOK_S)
            for _ in range(_TURNS):  # pending input is read meanwhile, and its requests start
                await asyncio.sleep(0)
            for slot in slowest:
                if slot.lag_s(loop.time()) >= _LAG_MIN_S:
                    slot.connection.abort()
            late = time.monotonic() - _LAG_MIN_S
            for task, begin in [*self._shaking.items()][: close_max - len(slowest)]:
                if begin <= late:
                    task.cancel()


def is_own_shortage(error: BaseException) -> bool:
    """Return whether a connection failed because this process or machine has no descriptor, memory
    or port left, rather than because of the other side.
    """
    return isinstance(error, OSError) and error.errno in _SHORTAGES


def _info(listening: Any, field: int) -> int:
    """Return a field of a socket's ``tcp_info``; 0 if the system does not have it."""
    try:
        info = listening.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, field + 4)
        return int(struct.unpack_from("=I", info, field)[0])
    except (OSError, struct.error):
        return 0


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
