# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Calls for asyncio: the event loop continues while they wait."""

from __future__ import annotations

import asyncio
import threading

import pytest

from beluga import AsyncClient, Handlers, Pool, Server
from beluga.errors import BadTypeError, BadValueError, HandlerError, NoServerError, RpcError


def square(number: int) -> int:
    return number * number


def fails() -> None:
    raise ValueError("no")


def test_concurrent_calls_of_tasks_get_their_own_results(pool: Pool) -> None:
    async def main() -> list[int]:
        async with AsyncClient(pool, sessions=3) as client:
            remote = client.remote(square)
            found = await asyncio.gather(*(remote(number) for number in range(50)))
            assert await client.call("square", 7, returns=int) == 49
            assert await client.call(64, "text") == b"text"
            assert [one.name for one in await client.handlers()] == ["fails", "square"]
            assert await client.ping() > 0
            with pytest.raises(HandlerError, match="ValueError: no"):
                await client.call("fails")
            return found

    with Server(pool) as server:
        server.register(Handlers(square, fails))
        server.handle(64, bytes)
        assert asyncio.run(main()) == [number * number for number in range(50)]


def test_the_event_loop_runs_while_a_call_waits(pool: Pool) -> None:
    """The handler waits for an action of the event loop during the call."""
    go = threading.Event()

    def wait() -> bool:
        return go.wait(60)

    async def main() -> bool:
        async with AsyncClient(pool) as client:
            call = asyncio.ensure_future(client.call("wait", returns=bool, timeout_s=60))
            for _ in range(10):
                await asyncio.sleep(0)
            go.set()
            return await call

    with Server(pool) as server:
        server.register(Handlers(wait))
        assert asyncio.run(main())


def test_a_cancelled_call_that_has_not_begun_is_not_made(pool: Pool) -> None:
    entered, go, seen = threading.Event(), threading.Event(), list[int]()

    def note(number: int) -> None:
        seen.append(number)
        entered.set()
        assert go.wait(60)

    async def main() -> None:
        async with AsyncClient(pool, timeout_s=60) as client:
            first = asyncio.ensure_future(client.call("note", 1))
            await asyncio.get_running_loop().run_in_executor(None, entered.wait)
            second = asyncio.ensure_future(client.call("note", 2))
            await asyncio.sleep(0)
            second.cancel()
            go.set()
            await first
            with pytest.raises(asyncio.CancelledError):
                await second

    with Server(pool) as server:
        server.register(Handlers(note))
        asyncio.run(main())
    assert seen == [1]


def test_a_closed_client_and_a_pool_without_a_server_raise(pool: Pool) -> None:
    async def main() -> None:
        client = AsyncClient(pool, timeout_s=0.1)
        with pytest.raises(NoServerError):
            await client.call(64)
        with Server(pool) as server:
            server.handle(64, bytes)
            assert await client.call(64, b"x") == b"x"  # a session is opened at the next call
            await client.close()
            await client.close()
        with pytest.raises(RpcError, match="this client is closed"):
            await client.call(64)

    asyncio.run(main())
    for wrong in (0, 257):
        with pytest.raises(BadValueError, match="must be from 1 to 256"):
            AsyncClient(pool, sessions=wrong)
    with pytest.raises(BadTypeError):
        AsyncClient("a pool")  # type: ignore[arg-type]
