# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The table of names: changes become events, and a router that follows them has the pool's blocks,
whenever it connected.
"""

import random

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from beluga.events.forms import encode_pool
from beluga.events.table import NameTable
from beluga.index import CHANGE, REMOVED, STORED, chain_names
from beluga.router import (
    Cleared,
    Indexer,
    PoolEvent,
    PoolFeed,
    Removed,
    Stored,
)

TOKENS, LINES = 16, 64


def stored(line: int, generation: int, name: NDArray[np.void]) -> np.void:
    change = np.zeros((), CHANGE)
    change["generation"], change["block"], change["kind"] = generation, line, STORED
    change["name"] = name
    return change[()]


def removed(line: int, generation: int) -> np.void:
    change = np.zeros((), CHANGE)
    change["generation"], change["block"], change["kind"] = generation, line, REMOVED
    return change[()]


def events_of(table: NameTable, *changes: np.void) -> list[PoolEvent]:
    rows = np.zeros(len(changes), CHANGE)
    for row, change in zip(rows, changes, strict=True):
        for field in CHANGE.names or ():
            row[field] = change[field]
    return table.apply(rows)


def stands(table: NameTable) -> dict[tuple[int, int], int]:
    """Return the blocks that the table sends to late routers, with the hashes of their tokens."""
    contents_of = {}
    for event in table.snapshot():
        assert isinstance(event.data, Stored) and event.data.tokens_hashes is not None
        for name, contents in zip(event.data.block_hashes, event.data.tokens_hashes, strict=True):
            contents_of[event.space, name] = contents
    return contents_of


def chain(first: int, count: int, **more: int) -> NDArray[np.void]:
    numbers = range(first, first + count)
    return chain_names(numbers, [n + 500 for n in numbers], block_tokens=TOKENS, **more)


def test_blocks_of_a_chain_make_one_event() -> None:
    table = NameTable(LINES)
    events = events_of(table, *(stored(n, n + 1, name) for n, name in enumerate(chain(10, 3))))
    assert events == [PoolEvent(Stored([10, 11, 12], [510, 511, 512], None), 0, TOKENS)]
    events = events_of(table, removed(0, 1), removed(2, 3))
    assert events == [PoolEvent(Removed([10, 12]), 0)]


def test_a_block_of_another_chain_begins_another_event() -> None:
    table = NameTable(LINES)
    first, second = chain(10, 1)[0], chain(20, 1, parent_hash=15)[0]
    events = events_of(table, stored(0, 1, first), stored(1, 2, second))
    assert [event.data.parent_hash for event in events] == [None, 15]  # type: ignore[union-attr]


def test_a_block_is_announced_when_its_last_rank_has_it() -> None:
    table = NameTable(LINES)
    ranks = [chain(10, 2, rank=rank, rank_count=3) for rank in range(3)]
    assert events_of(table, stored(0, 1, ranks[0][0]), stored(1, 2, ranks[2][0])) == []
    assert table.snapshot() == []
    [event] = events_of(table, stored(2, 3, ranks[1][0]), stored(3, 4, ranks[1][1]))
    assert event.data == Stored([10], [510], None)
    assert stands(table) == {(0, 10): 510}
    assert events_of(table, removed(1, 2)) == [PoolEvent(Removed([10]), 0)]
    assert events_of(table, removed(0, 1), removed(2, 3)) == []
    assert len(table) == 1


def test_changes_already_applied_have_no_effect() -> None:
    table = NameTable(LINES)
    names = chain(10, 2)
    events_of(table, stored(0, 5, names[0]))
    assert events_of(table, stored(0, 5, names[0])) == []
    assert (
        events_of(table, removed(0, 4), stored(0, 3, names[1])) == []
    )  # the name of an earlier block
    assert stands(table) == {(0, 10): 510}


def test_a_line_may_be_reused_before_its_removal_is_delivered() -> None:
    table = NameTable(LINES)
    names = chain(10, 2)
    events_of(table, stored(0, 5, names[0]))
    events = events_of(table, stored(0, 6, names[1]))
    assert [type(event.data) for event in events] == [Removed, Stored]


def test_a_rank_out_of_range_is_rejected() -> None:
    table = NameTable(LINES)
    name = chain(10, 1)[0].copy()
    name["rank"], name["rank_count"] = 3, 3
    assert events_of(table, stored(0, 1, name)) == []
    assert len(table) == 0


def test_a_part_in_two_lines_is_present_until_both_are_removed() -> None:
    table = NameTable(LINES)
    name = chain(10, 1)[0]
    assert len(events_of(table, stored(0, 1, name), stored(1, 2, name), stored(2, 3, name))) == 1
    assert events_of(table, removed(0, 1), removed(2, 3)) == []
    assert stands(table) == {(0, 10): 510}
    assert events_of(table, removed(1, 2)) == [PoolEvent(Removed([10]), 0)]
    assert len(table) == 0


def test_inconsistent_ranks_do_not_form_a_complete_block() -> None:
    table = NameTable(LINES)
    first, second = chain(10, 1)[0], chain(10, 1, rank=1, rank_count=2)[0]
    events = events_of(table, stored(0, 1, first), stored(1, 2, second))
    assert [type(event.data) for event in events] == [Stored, Removed]
    assert events_of(table, removed(1, 2)) == [PoolEvent(Stored([10], [510], None), 0, TOKENS)]


def test_a_line_number_out_of_range_is_rejected() -> None:
    table = NameTable(LINES)
    assert events_of(table, stored(LINES, 1, chain(10, 1)[0]), removed(LINES, 1)) == []


def test_a_late_router_gets_parents_before_children() -> None:
    table = NameTable(LINES)
    root, twigs = chain(10, 3), [chain(n, 2, parent_hash=11) for n in (20, 30)]
    names = [*twigs[1][::-1], *root[::-1], *twigs[0], chain(50, 1, parent_hash=49)[0]]
    events_of(table, *(stored(n, n + 1, name) for n, name in enumerate(names)))
    seen: list[int] = []
    for event in table.snapshot():
        assert isinstance(event.data, Stored)
        assert event.data.parent_hash in {None, 49, *seen}
        seen += event.data.block_hashes
    assert sorted(seen) == [10, 11, 12, 20, 21, 30, 31, 50]


def test_namespaces_are_separate() -> None:
    table = NameTable(LINES)
    events_of(table, stored(0, 1, chain(10, 1, space=1)[0]), stored(1, 2, chain(10, 1, space=2)[0]))
    assert set(stands(table)) == {(1, 10), (2, 10)}
    assert events_of(table, removed(0, 1)) == [PoolEvent(Removed([10]), 1)]


class World:
    """Random blocks of a tree come and go, as a pool stores them for several ranks."""

    def __init__(self, seed: int, ranks: int) -> None:
        self.random, self.ranks = random.Random(seed), ranks
        self.generation = 0
        self.lines: dict[int, tuple[int, int, int]] = {}  # line -> generation, block, rank

    def step(self) -> np.void:
        self.generation += 1
        line = self.random.randrange(60)
        if line in self.lines:
            generation, _, _ = self.lines.pop(line)
            return removed(line, generation)
        block, rank = self.random.randrange(1, 40), self.random.randrange(self.ranks)
        if (block, rank) in {
            (line_block, line_rank) for _, line_block, line_rank in self.lines.values()
        }:
            return removed(line, 0)
        self.lines[line] = (self.generation, block, rank)
        parent = block // 3
        name = chain(block, 1, rank=rank, rank_count=self.ranks)
        if parent:
            name = chain(block, 1, rank=rank, rank_count=self.ranks, parent_hash=parent)
        return stored(line, self.generation, name[0])

    def present(self) -> dict[int, int]:
        ranks_of: dict[int, set[int]] = {}
        for _, block, rank in self.lines.values():
            ranks_of.setdefault(block, set()).add(rank)
        return {block: block + 500 for block, have in ranks_of.items() if len(have) == self.ranks}


def receive(feed: PoolFeed, number: int, events: list[PoolEvent], pool: str = "") -> None:
    batch = encode_pool(float(number), events, pool)
    feed.received([b"kv-events", number.to_bytes(8, "big"), batch])


def begin(feed: PoolFeed, number: int, table: NameTable, pool: str = "") -> None:
    assert feed.wanted is not None
    everything = [PoolEvent(Cleared()), *table.snapshot()]
    assert not feed.replayed(
        [b"", number.to_bytes(8, "big"), encode_pool(float(number), everything, pool)]
    )
    assert feed.replayed([b"", b"\xff" * 8, b""])
    assert feed.wanted is None


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("seed", range(5))
def test_routers_that_join_at_any_time_have_the_pools_blocks(seed: int, ranks: int) -> None:
    world, table = World(seed, ranks), NameTable(LINES)
    feeds = [PoolFeed(Indexer(), block_size=TOKENS)]
    begin(feeds[0], 0, table)
    for number in range(1, 200):
        changes = [world.step() for _ in range(world.random.randrange(6))]
        events = events_of(table, *changes)
        for feed in feeds:
            receive(feed, number, events)
        if number % 50 == 0:
            feeds.append(PoolFeed(Indexer(), block_size=TOKENS))
            begin(feeds[-1], number, table)
    assert {name: contents for (_, name), contents in stands(table).items()} == world.present()
    for feed in feeds:
        assert feed.blocks() == world.present()
        assert feed.unread == 0


@pytest.mark.parametrize("live", [True, False], ids=["followed", "just joined"])
def test_a_pool_that_was_created_again_is_followed_whatever_its_clock(live: bool) -> None:
    """Its numbers begin anew, and a message's time, here its number, may be earlier."""
    feed, table = PoolFeed(Indexer(), block_size=TOKENS), NameTable(LINES)
    world = World(0, 1)
    events = events_of(table, *(world.step() for _ in range(40)))
    begin(feed, 100, table, "old")
    if live:
        receive(feed, 101, events, "old")
    receive(feed, 7, [], "new")
    assert (feed.up_to_date, feed.feed.restarts) == (False, 1)
    begin(feed, 7, NameTable(LINES), "new")
    assert (feed.up_to_date, feed.blocks()) == (True, {})
    receive(feed, 8, events, "new")
    assert feed.blocks() == world.present()


def test_invalid_messages_are_counted_and_the_feed_continues() -> None:
    feed, table = PoolFeed(Indexer(), block_size=TOKENS), NameTable(LINES)
    begin(feed, 0, table)
    endless = float("inf")
    for events in (
        [{"type": "BlockRemoved", "block_hashes": [1], "space": endless}],
        [{"type": "BlockStored", "block_hashes": [1], "tokens_hashes": [endless]}],
        [
            {
                "type": "BlockStored",
                "block_hashes": [1],
                "tokens_hashes": [1],
                "block_size": endless,
            }
        ],
    ):
        before = feed.unread
        number = feed.feed.next_number
        batch = msgspec.msgpack.encode([float(number), events, None])
        feed.received([b"", number.to_bytes(8, "big"), batch])
        assert feed.unread == before + 1
    feed.received([b"", b"\xff" * 8, encode_pool(99.0, [])])
    assert (feed.unread, feed.wanted) == (4, None)
