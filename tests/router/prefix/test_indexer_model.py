# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Random event streams: the index against a naive model."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models.prefix import NaiveIndex
from support.emulation import fewer

from beluga.errors import EventError
from beluga.router.events import Cleared, Removed, RouterEvent, Stored, Tier
from beluga.router.indexer import Indexer
from beluga.router.worker import Worker

# C may walk a broken tree forever. Only a thread can end that; a signal cannot.
pytestmark = pytest.mark.timeout(60, method="thread")

Pick = Callable[[int], int]  # returns a number below the given one

LOCALS = 3
NAMES = 12


def any_event(pick: Pick, *, ranks: int, tiers: int) -> RouterEvent:
    """Make an event with small numbers, so that names collide, parents are unknown and paths
    branch.
    """
    worker = Worker(pick(ranks), pick(2))
    tier = Tier(pick(tiers))
    kind = pick(16)
    count = 1 + pick(4)
    names = [pick(NAMES) for _ in range(count)]
    if kind < 10:
        contents = None if kind == 0 else [pick(LOCALS) for _ in range(count)]
        parent = None if kind < 4 else pick(NAMES)
        return RouterEvent(worker, Stored(names, contents, parent), tier=tier)
    if kind < 15:
        return RouterEvent(worker, Removed(names), tier=tier)
    return RouterEvent(worker, Cleared(), tier=tier)


def engine_event(pick: Pick, *, ranks: int) -> RouterEvent:
    """Make an event as engines do: a name belongs to one path, and every second worker has the same
    seed for its names.
    """
    worker = Worker(pick(ranks), pick(2))
    tier = Tier(pick(4))
    path = [pick(LOCALS) for _ in range(1 + pick(6))]
    names = [hash((worker.worker_id % 2, *path[: i + 1])) for i in range(len(path))]
    start = pick(len(path))
    if pick(3):
        parent = names[start - 1] if start else None
        contents = path[start:] if pick(8) else None
        return RouterEvent(worker, Stored(names[start:], contents, parent), tier=tier)
    return RouterEvent(worker, Removed(names[start:]) if pick(20) else Cleared(), tier=tier)


def check_same(index: Indexer, model: NaiveIndex, hashes: list[int]) -> None:
    held, shared = model.find(hashes)
    found = index.find_matches(hashes)
    assert (found.held, found.shared) == (held, shared)
    early = index.find_matches(hashes, early_exit=True)
    assert early.held.keys() <= held.keys()
    assert all(early.held[worker].held <= held[worker].held for worker in early.held)


def play(
    event_of: Callable[[], RouterEvent],
    pick: Pick,
    *,
    steps: int,
    index: Indexer,
    look: int,
) -> None:
    """Apply events to the index and to a model, which must agree. Then everything is removed, and
    the index must be empty.
    """
    model = NaiveIndex()
    for step in range(steps):
        event = event_of()
        applied = True
        try:
            index.apply(event)
        except EventError:
            applied = False
        assert model.apply(event) == applied
        if step % look == 0:
            check_same(index, model, [pick(LOCALS) for _ in range(8)])
    for _ in range(30):
        check_same(index, model, [pick(LOCALS) for _ in range(10)])
    for worker in index.workers():
        index.remove_worker(worker.worker_id)
    index.clear_shared()
    assert index.stat()[:2] == (0, 0)


@settings(max_examples=fewer(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_stream_agrees_with_a_naive_index(data: st.DataObject) -> None:
    def pick(count: int) -> int:
        return data.draw(st.integers(0, count - 1))

    play(
        lambda: any_event(pick, ranks=3, tiers=4),
        pick,
        steps=data.draw(st.integers(1, 12)),
        index=Indexer(workers=6, blocks=1 << 10),
        look=3,
    )


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("ranks", [3, 50])
def test_long_stream_agrees_with_a_naive_index(seed: int, ranks: int) -> None:
    pick = random.Random(seed).randrange
    index = Indexer(workers=2 * ranks, blocks=1 << 12)  # 100 ranks use two words of bits
    tiers = 3 + seed % 2
    play(
        lambda: any_event(pick, ranks=ranks, tiers=tiers),
        pick,
        steps=600,
        index=index,
        look=5,
    )


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("ranks", [3, 40])
def test_stream_of_engines_agrees_with_a_naive_index(seed: int, ranks: int) -> None:
    pick = random.Random(seed).randrange
    index = Indexer(workers=2 * ranks, blocks=1 << 12)
    play(
        lambda: engine_event(pick, ranks=ranks),
        pick,
        steps=600,
        index=index,
        look=5,
    )
