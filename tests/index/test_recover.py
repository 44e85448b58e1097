# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A restart recovers the order in which blocks were committed, whatever their places, with little
memory.
"""

from __future__ import annotations

import re
from pathlib import Path

from support.blocks import held, keys, put

from beluga.index import MetaClient, MetaServer
from beluga.pool import Pool
from beluga.rpc import Client

COUNT = 20
ROUNDS = 40
GONE = 9


def test_after_restarts_the_oldest_blocks_are_evicted_first(pool: Pool) -> None:
    """Numbers and space are reused in another order; generations of several epochs differ in many
    bits, so that a sort by some of the bits would fail.
    """
    with MetaServer(pool), Client(pool) as client:
        meta = MetaClient(client)
        put(meta, range(COUNT))
        meta.remove(keys([3, 11, 7]))
        for number in range(ROUNDS):
            meta.abort(meta.reserve(keys(range(1000, 1064)), length=4096))
            if number % 10 == 0:
                put(meta, [100 + number])
    with MetaServer(pool), Client(pool) as client:
        meta = MetaClient(client)
        meta.remove(keys([0, 110]))
        put(meta, [200, 201, 202])
    old = [n for n in range(1, COUNT) if n not in (3, 11, 7)]
    order = [*old, 100, 120, 130, 200, 201, 202]
    with MetaServer(pool) as server, Client(pool) as client:
        meta = MetaClient(client)
        assert server.meta_stat().block_count == len(order)
        for number in range(300, 400):
            put(meta, [number])
            if server.meta_stat().evict_count == GONE:
                break
        assert held(meta, order) == set(order[GONE:])


def numbers(meta: MetaClient, names: list[int]) -> set[int]:
    return {meta.lookup(keys([name])).hits[0].block for name in names}


def test_after_a_restart_new_blocks_fill_the_gaps_and_then_the_end(pool: Pool) -> None:
    with MetaServer(pool), Client(pool) as client:
        meta = MetaClient(client)
        put(meta, range(COUNT))
        first = numbers(meta, [*range(COUNT)])
        meta.remove(keys([3, 7]))
    kept = [name for name in range(COUNT) if name not in (3, 7)]
    with MetaServer(pool), Client(pool) as client:
        meta = MetaClient(client)
        put(meta, [103, 107])
        assert numbers(meta, [*kept, 103, 107]) == first
        put(meta, [200, 201])
        assert numbers(meta, [200, 201]) == {max(first) + 1, max(first) + 2}


def anonymous() -> int:
    """Return the private memory of this process, in bytes."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def test_a_restart_takes_no_memory_for_unused_numbers(shm: Path) -> None:
    """The table of 64 GiB has 24 MiB of numbers; nearly all of it is empty."""
    taken = []
    with Pool.create([shm / "a"], device_size=64 << 30, sparse=True) as pool:
        for _ in range(3):
            before = anonymous()
            with MetaServer(pool), Client(pool) as client:
                put(MetaClient(client), [len(taken)])
                taken.append(anonymous() - before)
    first, *later = taken
    assert max(later) < first + (12 << 20)
