# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The blocks of workers' requests in C match those of a naive model.

The router's tracking of its requests, compared with a naive model and rule by rule.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from beluga.errors import NoWorkersError
from beluga.router import (
    Load,
    LoadTracker,
    Overlap,
    Query,
    Worker,
    WorkerMetrics,
)
from beluga.router.tracker import alone


def held(counts: Counter[int], blocks: list[int]) -> int:
    return next((at for at, block in enumerate(blocks) if not counts[block]), len(blocks))


def held_alone(counts: Counter[int], blocks: list[int]) -> float:
    """Return the sum over the leading blocks that others hold, starting with the last."""
    total = 0.0
    for holders in range(1, 5):  # as C adds them up
        alike = [block for block in blocks[: held(counts, blocks)] if counts[block] == holders]
        total += len(alike) * alone(holders)
    return total


def query_of(blocks: list[int]) -> Query:
    return Query(16 * len(blocks), 16, blocks, blocks)


@pytest.mark.parametrize("seed", range(20))
def test_the_blocks_of_workers_match_a_model(seed: int) -> None:
    chance = random.Random(seed)
    prompts: list[list[int]] = [[]]
    for number in range(40):  # each one continues a prefix of another one
        start = chance.choice(prompts)
        start = start[: chance.randint(0, len(start))]
        prompts.append([*start, *(number << 32 | at for at in range(chance.randint(0, 30)))])
    workers = [Worker(number) for number in range(3)]
    tracker = LoadTracker(workers)
    counts: list[Counter[int]] = [Counter() for _ in workers]
    running: list[tuple[int, int, list[int]]] = []
    for request in range(300):
        if running and chance.random() < 0.45:
            ended, at, blocks = running.pop(chance.randrange(len(running)))
            tracker.free(ended)
            counts[at].subtract(blocks)
        else:
            at, blocks = chance.randrange(len(workers)), chance.choice(prompts)
            running.append((request, at, blocks))
            tracker.add(request, workers[at], query_of(blocks), Overlap())
            counts[at].update(blocks)
        prompt = chance.choice(prompts)
        states = tracker.states(workers, prompt)
        for state, count in zip(states, counts, strict=True):
            assert state.load.active_decode_blocks == len(+count)
            assert state.new_blocks == len(prompt) - held(count, prompt)
            assert state.held_alone == held_alone(count, prompt)


def test_blocks_with_colliding_slots_are_found_and_removed() -> None:
    """Each request holds one block, which is a hit until the request ends."""
    worker = Worker(0)
    tracker = LoadTracker([worker])
    for block in range(5000):
        tracker.add(block, worker, query_of([block]), Overlap())
    for block in range(0, 5000, 2):
        tracker.free(block)
    assert tracker.load(worker).active_decode_blocks == 2500
    for block in range(5000):
        assert tracker.new_blocks(worker, [block]) == (block + 1) % 2


A, B = Worker(1), Worker(2)
NOTHING = Overlap()


def account(requests: int, prefill: int, blocks: int, outstanding: int) -> Load:
    """Make a load without published metrics."""
    return Load(
        active_requests=requests,
        active_prefill_tokens=prefill,
        active_decode_blocks=blocks,
        outstanding_tokens=outstanding,
    )


def query(*sequence: int, isl: int = 0) -> Query:
    return Query(isl=isl or 16 * len(sequence), block_size=16, sequence=sequence)


def test_a_request_is_added_prefilled_and_freed() -> None:
    tracker = LoadTracker([A, B])
    tracker.add("x", A, query(1, 2, 3, isl=50), Overlap(device=1, shared=1))
    assert tracker.load(A) == account(1, 50 - 32, 3, 50)
    assert tracker.load(B) == Load()
    assert tracker.prefill_done("x")
    assert not tracker.prefill_done("x")
    assert tracker.load(A) == account(1, 0, 3, 0)
    assert tracker.free("x")
    assert not tracker.free("x")
    assert tracker.load(A) == Load()


def test_a_request_may_end_before_its_first_token() -> None:
    tracker = LoadTracker([A])
    tracker.add("x", A, query(1, 2), NOTHING)
    tracker.free("x")
    assert tracker.load(A) == Load()
    assert not tracker.prefill_done("x")


def test_shared_prefixes_count_once() -> None:
    tracker = LoadTracker([A])
    tracker.add(1, A, query(1, 2, 3), NOTHING)
    assert tracker.new_blocks(A, (1, 2, 4, 5)) == 2
    tracker.add(2, A, query(1, 2, 4, 5), NOTHING)
    assert tracker.load(A).active_decode_blocks == 5
    tracker.free(1)
    assert tracker.load(A).active_decode_blocks == 4


def test_without_kv_reuse_nothing_is_shared() -> None:
    tracker = LoadTracker([A], assume_kv_reuse=False)
    tracker.add(1, A, query(1, 2, 3), NOTHING)
    assert tracker.new_blocks(A, (1, 2, 3)) == 3
    tracker.add(2, A, query(1, 2, 3), NOTHING)
    assert tracker.load(A).active_decode_blocks == 6
    tracker.free(1)
    tracker.free(2)
    assert tracker.load(A) == Load()


