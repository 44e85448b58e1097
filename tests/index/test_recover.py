# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A restart finds the order in which blocks were committed, wherever they lie."""

from __future__ import annotations

from support.blocks import held, keys, put

from beluga.index import MetaClient, MetaServer
from beluga.pool import Pool
from beluga.rpc import Client

COUNT = 20
ROUNDS = 40
GONE = 9


def test_after_restarts_the_oldest_blocks_go_first(pool: Pool) -> None:
    """Numbers and space are used again in another order; generations of several epochs differ in
    many bits, so that a sort by some of them would not do."""
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
