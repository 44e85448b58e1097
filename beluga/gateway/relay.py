# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The relay forwards an engine's response byte for byte, as it arrives.

In an event stream, only the start of an unfinished line is buffered until the rest arrives. No
client could use it earlier, and if the engine dies within a line, the client has received whole
lines, which an error event can follow. Bytes are never decoded, so characters may be split between
chunks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import TracebackType

import aiohttp
from aiohttp import web

from beluga.gateway.health import FAILURES, words_of

EVENT_STREAM = "text/event-stream"
_DATA = b"data:"
_DONE = b"data: [DONE]"

HELD_SIZE_MAX = 1 << 20
"""Largest buffered part of a line, in bytes. A longer line is forwarded in parts."""


class BrokenOffError(Exception):
    """The engine failed during its response."""


class ClientGoneError(Exception):
    """The client has disconnected."""


class Lines:
    """Splits chunks after their last line end."""

    def __init__(self) -> None:
        self._held = b""

    def push(self, chunk: bytes) -> bytes:
        """Add a chunk. Returns what can be forwarded now."""
        if not self._held and chunk.endswith(b"\n"):
            return chunk
        cut = chunk.rfind(b"\n") + 1
        if cut == len(chunk):
            whole, self._held = self._held + chunk, b""
        elif cut:
            whole, self._held = self._held + chunk[:cut], chunk[cut:]
        else:
            whole, self._held = b"", self._held + chunk
        if len(self._held) > HELD_SIZE_MAX:
            whole, self._held = whole + self._held, b""
        return whole

    @property
    def holds(self) -> bool:
        """Whether the start of a line is buffered."""
        return bool(self._held)

    def rest(self) -> bytes:
        """Return the remainder at the end of a complete response."""
        held, self._held = self._held, b""
        return held


class Source:
    """An engine's response in pieces that can be forwarded; a context manager.

    An engine that sends nothing for ``stall_s`` seconds while the client waits has stalled. aiohttp
    would set a new timer for each piece; here one timer checks the time of the last piece.
    """

    def __init__(self, response: aiohttp.ClientResponse, stall_s: float) -> None:
        self.has_events = response.content_type == EVENT_STREAM
        self._response = response
        self._content = response.content
        self._lines = Lines()
        self._stall_s = stall_s
        self._since: float | None = None  # start of the wait for the engine
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Source:
        connection = self._response.connection
        if connection is not None and connection.protocol is not None:
            connection.protocol.read_timeout = None
            connection.protocol.start_timeout()  # without a timeout, this ends the old timer
            self._look_in(self._stall_s)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()

    async def next(self) -> bytes:
        """Return the next piece; an empty one is the end. Raises BrokenOffError."""
        while True:
            self._since = time.monotonic()
            try:
                chunk = await self._content.readany()
            except FAILURES as error:
                raise BrokenOffError(words_of(error)) from error
            finally:
                self._since = None
            if not chunk:
                return self._lines.rest()
            if not self.has_events:
                return chunk
            if whole := self._lines.push(chunk):
                return whole

    @property
    def ended(self) -> bool:
        """Whether the last returned piece is the final one."""
        return self._content.at_eof() and not self._lines.holds

    def _look_in(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        """End the response if the engine has stalled, otherwise check again when it might have."""
        silent_s = 0.0 if self._since is None else time.monotonic() - self._since
        if silent_s < self._stall_s:
            self._look_in(self._stall_s - silent_s)
        else:
            stalled = aiohttp.SocketTimeoutError(f"nothing came for {self._stall_s:g} s")
            self._content.set_exception(stalled)
            self._response.close()


async def relay(
    source: Source, first: bytes, target: web.StreamResponse, tokens: Callable[[int], None]
) -> None:
    """Forward a response whose first piece has been read. The caller ends the response, unless the
    end was sent with the last piece, which saves a packet.

    ``tokens`` gets the number of data events in each piece; an engine sends about one per token.
    Raises BrokenOffError or ClientGoneError.
    """
    piece = first
    while piece:
        try:
            await (target.write_eof(piece) if source.ended else target.write(piece))
        except (ConnectionError, RuntimeError) as error:  # "Cannot write to closing transport"
            raise ClientGoneError(words_of(error)) from error
        if source.has_events:
            tokens(piece.count(_DATA) - piece.count(_DONE))
        piece = await source.next()
