# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Names of blocks: they survive takeovers with the entries, and the journal contains them."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from support import roles
from support.forge import LINE, line_hash, read, write
from support.role import Process

from beluga import KVCache
from beluga._ffi import ffi, lib
from beluga.errors import LayoutError
from beluga.index import (
    NAME,
    REMOVED,
    STORED,
    IndexClient,
    IndexServer,
    chain_names,
    check_pool,
    read_names,
    repair_pool,
)
from beluga.pool import Pool
from beluga.rpc import Client

LENGTH = 4096


def digest(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


def named(numbers: range, **more: int) -> NDArray[np.void]:
    """Names of a chain that starts at the first block."""
    hashes = [1000 + number for number in numbers]
    return chain_names(hashes, [2000 + number for number in numbers], block_tokens=16, **more)


def put(cache: KVCache, numbers: range, names: NDArray[np.void] | None) -> None:
    blocks = np.zeros((len(numbers), LENGTH), np.uint8)
    assert cache.put(list(map(digest, numbers)), blocks, names=names).stored == len(numbers)


def hashes(rows: NDArray[np.void]) -> list[int]:
    return sorted(rows["name"]["block_hash"].tolist())


def half(pool: Pool) -> int:
    return check_pool(pool).half


def line_of(pool: Pool, block: int) -> int:
    """Return the offset of a block's name in the valid half."""
    return pool.geometry.name_offset + (half(pool) * pool.geometry.block_count_max + block) * LINE


def test_a_chain_returns_its_names() -> None:
    names = named(range(3), parent_hash=7, rank=1, rank_count=2)
    assert names["parent_hash"].tolist() == [7, 1000, 1001]
    assert names["flags"].tolist() == [1, 1, 1]
    assert named(range(2))["flags"].tolist() == [0, 1]
    assert len(named(range(0))) == 0
    with pytest.raises(ValueError, match="2 block hashes but 1"):
        chain_names([1, 2], [1], block_tokens=16)
    with pytest.raises(ValueError, match="rank 2 of 2"):
        named(range(1), rank=2, rank_count=2)


def test_names_are_stored_with_the_entries(pool: Pool, server: IndexServer) -> None:
    with KVCache(pool, namespace="named") as cache:
        put(cache, range(40), named(range(40)))
        put(cache, range(40, 50), None)
        cache.remove([digest(3)])
    rows = read_names(pool, half(pool))
    assert hashes(rows) == [1000 + number for number in range(40) if number != 3]
    assert {int(kind) for kind in rows["kind"]} == {STORED}
    names = {int(name["block_hash"]): name for name in rows["name"]}
    assert names[1005]["parent_hash"] == 1004 and names[1005]["tokens_hash"] == 2005
    assert not check_pool(pool).findings


def test_a_line_of_an_earlier_block_is_not_a_name(pool: Pool, server: IndexServer) -> None:
    with KVCache(pool, namespace="named") as cache:
        put(cache, range(1), named(range(1)))
        cache.remove([digest(0)])
        for other in range(1, pool.geometry.block_count_max + 1):  # one gets the same number
            put(cache, range(other, other + 1), None)
    assert len(read_names(pool, half(pool))) == 0
    assert not check_pool(pool).findings


def test_a_name_of_another_generation_is_not_read(pool: Pool, server: IndexServer) -> None:
    with KVCache(pool, namespace="named") as cache:
        put(cache, range(3), named(range(3)))
    row = read_names(pool, half(pool))[1]
    block = int(row["block"])
    offset = line_of(pool, block)
    line = (int(row["generation"]) + 1).to_bytes(8, "little") + read(pool, offset)[8:60] + bytes(4)
    write(pool, offset, line[:60] + line_hash(line, block).to_bytes(4, "little"))
    assert block not in read_names(pool, half(pool))["block"]
    assert len(read_names(pool, half(pool))) == 2


def test_a_repeated_commit_writes_the_name_again(pool: Pool, server: IndexServer) -> None:
    """A server may die after an entry was written and before its name. The client then commits
    again.
    """
    with Client(pool) as client:
        (grant,) = IndexClient(client).reserve(np.array([[5, 5]], np.uint64), length=LENGTH)
        name = dict(zip(NAME.names or (), named(range(1))[0].tolist(), strict=True))
        head = ffi.new("bl_block_request *", {"count": 1, "flags": lib.BL_COMMIT_NAMED})
        commit = ffi.new(
            "bl_named_commit *",
            {"commit": (grant.key, grant.generation, grant.block), "name": name},
        )
        request = bytes(ffi.buffer(head)) + bytes(ffi.buffer(commit))
        client.call(lib.BL_METHOD_COMMIT, request)
        before = read_names(pool, half(pool))
        assert hashes(before) == [1000]
        write(pool, line_of(pool, grant.block), bytes(LINE))
        assert len(read_names(pool, half(pool))) == 0
        client.call(lib.BL_METHOD_COMMIT, request)
    assert np.array_equal(read_names(pool, half(pool)), before)


@pytest.mark.parametrize("takeovers", [1, 2, 3])
def test_names_outlive_their_server(pool: Pool, paths: list[Path], takeovers: int) -> None:
    with Process(roles.serve_index, paths) as first:
        with KVCache(pool, namespace="named") as cache:
            put(cache, range(20), named(range(20)))
            put(cache, range(20, 30), None)
        before = read_names(pool, half(pool))
        assert len(before) == 20
        first.kill()
    for _ in range(takeovers):
        with Process(roles.serve_index, paths) as server:
            after = read_names(pool, half(pool))
            assert np.array_equal(before, after)
            server.kill()


def test_a_name_of_two_epochs_ago_is_not_found(pool: Pool, paths: list[Path]) -> None:
    for number in range(3):
        with Process(roles.serve_index, paths) as server:
            with KVCache(pool, namespace="named") as cache:
                if number == 0:
                    put(cache, range(5), named(range(5)))
                if number == 1:
                    cache.remove([digest(n) for n in range(5)])
            server.kill()
    assert len(read_names(pool, half(pool))) == 0


@contextmanager
def journaling(pool: Pool, capacity: int) -> Iterator[tuple[IndexServer, KVCache]]:
    server = IndexServer(pool)
    server.attach_journal(capacity)
    with server, KVCache(pool, namespace="named") as cache:
        yield server, cache


def test_the_journal_has_only_named_blocks(pool: Pool) -> None:
    with journaling(pool, 100) as (server, cache):
        put(cache, range(4), named(range(4)))
        put(cache, range(4, 8), None)
        cache.remove([digest(number) for number in (1, 5, 2)])
        changes, lost = server.take_changes(5)
        removal, _ = server.take_changes(100)
        assert lost == 0
        assert changes["kind"].tolist() == [STORED] * 4 + [REMOVED]
        assert changes["name"]["tokens_hash"][:4].tolist() == [2000, 2001, 2002, 2003]
        assert removal["kind"].tolist() == [REMOVED]
        generations = changes["generation"].tolist()
        assert [generations[4], int(removal["generation"][0])] == generations[1:3]


def test_an_evicted_block_and_a_pinned_one_are_reported(pool: Pool) -> None:
    with journaling(pool, 10_000) as (server, cache):
        put(cache, range(2), named(range(2)))
        pins = cache.pin([digest(0)])
        cache.remove([digest(0)])
        assert hashes(read_names(pool, half(pool))) == [1001]
        cache.release(pins)
        for number in range(2, 300):  # the table has 256 lines
            put(cache, range(number, number + 1), named(range(number, number + 1)))
        changes, _ = server.take_changes(10_000)
        held: dict[int, int] = {}
        for change in changes:
            if change["kind"] == STORED:
                held[int(change["generation"])] = int(change["name"]["block_hash"])
            else:
                del held[int(change["generation"])]  # each once
        assert sorted(held.values()) == hashes(read_names(pool, half(pool)))
        assert len(held) == 256


def test_changes_beyond_the_journal_are_counted(pool: Pool) -> None:
    with journaling(pool, 8) as (server, cache):
        put(cache, range(11), named(range(11)))
        assert server.take_changes(0)[1] == 3
        changes, lost = server.take_changes(100)
        assert (len(changes), lost) == (8, 3)
        put(cache, range(11, 13), named(range(11, 13)))
        assert len(server.take_changes(100)[0]) == 2


def test_a_server_without_a_journal_reports_no_changes(pool: Pool, server: IndexServer) -> None:
    with KVCache(pool, namespace="named") as cache:
        put(cache, range(2), named(range(2)))
    changes, lost = server.take_changes(10)
    assert (len(changes), lost) == (0, 0)


def test_only_one_journal_can_be_opened_and_it_has_a_capacity(pool: Pool) -> None:
    server = IndexServer(pool)
    with pytest.raises(ValueError, match="keeps from 1 to"):
        server.attach_journal(0)
    server.attach_journal(1)
    with pytest.raises(OSError, match="attaching a journal"):
        server.attach_journal(1)
    server.stop()


def test_a_count_of_names_that_differs_from_the_count_of_blocks_is_rejected(
    pool: Pool, server: IndexServer
) -> None:
    blocks = np.zeros((2, LENGTH), np.uint8)
    with KVCache(pool, namespace="named") as cache:
        for wrong in (named(range(3)), np.zeros(2, np.uint64), np.zeros((2, 1), NAME)):
            with pytest.raises(LayoutError, match="2 blocks need 2 names"):
                cache.put([digest(0), digest(1)], blocks, names=wrong)


def test_a_damaged_name_is_found_and_repaired(pool: Pool, paths: list[Path]) -> None:
    with Process(roles.serve_index, paths) as server:
        with KVCache(pool, namespace="named") as cache:
            put(cache, range(3), named(range(3)))
        row = read_names(pool, half(pool))[1]
        server.end()
    offset = line_of(pool, int(row["block"]))
    line = bytearray(read(pool, offset))
    line[20] ^= 1
    write(pool, offset, bytes(line))
    assert [text.split()[0] for text in check_pool(pool).findings] == ["name-damaged"]
    assert len(read_names(pool, half(pool))) == 2
    acts, report = repair_pool(pool)
    assert len(acts) == 1 and report.finding_count == 0
    assert report.block_count == 3  # the block is still stored; it is not announced
