# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A server dies; the next one serves all committed blocks, and grants no space in use."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import roles
from support.blocks import eventually, held, keys, put, states
from support.emulation import long
from support.role import Process

from beluga._ffi import ffi, lib
from beluga.errors import CallTimeoutError
from beluga.index import BlockState, IndexClient, IndexServer
from beluga.pool import Pool
from beluga.rpc import Client

MIB = 1 << 20

BlockPlace = tuple[int, int, int, int]


def places(index: IndexClient, numbers: range) -> dict[int, BlockPlace]:
    """Return where each block is, by its number."""
    found = {number: index.lookup(keys([number])).hits for number in numbers}
    return {
        number: (hits[0].offset, hits[0].length, hits[0].generation, hits[0].block)
        for number, hits in found.items()
        if hits
    }


def conserved(index: IndexClient) -> bool:
    """Check that only committed and granted blocks use space."""
    stat = index.stat()
    return stat.used_bytes == stat.block_bytes + stat.grant_count * MIB and stat.held_bytes == 0


@pytest.fixture
def first(pool: Pool, paths: list[Path]) -> Iterator[Process]:
    with Process(roles.serve_index, paths) as server:
        yield server


@pytest.mark.parametrize("deaths", [1, 2, long(3), long(4)])
def test_every_committed_block_survives_kills_of_the_server(
    pool: Pool, paths: list[Path], first: Process, deaths: int
) -> None:
    with Client(pool) as client:
        index = IndexClient(client)
        put(index, range(20))
        put(index, range(20, 30), length=5 * MIB // 2)
        index.remove(keys(range(5, 25)))
        before = places(index, range(40))
        assert set(before) == {*range(5), *range(25, 30)}
    first.kill()
    for _ in range(deaths - 1):
        Process(roles.serve_index, paths).kill()
    with IndexServer(pool) as server, Client(pool) as client:
        index = IndexClient(client)
        assert server.stat().epoch == deaths + 1
        assert places(index, range(40)) == before
        assert index.stat().damaged_count == 0
        assert eventually(lambda: index.stat().held_bytes == 0)
        assert index.stat().used_bytes == index.stat().block_bytes


@pytest.mark.parametrize("deaths", [long(1), 2, long(3)])
def test_a_client_continues_its_puts_across_server_deaths(
    pool: Pool, paths: list[Path], first: Process, deaths: int
) -> None:
    server = first
    with Client(pool) as client:
        index = IndexClient(client)
        for turn in range(deaths):
            put(index, range(turn * 5, turn * 5 + 5))
            server.kill()
            server = Process(roles.serve_index, paths)
        assert held(index, range(deaths * 5)) == set(range(deaths * 5))
        assert eventually(lambda: conserved(index))
        generations = [place[2] for place in places(index, range(deaths * 5)).values()]
        assert sorted(set(generations)) == generations
    server.kill()


def test_a_clean_stop_loses_no_blocks(pool: Pool) -> None:
    with IndexServer(pool), Client(pool) as client:
        put(IndexClient(client), range(10))
        before = places(IndexClient(client), range(10))
    for _ in range(3):
        with IndexServer(pool), Client(pool) as client:
            assert places(IndexClient(client), range(10)) == before


def test_grants_of_a_live_client_are_not_reassigned(
    pool: Pool, paths: list[Path], first: Process
) -> None:
    with Process(roles.hold_blocks, paths) as writer:
        assert set(json.loads(writer.request('["reserve", [1, 2, 3]]'))) == {"GRANTED"}
        with Client(pool) as client:
            (beside,) = put(IndexClient(client), [100])
        first.kill()
        with IndexServer(pool) as server, Client(pool) as client:
            index = IndexClient(client)
            assert server.stat().inherited_count >= 1
            assert index.stat().held_bytes > 0
            # The writer may still write there, so no session gets this space.
            grants = index.reserve(keys(range(1000, 1070)), length=MIB)
            given = {grant.offset for grant in grants if grant.state is BlockState.GRANTED}
            assert not given & {beside.offset - (3 - i) * MIB for i in range(3)}
            assert given
            index.abort(grants)
            # The client makes a call: it has a new session, and its old grants have ended.
            assert (
                json.loads(writer.request('["commit", [1, 2, 3]]')) == [-lib.BL_ERROR_NO_GRANT] * 3
            )
            assert eventually(lambda: index.stat().held_bytes == 0)
            assert server.stat().inherited_count == 0
            assert states(index.reserve(keys([1, 2, 3]), length=MIB)) == ["GRANTED"] * 3


def test_grants_of_a_dead_client_are_free_soon_after_a_takeover(
    pool: Pool, paths: list[Path], first: Process
) -> None:
    with Process(roles.hold_blocks, paths) as writer:
        writer.request('["reserve", [1, 2, 3]]')
        first.kill()
        writer.kill()
    with IndexServer(pool) as server, Client(pool) as client:
        index = IndexClient(client)
        assert eventually(lambda: index.stat().held_bytes == 0)
        assert server.stat().inherited_count == 0
        assert index.stat().used_bytes == 0
        assert states(index.reserve(keys([1, 2, 3]), length=MIB)) == ["GRANTED"] * 3


def test_a_commit_repeated_to_the_next_server_succeeds(
    pool: Pool, paths: list[Path], first: Process
) -> None:
    with Client(pool) as client:
        index = IndexClient(client)
        grants = put(index, [1, 2])
        first.kill()
        with pytest.raises(CallTimeoutError):
            client.ping(timeout_s=0.05)
        with Process(roles.serve_index, paths):
            assert index.commit(grants) == [0, 0]
            assert index.stat().commit_count == 0


def test_the_order_of_eviction_starts_by_generation(
    pool: Pool, paths: list[Path], first: Process
) -> None:
    with Client(pool) as client:
        put(IndexClient(client), range(50))
    first.kill()
    with IndexServer(pool), Client(pool) as client:
        index = IndexClient(client)
        assert eventually(lambda: index.stat().held_bytes == 0)
        put(index, range(100, 120))
        there = held(index, range(50))
        assert there == set(range(50 - len(there), 50))
        assert len(there) < 50


def test_a_damaged_entry_is_dropped_and_counted(pool: Pool) -> None:
    with IndexServer(pool), Client(pool) as client:
        grants = put(IndexClient(client), range(3))
    address = lib.bl_pool_address(
        pool.handle, pool.geometry.table_offset + (pool.geometry.block_count_max + 1) * 64
    )  # epoch 1 wrote half 1
    assert grants[1].block == 1
    damaged = bytearray(ffi.buffer(ffi.cast("char *", address), 64))
    damaged[20] ^= 1
    lib.bl_ntstore_copy(address, bytes(damaged), 64)
    with IndexServer(pool), Client(pool) as client:
        index = IndexClient(client)
        assert held(index, range(3)) == {0, 2}
        assert index.stat().damaged_count == 1
        put(index, [1])


def test_a_damaged_open_mark_only_affects_its_extent(pool: Pool) -> None:
    with IndexServer(pool), Client(pool) as client:
        put(IndexClient(client), range(6))  # two in an extent of one stripe
    stripes = pool.geometry.stripe_count
    address = lib.bl_pool_address(pool.handle, pool.geometry.extent_offset + stripes * 64)
    damaged = bytearray(ffi.buffer(ffi.cast("char *", address), 64))  # of epoch 1, stripe 0
    mark = ffi.from_buffer("bl_extent_line *", damaged)
    assert (mark.state, mark.first_stripe, mark.stripe_count) == (lib.BL_EXTENT_OPEN, 0, 1)
    mark.stripe_count = 64
    lib.bl_ntstore_copy(address, bytes(damaged), 64)
    with IndexServer(pool), Client(pool) as client:
        assert held(IndexClient(client), range(6)) == {2, 3, 4, 5}


def test_a_full_table_is_taken_over(shm: Path) -> None:
    count = 50_000
    paths = [shm / "a"]
    with Pool.create(paths, device_size=512 * MIB, sparse=True, max_blocks=count) as pool:
        with Process(roles.serve_index, paths) as server, Client(pool) as client:
            index = IndexClient(client)
            for first in range(0, count, 1000):
                numbers = keys(range(first, first + 1000))
                index.commit(index.reserve(numbers, length=4096))
            assert index.stat().block_count == count
            server.kill()
        with IndexServer(pool), Client(pool) as client:
            index = IndexClient(client)
            assert index.stat().block_count == count
            assert len(index.lookup(keys(range(count))).hits) == count
