# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The HTTP client for engines. It keeps connections open between requests ("keep-alive"), and finds
out whether an engine closed one of them before it had read a request.

An engine may close an idle connection at any time, so a request and the close can cross on their
way. The engine cannot have executed such a request, because either its kernel has acknowledged none
of the request's bytes, or the connection was reset, which a kernel does if bytes were never read.
"""

from __future__ import annotations

import asyncio
import contextvars
import socket
import struct
from functools import partial
from typing import Any

import aiohttp
from aiohttp.client_proto import ResponseHandler

from beluga.http_server import HEADER_SIZE_MAX, HEADERS_MAX

_IDLE_CONNECTION_S = 4.0  # vLLM's server closes an idle connection after 5 s
# Of Linux's struct tcp_info: the bytes that the other side acknowledged and sent, 64 bits each.
_INFO_BYTES = struct.Struct("=QQ")
_INFO_BYTES_OFFSET = 120
_FIN_SIZE = 1  # the end of the other side's bytes counts as one of them


class _EngineConnection(ResponseHandler):
    """A connection to an engine."""

    unread = False  # whether it was closed before the engine had read the last request
    _requests = 0
    _counts: tuple[int, int] | None = None  # bytes before the last request

    def begin(self) -> None:
        """Record that a request will be sent."""
        self._requests += 1
        if self._requests > 1:  # a new connection cannot be stale
            self._counts = self._bytes()

    def connection_lost(self, exc: BaseException | None) -> None:
        now = self._bytes()
        if self._counts is not None and now is not None:
            acknowledged, received = (b - a for a, b in zip(self._counts, now, strict=True))
            was_reset = isinstance(exc, ConnectionResetError)
            self.unread = received <= _FIN_SIZE and (acknowledged == 0 or was_reset)
        super().connection_lost(exc)

    def _bytes(self) -> tuple[int, int] | None:
        """Return the numbers of bytes that the engine acknowledged and sent, if known."""
        try:
            own: Any = self.transport.get_extra_info("socket")  # type: ignore[union-attr]
            size = _INFO_BYTES_OFFSET + _INFO_BYTES.size
            info = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
            acknowledged, received = _INFO_BYTES.unpack_from(info, _INFO_BYTES_OFFSET)
        except (AttributeError, OSError, struct.error):
            return None
        return acknowledged, received


_last: contextvars.ContextVar[_EngineConnection | None] = contextvars.ContextVar("last")


class _Connector(aiohttp.TCPConnector):
    """Makes connections of this module's class."""

    def __init__(self, **options: Any) -> None:
        super().__init__(limit=0, ttl_dns_cache=30, **options)
        loop = asyncio.get_running_loop()
        self._factory = partial(_EngineConnection, loop=loop)  # type: ignore[assignment]

    async def connect(self, *arguments: Any, **options: Any) -> Any:
        connection = await super().connect(*arguments, **options)
        if isinstance(connection.protocol, _EngineConnection):
            connection.protocol.begin()
            _last.set(connection.protocol)
        return connection


class EngineClient:
    """Sends requests to engines; a context manager. ``session`` is for the gateway's own."""

    async def __aenter__(self) -> EngineClient:
        self.session = _session(_Connector(keepalive_timeout=_IDLE_CONNECTION_S))
        self._unpooled = _session(_Connector(force_close=True))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()
        await self._unpooled.close()

    async def request(self, *arguments: Any, **options: Any) -> aiohttp.ClientResponse:
        """Send a request as ``aiohttp.ClientSession.request`` does. If the engine had closed its
        connection without reading it, it is sent once more, on a new one.
        """
        _last.set(None)
        try:
            return await self.session.request(*arguments, **options)
        except (aiohttp.ClientError, OSError):
            connection = _last.get(None)
            if connection is None or not connection.unread:
                raise
        return await self._unpooled.request(*arguments, **options)


def _session(connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=connector,
        # Streams must be uncompressed to be forwarded as events, and metrics to be read.
        headers={"Accept-Encoding": "identity"},
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
        # More than the listener's limit: engines return some of a client's headers.
        max_field_size=2 * HEADER_SIZE_MAX,
        max_line_size=2 * HEADER_SIZE_MAX,
        max_headers=2 * HEADERS_MAX,
    )
