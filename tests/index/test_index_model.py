# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The whole block index compared with a dictionary: random calls of three clients, with changes of
the server. A committed block may be evicted and miss. But a hit must be the last committed block, a
removed or aborted block is never a hit, a pinned one always is, and all space is free, used by
blocks and grants, or held.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.blocks import eventually, keys
from support.emulation import fewer

from beluga._ffi import lib
from beluga.index import BlockState, Grant, IndexClient, IndexServer
from beluga.pool import Pool
from beluga.rpc import Client

MIB = 1 << 20
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
