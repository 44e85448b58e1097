# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The block manager in any order of calls, failures and cancellations (Hypothesis).

After every step: each block has the bytes of its key, in both tiers; each block has one owner; and
only handles of the test and of onboards in progress hold blocks. With ``wait`` no block is ever
lost. An onboard that is possible is done before anything else.
"""

from __future__ import annotations

from concurrent.futures import CancelledError, Future

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from support.emulation import fewer

from beluga.errors import TierError, TransferError
from beluga.kvbm import OFFLOAD_POLICIES, BlockManager, MutableBlock, RegisteredBlock
from beluga.metrics import Registry
from tests.kvbm.device import Device, SharedMemory, content

REQUESTS = st.sampled_from(["a", "b", "c"])
LEAVES = st.integers(1, 31)
PLACES = st.integers(0, 63)
CONTENT: dict[object, bytes] = {number: content(number).tobytes() for number in range(1, 32)}


def chain(leaf: int) -> list[int]:
    """Numbers are the nodes of a binary tree; a chain starts at the root."""
    return [*chain(leaf // 2), leaf] if leaf else []


class ManagerMachine(RuleBasedStateMachine):
    """A manager without threads. Rules have no preconditions, so what is drawn never depends on
    what the manager did before.
    """

    @initialize(size=st.integers(2, 7), offload=st.sampled_from(OFFLOAD_POLICIES))
    def begin(self, size: int, offload: str) -> None:
        # time is frozen; otherwise heat would depend on the machine
        self.device = Device(size, watermark=0.5, clock=lambda: 0.0)
        self.pool = self.device.pool
        self.below = SharedMemory(self.device)
        self.below.before = self.copy
        self.waits = offload == "wait"
        self.copy_fails = self.has_failed = False
        self.manager = BlockManager(
            self.pool, self.below, offload=offload, threads=False, registry=Registry()
        )
        self.known: set[int] = set()
        self.reserved: list[tuple[int, str, Future[list[MutableBlock]]]] = []
        self.onboards: list[tuple[list[int], str, Future[list[RegisteredBlock]], int]] = []
        self.held: list[RegisteredBlock] = []

    def copy(self, _: str) -> None:
        if self.copy_fails:
            raise TransferError("planned")

    @rule(leaf=LEAVES, request=REQUESTS, sinks=st.sampled_from([True, True, False]))
    def store(self, leaf: int, request: str, sinks: bool) -> None:
        """Store a chain and release it, perhaps until it is offloaded."""
        blocks = self.pool.try_reserve(request, len(chain(leaf)))
        if blocks is not None:
            self.device.write(blocks, chain(leaf))
            self.known |= set(chain(leaf))
        if sinks:
            self.step(8)

    @rule(leaf=LEAVES, request=REQUESTS)
    def reserve(self, leaf: int, request: str) -> None:
        if len(chain(leaf)) <= self.pool.total_blocks:
            future = self.pool.reserve(request, len(chain(leaf)))
            self.reserved.append((leaf, request, future))

    @rule(place=PLACES, keeps=st.booleans(), is_cancelled=st.booleans())
    def register(self, place: int, keeps: bool, is_cancelled: bool) -> None:
        """Use a reservation that was granted; one that waits may be cancelled."""
        if not self.reserved:
            return
        leaf, _, future = self.reserved[place % len(self.reserved)]
        if not future.done() and not is_cancelled:
            return
        del self.reserved[place % len(self.reserved)]
        if future.cancel():
            return
        if future.exception(0) is not None:
            return
        handles = self.device.write(future.result(0), chain(leaf))
        self.known |= set(chain(leaf))
        if keeps:
            self.held += handles

    @rule(
        leaf=LEAVES,
        request=REQUESTS,
        skips=st.integers(0, 2),
        is_awaited=st.booleans(),
        is_known=st.booleans(),
    )
    def onboard(
        self, leaf: int, request: str, skips: int, is_awaited: bool, is_known: bool
    ) -> None:
        if is_known and self.known:
            leaf = sorted(self.known)[leaf % len(self.known)]
        numbers = chain(leaf)[skips:]
        self.onboard_blocks(numbers, request)
        if is_awaited:
            self.step(8)

    @rule(place=PLACES)
    def cancel(self, place: int) -> None:
        if not self.onboards:
            return
        future = self.onboards[place % len(self.onboards)][2]
        assert future.cancel(), "no copy is under way between steps"

    def onboard_blocks(self, numbers: list[int], request: str) -> None:
        """Onboard blocks; with wait, those that are known now must be returned."""
        least = next((at for at, one in enumerate(numbers) if one not in self.known), len(numbers))
        future = self.manager.onboard(numbers, request)
        self.onboards.append((numbers, request, future, least))

    @rule(place=PLACES)
    def recall(self, place: int) -> None:
        """Drop all handles, and onboard one known block."""
        for request in ("a", "b", "c"):
            self.release(request)
        if self.known:
            number = sorted(self.known)[place % len(self.known)]
            self.onboard_blocks([number], "a")
            self.step(4)

    @rule(leaf=LEAVES)
    def prefetch(self, leaf: int) -> None:
        self.manager.prefetch(chain(leaf))

    @rule(leaf=LEAVES, request=REQUESTS, keeps=st.booleans())
    def match(self, leaf: int, request: str, keeps: bool) -> None:
        found = self.pool.match(chain(leaf), request)
        assert [block.key for block in found] == chain(leaf)[: len(found)]
        if keeps:
            self.held += found

    @rule(place=PLACES)
    def drop(self, place: int) -> None:
        if not self.held:
            return
        self.held.pop(place % len(self.held)).release()

    @rule(request=REQUESTS)
    def release(self, request: str) -> None:
        self.manager.release(request)
        self.reserved = [  # the granted blocks were released
            one for one in self.reserved if one[1] != request
        ]
        for numbers, whose, future, _ in self.onboards:
            assert whose != request or future.done(), f"onboard of {numbers} goes on"

    @rule()
    def let_go(self) -> None:
        """A request that holds nothing waits only for requests that hold blocks: every onboard
        ends.
        """
        if self.waits and self.has_failed:
            return  # blocks in no lower tier are not evicted
        self.trouble("heal")
        for request in ("a", "b", "c"):
            self.pool.release(request)
        self.reserved = []
        for _ in range(2 * len(self.onboards) + 2):
            while self.manager.step():
                pass
            self.results_are_right()
            for block in self.held:
                block.release()
        assert not self.onboards, "onboards wait for each other"

    @rule(what=st.sampled_from(["copy", "full", "lose", *["heal"] * 12]))
    def trouble(self, what: str) -> None:
        if what == "lose":
            self.below.blocks.clear()
        self.copy_fails = what == "copy"
        self.below.is_full = what == "full"
        self.has_failed |= what != "heal"

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.below.copies.clear()
            can_start = any(not one.future.cancelled() for one in self.manager._onboards._ready)
            self.manager.step()
            if can_start:
                assert {what for what, _ in self.below.copies} <= {"load"}, "it was overtaken"

    @invariant()
    def all_is_well(self) -> None:
        self.results_are_right()
        self.bytes_are_those_of_their_keys()
        self.every_block_has_one_place_and_one_owner()
        self.nothing_is_lost()

    def results_are_right(self) -> None:
        left = []
        for numbers, request, future, least in self.onboards:
            if not future.done():
                left.append((numbers, request, future, least))
                continue
            try:
                blocks = future.result(0)
            except CancelledError:
                continue
            except TierError:
                in_time = len(numbers) > self.pool.total_blocks
                assert self.has_failed or in_time
                continue
            assert [block.key for block in blocks] == numbers[: len(blocks)]
            if self.waits and not self.has_failed:
                assert len(blocks) >= least
            self.held += blocks
        self.onboards = left

    def bytes_are_those_of_their_keys(self) -> None:
        for key, block in self.pool._registered.items():
            assert self.device.memory[block.index].tobytes() == CONTENT[key]
        for key, payload in self.below.blocks.items():
            assert payload == CONTENT[key]

    def every_block_has_one_place_and_one_owner(self) -> None:
        mutable = [
            block.index
            for _, _, future in self.reserved
            if future.done() and not future.cancelled() and future.exception(0) is None
            for block in future.result(0)
        ]
        waiting = [one for pending in self.manager._pending.values() for one in pending]
        mutable += [block.index for one in waiting for block in one.room]
        assert len(set(mutable)) == len(mutable), "two reservations have one block"
        free = [block.index for block in self.pool._free]
        registered = [block.index for block in self.pool._registered.values()]
        assert sorted(free + registered + mutable) == list(range(self.pool.total_blocks))
        self.held = [block for block in self.held if block.claim.block is not None]
        held = {block.index for block in self.held}
        held |= {block.index for one in waiting for block in one.present if block is not None}
        assert self.pool.inflight_blocks == len(held) + len(mutable), "a block is held for good"

    def nothing_is_lost(self) -> None:
        if self.waits and not self.has_failed:
            assert self.known <= {*self.pool._registered, *self.below.blocks}

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        for request in ("a", "b", "c"):
            self.release(request)
        for block in self.held:
            block.release()
        self.trouble("heal")
        while self.manager.step():
            pass
        self.manager.close()
        assert all(future.done() for _, _, future, _ in self.onboards)
        assert (self.pool.inflight_blocks, len(self.pool._waiting)) == (0, 0)
        every = self.pool.reserve("last", self.pool.total_blocks).result(0)
        assert len(every) == self.pool.total_blocks


QUICK = settings(max_examples=fewer(60), stateful_step_count=50, deadline=None)
LONG = settings(
    max_examples=10_000,
    stateful_step_count=100,
    deadline=None,
    phases=(Phase.generate,),
    database=None,
    suppress_health_check=list(HealthCheck),
)


def test_any_order_of_moves_loses_and_leaks_nothing() -> None:
    run_state_machine_as_test(ManagerMachine, settings=QUICK)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_million_moves_lose_and_leak_nothing() -> None:
    run_state_machine_as_test(ManagerMachine, settings=LONG)