def test_output_blocks_are_added_and_weighted_down() -> None:
    tracker = LoadTracker([A])
    tracker.add("plain", A, query(1, 2), NOTHING)
    assert tracker.output("plain", 16)
    assert tracker.load(A).active_decode_blocks == 3
    tracker.free("plain")
    tracker.add("fading", A, query(1, 2, 3, 4), NOTHING, expected_output=64)
    tracker.add("other", A, query(1, 2), NOTHING)
    tracker.output("fading", 32)  # blocks 3, 4 and the block of the output count one half each
    assert tracker.load(A).active_decode_blocks == round(2 + 3 * 0.5)
    tracker.output("fading", 640)
    assert tracker.load(A).active_decode_blocks == 2
    tracker.add("third", A, query(1, 2, 3, 4), NOTHING)  # the blocks are no longer exclusive
    assert tracker.load(A).active_decode_blocks == 4
    for request in ("fading", "other", "third"):
        tracker.free(request)
    assert tracker.load(A) == Load()
    assert not tracker.output("fading", 700)


def test_duplicate_names_and_unknown_workers_are_rejected() -> None:
    tracker = LoadTracker([A])
    tracker.add("x", A, query(1), NOTHING)
    with pytest.raises(ValueError, match="'x'"):
        tracker.add("x", A, query(1), NOTHING)
    with pytest.raises(NoWorkersError, match="add it first"):
        tracker.add("y", B, query(1), NOTHING)
    assert tracker.load(A).active_requests == 1
    assert not tracker.free("y")


def test_a_worker_that_is_added_again_starts_without_load() -> None:
    tracker = LoadTracker([A])
    tracker.add("x", A, query(1, 2), NOTHING)
    tracker.remove_worker(A)
    assert A not in tracker.loads
    tracker.add_worker(A)
    assert tracker.load(A) == Load()
    tracker.free("x")
    assert tracker.load(A) == Load()


def test_only_expired_requests_are_dropped_and_not_at_every_call() -> None:
    tracker = LoadTracker([A])
    tracker.add("mine", A, query(1), NOTHING, now=0)
    tracker.add("theirs", A, query(2), NOTHING, now=0, expires=300)
    assert tracker.sweep(299) == []
    assert tracker.sweep(301) == []  # 60 s have not passed since the last sweep
    assert tracker.sweep(360) == ["theirs"]
    assert tracker.load(A).active_requests == 1


def test_prefills_progress_at_the_rate_of_the_oldest() -> None:
    tracker = LoadTracker([A])
    tracker.add("first", A, query(isl=100), NOTHING, now=10, prefill_s=2.0)
    tracker.add("second", A, query(isl=50), NOTHING, now=11, prefill_s=1.0)
    tracker.refresh(11)
    assert tracker.load(A).active_prefill_tokens == 150 - 50
    tracker.refresh(12.5)  # the first prefill is late, and the second one has also made progress
    assert tracker.load(A).active_prefill_tokens == 150 - 125
    tracker.refresh(90)
    assert tracker.load(A).active_prefill_tokens == 0
    tracker.prefill_done("first", 12.5)
    assert tracker.load(A).active_prefill_tokens == 50
    tracker.refresh(13)
    assert tracker.load(A).active_prefill_tokens == 25


def test_a_prefill_without_a_prediction_stops_the_spill_over() -> None:
    tracker = LoadTracker([A])
    tracker.add("first", A, query(isl=100), NOTHING, now=0, prefill_s=2.0)
    tracker.add("second", A, query(isl=50), NOTHING, now=0)
    tracker.refresh(9)
    assert tracker.load(A).active_prefill_tokens == 50
    tracker.prefill_done("first", 9)
    tracker.refresh(20)
    assert tracker.load(A).active_prefill_tokens == 50


def test_the_expected_delay_of_a_late_prefill_doubles() -> None:
    tracker = LoadTracker([A])
    tracker.add("first", A, query(isl=100), NOTHING, now=10, prefill_s=2.0)
    tracker.add("second", A, query(isl=50), NOTHING, now=10, prefill_s=1.0)
    assert tracker.load(A).prefill_s == 3.0
    tracker.refresh(11.5)
    assert tracker.load(A).prefill_s == 1.5
    tracker.refresh(20)  # the first one should have ended 8 s ago: HBM may be full
    assert tracker.load(A).prefill_s == 1.0 + 8.0
    tracker.prefill_done("first", 20)
    assert tracker.load(A).prefill_s == 1.0
    tracker.free("second", 20.5)
    assert tracker.load(A).prefill_s == 0.0


def test_the_typical_request_is_the_mean_of_sent_requests() -> None:
    tracker = LoadTracker([A])
    size = query().block_size
    tracker.add("first", A, query(isl=size), Overlap(device=1), now=0)
    tracker.add("second", A, query(isl=3 * size), NOTHING, now=0)
    assert (tracker.usual.blocks, tracker.usual.on_device) == (2.0, 0.5)
    tracker.prefill_done("first", 1.0)
    tracker.free("first", 5.0)
    tracker.free(
        "second", 50.0
    )  # ended before the first token: not counted in the length of answers
    assert (tracker.usual.ended, tracker.usual.decode_s) == (1, 4.0)


