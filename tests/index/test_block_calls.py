# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The calls of the block index satisfy their contract with one client and with two, and any of them
in any order agree with a dictionary: a hit is the last committed block, a removed or aborted one is
never a hit, a pinned one always is, and all space is free, used or held.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.blocks import eventually, held, keys, put, states
from support.emulation import fewer

from beluga._ffi import lib
from beluga.errors import BadRequestError
from beluga.index import EVICTIONS, BlockState, Grant, IndexClient, IndexServer
from beluga.pool import Pool
from beluga.rpc import Client

MIB = 1 << 20
DATA_BLOCKS = 58  # blocks of 1 MiB that certainly fit in the pool of conftest.py

Attach = Callable[[], IndexClient]


def test_a_new_key_is_granted_committed_and_found(index: IndexClient, pool: Pool) -> None:
    assert index.lookup(keys([1])).state is BlockState.MISS
    (grant,) = index.reserve(keys([1]), length=MIB)
    assert grant.state is BlockState.GRANTED
    assert grant.offset >= pool.geometry.data_offset
    assert index.commit([grant]) == [0]
    lookup = index.lookup(keys([1]))
    assert lookup.state is BlockState.HIT
    (hit,) = lookup.hits
    assert (hit.offset, hit.length, hit.generation) == (grant.offset, MIB, grant.generation)


def test_a_peek_counts_in_no_figure(index: IndexClient) -> None:
    index.commit(index.reserve(keys([1]), length=MIB))
    index.lookup(keys([1, 2]))
    before = index.stat()
    assert (before.lookup_count, before.hit_count) == (2, 1)
    assert index.lookup(keys([1, 2]), peek=True).count == 1
    assert index.stat() == before


def test_a_granted_key_is_pending_for_all_clients(attach: Attach) -> None:
    writer, other = attach(), attach()
    (grant,) = writer.reserve(keys([1]), length=MIB)
    for index in (writer, other):
        assert index.lookup(keys([1])).state is BlockState.PENDING
        assert states(index.reserve(keys([1]), length=MIB)) == ["PENDING"]
    writer.commit([grant])
    assert states(other.reserve(keys([1]), length=MIB)) == ["HIT"]


def test_a_key_twice_in_one_call_is_granted_once(index: IndexClient) -> None:
    assert states(index.reserve(keys([1, 1, 2]), length=MIB)) == ["GRANTED", "PENDING", "GRANTED"]


def test_a_commit_may_be_repeated(index: IndexClient) -> None:
    grants = index.reserve(keys([1]), length=MIB)
    assert index.commit(grants) == index.commit(grants) == [0]
    assert index.stat().commit_count == 1


def test_only_a_sessions_own_grants_can_be_committed_or_aborted(attach: Attach) -> None:
    writer, other = attach(), attach()
    grants = writer.reserve(keys([1]), length=MIB)
    assert other.commit(grants) == [-lib.BL_ERROR_NO_GRANT]
    assert other.abort(grants) == 0
    assert writer.abort(grants) == 1
    assert writer.abort(grants) == 0
    assert writer.commit(grants) == [-lib.BL_ERROR_NO_GRANT]
    assert other.lookup(keys([1])).state is BlockState.MISS
    assert states(other.reserve(keys([1]), length=MIB)) == ["GRANTED"]


@pytest.mark.parametrize("sessions", [1, 2])
def test_an_old_grant_of_reused_space_is_invalid(attach: Attach, sessions: int) -> None:
    first = attach()
    second = attach() if sessions == 2 else first
    (old,) = first.reserve(keys([1]), length=MIB)
    first.abort([old])
    (new,) = second.reserve(keys([1]), length=MIB)
    assert (new.block, new.offset) == (old.block, old.offset)
    assert new.generation > old.generation
    assert first.abort([old]) == 0
    assert first.commit([old]) == [-lib.BL_ERROR_NO_GRANT]
    assert second.commit([new]) == [0]


def test_lookup_returns_the_leading_hits(index: IndexClient) -> None:
    put(index, [0, 1, 2, 4])
    lookup = index.lookup(keys(range(5)))
    assert len(lookup.hits) == 3
    assert lookup.state is BlockState.MISS
    assert len(index.lookup(keys([4])).hits) == 1


def test_a_chain_longer_than_a_message_is_found_whole(index: IndexClient, pool: Pool) -> None:
    count = pool.geometry.block_count_max
    assert pool.geometry.bulk_size < 5000 * 32
    put(index, range(count), length=4096)
    many = keys([n % count for n in range(5000)])
    assert len(index.lookup(many).hits) == 5000


