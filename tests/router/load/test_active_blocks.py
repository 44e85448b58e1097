# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The blocks of workers' requests in C match those of a naive model."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from beluga.router import LoadTracker, Overlap, Query, Worker
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