def test_the_growth_of_a_workers_blocks_is_estimated_from_ended_requests() -> None:
    tracker = LoadTracker([A])
    tracker.add("first", A, query(1, 2), NOTHING)  # 2 blocks are held now
    tracker.add("second", A, query(1, 2, 3, 4, 5), NOTHING)  # and now 5
    tracker.prefill_done("first", 1.0)
    tracker.free("first", 2.0)
    assert tracker.usual.change == 3**2
    tracker.publish(A, WorkerMetrics(kv_active_blocks=12, kv_total_blocks=100))
    tracker.prefill_done("second", 3.0)
    tracker.free("second", 4.0)
    assert tracker.usual.change == (3**2 + 7**2) / 2


def simulated_alone(holders: int, chance: random.Random) -> float:
    """Return the mean fraction of its time in which a request is the only holder of a block, from
    20,000 runs: ``holders`` others hold it first, and as many arrive per mean run time of a
    request.
    """
    total = 0.0
    for _ in range(20_000):
        mine = chance.expovariate(1.0)
        ends = [(0.0, chance.expovariate(1.0)) for _ in range(holders)]
        now = 0.0
        while holders and (now := now + chance.expovariate(holders)) < mine:
            ends.append((now, now + chance.expovariate(1.0)))
        last = 0.0  # the times until which others hold the block
        for start, end in ends:
            total += max(start - last, 0.0)
            last = max(last, end)
        total += max(mine - last, 0.0)
    return total / 20_000


def test_the_share_of_exclusive_block_time_is_measured() -> None:
    assert alone(0) == 1.0
    chance = random.Random(1)
    for holders in (1, 2, 3, 5):
        assert alone(holders) == pytest.approx(simulated_alone(holders, chance), abs=0.012)


def test_exclusive_blocks_of_a_new_request_are_counted() -> None:
    tracker = LoadTracker([A])
    tracker.add("first", A, query(1, 2, 3), NOTHING)
    tracker.add("second", A, query(1, 2, 4), NOTHING)
    [state] = tracker.states([A], (1, 2, 3, 5))
    assert state.new_blocks == 1
    assert state.held_alone == pytest.approx(2 * alone(2) + alone(1))
    for request in range(20):
        tracker.add(request, A, query(1, 2, 3), NOTHING)
    [state] = tracker.states([A], (1, 2, 4))
    assert state.held_alone == pytest.approx(alone(1))  # no block with many holders


def naive(active: dict[int, tuple[Worker, Sequence[int], int, bool]], worker: Worker) -> Load:
    mine = [entry for entry in active.values() if entry[0] == worker]
    return Load(
        active_requests=len(mine),
        active_prefill_tokens=sum(isl for _, _, isl, waiting in mine if waiting),
        active_decode_blocks=len({block for _, blocks, _, _ in mine for block in blocks}),
        outstanding_tokens=sum(isl for _, _, isl, waiting in mine if waiting),
    )


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_any_lifecycle_agrees_with_a_naive_model(seed: int) -> None:
    chance = random.Random(seed)
    tracker = LoadTracker([A, B])
    active: dict[int, tuple[Worker, Sequence[int], int, bool]] = {}
    for request in range(60):
        act = chance.random()
        if act < 0.5:
            root = chance.randrange(3)  # prefixes of three chains
            blocks = tuple(range(100 * root, 100 * root + chance.randrange(8)))
            worker = chance.choice((A, B))
            held = tracker.new_blocks(worker, blocks)
            before = tracker.load(worker).active_decode_blocks
            tracker.add(request, worker, query(*blocks, isl=7 * request), NOTHING)
            assert tracker.load(worker).active_decode_blocks == before + held
            active[request] = (worker, blocks, 7 * request or 16 * len(blocks), True)
        elif active:
            running = chance.choice(list(active))
            if act < 0.75:
                assert tracker.prefill_done(running) is active[running][3]
                active[running] = (*active[running][:3], False)
            else:
                assert tracker.free(running)
                del active[running]
        assert tracker.loads == {worker: naive(active, worker) for worker in (A, B)}


def test_published_metrics_update_the_load_and_are_extrapolated() -> None:
    tracker = LoadTracker([A])
    metrics = WorkerMetrics(3, 8, 40, 100, 2, 0.4, 0.5)
    tracker.publish(A, metrics)
    tracker.add("x", A, query(1, 2, 3), Overlap(device=1))
    load = tracker.load(A)
    assert (load.request_active_slots, load.kv_active_blocks, load.num_requests_waiting) == (
        *(4, 42),
        3,
    )
    tracker.publish(A, metrics)
    assert (load.request_active_slots, load.kv_active_blocks, load.num_requests_waiting) == (
        *(3, 40),
        2,
    )
    tracker.add("hit", A, query(1, 2), Overlap(shared=2))
    assert load.kv_active_blocks == 40
    tracker.free("hit")
    tracker.publish(A, None)
    tracker.free("x")
    assert tracker.load(A) == Load()
    tracker.publish(B, metrics)  # the worker has left, so nothing happens
