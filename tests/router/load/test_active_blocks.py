# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The blocks of workers' requests in C are those of a plain model."""

from __future__ import annotations

import random
from array import array
from collections import Counter

import pytest

from beluga.router.load.blocks import ActiveBlocks, Group, alone


def held(counts: Counter[int], blocks: list[int]) -> int:
    return next((at for at, block in enumerate(blocks) if not counts[block]), len(blocks))


def held_alone(counts: Counter[int], blocks: list[int]) -> float:
    """Return the sum over the leading blocks that others hold, from the last on."""
    total = 0.0
    for holders in range(1, 5):
        alike = [block for block in blocks[: held(counts, blocks)] if counts[block] == holders]
        total += len(alike) * alone(holders)
    return total


@pytest.mark.parametrize("seed", range(20))
def test_workers_blocks_are_those_of_a_model(seed: int) -> None:
    chance = random.Random(seed)
    prompts: list[list[int]] = [[]]
    for number in range(40):  # each goes on from a prefix of another one
        start = chance.choice(prompts)
        start = start[: chance.randint(0, len(start))]
        prompts.append([*start, *(number << 32 | at for at in range(chance.randint(0, 30)))])
    workers = [ActiveBlocks() for _ in range(3)]
    counts: list[Counter[int]] = [Counter() for _ in workers]
    running: list[tuple[int, list[int]]] = []
    group = Group(workers)
    for _ in range(300):
        if running and chance.random() < 0.45:
            at, blocks = running.pop(chance.randrange(len(running)))
            workers[at].remove(array("Q", blocks))
            counts[at].subtract(blocks)
        else:
            at, blocks = chance.randrange(len(workers)), chance.choice(prompts)
            running.append((at, blocks))
            workers[at].add(array("Q", blocks))
            counts[at].update(blocks)
        asked = chance.choice(prompts)
        found, alone_there = group.states(array("Q", asked))
        for place, (worker, count) in enumerate(zip(workers, counts, strict=True)):
            assert len(worker) == len(+count)
            assert found[place] == held(count, asked)
            assert alone_there[place] == pytest.approx(held_alone(count, asked))


def test_blocks_whose_places_collide_are_all_found_and_removed() -> None:
    worker, many = ActiveBlocks(), array("Q", range(5000))
    worker.add(many)
    for block in range(0, 5000, 2):
        worker.remove(array("Q", [block]))
    assert len(worker) == 2500
    for block in range(5000):
        found, _ = Group([worker]).states(array("Q", [block]))
        assert found[0] == block % 2
