# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A simulated pool with hints behaves like a server's index, and ends hints by the time of the
trace.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest
from beluga.simulate.hinted import LEVELS, HintedPool
from support.blocks import keys

from beluga._ffi import lib
from beluga.index import BlockState, IndexClient, IndexServer
from beluga.pool import Pool
from beluga.rpc import Client

PAGE = 4096
CAPACITY = 60


def ids(*blocks: int) -> np.ndarray:
    return np.array(blocks, np.uint32)


class Indexed:
    """A server's pool in which only that many pages are left for blocks."""

    def __init__(self, server: IndexServer, meta: IndexClient, capacity: int) -> None:
        self._meta = meta
        stat = server.index_stat()
        pages = stat.data_bytes // PAGE
        for number in range(pages - capacity):  # blocks that are pinned fill the rest
            self._stored(10_000 + number)
        names = keys(range(10_000, 10_000 + pages - capacity))
        self._pins = [
            meta.lookup(names[at : at + 256], pin=True) for at in range(0, len(names), 256)
        ]

    def _stored(self, *blocks: int) -> None:
        grants = self._meta.reserve(keys(blocks), length=PAGE)
        self._meta.commit([grant for grant in grants if grant.state is BlockState.GRANTED])

    def look_up(self, blocks: list[int]) -> int:
        return self._meta.lookup(keys(blocks)).count

    def put(self, blocks: list[int]) -> None:
        self._stored(*blocks)

    def has(self, block: int) -> bool:
        return bool(self._meta.tiers(keys([block]))[0] & 1)

    def hint(self, blocks: list[int], level: int) -> int:
        return self._meta.hint(keys(blocks), level=level)[0]


@pytest.fixture
def small(shm: Path) -> Pool:
    return Pool.create([shm / "a"], device_size=8 << 20, sparse=True, max_blocks=4096)


@pytest.mark.parametrize("seed", range(4))
def test_a_simulated_pool_evicts_the_same_blocks_as_a_server(small: Pool, seed: int) -> None:
    chance = Random(seed)
    chains = [[100 * tree + depth for depth in range(chance.randint(1, 30))] for tree in range(12)]
    with (
        small,
        IndexServer(small, hint_budget=1.0) as server,
        Client(small) as client,
    ):
        real = Indexed(server, IndexClient(client), CAPACITY)
        made = HintedPool(2000, CAPACITY, CAPACITY)
        for _ in range(150):
            chain = chance.choice(chains)
            act = chance.randrange(4)
            if act < 2:
                assert made.look_up(0, ids(*chain)) == real.look_up(chain)
                made.put(0, ids(*chain))
                real.put(chain)
            else:
                level = chance.choice(list(LEVELS.values()))
                part = chain[chance.randrange(len(chain)) :]
                assert made.hint(0, ids(*part), level) == real.hint(part, level)
            everything = [block for one in chains for block in one]
            assert [made.has(one) for one in everything] == [real.has(one) for one in everything]


def test_hints_end_in_the_order_of_their_times() -> None:
    pool = HintedPool(20, 4, 4)
    pool.put(0, ids(0, 1, 2, 3))
    assert pool.hint(0, ids(0, 1), LEVELS["pin"], 100) == 2
    assert pool.hint(0, ids(2), LEVELS["high"], 50) == 1
    assert pool.look_up(60, ids(0)) == 1  # the block's time to live starts again
    pool.put(149, ids(10))
    assert [pool.has(number) for number in (0, 1, 2, 3)] == [True, False, True, True], "1, at 100"
    pool.put(150, ids(11))
    assert [pool.has(number) for number in (0, 2, 3)] == [True, False, True]
    pool.put(161, ids(12))
    assert [pool.has(number) for number in (0, 3)] == [False, True]


def test_a_hint_ends_with_its_block() -> None:
    pool = HintedPool(20, 2, 1)
    pool.put(0, ids(0, 1))
    assert pool.hint(0, ids(0), LEVELS["low"], 100) == 1
    pool.put(1, ids(2))
    assert not pool.has(0)
    pool.put(2, ids(0))
    pool.put(200, ids(3))
    assert (pool.has(0), pool.has(2)) == (True, False), "it went by age"


def test_a_budget_favors_the_leading_blocks() -> None:
    pool = HintedPool(1000, 800, 300)
    chain = np.arange(700, dtype=np.uint32)
    pool.put(0, chain)
    assert pool.hint(0, chain, LEVELS["high"]) == 300
    assert (pool.favored_max, pool.refused) == (300, 400)
    assert pool.hint(0, chain[:300], lib.BL_LEVEL_PINNED) == 300, "they are favored already"
    assert pool.hint(0, chain, LEVELS["low"]) == 700
    pool.hint(0, chain[400:], LEVELS["high"])
    assert (pool.favored_max, pool.refused) == (300, 400)
