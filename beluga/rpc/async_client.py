# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Asyncio client: each session has its own thread, so the event loop never blocks."""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, ParamSpec, TypeVar, cast, overload

from beluga._shared import OfThisProcess
from beluga.arguments import short, whole
from beluga.errors import BadTypeError, BadValueError, ForkedSessionError, RpcError
from beluga.rpc.client import Buffer, Client
from beluga.threads import refuse_green_threads

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from typing_extensions import Self

    from beluga.pool import Pool
    from beluga.rpc.handlers import HandlerInfo

_P = ParamSpec("_P")
_T = TypeVar("_T")
_SESSIONS_MAX = 256


class AsyncClient(OfThisProcess):
    """Sessions with the pool's server for asyncio. Up to ``sessions`` calls (1 to 256) run at a
    time, each on its own lane and thread; further calls wait in order. A session is opened at its
    first use::

        async with AsyncClient(pool, sessions=4) as client:
            await asyncio.gather(*(client.call("square", n, returns=int) for n in range(100)))

    A call that is cancelled before it starts is not made. A call that is cancelled while it runs
    completes, and its result is dropped. Raises the errors of :class:`Client`, and
    :class:`~beluga.errors.ForkedSessionError` in a forked child.
    """

    def __init__(
        self, pool: Pool, *, host: int | None = None, timeout_s: float = 5.0, sessions: int = 1
    ) -> None:
        if not hasattr(pool, "using"):
            raise BadTypeError(f"a session needs a Pool, not {short(pool)}; open one")
        if not 1 <= whole("sessions", sessions) <= _SESSIONS_MAX:
            raise BadValueError(f"sessions is {sessions}, but must be from 1 to {_SESSIONS_MAX}")
        refuse_green_threads()
        self._open = partial(Client, pool, host=host, timeout_s=timeout_s)
        self._executor = ThreadPoolExecutor(sessions, thread_name_prefix="beluga-async")
        self._own = threading.local()  # the session of each thread
        self._clients: list[Client] = []
        self._pid, self._closed = os.getpid(), False

    @overload
    async def call(
        self, method: int, request: Buffer | str = b"", /, *, timeout_s: float | None = None
    ) -> bytes: ...

    @overload
    async def call(
        self,
        method: str,
        /,
        *arguments: object,
        returns: type[_T],
        timeout_s: float | None = None,
    ) -> _T: ...

    @overload
    async def call(
        self, method: str, /, *arguments: object, timeout_s: float | None = None
    ) -> object: ...

    async def call(
        self,
        method: int | str,
        /,
        *arguments: object,
        returns: object = object,
        timeout_s: float | None = None,
    ) -> object:
        """Call a handler by name, or a method by number, as :meth:`Client.call` does."""

        def run_call(client: Client) -> object:
            # Cast() because call() above has the overloads
            call = cast("Callable[..., object]", client.call)
            return call(method, *arguments, returns=returns, timeout_s=timeout_s)

        return await self._run(run_call)

    def remote(
        self, handler: Callable[_P, _T], *, timeout_s: float | None = None
    ) -> Callable[_P, Awaitable[_T]]:
        """Return a coroutine function that calls the server's handler named like ``handler``, as
        :meth:`Client.remote` does.
        """

        async def call(*arguments: _P.args, **named: _P.kwargs) -> _T:
            return await self._run(
                lambda client: client.remote(handler, timeout_s=timeout_s)(*arguments, **named)
            )

        return call

    async def handlers(self, *, timeout_s: float | None = None) -> list[HandlerInfo]:
        """Return the server's handlers, as :meth:`Client.handlers` does."""
        return await self._run(lambda client: client.handlers(timeout_s=timeout_s))

    async def ping(self, *, timeout_s: float | None = None) -> float:
        """Return the round-trip time to the server in seconds."""
        return await self._run(lambda client: client.ping(timeout_s=timeout_s))

    async def _run(self, what: Callable[[Client], _T]) -> _T:
        if self._pid != os.getpid():
            raise ForkedSessionError(
                "this client belongs to the parent process; make a new AsyncClient after fork"
            )
        if self._closed:
            raise RpcError("this client is closed; make a new one")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, self._on_thread, what)

    def _on_thread(self, what: Callable[[Client], _T]) -> _T:
        client: Client | None = getattr(self._own, "client", None)
        if client is None:
            client = self._own.client = self._open()
            self._clients.append(client)
        return what(client)

    async def close(self) -> None:
        """End the sessions after their running calls. Waiting calls are cancelled."""
        self._closed = True
        if self._pid == os.getpid():
            await asyncio.get_running_loop().run_in_executor(None, self._end)

    def _end(self) -> None:
        self._executor.shutdown(cancel_futures=True)
        for client in self._clients:
            client.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
