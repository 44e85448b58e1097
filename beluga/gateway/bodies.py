# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The bodies of requests: how they are read, and the memory that all of them may use.

A body is kept until its engine has started to respond, because the request may have to go to
another engine. A body for which there is no room is refused at once. It does not wait, because the
bodies that occupy the room may themselves be waiting. The first bytes of each body are not counted,
so large bodies do not block ordinary requests.
"""

from __future__ import annotations

import asyncio

from aiohttp import web

from beluga.gateway.acceptor import connection_of
from beluga.gateway.answers import Refusal
from beluga.gateway.settings import Limits

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
        most = self._limits.body_size_max
        if request.content_length is not None and request.content_length > most:
            raise Refusal(413, f"the request's body has more than {most} bytes")
        if request.content.is_eof():  # the body arrived with the headers
            body = await request.content.readany()
            if len(body) > most:
                raise Refusal(413, f"the request's body has more than {most} bytes")
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
        connection, most = connection_of(request), self._limits.body_size_max
        pieces: list[bytes] = []
        size = 0
        connection.wait()
        try:
            while piece := await request.content.readany():
                size += len(piece)
                if size > most:
                    raise Refusal(413, f"the request's body has more than {most} bytes")
                held.grow(size)
                connection.place.move(len(piece))
                pieces.append(piece)
        except BaseException:
            pieces.clear()  # the error's traceback keeps this frame alive during the response
            raise
        connection.place.work()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)
