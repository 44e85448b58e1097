# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The block pool: any order of calls compared with a brute-force model (Hypothesis), messages,
effects of garbage collection and threads, and statistics.
"""

import random
import sys
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.state_machines import each_budget
from support.virtual_clock import Clock

from beluga.errors import TierError
from beluga.kvbm import TARGETS, BlockPhase, BlockPool, MutableBlock, RegisteredBlock
from beluga.metrics import Registry

SIZE = 16
WAIT_S = 30


def make(total: int = 8, **options: Any) -> BlockPool:
    return BlockPool("device", total, block_size=SIZE, registry=Registry(), **options)


def store(
    pool: BlockPool, keys: list[int], request: str = "r", *, chain: bool = True
) -> list[RegisteredBlock]:
    blocks = pool.reserve(request, len(keys)).result(WAIT_S)
    for index, (block, key) in enumerate(zip(blocks, keys, strict=True)):
        block.fill(SIZE)
        block.commit(key, parent=keys[index - 1] if chain and index else None)
    return pool.register(blocks)


def test_a_block_passes_its_states_and_rejects_invalid_transitions() -> None:
    pool = make()
    (block,) = pool.reserve("r", 1).result(0)
    assert block.state is BlockPhase.RESET
    with pytest.raises(TierError, match="block 0 is reset and cannot be committed"):
        block.commit(1)
    block.fill(SIZE - 1)
    assert block.state is BlockPhase.PARTIAL
    with pytest.raises(TierError, match="has 15 of 16 tokens; fill it before"):
        block.commit(1)
    with pytest.raises(TierError, match="has 15 of 16 tokens and cannot take 2 more"):
        block.fill(2)
    with pytest.raises(TierError, match="block 0 is partial and cannot be registered"):
        pool.register([block])
    block.fill(1)
    with pytest.raises(TierError, match="has the key 1; give it a key other than its parent's"):
        block.commit(1, parent=1)
    block.commit(1)
    assert block.state is BlockPhase.COMPLETE
    with pytest.raises(TierError, match="is complete and cannot be filled"):
        block.fill(1)
    (shared,) = pool.register([block])
    assert (shared.index, shared.key) == (0, 1)
    with pytest.raises(TierError, match="this handle was released"):
        pool.register([block])


def test_blocks_of_two_tiers_or_duplicates_are_rejected_together() -> None:
    pool, other = make(), make()
    (block,), (foreign,) = pool.reserve("r", 1).result(0), other.reserve("r", 1).result(0)
    for mutable, key in ((block, 1), (foreign, 2)):
        mutable.fill(SIZE)
        mutable.commit(key)
    with pytest.raises(TierError, match="of another tier"):
        pool.register([block, foreign])
    with pytest.raises(TierError, match="twice in one call"):
        pool.register([block, block])
    assert block.state is BlockPhase.COMPLETE
    assert pool.match([1], "m") == []


def test_parents_in_a_circle_do_not_lock_the_pool() -> None:
    pool = make(2)
    blocks = pool.reserve("r", 2).result(0)
    for block, key, parent in zip(blocks, (1, 2), (2, 1), strict=True):
        block.fill(SIZE)
        block.commit(key, parent=parent)
    pool.register(blocks)
    pool.release("r")
    assert len(pool.reserve("next", 2).result(0)) == 2


def test_a_reservation_that_waits_too_long_fails_and_frees_the_queue() -> None:
    pool = make(2)
    held = pool.reserve("a", 1).result(0)
    large, small = pool.reserve("b", 2, timeout_s=0.01), pool.reserve("c", 1)
    with pytest.raises(TierError, match="tier device could not free 2 blocks within"):
        large.result(WAIT_S)
    assert len(small.result(WAIT_S)) == 1
    assert held[0].index == 0


def test_closing_fails_waiting_reservations_and_rejects_new_ones() -> None:
    pool = make(1)
    held = pool.reserve("a", 1).result(0)
    waiting = pool.reserve("b", 1)
    pool.close()
    pool.close()
    with pytest.raises(TierError, match="tier device was closed"):
        waiting.result(0)
    with pytest.raises(TierError, match="tier device is closed"):
        pool.reserve("c", 1)
    held[0].release()
    assert pool.available_blocks == 1


def test_a_callback_of_a_future_may_use_the_pool() -> None:
    pool, seen = make(1), []
    held = pool.reserve("a", 1).result(0)
    waiting = pool.reserve("b", 1)
    waiting.add_done_callback(lambda done: seen.append(pool.release("b")))
    held[0].release()
    assert seen == [1]
    assert pool.available_blocks == 1


def test_threads_neither_lose_nor_share_blocks() -> None:
    """Eight threads reserve, register, match, drop and cancel; no block has two owners."""
    pool = make(24)
    owners: dict[int, str] = {}

    def work(seed: int) -> None:
        rng, request = random.Random(seed), f"r{seed}"
        for _ in range(150):
            future = pool.reserve(request, rng.randint(1, 6))
            if rng.random() < 0.2 and future.cancel():
                continue
            blocks: list[MutableBlock] = future.result(WAIT_S)
            for block in blocks:
                assert owners.setdefault(block.index, request) == request, "it has two owners"
            registers = rng.random() < 0.5
            for block in blocks:
                del owners[block.index]
            if registers:
                for block in blocks:
                    block.fill(SIZE)
                    key = rng.randint(1, 40)
                    block.commit(key, parent=key // 2 or None)
                pool.register(blocks)
                pool.match([rng.randint(1, 40) for _ in range(3)], request)
            pool.release(request)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(work, range(8)))
    finally:
        sys.setswitchinterval(interval)
    assert (pool.available_blocks, len(pool._waiting)) == (24, 0)
    assert len({block.index for block in pool.reserve("all", 24).result(0)}) == 24


def test_gauges_show_a_pool_until_it_is_closed() -> None:
    registry = Registry()
    pool = BlockPool("device", 8, block_size=SIZE, registry=registry)
    held = pool.reserve("a", 7).result(0)

    def gauge(name: str, **labels: str) -> object:
        labels["tier"] = "device"
        return registry.gauge(f"beluga_kvbm_{name}", "").value(**labels)

    assert [gauge(name) for name in ("available_blocks", "inflight_blocks", "blocks")] == [1, 7, 8]
    assert [gauge(name) for name in ("usage_ratio", "watermark_ratio")] == [0.875, 0.85]
    assert gauge("offload_due") == 1
    assert gauge("prefetch_heat_ratio") == 0.7
    assert gauge("target", target="allocation_s_max") == 0.001
    assert gauge("target", target="available_share_min") == 0.1
    assert gauge("target_missed", target="available_share_min") == 0
    held += pool.reserve("a", 1).result(0)
    assert gauge("target_missed", target="available_share_min") == 1
    pool.release("a")
    assert held[0].block is None
    latency = registry.histogram("beluga_kvbm_allocation_seconds", "")
    assert latency.value(tier="device").count == 2
    assert registry.histogram("beluga_kvbm_release_seconds", "").value(tier="device").count
    pool.close()
    kinds = registry.snapshot().values()
    assert all(sample.series == {} for sample in kinds if sample.kind == "gauge")


def test_missed_targets_are_listed_with_their_values(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make(10)
    monkeypatch.setitem(TARGETS, "allocation_s_max", 60)  # machines may be slow
    monkeypatch.setitem(TARGETS, "release_s_max", 60)
    held = pool.reserve("a", 9).result(0)
    assert pool.missed_targets() == []
    held += pool.reserve("a", 1).result(0)
    missed = [each.name for each in pool.missed_targets()]
    assert missed == ["available_share_min", "inflight_share_max"]
    assert str(pool.missed_targets()[0]).endswith("is 0, but its target is 0.1")
    monkeypatch.undo()
    pool.release("a")
    pool.metrics.allocation.observe(2.0, tier="device")
    pool.metrics.release.observe(0.004, tier="device")
    assert [(missed.name, missed.target) for missed in pool.missed_targets()] == [
        ("allocation_s_max", 0.001),
        ("release_s_max", 0.0005),
    ]


def test_a_match_counts_its_hits_and_the_heat_of_its_keys() -> None:
    registry = Registry()
    pool = BlockPool("device", 4, block_size=SIZE, registry=registry, clock=Clock().monotonic)
    store(pool, [1, 2])
    for _ in range(3):
        pool.match([1, 2, 3], "m")
    assert registry.counter("beluga_kvbm_hit_blocks_total", "").value(tier="device") == 6
    heat = registry.histogram("beluga_kvbm_heat_ratio", "").value(tier="device")
    at_most = dict(zip(heat.bounds, heat.counts, strict=False))
    assert (at_most[0.5], at_most[0.7], at_most[0.8]) == (3, 3, 3), "1/2, 2/3 and 3/4"
    assert heat.count == 9


def test_keys_with_frequent_recent_requests_are_prefetched() -> None:
    clock = Clock()
    pool = make(2, clock=clock.monotonic, half_life_s=10)
    for _ in range(2):
        pool.match([1, 2], "m")
    assert pool.hot_and_missing([1, 2, 3]) == []
    pool.match([1], "m")
    assert pool._heat.of(1) == 0.75
    assert pool.hot_and_missing([1, 2, 3]) == [1]
    clock.now_s += 10
    assert pool._heat.of(1) == 0.6
    assert pool.hot_and_missing([1, 2, 3]) == []
    clock.now_s -= 10
    store(pool, [1])
    assert pool.hot_and_missing([1]) == [], "it is here"


def test_heat_is_tracked_for_a_bounded_number_of_keys() -> None:
    pool = make(2, clock=Clock().monotonic)
    pool.match([0], "m")
    for key in range(1, 5):
        pool.match([key], "m")
    assert pool._heat.of(0) == 0
    assert pool._heat.of(4) == 0.5


def test_ghosts_are_keys_that_were_evicted_and_a_miss_of_one_is_counted() -> None:
    registry = Registry()
    pool = BlockPool("device", 1, block_size=SIZE, ghosts=2, registry=registry)
    for key in range(4):
        store(pool, [key])
        pool.release("r")
    pool.match([0, 1], "m")
    hits = registry.counter("beluga_kvbm_ghost_hits_total", "")
    assert hits.value(tier="device") == 0
    pool.match([1, 3], "m")
    assert hits.value(tier="device") == 1
    store(pool, [1])
    pool.match([1], "m")
    assert hits.value(tier="device") == 1


def test_offload_is_due_above_the_watermark() -> None:
    pool = make(10, watermark=0.8)
    store(pool, list(range(8)))
    pool.release("r")
    assert not pool.offload_due
    held = store(pool, [8])
    assert pool.offload_due
    coldest = pool.coldest(3)
    assert coldest == [7, 6, 5], "the chain came back from its end"
    pool.mark_saved([6])
    assert pool.coldest(2) == [7, 5]
    assert pool.inflight_blocks == len(held), "coldest() takes no block"


def test_wrong_sizes_are_refused() -> None:
    for total, size, watermark in ((0, 1, 0.5), (1, 0, 0.5), (1, 1, 0.0), (1, 1, 1.5)):
        with pytest.raises(TierError, match="give at least one block and one token"):
            BlockPool("x", total, block_size=size, watermark=watermark, registry=Registry())
    with pytest.raises(TierError, match="tier device has 8 blocks, but 9 were requested"):
        make().reserve("r", 9)
    with pytest.raises(TierError, match="but -1"):
        make().reserve("r", -1)


@dataclass
class ModelBlock:
    """The model's state of a block. A claim is a number; ``request`` of each claim is kept."""

    index: int
    key: int | None = None
    parent: int | None = None
    tokens: int = 0
    is_committed: bool = False
    is_registered: bool = False
    is_saved: bool = False
    claims: list[int] = field(default_factory=list)
    tick: int = 0


