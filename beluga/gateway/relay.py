# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The relay: it forwards an engine's answer byte for byte, as it arrives.

In a stream of events only the beginning of an unfinished line is held until the rest of the line
arrives. No client could use it earlier, and if the engine dies in the middle of a line, the client
has received whole lines, which an error event can follow. Bytes are never decoded, so a character
that is split between two chunks does no harm.
"""

from __future__ import annotations

from collections.abc import Callable

import aiohttp
from aiohttp import web

from beluga.gateway.health import FAILURES, words_of

EVENT_STREAM = "text/event-stream"
_DATA = b"data:"
_DONE = b"data: [DONE]"

HELD_SIZE_MAX = 1 << 20
"""How many bytes of one line are held. A longer line is forwarded in parts."""


class BrokenOffError(Exception):
    """The engine failed in the middle of its answer."""


class ClientGoneError(Exception):
    """The client has closed its connection."""


class Lines:
    """Cuts chunks behind their last line end."""

    def __init__(self) -> None:
        self._held = b""

    def push(self, chunk: bytes) -> bytes:
        """Add a chunk. Returns what can be forwarded now."""
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

    def rest(self) -> bytes:
        """Return what is left at the end of a complete answer."""
        held, self._held = self._held, b""
        return held


class Source:
    """An engine's answer, as pieces that can be forwarded."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.has_events = response.content_type == EVENT_STREAM
        self._content = response.content
        self._lines = Lines()

    async def next(self) -> bytes:
        """Return the next piece, which is empty at the end. Raises BrokenOffError."""
        while True:
            try:
                chunk = await self._content.readany()
            except FAILURES as error:
                raise BrokenOffError(words_of(error)) from error
            if not chunk:
                return self._lines.rest()
            if not self.has_events:
                return chunk
            if whole := self._lines.push(chunk):
                return whole


async def relay(
    source: Source, first: bytes, target: web.StreamResponse, tokens: Callable[[int], None]
) -> None:
    """Forward an answer whose first piece has been read. The caller ends the answer.

    ``tokens`` gets the number of data events in each piece; an engine sends about one per token.
    Raises BrokenOffError or ClientGoneError.
    """
    piece = first
    while piece:
        await _write(target, piece)
        if source.has_events:
            tokens(piece.count(_DATA) - piece.count(_DONE))
        piece = await source.next()


async def _write(target: web.StreamResponse, data: bytes) -> None:
    try:
        await target.write(data)
    except (ConnectionError, RuntimeError) as error:  # aiohttp: "Cannot write to closing transport"
        raise ClientGoneError(words_of(error)) from error