def test_removed_blocks_are_missed_and_their_space_is_free(index: IndexClient) -> None:
    put(index, [1, 2, 3])
    assert index.remove(keys([1, 3, 9])) == 2
    assert held(index, [1, 2, 3]) == {2}
    assert index.stat().used_bytes == index.stat().block_bytes == MIB


def test_a_removed_block_keeps_its_bytes_while_it_is_pinned(attach: Attach) -> None:
    reader, other = attach(), attach()
    put(other, [1])
    (hit,) = reader.lookup(keys([1]), pin=True).hits
    other.remove(keys([1]))
    assert held(other, [1]) == set()
    assert other.stat().used_bytes == MIB
    assert reader.release([hit]) == 1
    assert other.stat().used_bytes == 0


def test_the_coldest_block_makes_room(index: IndexClient) -> None:
    for number in range(2 * DATA_BLOCKS):
        put(index, [number])
    there = held(index, range(2 * DATA_BLOCKS))
    assert there == set(range(2 * DATA_BLOCKS - len(there), 2 * DATA_BLOCKS))
    assert len(there) >= DATA_BLOCKS
    assert index.stat().evict_count == 2 * DATA_BLOCKS - len(there)


def test_a_chain_is_evicted_from_its_end(index: IndexClient) -> None:
    put(index, range(20))
    put(index, range(100, 138))
    assert len(index.lookup(keys(range(20))).hits) == 20
    assert len(index.lookup(keys(range(100, 138))).hits) == 38
    size = 20
    for number in range(200, 240):
        put(index, [number])
        there = held(index, range(20))
        assert there == set(range(len(there)))
        assert len(there) <= size
        size = len(there)
    assert size < 20


def test_a_chain_that_was_only_committed_is_evicted_from_its_end(index: IndexClient) -> None:
    grants = index.reserve(keys(range(20)), length=MIB)
    assert index.commit(grants) == [0] * 20
    for number in range(200, 200 + DATA_BLOCKS - 10):
        put(index, [number])
    there = held(index, range(20))
    assert 0 < len(there) < 20
    assert there == set(range(len(there)))


def test_pinned_blocks_stay_and_released_ones_are_evicted(index: IndexClient) -> None:
    put(index, range(3))
    pinned = index.lookup(keys([0, 1]), pin=True).hits
    assert index.stat().pinned_count == 2
    put(index, range(100, 100 + 2 * DATA_BLOCKS))
    assert held(index, range(3)) == {0, 1}
    assert index.release(pinned) == 2
    assert index.release(pinned) == 0
    put(index, range(300, 300 + 2 * DATA_BLOCKS))
    assert held(index, range(3)) == set()


def test_a_commit_that_is_repeated_leaves_a_pinned_block_unevictable(index: IndexClient) -> None:
    grants = index.reserve(keys([0, 1]), length=MIB)
    assert index.commit(grants) == [0, 0]
    pinned = index.lookup(keys([0]), pin=True).hits
    assert index.commit(grants) == [0, 0]
    put(index, range(100, 100 + 2 * DATA_BLOCKS))
    assert held(index, range(2)) == {0}
    assert index.release(pinned) == 1
    put(index, range(300, 300 + 2 * DATA_BLOCKS))
    assert held(index, range(2)) == set()


def test_a_block_pinned_twice_needs_two_releases(attach: Attach) -> None:
    first_client, second_client = attach(), attach()
    put(first_client, [0])
    first, second = first_client.lookup(keys([0, 0]), pin=True).hits
    (third,) = second_client.lookup(keys([0]), pin=True).hits
    assert first_client.release([first]) == 1
    assert second_client.release([third]) == 1
    assert first_client.stat().pinned_count == 1
    assert second_client.release([third]) == 0
    assert first_client.release([second]) == 1
    assert first_client.stat().pinned_count == 0


def test_a_grant_is_refused_if_all_blocks_are_pinned(index: IndexClient) -> None:
    put(index, range(DATA_BLOCKS + 20))
    there = sorted(held(index, range(DATA_BLOCKS + 20)))
    hits = index.lookup(keys(there), pin=True).hits
    (refused,) = index.reserve(keys([999]), length=MIB)
    assert refused.state is BlockState.REFUSED
    assert refused.status == -lib.BL_ERROR_NO_SPACE
    assert index.stat().refuse_count == 1
    index.release(hits)
    put(index, [999])


