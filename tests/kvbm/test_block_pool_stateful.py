# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The block pool compared with a brute-force model, in any order of calls (Hypothesis)."""

from __future__ import annotations

from concurrent.futures import CancelledError, Future
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.emulation import fewer

from beluga.errors import TierError
from beluga.kvbm import BlockPhase, BlockPool, MutableBlock, RegisteredBlock, WeakBlock
from beluga.metrics import Registry
from tests.kvbm.pool_model import ModelPool

SIZE = 4  # tokens of a block
KEYS = st.integers(1, 31)
REQUESTS = st.sampled_from(["a", "b", "c"])
PLACES = st.integers(0, 63)


def parent_of(key: int) -> int | None:
    """Keys are the nodes of a binary tree."""
    return key // 2 or None


class PoolMachine(RuleBasedStateMachine):
    """``mutable`` and ``shared`` are the live handles, each with its claim in the model."""

    @initialize(total=st.integers(1, 9), keep_unsaved=st.booleans())
    def begin(self, total: int, keep_unsaved: bool) -> None:
        self.pool = BlockPool("model", total, block_size=SIZE, registry=Registry())
        if keep_unsaved:
            self.pool.keep_unsaved(True)
        self.model = ModelPool(total, keep_unsaved=keep_unsaved)
        self.futures: dict[int, Future[list[MutableBlock]]] = {}
        self.mutable: list[tuple[MutableBlock, int]] = []
        self.shared: list[tuple[RegisteredBlock, int]] = []
        self.weak: list[WeakBlock] = []
        self.number = 0

    def pick(self, handles: list[Any], place: int) -> Any:
        return handles[place % len(handles)]

    def settle(self) -> None:
        """Compare the futures that have ended with the model, and drop handles that ended."""
        for number, claims in list(self.model.granted.items()):
            blocks = self.futures.pop(number).result(0)
            assert [block.index for block in blocks] == [
                self.model.owner[claim][0] for claim in claims
            ]
            self.mutable += zip(blocks, claims, strict=True)
            del self.model.granted[number]
        for number, future in self.futures.items():
            assert not future.done(), f"reservation {number} has ended too early"
        self.mutable = [(block, claim) for block, claim in self.mutable if self.live(claim)]
        self.shared = [(block, claim) for block, claim in self.shared if self.live(claim)]

    def live(self, claim: int) -> bool:
        return claim in self.model.owner

    @rule(request=REQUESTS, count=st.integers(0, 5))
    def reserve(self, request: str, count: int) -> None:
        if count > self.pool.total_blocks:
            with pytest.raises(TierError, match="blocks, but"):
                self.pool.reserve(request, count)
            return
        self.number += 1
        self.futures[self.number] = self.pool.reserve(request, count)
        self.model.reserve(self.number, request, count)
        self.settle()

    @rule(request=REQUESTS, count=st.integers(0, 5))
    def try_reserve(self, request: str, count: int) -> None:
        found = self.pool.try_reserve(request, count)
        if self.model.waiting or not self.model.make_room(count):
            assert found is None
            return
        assert found is not None
        self.number += 1
        self.model.reserve(self.number, request, count)
        self.futures[self.number] = Future()
        self.futures[self.number].set_result(found)
        del found
        self.settle()

    @precondition(lambda self: self.futures)
    @rule(place=PLACES)
    def cancel(self, place: int) -> None:
        number = self.pick(list(self.futures), place)
        future = self.futures.pop(number)
        assert future.cancel()
        with pytest.raises(CancelledError):
            future.result(0)
        self.model.cancel(number)
        self.settle()

    @precondition(lambda self: self.mutable)
    @rule(place=PLACES, tokens=st.integers(1, SIZE))
    def fill(self, place: int, tokens: int) -> None:
        block, claim = self.pick(self.mutable, place)
        known = self.model.blocks[self.model.owner[claim][0]]
        if known.is_committed or known.tokens + tokens > SIZE:
            with pytest.raises(TierError):
                block.fill(tokens)
            return
        block.fill(tokens)
        known.tokens += tokens

    @precondition(lambda self: self.mutable)
    @rule(place=PLACES, key=KEYS, is_filled=st.booleans())
    def commit(self, place: int, key: int, is_filled: bool) -> None:
        block, claim = self.pick(self.mutable, place)
        known = self.model.blocks[self.model.owner[claim][0]]
        if is_filled and not known.is_committed and known.tokens < SIZE:
            block.fill(SIZE - known.tokens)
            known.tokens = SIZE
        if known.is_committed or known.tokens < SIZE:
            with pytest.raises(TierError):
                block.commit(key, parent=parent_of(key))
            return
        block.commit(key, parent=parent_of(key))
        known.key, known.parent, known.is_committed = key, parent_of(key), True

    @precondition(lambda self: self.mutable)
    @rule(place=PLACES, count=st.integers(1, 4))
    def register(self, place: int, count: int) -> None:
        start = place % len(self.mutable)
        chosen = self.mutable[start : start + count]
        states = [block.state for block, _ in chosen]
        if any(state is not BlockPhase.COMPLETE for state in states):
            with pytest.raises(TierError, match="cannot be registered"):
                self.pool.register([block for block, _ in chosen])
            assert [block.state for block, _ in chosen] == states
            return
        handles = self.pool.register([block for block, _ in chosen])
        waiting, self.model.waiting = self.model.waiting, []
        claims = [self.model.register(claim) for _, claim in chosen]
        self.model.waiting = waiting
        self.model.grant()
        self.shared += zip(handles, claims, strict=True)
        self.settle()

    @rule(keys=st.lists(KEYS, max_size=4), request=st.one_of(st.none(), REQUESTS))
    def match(self, keys: list[int], request: str | None) -> None:
        found = self.pool.match(keys, request)
        claims = self.model.match(keys, request)
        assert [block.key for block in found] == keys[: len(claims)]
        self.shared += zip(found, claims, strict=True)
        self.settle()

    @rule(leaf=KEYS, request=REQUESTS)
    def match_chain(self, leaf: int, request: str) -> None:
        chain = [leaf]
        while (above := parent_of(chain[-1])) is not None:
            chain.append(above)
        self.match(chain[::-1], request)

    @precondition(lambda self: self.shared)
    @rule(place=PLACES)
    def weaken(self, place: int) -> None:
        self.weak.append(self.pick(self.shared, place)[0].weak())

    @precondition(lambda self: self.weak)
    @rule(place=PLACES, is_use=st.booleans())
    def upgrade(self, place: int, is_use: bool) -> None:
        weak = self.pick(self.weak, place)
        found, known = weak.upgrade(is_use=is_use), self.model.by_key(weak.key)
        assert (found is None) == (known is None)
        if found is not None and known is not None:
            assert found.index == known.index
            self.shared.append((found, self.model.share(known, None, is_use=is_use)))

    @precondition(lambda self: self.mutable or self.shared)
    @rule(place=PLACES, how=st.sampled_from(["release", "twice", "with", "collect", "all"]))
    def drop(self, place: int, how: str) -> None:
        handles: list[Any] = self.mutable + self.shared
        chosen = self.pick(handles, place)
        handle, claim = chosen
        for kind in (self.mutable, self.shared):
            if chosen in kind:
                kind.remove(chosen)
        del handles, chosen
        if how in {"release", "twice"}:
            for _ in range(1 + (how == "twice")):
                handle.release()
        elif how == "with":
            with handle as same:
                assert same is handle
        elif how == "all":
            self.pool.drop_all([handle])
        if how != "collect":
            with pytest.raises(TierError, match="was released"):
                _ = handle.index
        del handle
        self.model.drop(claim)
        self.settle()

    @rule(request=REQUESTS)
    def release(self, request: str) -> None:
        count = self.pool.release(request)
        had = sum(whose == request for _, whose in self.model.owner.values())
        failed = self.model.release(request)
        assert count == had
        for number in failed:
            with pytest.raises(TierError, match="was released"):
                self.futures.pop(number).result(0)
        self.settle()

    @rule(keys=st.lists(KEYS, max_size=6))
    def save(self, keys: list[int]) -> None:
        self.pool.mark_saved(keys)
        self.model.save(keys)
        self.settle()

    @invariant()
    def same(self) -> None:
        pool, model = self.pool, self.model
        assert [block.index for block in pool._free] == model.free
        assert {key: block.index for key, block in pool._registered.items()} == {
            one.key: one.index for one in model.blocks if one.is_registered
        }
        assert pool.available_blocks == len(model.free) + len(model.inactive())
        assert pool.inflight_blocks == sum(1 for one in model.blocks if one.claims)
        assert len(pool._waiting) == len(model.waiting) == len(self.futures)
        active = {
            id(block.claim.block): block.claim.block for block, _ in self.mutable + self.shared
        }
        assert {block.index: block.references for block in active.values()} == {
            one.index: len(one.claims) for one in model.blocks if one.claims
        }

    def teardown(self) -> None:
        """Nothing leaks: when all handles are released, every block can be reserved, in the right
        order.
        """
        if not hasattr(self, "pool"):
            return
        while self.futures:
            number, future = self.futures.popitem()
            future.cancel()
            self.model.cancel(number)
            self.settle()
        for handle, claim in self.mutable + self.shared:
            handle.release()
            self.model.drop(claim)
        assert self.pool.inflight_blocks == 0
        self.save(list(range(1, 32)))
        taken = []
        for _ in range(self.pool.total_blocks):
            assert self.model.make_room(1)
            expected = self.model.free.pop(0)
            (block,) = self.pool.reserve("last", 1).result(0)
            assert block.index == expected
            taken.append(block)
        assert self.pool.release("last") == self.pool.total_blocks


QUICK = settings(max_examples=fewer(60), stateful_step_count=50, deadline=None)
LONG = settings(
    max_examples=10_000,
    stateful_step_count=100,
    deadline=None,
    phases=(Phase.generate,),
    database=None,
    suppress_health_check=list(HealthCheck),
)


def test_any_order_of_calls_has_the_results_of_the_model() -> None:
    run_state_machine_as_test(PoolMachine, settings=QUICK)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_million_steps_have_the_results_of_the_model() -> None:
    run_state_machine_as_test(PoolMachine, settings=LONG)
