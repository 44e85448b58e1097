# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Threads share one cache, and so one session, while servers come and go: the right bytes, and
nothing left behind.
"""

from __future__ import annotations

import contextlib
import threading

import numpy as np
from support.blocks import eventually

from beluga import IndexServer, KVCache, Pool
from beluga.errors import SessionLostError
from tests.kvcache.conftest import digests

_THREADS, _BLOCKS, _LENGTH = 4, 8, 256 << 10
_REPLACEMENTS, _ROUNDS = 3, 4


def test_threads_share_a_cache_while_the_server_is_replaced(pool: Pool) -> None:
    names = digests(_THREADS * _BLOCKS)
    numbers = np.arange(len(names), dtype=np.uint8) + 1
    faults: list[str] = []
    rounds = [0] * _THREADS
    ended = threading.Event()
    servers = contextlib.ExitStack()

    def work(own: int) -> None:
        of_own, of_next = (
            slice(n * _BLOCKS, (n + 1) * _BLOCKS) for n in (own, (own + 1) % _THREADS)
        )
        blocks = np.repeat(numbers[of_own, None], _LENGTH, axis=1)
        targets = np.empty_like(blocks)
        while not ended.is_set():
            with contextlib.suppress(SessionLostError):
                cache.put(names[of_own], blocks)
                hits = cache.get(names[of_next], targets).hits
                expected = numbers[of_next][:hits, None]
                if not (targets[:hits] == expected).all():
                    faults.append(f"thread {own} got other bytes")
                cache.remove(names[own * _BLOCKS : own * _BLOCKS + 2])
            rounds[own] += 1

    def guarded(own: int) -> None:
        try:
            work(own)
        except Exception as error:
            faults.append(f"thread {own}: {error!r}")

    with servers:
        server = servers.enter_context(IndexServer(pool))
        cache = servers.enter_context(KVCache(pool, namespace="shared", timeout_s=30))
        threads = [threading.Thread(target=guarded, args=(own,)) for own in range(_THREADS)]
        for thread in threads:
            thread.start()
        for _ in range(_REPLACEMENTS + 1):
            due = [count + _ROUNDS for count in rounds]
            assert eventually(
                lambda due=due: faults or all(map(int.__ge__, rounds, due)), timeout_s=120
            )
            if faults:
                break
            server.stop()
            server = servers.enter_context(IndexServer(pool))
        ended.set()
        for thread in threads:
            thread.join()
        assert not faults
        cache.put(names, np.repeat(numbers[:, None], _LENGTH, axis=1))
        stat = cache.stat()
        assert (server.stat().live_count, stat.grant_count, stat.pinned_count) == (1, 0, 0)