def test_the_table_takes_as_many_blocks_as_it_has_lines(index: IndexClient, pool: Pool) -> None:
    count = pool.geometry.block_count_max
    put(index, [0], length=4096)
    put(index, range(1, count), length=4096)
    assert index.stat().block_count == count
    put(index, [count], length=4096)
    assert held(index, range(count + 1)) == set(range(1, count + 1))
    hits = index.lookup(keys(range(1, count + 1)), pin=True).hits
    assert len(hits) == count
    (refused,) = index.reserve(keys([5000]), length=4096)
    assert refused.status == -lib.BL_ERROR_TABLE_FULL


@pytest.fixture
def roomy(shm: Path) -> Iterator[IndexClient]:
    """A pool with room for blocks of many sizes."""
    paths = [shm / "roomy"]
    with (
        Pool.create(paths, device_size=512 * MIB, sparse=True) as pool,
        IndexServer(pool),
        Client(pool) as client,
    ):
        yield IndexClient(client)


def test_any_number_of_sizes_share_a_pool(roomy: IndexClient) -> None:
    for number in range(1000):
        put(roomy, [number], length=4096 * (number % 120) + number + 1)
    assert held(roomy, range(1000)) == set(range(1000))
    assert roomy.stat().evict_count == 0


@pytest.mark.parametrize(("length", "chunk_size"), [(0, 0), (4096, 1), (4096, 63), (0, 16384)])
def test_invalid_sizes_are_rejected(index: IndexClient, length: int, chunk_size: int) -> None:
    with pytest.raises(BadRequestError):
        index.reserve(keys([1]), length=length, chunk_size=chunk_size)


@pytest.mark.parametrize("length", [64 * MIB, 1024 * MIB, 1024 * MIB + 1, 0xFFFFFFFF])
def test_a_block_larger_than_the_pool_is_rejected_without_an_eviction(
    index: IndexClient, length: int
) -> None:
    put(index, range(DATA_BLOCKS))
    (refused,) = index.reserve(keys([99]), length=length)
    assert refused.status == -lib.BL_ERROR_TOO_LARGE
    assert held(index, range(DATA_BLOCKS)) == set(range(DATA_BLOCKS))


