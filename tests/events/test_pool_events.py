# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A replay through `beluga serve --events`: blocks come, go and are evicted, servers are killed,
a standby takes over, and routers miss messages or come late. At the end, all of them have the
pool's table.
"""

from __future__ import annotations

import hashlib
import json
import random
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from support.blocks import eventually

from beluga import KVCache
from beluga.errors import RpcError
from beluga.index import chain_names
from beluga.pool import Pool
from tests.conftest import Run, Start
from tests.events.follower import Follower, free_endpoints, table

pytest.importorskip("zmq")
TOKENS, LENGTH, CHAIN, RANKS = 16, 4096, 12, 2
BLOCKS = 300  # lines of the block table
ROUNDS = 40


@pytest.fixture
def pool(shm: Path) -> Iterator[Pool]:
    with Pool.create([shm / "a"], device_size=32 << 20, sparse=True, max_blocks=BLOCKS) as pool:
        yield pool


class Engine:
    """Replays prompts of a few conversations: each rank stores its part of the blocks."""

    def __init__(self, pool: Pool, seed: int) -> None:
        self._random = random.Random(seed)
        self.caches = [
            KVCache(pool, namespace=f"rank {rank}", timeout_s=30) for rank in range(RANKS)
        ]

    def step(self) -> None:
        """Store the blocks of one prompt, which grows a shared prefix, or remove a few."""
        talk = self._random.randrange(60)
        count = self._random.randrange(1, CHAIN)
        path = [1 + talk // 10, *(100 * (1 + talk) + depth for depth in range(count))]
        if self._random.random() < 0.1:
            gone = [self.digest(rank, path[-1]) for rank in range(RANKS)]
            for rank, digest in enumerate(gone):
                self.caches[rank].remove([digest])
            return
        for rank, cache in enumerate(self.caches):
            names = chain_names(
                path,
                [number ^ 0xABCDEF for number in path],
                block_tokens=TOKENS,
                space=77,
                rank=rank,
                rank_count=RANKS,
            )
            digests = [self.digest(rank, number) for number in path]
            cache.put(digests, np.zeros((len(path), LENGTH), np.uint8), names=names)

    def try_steps(self, count: int) -> None:
        for _ in range(count):
            try:
                self.step()
            except RpcError:  # a server died meanwhile
                return

    @staticmethod
    def digest(rank: int, number: int) -> bytes:
        return hashlib.sha256(b"%d %d" % (rank, number)).digest()

    def close(self) -> None:
        for cache in self.caches:
            cache.close()


def test_routers_have_the_pools_table_after_random_operations(
    pool: Pool, shm: Path, start: Start, run: Run
) -> None:
    live, replay = free_endpoints()
    serve = ["serve", "--pool", str(shm / "a"), "--events", live, "--events-replay", replay]
    with ExitStack() as stack:
        first = start(*serve)
        assert first.stderr is not None and "epoch 1" in first.stderr.readline()
        early = stack.enter_context(Follower(live, replay, block_size=TOKENS))
        engine = Engine(pool, seed=5)
        stack.callback(engine.close)
        routers = {"early": early}

        def settled() -> bool:
            wanted = table(pool)
            return all(router.blocks() == wanted for router in routers.values())

        engine.try_steps(ROUNDS)
        assert eventually(settled)
        first.send_signal(signal.SIGSTOP)  # a router that connects now waits for the table
        routers["late"] = stack.enter_context(Follower(live, replay, block_size=TOKENS))
        first.send_signal(signal.SIGCONT)
        engine.try_steps(ROUNDS)
        assert eventually(settled)

        standby = start(*serve, "--standby", "--silent", "0.5")
        assert standby.stderr is not None and "standing by" in standby.stderr.readline()
        engine.try_steps(3)
        first.kill()
        first.wait()
        assert "epoch 2" in standby.stderr.readline()
        engine.try_steps(ROUNDS)
        assert eventually(settled, timeout_s=60)

        standby.kill()
        standby.wait()
        third = start(*serve)
        assert third.stderr is not None and "epoch 3" in third.stderr.readline()
        routers["third"] = stack.enter_context(Follower(live, replay, block_size=TOKENS))
        engine.try_steps(ROUNDS)
        assert eventually(settled, timeout_s=60)

        stat = engine.caches[0].stat()
        assert stat.evict_count > 0 and len(table(pool)) > BLOCKS / RANKS / 4
        assert all(router.feed.unread == 0 for router in routers.values())
        shown = json.loads(
            run("pool", "check", "--pool", str(shm / "a"), "--names", "--json").stdout
        )
        named = {int(one["hash"], 16) ^ int(one["space"], 16) for one in shown["names"]}
        assert set(early.blocks()) <= named
