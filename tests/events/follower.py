# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A router that follows a pool's events, as the gateway does, in a thread of its own."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from beluga.gateway.kv_events import PoolListener
from beluga.index import check_pool, read_names
from beluga.listening import Token
from beluga.pool import Pool
from beluga.router import Indexer

T = TypeVar("T")


def endpoints(path: Path) -> tuple[str, str]:
    """Return two endpoints in a directory, for events and their replay."""
    return f"ipc://{path}/live", f"ipc://{path}/again"


def free_endpoints() -> tuple[str, str]:
    """Return two unused endpoints of this machine."""
    with socket.socket() as one, socket.socket() as two:
        for each in (one, two):
            each.bind(("127.0.0.1", 0))
        return (
            f"tcp://127.0.0.1:{one.getsockname()[1]}",
            f"tcp://127.0.0.1:{two.getsockname()[1]}",
        )


def table(pool: Pool) -> dict[int, int]:
    """Return the output of `beluga pool check --names`: the blocks that all their ranks have, with
    hashes as the index has them for their space.
    """
    report = check_pool(pool)
    assert not report.findings
    ranks: dict[tuple[int, int], set[int]] = {}
    contents: dict[tuple[int, int], tuple[int, int]] = {}
    for _, _, _, name in read_names(pool, report.half).tolist():
        block_hash, _, tokens_hash, space, _, rank, rank_count, _, _ = name
        ranks.setdefault((space, block_hash), set()).add(rank)
        contents[space, block_hash] = (tokens_hash ^ space, rank_count)
    return {
        space ^ block_hash: contents[space, block_hash][0]
        for (space, block_hash), have in ranks.items()
        if len(have) == contents[space, block_hash][1]
    }


class Follower:
    """Follows two endpoints until it is closed."""

    def __init__(
        self, live: str, replay: str, *, block_size: int, token: Token | None = None
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.indexer = Indexer()
        self._listener = self._run(self._make(f"{live},{replay}", block_size, token))

    @property
    def feed(self) -> Any:
        return self._listener.feed

    def blocks(self) -> dict[int, int]:
        async def read() -> dict[int, int]:
            return self._listener.feed.blocks()

        return self._run(read())

    def close(self) -> None:
        async def end() -> None:
            self._listener.close()

        self._run(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _make(self, where: str, block_size: int, token: Token | None) -> PoolListener:
        return PoolListener(self.indexer, where, block_size=block_size, token=token)

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