class ModelPool:
    """The rules of :class:`beluga.kvbm.BlockPool`, by brute force."""

    def __init__(self, total: int, *, keep_unsaved: bool) -> None:
        self.blocks = [ModelBlock(index) for index in range(total)]
        self.free = list(range(total))
        self.keep_unsaved = keep_unsaved
        self.waiting: list[tuple[int, str, int]] = []  # number, request, count
        self.granted: dict[int, list[int]] = {}  # claims by number of the reservation
        self.owner: dict[int, tuple[int, str | None]] = {}  # claim -> block, request
        self.evicted: list[int] = []
        self.tick = 0
        self.next_claim = 0

    def by_key(self, key: int) -> ModelBlock | None:
        return next(
            (block for block in self.blocks if block.is_registered and block.key == key), None
        )

    def inactive(self) -> list[ModelBlock]:
        return [block for block in self.blocks if block.is_registered and not block.claims]

    def victim(self) -> ModelBlock | None:
        inactive = self.inactive()
        parents = {block.parent for block in inactive}
        leaves = [
            block
            for block in inactive
            if block.key not in parents and (block.is_saved or not self.keep_unsaved)
        ]
        return min(leaves, key=lambda block: block.tick, default=None)

    def claim(self, block: ModelBlock, request: str | None) -> int:
        self.next_claim += 1
        block.claims.append(self.next_claim)
        self.owner[self.next_claim] = (block.index, request)
        return self.next_claim

    def reset(self, block: ModelBlock) -> None:
        self.blocks[block.index] = ModelBlock(block.index)
        self.free.append(block.index)

    def make_room(self, count: int) -> bool:
        if len(self.free) + len(self.inactive()) < count:
            return False
        while len(self.free) < count:
            victim = self.victim()
            if victim is None:
                return False
            assert victim.key is not None
            self.evicted.append(victim.key)
            self.reset(victim)
        return True

    def reserve(self, number: int, request: str, count: int) -> None:
        self.waiting.append((number, request, count))
        self.grant()

    def grant(self) -> None:
        while self.waiting and self.make_room(self.waiting[0][2]):
            number, request, count = self.waiting.pop(0)
            taken = [self.blocks[self.free.pop(0)] for _ in range(count)]
            self.granted[number] = [self.claim(block, request) for block in taken]

    def drop(self, claim: int) -> None:
        if claim not in self.owner:
            return
        block = self.blocks[self.owner.pop(claim)[0]]
        block.claims.remove(claim)
        if not block.claims:
            if not block.is_registered:
                self.reset(block)
            elif not block.tick:
                self.tick += 1
                block.tick = self.tick
        self.grant()

    def share(self, block: ModelBlock, request: str | None, *, is_use: bool = True) -> int:
        if is_use:
            block.tick = 0
        return self.claim(block, request)

    def register(self, claim: int) -> int:
        index, request = self.owner[claim]
        block = self.blocks[index]
        assert block.key is not None
        known = self.by_key(block.key)
        if known is not None:
            shared = self.share(known, request)
            self.drop(claim)
            return shared
        block.is_registered = True
        shared = self.claim(block, request)
        self.drop(claim)
        return shared

    def match(self, keys: list[int], request: str | None) -> list[int]:
        shared = []
        for key in keys:
            block = self.by_key(key)
            if block is None:
                break
            shared.append(self.share(block, request))
        return shared

    def release(self, request: str) -> list[int]:
        """Return the numbers of the reservations that fail."""
        failed = [number for number, whose, _ in self.waiting if whose == request]
        self.waiting = [waiter for waiter in self.waiting if waiter[1] != request]
        claims = [claim for claim, (_, whose) in self.owner.items() if whose == request]
        order = sorted(claims, reverse=True)  # the newest claim is the end of the chain
        waiting, self.waiting = self.waiting, []  # no blocks are granted in between
        for claim in order:
            self.drop(claim)
        self.waiting = waiting
        self.grant()
        return failed

    def cancel(self, number: int) -> None:
        self.waiting = [waiter for waiter in self.waiting if waiter[0] != number]
        self.grant()

    def save(self, keys: list[int]) -> None:
        for key in keys:
            block = self.by_key(key)
            if block is not None:
                block.is_saved = True
        self.grant()


