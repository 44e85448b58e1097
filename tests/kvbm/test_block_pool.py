# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The block pool: states, reservations, effects of garbage collection and threads, and
statistics.
"""

from __future__ import annotations

import random
import sys
import threading
from concurrent.futures import wait
from typing import Any

import pytest
from support.virtual_clock import Clock

from beluga.errors import TierError
from beluga.kvbm import BlockPhase, BlockPool, MutableBlock, RegisteredBlock, Targets
from beluga.metrics import Registry

SIZE = 16
WAIT_S = 30


def make(total: int = 8, **options: Any) -> BlockPool:
    return BlockPool("device", total, block_size=SIZE, registry=Registry(), **options)


def store(
    pool: BlockPool, keys: list[int], request: str = "r", *, chain: bool = True
) -> list[RegisteredBlock]:
    blocks = pool.reserve(request, len(keys)).result(WAIT_S)
    for place, (block, key) in enumerate(zip(blocks, keys, strict=True)):
        block.fill(SIZE)
        block.commit(key, parent=keys[place - 1] if chain and place else None)
    return pool.register(blocks)


def test_a_block_passes_its_states_and_rejects_invalid_transitions() -> None:
    pool = make()
    (block,) = pool.reserve("r", 1).result(0)
    assert block.state is BlockPhase.RESET
    with pytest.raises(TierError, match="block 0 is reset and cannot be committed"):
        block.commit(1)
    block.fill(SIZE - 1)
    assert block.state is BlockPhase.PARTIAL
    with pytest.raises(TierError, match="has 15 of 16 tokens; it can be committed when"):
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
    for one, key in ((block, 1), (foreign, 2)):
        one.fill(SIZE)
        one.commit(key)
    with pytest.raises(TierError, match="of another tier"):
        pool.register([block, foreign])
    with pytest.raises(TierError, match="twice in one call"):
        pool.register([block, block])
    assert block.state is BlockPhase.COMPLETE
    assert pool.match([1]) == []


def test_a_duplicate_is_reset_and_the_first_block_is_returned() -> None:
    pool = make(3)
    (first,) = store(pool, [7])
    (second,) = store(pool, [7], "other")
    assert second.index == first.index
    assert pool.inflight_blocks == 1
    pool.release("r")
    assert pool.inflight_blocks == 1, "the other request has it, too"
    pool.release("other")
    assert (pool.inflight_blocks, pool.available_blocks) == (0, 3)


def test_the_end_of_a_chain_is_evicted_before_its_beginning_in_any_order() -> None:
    pool = make(4)
    chain = store(pool, [1, 2, 3, 4])
    for block in chain:  # the parent first, which is against the rule
        block.release()
    kept = pool.reserve("next", 1).result(0)
    assert pool.contains([1, 2, 3, 4]) == [True, True, True, False]
    kept += pool.reserve("next", 2).result(0)
    assert pool.contains([1, 2, 3, 4]) == [True, False, False, False]


def test_parents_in_a_circle_do_not_lock_the_pool() -> None:
    pool = make(2)
    blocks = pool.reserve("r", 2).result(0)
    for block, key, parent in zip(blocks, (1, 2), (2, 1), strict=True):
        block.fill(SIZE)
        block.commit(key, parent=parent)
    pool.register(blocks)
    pool.release("r")
    assert len(pool.reserve("next", 2).result(0)) == 2


def test_a_larger_reservation_is_not_overtaken_by_a_smaller_one() -> None:
    pool = make(4)
    held = pool.reserve("a", 3).result(0)
    large, small = pool.reserve("b", 3), pool.reserve("c", 1)
    assert not small.done(), "one block is free, but b was first"
    assert pool.try_reserve("d", 1) is None
    held[0].release()
    assert not large.done()
    held[1].release()
    assert len(large.result(0)) == 3
    assert not small.done()
    assert large.result(0)[0].index == 3, "blocks are taken in the order in which they became free"
    held[2].release()
    assert len(small.result(0)) == 1


def test_a_canceled_reservation_frees_the_queue_and_leaves_no_state() -> None:
    pool = make(2)
    held = pool.reserve("a", 1).result(0)
    large, small = pool.reserve("b", 2), pool.reserve("c", 1)
    assert large.cancel()
    assert small.result(0)[0].index == 1
    assert wait([large], 0).done, "waiting for a cancelled future ends"
    del held, small
    assert pool.available_blocks == 2


def test_a_reservation_that_waits_too_long_fails_and_frees_the_queue() -> None:
    pool = make(2)
    pool.reserve("a", 1).result(0)[0].fill(1)
    held = pool.reserve("a", 1).result(0)
    large, small = pool.reserve("b", 2, timeout_s=0.01), pool.reserve("c", 1)
    with pytest.raises(TierError, match="tier device could not free 2 blocks within"):
        large.result(WAIT_S)
    assert len(small.result(WAIT_S)) == 1
    assert held[0].index == 1


def test_a_dropped_result_is_free_before_its_deadline() -> None:
    pool = make(1)
    held = pool.reserve("a", 1).result(0)
    waiting = pool.reserve("b", 1, timeout_s=3600)
    held[0].release()
    assert waiting.done()
    del waiting
    assert pool.available_blocks == 1


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


def test_handles_collected_under_the_lock_are_released_by_its_holder() -> None:
    pool = make(2)
    blocks = pool.reserve("a", 2).result(0)
    with pool._exclusive:
        blocks.clear()  # as garbage collection may do in the middle of a call
        assert pool.inflight_blocks == 2
    assert pool.inflight_blocks == 0


def test_a_weak_reference_finds_the_block_until_it_is_evicted() -> None:
    pool = make(1)
    (block,) = store(pool, [5])
    weak = block.weak()
    active = weak.upgrade()
    assert active is not None
    assert active.index == 0
    del active
    block.release()
    inactive = weak.upgrade("later")
    assert inactive is not None
    assert pool.inflight_blocks == 1
    pool.release("later")
    store(pool, [6], "next")
    assert weak.upgrade() is None


def test_threads_neither_lose_nor_share_blocks() -> None:
    """Eight threads reserve, register, match, drop and cancel; no block has two owners."""
    pool = make(24)
    owners: dict[int, str] = {}
    failures: list[str] = []

    def steps(rng: random.Random, request: str) -> None:
        for step in range(150):
            future = pool.reserve(request, rng.randint(1, 6))
            if rng.random() < 0.2 and future.cancel():
                continue
            blocks: list[MutableBlock] = future.result(WAIT_S)
            for block in blocks:
                if owners.setdefault(block.index, request) != request:
                    failures.append(f"block {block.index} has two owners")
            if rng.random() < 0.5:
                for block in blocks:
                    del owners[block.index]
                for block in blocks:
                    block.fill(SIZE)
                    key = rng.randint(1, 40)
                    block.commit(key, parent=key // 2 or None)
                pool.register(blocks)
                pool.match([rng.randint(1, 40) for _ in range(3)], request)
            else:
                for block in blocks:
                    del owners[block.index]
            if step % 2:
                del blocks, future
            else:
                pool.release(request)

    def work(seed: int) -> None:
        try:
            steps(random.Random(seed), f"r{seed}")
        except BaseException as error:
            failures.append(repr(error))
            raise
        finally:
            pool.release(f"r{seed}")

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
    finally:
        sys.setswitchinterval(interval)
    assert failures == []
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
    assert held[0].claim.block is None
    latency = registry.histogram("beluga_kvbm_allocation_seconds", "")
    assert latency.value(tier="device").count == 2
    assert registry.histogram("beluga_kvbm_release_seconds", "").value(tier="device").count
    pool.close()
    kinds = registry.snapshot().values()
    assert all(sample.series == {} for sample in kinds if sample.kind == "gauge")


def test_missed_targets_are_listed_with_their_values() -> None:
    pool = make(10)
    lax = Targets(allocation_s_max=60, release_s_max=60)
    held = pool.reserve("a", 8).result(0)
    assert pool.missed_targets(lax) == []
    held += pool.reserve("a", 1).result(0)
    assert [missed.name for missed in pool.missed_targets(lax)] == [
        "available_share_min",
        "inflight_share_max",
    ]
    assert str(pool.missed_targets(lax)[0]).endswith("is 0.1, but its target is 0.1")
    pool.release("a")
    pool._metrics.allocation.observe(2.0, tier="device")
    pool._metrics.release.observe(0.004, tier="device")
    assert [(missed.name, missed.target) for missed in pool.missed_targets()] == [
        ("allocation_s_max", 0.001),
        ("release_s_max", 0.0005),
    ]


def test_a_match_counts_its_hits_and_the_heat_of_its_keys() -> None:
    registry = Registry()
    pool = BlockPool("device", 4, block_size=SIZE, registry=registry, clock=Clock().monotonic)
    store(pool, [1, 2])
    for _ in range(3):
        pool.match([1, 2, 3])
    assert registry.counter("beluga_kvbm_hit_blocks_total", "").value(tier="device") == 6
    heat = registry.histogram("beluga_kvbm_heat_ratio", "").value(tier="device")
    at_most = dict(zip(heat.bounds, heat.counts, strict=False))
    assert (at_most[0.5], at_most[0.7], at_most[0.8]) == (3, 3, 3), "1/2, 2/3 and 3/4"
    assert heat.count == 9


def test_keys_with_frequent_recent_requests_are_prefetched() -> None:
    clock = Clock()
    pool = make(2, clock=clock.monotonic, half_life_s=10)
    for _ in range(2):
        pool.match([1, 2])
    assert pool.hot_and_missing([1, 2, 3]) == []
    pool.match([1])
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
    pool.match([0])
    for key in range(1, 5):
        pool.match([key])
    assert pool._heat.of(0) == 0
    assert pool._heat.of(4) == 0.5


def test_ghosts_are_keys_that_were_evicted_and_a_miss_of_one_is_counted() -> None:
    registry = Registry()
    pool = BlockPool("device", 1, block_size=SIZE, ghosts=2, registry=registry)
    for key in range(4):
        store(pool, [key])
        pool.release("r")
    pool.match([0, 1])
    hits = registry.counter("beluga_kvbm_ghost_hits_total", "")
    assert hits.value(tier="device") == 0
    pool.match([1, 3])
    assert hits.value(tier="device") == 1
    store(pool, [1])
    pool.match([1])
    assert hits.value(tier="device") == 1


def test_offload_is_due_above_the_watermark() -> None:
    pool = make(10, watermark=0.8)
    store(pool, list(range(8)))
    pool.release("r")
    assert not pool.offload_due
    held = store(pool, [8])
    assert pool.offload_due
    coldest = [weak.key for weak in pool.coldest(3)]
    assert coldest == [7, 6, 5], "the chain came back from its end"
    pool.mark_saved([6])
    assert [weak.key for weak in pool.coldest(2)] == [7, 5]
    assert pool.inflight_blocks == len(held), "coldest() takes no block"


def test_wrong_sizes_are_refused() -> None:
    for total, size, watermark in ((0, 1, 0.5), (1, 0, 0.5), (1, 1, 0.0), (1, 1, 1.5)):
        with pytest.raises(TierError, match="give at least one block and one token"):
            BlockPool("x", total, block_size=size, watermark=watermark, registry=Registry())
    with pytest.raises(TierError, match="tier device has 8 blocks, but 9 were requested"):
        make().reserve("r", 9)
    with pytest.raises(TierError, match="but -1"):
        make().reserve("r", -1)
