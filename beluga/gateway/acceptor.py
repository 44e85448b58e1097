# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The acceptor: it takes clients' connections only while file descriptors are left for what their
requests need.

A request that is under way needs two descriptors, one for its client and one for its engine.
Example: of 64 descriptors 11 are open at the start. 13 of the other 53 are spare, for health checks
and for clients that are told that there is no room. So 20 requests may be under way and 26 clients
connected. Further clients wait in the kernel's queue until one of those 26 has gone. If none goes
in a second, those that have no request under way are closed: a client may keep a connection for as
long as it lives, and open one without ever asking for anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path

from aiohttp import web
from aiohttp.http import HttpProcessingError
from aiohttp.typedefs import Handler

from beluga.gateway.settings import Address

log = logging.getLogger(__name__)

_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL)
_SPARE_MAX = 64
_USUALLY_OPEN = 16  # where /proc does not tell
_LOOK_S = 0.02  # between looks for a connection that has ended
_PAUSE_S = 0.2  # after an error of the system
_IDLE_S = 1.0  # how long a connection without a request may keep others out
_BACKLOG = 1024


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


class FileShare:
    """How many of the process's descriptors clients may use."""

    def __init__(self, kept: int = 0) -> None:
        """``kept`` files, beside those that are open now, will be open for other purposes."""
        listed = Path("/proc/self/fd")
        opened = len(list(listed.iterdir())) if listed.is_dir() else _USUALLY_OPEN
        left = max(2, file_limit() - opened - kept)
        spare = min(_SPARE_MAX, left // 4)
        self.requests_max = max(1, (left - spare) // 2)
        self.connections_max = self.requests_max + max(1, spare // 2)
        self._busy: set[object] = set()  # connections
        self.crowded = False  # whether more clients are connected than requests may be under way

    @web.middleware
    async def note_busy(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Note which connection has a request under way."""
        self._busy.add(request.protocol)
        try:
            return await handler(request)
        finally:
            self._busy.discard(request.protocol)

    def close_idle(self, connections: Iterable[web.RequestHandler]) -> None:
        """Close those connections that have no request under way."""
        for connection in connections:
            if connection not in self._busy:
                connection.force_close()

    async def close_if_crowded(self, _: web.Request, answer: web.StreamResponse) -> None:
        """Let a connection end with its answer, so that idle ones do not keep others out."""
        if self.crowded:
            answer.force_close()
            answer.headers["Connection"] = "close"  # aiohttp has made the other headers already


class Acceptor:
    """Accepts connections for a server of aiohttp in tasks of its own, until it is closed. Without
    a share, as for operators, it accepts all.
    """

    def __init__(
        self, server: web.Server, sockets: Sequence[socket.socket], share: FileShare | None
    ) -> None:
        self._server = server
        self._sockets = sockets
        self._share = share
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._accept(one)) for one in sockets]

    @classmethod
    async def open(
        cls, runner: web.AppRunner, address: Address, share: FileShare | None
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
        return cls(server, sockets, share)

    @property
    def address(self) -> Address:
        """The real address."""
        return Address(*self._sockets[0].getsockname()[:2])

    async def close(self) -> None:
        """Accept no more connections. Those that are open stay."""
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        for one in self._sockets:
            one.close()

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            if self._share is not None:
                await self._room(self._share)
            try:
                client, _ = await loop.sock_accept(listening)
            except OSError as error:
                if is_own_shortage(error):
                    log.warning("no connection can be accepted: %s", error)
                    await asyncio.sleep(_PAUSE_S)
                continue
            try:
                await loop.connect_accepted_socket(self._server, client)
            except OSError as error:  # the client has gone
                log.debug("a connection failed at once: %s", error)
                client.close()

    async def _room(self, share: FileShare) -> None:
        """Wait until one more client may be connected."""
        told, loop = False, asyncio.get_running_loop()
        patient_until = loop.time() + _IDLE_S
        while (count := len(self._server.connections)) >= share.connections_max:
            if not told:
                log.warning(
                    "%d clients are connected, as many as the limit of %d open files allows; "
                    "others wait; raise it (ulimit -n)",
                    count,
                    file_limit(),
                )
            told = True
            if loop.time() > patient_until:
                patient_until = loop.time() + _IDLE_S
                share.close_idle(self._server.connections)
            await asyncio.sleep(_LOOK_S)
        share.crowded = count >= share.requests_max