def test_freed_space_can_hold_any_other_size(index: IndexClient) -> None:
    for turn, length in enumerate([MIB, 3 * MIB, 4096, 5 * MIB // 2, MIB]):
        numbers = range(turn * 1000, turn * 1000 + 10)
        put(index, numbers, length=length)
        assert index.remove(keys(numbers)) == 10
        stat = index.stat()
        assert (stat.used_bytes, stat.extent_count, stat.evict_count) == (0, 0, 0)
        assert stat.free_stripe_count == stat.stripe_count


def test_an_empty_batch_has_no_effect(index: IndexClient) -> None:
    assert index.lookup(keys([])).hits == ()
    assert index.reserve(keys([]), length=MIB) == []
    assert index.commit([]) == []
    assert index.abort([]) == index.release([]) == index.remove(keys([])) == 0


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_each_policy_evicts_unused_chains_before_a_used_one(pool: Pool, eviction: str) -> None:
    with IndexServer(pool, eviction=eviction), Client(pool) as client:
        index = IndexClient(client)
        put(index, range(8))
        for number in range(100, 100 + 2 * DATA_BLOCKS):
            hits = index.lookup(keys(range(8)), pin=True).hits
            assert len(hits) == 8
            index.release(hits)
            put(index, [number])
        assert index.stat().evict_count > DATA_BLOCKS


def test_an_unknown_policy_is_refused(pool: Pool) -> None:
    with pytest.raises(ValueError, match=r"no eviction policy 'x'; choose one of lru, s3fifo$"):
        IndexServer(pool, eviction="x")


CLIENTS = 3

clients = st.integers(0, CLIENTS - 1)
numbers = st.integers(0, 39)
batches = st.lists(numbers, min_size=1, max_size=12, unique=True)
lengths = st.sampled_from([4096, 100_000, MIB, 5 * MIB // 2, 3 * MIB, 11 * MIB])


class IndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.cleanup = ExitStack()
        directory = Path(self.cleanup.enter_context(tempfile.TemporaryDirectory()))
        self.pool = self.cleanup.enter_context(
            Pool.create([directory / "a"], device_size=64 * MIB, sparse=True, max_blocks=24)
        )
        self.server = IndexServer(self.pool)
        self.server.start()
        self.sessions = [Client(self.pool) for _ in range(CLIENTS)]
        self.metas = [IndexClient(session) for session in self.sessions]
        self.committed: dict[int, Grant] = {}  # may have been evicted since then
        self.granted: dict[int, tuple[int, Grant]] = {}
        self.pinned: list[list[Grant]] = [[] for _ in range(CLIENTS)]

    def teardown(self) -> None:
        self.pool.close()
        self.cleanup.close()

    @rule(who=clients, batch=batches, length=lengths)
    def reserve(self, who: int, batch: list[int], length: int) -> None:
        for number, grant in zip(
            batch, self.metas[who].reserve(keys(batch), length=length), strict=True
        ):
            if number in self.granted:
                assert grant.state is BlockState.PENDING
            elif grant.state is BlockState.HIT:
                assert grant.generation == self.committed[number].generation
            elif grant.state is BlockState.GRANTED:
                self.committed.pop(number, None)
                self.granted[number] = (who, grant)
            else:
                assert grant.status in (-lib.BL_ERROR_NO_SPACE, -lib.BL_ERROR_TABLE_FULL)

    @rule(who=clients, batch=batches)
    def commit(self, who: int, batch: list[int]) -> None:
        mine = [n for n in batch if n in self.granted and self.granted[n][0] == who]
        assert self.metas[who].commit([self.granted[n][1] for n in mine]) == [0] * len(mine)
        for number in mine:
            self.committed[number] = self.granted.pop(number)[1]

    @rule(who=clients, batch=batches)
    def abort(self, who: int, batch: list[int]) -> None:
        mine = [n for n in batch if n in self.granted and self.granted[n][0] == who]
        assert self.metas[who].abort([self.granted.pop(n)[1] for n in mine]) == len(mine)

    @rule(who=clients, batch=batches, pin=st.booleans())
    def lookup(self, who: int, batch: list[int], pin: bool) -> None:
        lookup = self.metas[who].lookup(keys(batch), pin=pin)
        for number, hit in zip(batch, lookup.hits, strict=False):
            was = self.committed[number]
            assert (hit.offset, hit.length, hit.generation) == (
                was.offset,
                was.length,
                was.generation,
            )
        if pin:
            self.pinned[who] += lookup.hits
        if len(lookup.hits) < len(batch):
            pending = batch[len(lookup.hits)] in self.granted
            assert lookup.state is (BlockState.PENDING if pending else BlockState.MISS)

    @rule(who=clients)
    def release(self, who: int) -> None:
        assert self.metas[who].release(self.pinned[who]) == len(self.pinned[who])
        self.pinned[who] = []

    @rule(who=clients, batch=batches)
    def remove(self, who: int, batch: list[int]) -> None:
        there = self.metas[who].remove(keys(batch))
        known = [number for number in batch if self.committed.pop(number, None)]
        assert there <= len(known)

    @rule(who=clients)
    def replace_session(self, who: int) -> None:
        self.sessions[who].close()
        self.forget(who)
        self.sessions[who] = Client(self.pool)
        self.metas[who] = IndexClient(self.sessions[who])

    @rule()
    def replace_server(self) -> None:
        self.server.stop()
        self.server = IndexServer(self.pool)
        self.server.start()
        for who in range(CLIENTS):
            self.sessions[who].ping()
            self.forget(who)
        assert eventually(lambda: self.server.stat().inherited_count == 0)

    def forget(self, who: int) -> None:
        self.pinned[who] = []
        self.granted = {n: grant for n, grant in self.granted.items() if grant[0] != who}

    @precondition(lambda self: any(self.pinned))
    @invariant()
    def pinned_blocks_are_not_evicted(self) -> None:
        held = {hit.generation for hits in self.pinned for hit in hits}
        for number, grant in self.committed.items():
            if grant.generation in held:
                assert len(self.metas[0].lookup(keys([number])).hits) == 1

    @invariant()
    def space_is_conserved(self) -> None:
        stat = self.metas[0].stat()
        assert stat.grant_count == len(self.granted)
        assert stat.block_count <= len(self.committed)
        assert stat.held_bytes == 0
        assert stat.used_bytes + stat.free_stripe_count * 2 * MIB <= stat.data_bytes
        assert stat.used_bytes >= stat.block_bytes
        if not self.granted and stat.block_count == 0 and stat.pinned_count == 0:
            assert stat.free_stripe_count == stat.stripe_count


IndexMachine.TestCase.settings = settings(
    max_examples=fewer(30), stateful_step_count=40, deadline=None
)
test_the_index_agrees_with_a_dictionary = IndexMachine.TestCase