BLOCK_SIZE = 4  # tokens of a block
KEYS = st.integers(1, 31)
REQUESTS = st.sampled_from(["a", "b", "c"])
CHOICES = st.integers(0, 63)


def parent_of(key: int) -> int | None:
    """Keys are the nodes of a binary tree."""
    return key // 2 or None


class PoolMachine(RuleBasedStateMachine):
    """``mutable`` and ``shared`` are the live handles, each with its claim in the model."""

    @initialize(total=st.integers(1, 9), keep_unsaved=st.booleans())
    def begin(self, total: int, keep_unsaved: bool) -> None:
        self.pool = BlockPool("model", total, block_size=BLOCK_SIZE, registry=Registry())
        if keep_unsaved:
            self.pool.keep_unsaved(True)
        self.model = ModelPool(total, keep_unsaved=keep_unsaved)
        self.futures: dict[int, Future[list[MutableBlock]]] = {}
        self.mutable: list[tuple[MutableBlock, int]] = []
        self.shared: list[tuple[RegisteredBlock, int]] = []
        self.number = 0

    def pick(self, handles: list[Any], choice: int) -> Any:
        return handles[choice % len(handles)]

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
        granted = self.pool.try_reserve(request, count)
        if self.model.waiting or not self.model.make_room(count):
            assert granted is None
            return
        assert granted is not None
        self.number += 1
        self.model.reserve(self.number, request, count)
        self.futures[self.number] = Future()
        self.futures[self.number].set_result(granted)
        self.settle()

    @precondition(lambda self: self.futures)
    @rule(choice=CHOICES)
    def cancel(self, choice: int) -> None:
        number = self.pick(list(self.futures), choice)
        future = self.futures.pop(number)
        assert future.cancel()
        with pytest.raises(CancelledError):
            future.result(0)
        self.model.cancel(number)
        self.settle()

    @precondition(lambda self: self.mutable)
    @rule(choice=CHOICES, tokens=st.integers(1, BLOCK_SIZE))
    def fill(self, choice: int, tokens: int) -> None:
        block, claim = self.pick(self.mutable, choice)
        known = self.model.blocks[self.model.owner[claim][0]]
        if known.is_committed or known.tokens + tokens > BLOCK_SIZE:
            with pytest.raises(TierError):
                block.fill(tokens)
            return
        block.fill(tokens)
        known.tokens += tokens

    @precondition(lambda self: self.mutable)
    @rule(choice=CHOICES, key=KEYS, is_filled=st.booleans())
    def commit(self, choice: int, key: int, is_filled: bool) -> None:
        block, claim = self.pick(self.mutable, choice)
        known = self.model.blocks[self.model.owner[claim][0]]
        if is_filled and not known.is_committed and known.tokens < BLOCK_SIZE:
            block.fill(BLOCK_SIZE - known.tokens)
            known.tokens = BLOCK_SIZE
        if known.is_committed or known.tokens < BLOCK_SIZE:
            with pytest.raises(TierError):
                block.commit(key, parent=parent_of(key))
            return
        block.commit(key, parent=parent_of(key))
        known.key, known.parent, known.is_committed = key, parent_of(key), True

    @precondition(lambda self: self.mutable)
    @rule(choice=CHOICES, count=st.integers(1, 4))
    def register(self, choice: int, count: int) -> None:
        start = choice % len(self.mutable)
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

    @rule(keys=st.lists(KEYS, max_size=4), request=REQUESTS)
    def match(self, keys: list[int], request: str) -> None:
        matched = self.pool.match(keys, request)
        claims = self.model.match(keys, request)
        assert [block.key for block in matched] == keys[: len(claims)]
        self.shared += zip(matched, claims, strict=True)
        self.settle()

    @rule(leaf=KEYS, request=REQUESTS)
    def match_chain(self, leaf: int, request: str) -> None:
        chain = [leaf]
        while (above := parent_of(chain[-1])) is not None:
            chain.append(above)
        self.match(chain[::-1], request)

    @rule(key=KEYS, request=st.one_of(st.none(), REQUESTS), is_use=st.booleans())
    def find(self, key: int, request: str | None, is_use: bool) -> None:
        block, known = self.pool.find(key, request, is_use=is_use), self.model.by_key(key)
        assert (block is None) == (known is None)
        if block is not None and known is not None:
            assert block.index == known.index
            self.shared.append((block, self.model.share(known, request, is_use=is_use)))

    @precondition(lambda self: self.mutable or self.shared)
    @rule(choice=CHOICES, how=st.sampled_from(["release", "twice", "with", "all"]))
    def drop(self, choice: int, how: str) -> None:
        handles: list[Any] = self.mutable + self.shared
        chosen = self.pick(handles, choice)
        handle, claim = chosen
        for kind in (self.mutable, self.shared):
            if chosen in kind:
                kind.remove(chosen)
        if how in {"release", "twice"}:
            for _ in range(1 + (how == "twice")):
                handle.release()
        elif how == "with":
            with handle as same:
                assert same is handle
        elif how == "all":
            self.pool.drop_all([handle])
        with pytest.raises(TierError, match="was released"):
            _ = handle.index
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
            block.key: block.index for block in model.blocks if block.is_registered
        }
        assert pool.available_blocks == len(model.free) + len(model.inactive())
        assert pool.inflight_blocks == sum(1 for block in model.blocks if block.claims)
        assert len(pool._waiting) == len(model.waiting) == len(self.futures)
        active = {
            id(block): block for handle, _ in self.mutable + self.shared if (block := handle.block)
        }
        assert {block.index: block.references for block in active.values()} == {
            block.index: len(block.claims) for block in model.blocks if block.claims
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


@each_budget
def test_any_order_of_calls_has_the_results_of_the_model(budget: settings) -> None:
    run_state_machine_as_test(PoolMachine, settings=budget)
