# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The connection between a gateway's supervisor and one of its processes: JSON, one message a line.

The supervisor commands, and the process replies to each command by its ticket. The process also
reports, without a ticket, that it is ready, that it cannot start, and that a worker has left. It
requests the metrics of all processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from typing import Any

import msgspec

from beluga.errors import RouterError
from beluga.gateway.settings import EngineSpec

_LINE_SIZE_MAX = 1 << 26  # bytes; the metrics of a process are the longest message


class NumberedWorker(msgspec.Struct):
    """A worker as the supervisor numbers it. ``slot`` is its place in the shared loads."""

    number: int
    slot: int
    spec: EngineSpec


class Command(msgspec.Struct, omit_defaults=True):
    """A command to a process. ``do`` names it, and the other fields are its arguments."""

    do: str
    ticket: int = 0
    worker: int = 0
    members: list[NumberedWorker] = []
    thresholds: dict[str, float | int | None] = {}
    result: Any = None  # the reply to a request of the process


class Statement(msgspec.Struct, omit_defaults=True):
    """What a process replies (``reply``), or reports by itself."""

    kind: str
    ticket: int = 0
    worker: int = 0
    result: Any = None
    error: str = ""


class ControlChannel:
    """One end of the connection. ``receives`` is the type of the other end's messages."""

    def __init__(
        self, receives: type[Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._decoder = msgspec.json.Decoder(receives)
        self._reader, self._writer = reader, writer
        self._tickets = itertools.count(1)
        self._open: dict[int, asyncio.Future[Any]] = {}

    @classmethod
    async def open(cls, end: socket.socket, receives: type[Any]) -> ControlChannel:
        """Use one end of a pair of sockets."""
        streams = await asyncio.open_unix_connection(sock=end, limit=_LINE_SIZE_MAX)
        return cls(receives, *streams)

    async def receive(self) -> Any | None:
        """Return the next message, or None after the other end has closed the connection."""
        try:
            line = await self._reader.readuntil(b"\n")
        except (asyncio.IncompleteReadError, OSError):
            return None
        return self._decoder.decode(line)

    def send(self, message: Command | Statement) -> None:
        """Send a message. It is dropped if the other end has closed the connection."""
        with contextlib.suppress(OSError, RuntimeError):
            self._writer.write(msgspec.json.encode(message) + b"\n")

    async def call(self, message: Command | Statement, patience_s: float) -> Any:
        """Send a message and return its result. Raises RouterError for an error in the reply, a
        closed connection, and a reply that takes too long.
        """
        message.ticket = next(self._tickets)
        reply = asyncio.get_running_loop().create_future()
        self._open[message.ticket] = reply
        try:
            self.send(message)
            return await asyncio.wait_for(reply, patience_s)
        except asyncio.TimeoutError:
            raise RouterError(
                f"a process of the gateway has not replied within {patience_s:g} s"
            ) from None
        finally:
            self._open.pop(message.ticket, None)

    def replied(self, ticket: int, result: Any, error: str = "") -> None:
        """Pass a reply to the caller of :meth:`call`."""
        reply = self._open.get(ticket)
        if reply is None or reply.done():
            return
        if error:
            reply.set_exception(RouterError(error))
        else:
            reply.set_result(result)

    async def flush(self) -> None:
        """Wait until the other end has all messages, or has closed the connection."""
        with contextlib.suppress(OSError):
            await self._writer.drain()

    def close(self) -> None:
        """Close this end, so that no caller waits for a reply."""
        for ticket in list(self._open):
            self.replied(ticket, None, "a process of the gateway has ended")
        with contextlib.suppress(OSError, RuntimeError):
            self._writer.close()
