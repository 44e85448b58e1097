# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A restart recovers the order in which blocks were committed, whatever their places, with little
memory.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from lines import LINE
from plants import STRIPE, Ground
from support.blocks import held, keys, put, states

from beluga.index import IndexClient, IndexServer
from beluga.pool import Pool
from beluga.rpc import Client

COUNT = 20
ROUNDS = 40
GONE = 9


def test_after_restarts_the_oldest_blocks_are_evicted_first(pool: Pool) -> None:
    """Numbers and space are reused in another order; generations of several epochs differ in many
    bits, so that a sort by some of the bits would fail.
    """
    with IndexServer(pool), Client(pool) as client:
        index = IndexClient(client)
        put(index, range(COUNT))
        index.remove(keys([3, 11, 7]))
        for number in range(ROUNDS):
            index.abort(index.reserve(keys(range(1000, 1064)), length=4096))
            if number % 10 == 0:
                put(index, [100 + number])
    with IndexServer(pool), Client(pool) as client:
        index = IndexClient(client)
        index.remove(keys([0, 110]))
        put(index, [200, 201, 202])
    old = [n for n in range(1, COUNT) if n not in (3, 11, 7)]
    order = [*old, 100, 120, 130, 200, 201, 202]
    with IndexServer(pool) as server, Client(pool) as client:
        index = IndexClient(client)
        assert server.index_stat().block_count == len(order)
        for number in range(300, 400):
            put(index, [number])
            if server.index_stat().evict_count == GONE:
                break
        assert held(index, order) == set(order[GONE:])


def numbers(index: IndexClient, names: list[int]) -> set[int]:
    return {index.lookup(keys([name])).hits[0].block for name in names}


def test_after_a_restart_new_blocks_fill_the_gaps_and_then_the_end(pool: Pool) -> None:
    with IndexServer(pool), Client(pool) as client:
        index = IndexClient(client)
        put(index, range(COUNT))
        first = numbers(index, [*range(COUNT)])
        index.remove(keys([3, 7]))
    kept = [name for name in range(COUNT) if name not in (3, 7)]
    with IndexServer(pool), Client(pool) as client:
        index = IndexClient(client)
        put(index, [103, 107])
        assert numbers(index, [*kept, 103, 107]) == first
        put(index, [200, 201])
        assert numbers(index, [200, 201]) == {max(first) + 1, max(first) + 2}


@pytest.mark.parametrize("unused", [1, 2, 3, 4, 7, 8, 63, 64, 100])
def test_blocks_after_numbers_without_entries_survive_restarts(pool: Pool, unused: int) -> None:
    with IndexServer(pool), Client(pool) as client:
        index = IndexClient(client)
        grants = index.reserve(keys(range(1000, 1000 + unused)), length=4096)
        assert states(grants) == ["GRANTED"] * unused
        put(index, [0], length=4096)
    for epoch in range(1, 5):
        with IndexServer(pool) as server, Client(pool) as client:
            index = IndexClient(client)
            assert held(index, range(epoch)) == set(range(epoch))
            assert server.index_stat().block_count == epoch
            put(index, [epoch], length=4096)


def test_blocks_removed_in_any_epoch_do_not_return(pool: Pool) -> None:
    for epoch, count in enumerate([5, 0, 40, 3, 1, 0, 100, 0, 0, 0]):
        with IndexServer(pool) as server, Client(pool) as client:
            index = IndexClient(client)
            assert server.index_stat().block_count == 0
            mine = [1000 * epoch + number for number in range(count)]
            put(index, mine, length=4096)
            assert index.remove(keys(mine)) == count


def places(pool: Pool) -> dict[int, tuple[int, range]]:
    """Store blocks, restart the server, and return each one's number and stripes. Both halves have
    the blocks then, and half 0 is the valid one.
    """
    with IndexServer(pool), Client(pool) as client:
        put(IndexClient(client), range(COUNT))
    with IndexServer(pool), Client(pool) as client:
        index = IndexClient(client)
        hits = {name: index.lookup(keys([name])).hits[0] for name in range(COUNT)}
    start = pool.geometry.data_offset
    return {
        name: (
            hit.block,
            range(
                (hit.offset - start) // STRIPE, (hit.offset + hit.length - start - 1) // STRIPE + 1
            ),
        )
        for name, hit in hits.items()
    }


def found_after_restarts(pool: Pool) -> set[int]:
    """Return the blocks that a server finds. Its successor finds the same."""
    found = []
    for _ in range(2):
        with IndexServer(pool), Client(pool) as client:
            found.append(held(IndexClient(client), range(COUNT)))
    assert found[0] == found[1]
    return found[0]


@pytest.mark.parametrize("milestone", [1, 2, 4, 8, 16])
def test_an_entry_that_lost_its_bytes_does_not_end_the_table(pool: Pool, milestone: int) -> None:
    """If it is a milestone, its copy of two epochs ago is the second look of bl_table_ends()."""
    lost = {name for name, (block, _) in places(pool).items() if block == milestone}
    assert len(lost) == 1
    ground = Ground(pool)
    ground.at(ground.entry(milestone))[:] = bytes(LINE)
    assert found_after_restarts(pool) == set(range(COUNT)) - lost


@pytest.mark.parametrize("milestone", [1, 2, 4, 8])
def test_a_mark_that_lost_its_bytes_does_not_end_the_table(pool: Pool, milestone: int) -> None:
    """If no extent begins at a milestone, its mark is free, and nothing is lost."""
    where = places(pool)
    ground = Ground(pool)
    mark = ground.read("bl_extent_line", ground.mark(milestone))
    stripes = range(milestone, milestone + mark.stripe_count)
    lost = {name for name, (_, own) in where.items() if own.start in stripes or own[-1] in stripes}
    assert any(own.start >= stripes.stop for _, own in where.values()), "there is content behind it"
    ground.at(ground.mark(milestone))[:] = bytes(LINE)
    assert found_after_restarts(pool) == set(range(COUNT)) - lost


def resident(kind: str) -> int:
    """Return this process's memory of a kind (Anon: private, Shmem: of pools), in bytes."""
    found = re.search(rf"Rss{kind}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def test_a_restart_takes_no_memory_for_unused_numbers(shm: Path) -> None:
    """The table of 64 GiB has 24 MiB of numbers; nearly all of it is empty."""
    taken = []
    with Pool.create([shm / "a"], device_size=64 << 30, sparse=True) as pool:
        for _ in range(3):
            before = resident("Anon")
            with IndexServer(pool), Client(pool) as client:
                put(IndexClient(client), [len(taken)])
                taken.append(resident("Anon") - before)
    first, *later = taken
    assert max(later) < first + (12 << 20)


def test_a_restart_touches_the_used_part_of_the_tables(shm: Path) -> None:
    """The tables of 64 GiB have 36 MiB of entries and marks; nearly all of them are empty."""
    with Pool.create([shm / "a"], device_size=64 << 30, sparse=True) as pool:
        for number in range(3):
            with IndexServer(pool), Client(pool) as client:
                put(IndexClient(client), [number])
    with Pool.open([shm / "a"]) as pool:
        before = resident("Shmem")
        with IndexServer(pool), Client(pool) as client:
            assert held(IndexClient(client), range(3)) == {0, 1, 2}
        assert resident("Shmem") - before < 4 << 20
