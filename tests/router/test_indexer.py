# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The rules of Dynamo's radix indexer, R1 to R10, and what the index adds: tiers and limits.

Random event streams: the index against a naive model.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models.prefix import NaiveIndex
from support.emulation import fewer

from beluga.errors import EventError, RouterError
from beluga.router import (
    Overlap,
    Query,
)
from beluga.router.events import Cleared, Removed, RouterEvent, Stored, Tier, tier_of, to_dynamo
from beluga.router.indexer import Indexer
from beluga.router.worker import Worker

# C may walk a broken tree forever. Only a thread can end that; a signal cannot.
pytestmark = pytest.mark.timeout(60, method="thread")

A, B = Worker(1), Worker(2)
A1 = Worker(1, 1)


def stored(
    worker: Worker,
    names: Sequence[int],
    contents: Sequence[int] | None,
    parent: int | None = None,
    tier: Tier = Tier.DEVICE,
) -> RouterEvent:
    return RouterEvent(worker, Stored(names, contents, parent), tier=tier)


def removed(worker: Worker, *names: int, tier: Tier = Tier.DEVICE) -> RouterEvent:
    return RouterEvent(worker, Removed(names), tier=tier)


@pytest.fixture
def index() -> Indexer:
    return Indexer(workers=8, blocks=1000)


def scores(index: Indexer, *hashes: int, early_exit: bool = False) -> dict[Worker, int]:
    matches = index.find_matches(hashes, early_exit=early_exit)
    return {worker: overlap.device for worker, overlap in matches.held.items()}


def test_r1_unknown_parent_drops_the_whole_event(index: Indexer) -> None:
    index.apply(stored(B, [11], [1]))
    with pytest.raises(EventError, match="parent block not found"):
        index.apply(stored(A, [12, 13], [2, 3], parent=11))  # only B has announced 11
    assert index.counts.parent_not_found == 1
    assert scores(index, 1, 2, 3) == {B: 1}
    index.apply(stored(A, [11, 12], [1, 2]))
    index.apply(stored(A, [13], [3], parent=12))
    assert scores(index, 1, 2, 3) == {A: 3, B: 1}


def test_r2_block_that_is_its_own_parent_is_refused(index: Indexer) -> None:
    index.apply(stored(A, [11], [1]))
    with pytest.raises(EventError, match="invalid block sequence"):
        index.apply(stored(A, [12, 11], [2, 1], parent=11))
    assert scores(index, 1, 2) == {A: 1}


def test_cycle_of_parents_is_only_a_longer_path(index: Indexer) -> None:
    index.apply(stored(A, [11], [1]))
    index.apply(stored(A, [12], [2], parent=11))
    index.apply(stored(A, [11], [1], parent=12))  # 11 names the third block from now on
    assert scores(index, 1, 2, 1) == {}
    assert index.counts.moved == 1
    index.apply(removed(A, 12, 11))
    assert index.stat()[:2] == (0, 0)


def test_r3_storing_again_changes_nothing(index: Indexer) -> None:
    for _ in range(3):
        index.apply(stored(A, [11, 12], [1, 2]))
    assert scores(index, 1, 2) == {A: 2}
    assert (index.counts.stored, index.counts.repeated) == (2, 4)
    index.apply(removed(A, 11, 12))
    assert index.stat()[:2] == (0, 0)


def test_r3_engines_have_their_own_hashes_of_a_block(index: Indexer) -> None:
    index.apply(stored(A, [11, 12], [1, 2]))
    index.apply(stored(B, [12, 11], [1, 2]))
    index.apply(removed(B, 11))
    assert scores(index, 1, 2) == {A: 2, B: 1}


def test_r3_hashes_with_a_sign_are_read_as_bits(index: Indexer) -> None:
    index.apply(stored(A, [-1], [-2]))
    index.apply(stored(A, [5], [6], parent=-1))
    assert scores(index, (1 << 64) - 2, 6) == {A: 2}
    index.apply(removed(A, (1 << 64) - 1))
    assert scores(index, -2, 6) == {}


def test_r4_removal_continues_after_an_unknown_block(index: Indexer) -> None:
    index.apply(stored(A, [11, 12, 13], [1, 2, 3]))
    with pytest.raises(EventError, match="2 blocks of an event are not in the index"):
        index.apply(removed(A, 99, 13, 98, 12))
    assert scores(index, 1, 2, 3) == {A: 1}
    assert (index.counts.removed, index.counts.unknown) == (2, 2)


def test_r4_path_may_be_removed_from_its_middle_on(index: Indexer) -> None:
    index.apply(stored(A, [11, 12, 13], [1, 2, 3]))
    index.apply(removed(A, 12, 13))
    assert scores(index, 1, 2, 3) == {A: 1}
    index.apply(removed(A, 11))
    assert index.stat()[:2] == (0, 0)


def test_r5_block_counts_only_if_those_before_it_do(index: Indexer) -> None:
    for worker in (A, B):
        index.apply(stored(worker, [11, 12], [1, 2]))
        index.apply(stored(worker, [13, 14], [3, 4], parent=12))
        index.apply(stored(worker, [15], [5], parent=12))
    index.apply(removed(A, 12))
    assert scores(index, 1, 2, 3, 4) == {A: 1, B: 4}
    assert scores(index, 1, 2, 5) == {A: 1, B: 3}
    with pytest.raises(EventError, match="parent block not found"):
        index.apply(stored(A, [16], [6], parent=12))


def test_r5_blocks_after_a_gap_count_again_when_it_is_filled(index: Indexer) -> None:
    index.apply(stored(A, [11, 12, 13], [1, 2, 3]))
    index.apply(removed(A, 12))
    index.apply(removed(A, 11))
    assert scores(index, 1, 2, 3) == {}
    index.apply(stored(A, [11], [1]))
    assert scores(index, 1, 2, 3) == {A: 1}
    index.apply(stored(A, [12], [2], parent=11))
    assert scores(index, 1, 2, 3) == {A: 3}  # 13 was never removed


def test_r6_a_clear_affects_one_rank_and_a_removal_all(index: Indexer) -> None:
    for worker in (A, A1, B):
        index.apply(stored(worker, [11, 12], [1, 2]))
    index.apply(stored(A, [11], None, tier=Tier.HOST))
    index.apply(RouterEvent(A, Cleared()))
    assert scores(index, 1, 2) == {A1: 2, B: 2}
    assert index.held(A, Tier.HOST) == 0
    index.apply(stored(A, [11], [1]))
    index.remove_worker(1)
    assert scores(index, 1, 2) == {B: 2}
    assert index.workers() == [B]


def test_r7_scores_are_leading_blocks(index: Indexer) -> None:
    index.apply(stored(A, [11, 12, 13], [1, 2, 3]))
    index.apply(stored(B, [11], [1]))
    index.apply(stored(A1, [22], [2]))
    assert scores(index, 1, 2, 3, 4) == {A: 3, B: 1}
    assert scores(index, 2, 3) == {A1: 1}
    assert scores(index, 7) == scores(index) == {}


def test_r7_early_exit_gives_a_lower_bound(index: Indexer) -> None:
    index.apply(stored(A, list(range(100, 150)), list(range(50))))
    index.apply(stored(B, [100, 101, 102], [0, 1, 2]))
    held_by = scores(index, *range(50), early_exit=True)
    assert held_by[B] == 3
    assert 3 < held_by[A] < 50


def test_r10_numbers_order_a_workers_events(index: Indexer) -> None:
    def numbered(number: int, worker: Worker = A) -> RouterEvent:
        return RouterEvent(worker, Stored([number], [number]), number)

    for number in (5, 6, 9, 7, 12):
        index.apply(numbered(number))
    index.apply(numbered(1, B))
    assert scores(index, 7) == {}  # the event came too late
    assert (index.counts.stale, index.counts.gaps, index.counts.missed) == (1, 2, 4)


def test_tiers_continue_each_other(index: Indexer) -> None:
    index.apply(stored(A, [11, 12, 13, 14], [1, 2, 3, 4]))
    index.apply(stored(A, [12, 13, 14], None, tier=Tier.HOST))
    index.apply(removed(A, 13, 14))
    index.apply(stored(A, [15], [5], parent=14, tier=Tier.DISK))
    index.apply(stored(B, [11, 12], [1, 2]))
    index.apply(stored(B, [13], [3], parent=12, tier=Tier.SHARED))
    index.apply(stored(A, [16, 17], [6, 7], parent=15, tier=Tier.SHARED))
    matches = index.matches(Query(isl=8, block_size=1, hashes=[1, 2, 3, 4, 5, 6, 7, 8]))
    assert matches.of(A) == Overlap(device=2, host=2, disk=1, shared=2)
    assert matches.of(B) == Overlap(device=2, shared=1)
    assert matches.of(Worker(9)) == Overlap()
    index.apply(stored(B, [11, 12], None, tier=Tier.SHARED))
    matches = index.find_matches([1, 2, 3, 4])
    assert (matches.of(Worker(9)), matches.shared) == (Overlap(shared=3), 3)


def test_the_pools_blocks_outlive_their_publishers(index: Indexer) -> None:
    index.apply(stored(A, [11, 12], [1, 2], tier=Tier.SHARED))
    index.apply(stored(A, [21], [1]))
    assert index.held(B, Tier.SHARED) == 2  # any worker may send it
    assert (index.held(A, Tier.DEVICE), index.held(B, Tier.DEVICE)) == (1, 0)
    index.apply(RouterEvent(A, Cleared()))
    index.remove_worker(1)
    assert index.find_matches([1, 2]).shared == 2
    index.apply(removed(B, 12, tier=Tier.SHARED))
    assert index.find_matches([1, 2]).shared == 1
    index.clear_shared()
    assert index.find_matches([1, 2]).shared == 0


@pytest.mark.parametrize(
    ("word", "tier"),
    [(None, 0), ("GPU", 0), ("CPU", 1), ("cpu_pinned", 1), ("CPU_TIER2", 2), ("STORAGE", 2)]
    + [(word, 3) for word in ("EXTERNAL", "NETWORK", "REMOTE", "SHARED")],
)
def test_tier_names_are_parsed(word: str | None, tier: int) -> None:
    assert tier_of(word) == tier


@pytest.mark.parametrize("word", ["TAPE", "", 7])
def test_unknown_tier_is_an_error(word: object) -> None:
    with pytest.raises(EventError, match="tier"):
        tier_of(word)  # type: ignore[arg-type]


def test_a_full_index_evicts_the_oldest_blocks() -> None:
    index = Indexer(workers=2, blocks=10)
    for first in (10, 20, 30):
        index.apply(stored(A, [first + i for i in range(4)], [first + i for i in range(4)]))
    assert index.stat().blocks == 10
    assert index.counts.evicted == index.stat().evicted == 2
    assert scores(index, 10, 11, 12, 13) == {A: 2}  # blocks are evicted from the end
    assert scores(index, 30, 31, 32, 33) == {A: 4}
    with pytest.raises(EventError, match="no room for 3 blocks"):
        index.apply(stored(B, list(range(100, 113)), list(range(100, 113))))
    assert scores(index, *range(100, 113)) == {B: 10}
    assert index.stat().blocks == 10


def test_a_block_that_is_stored_again_is_evicted_later() -> None:
    index = Indexer(workers=2, blocks=3)
    for block in (1, 2, 3):
        index.apply(stored(A, [block], [block]))
    index.apply(stored(B, [1], [1]))
    index.apply(stored(A, [4], [4]))
    assert scores(index, 2) == {}
    assert scores(index, 1) == {A: 1, B: 1}


def test_a_chain_that_is_stored_again_is_evicted_from_its_tail() -> None:
    index = Indexer(workers=2, blocks=3)
    for _ in range(2):
        index.apply(stored(A, [1, 2], [1, 2]))
    for block in (3, 4):
        index.apply(stored(A, [block], [block]))
    assert scores(index, 1, 2) == {A: 1}
    assert scores(index, 3) == scores(index, 4) == {A: 1}


def test_full_table_of_names_makes_room_too() -> None:
    index = Indexer(workers=2, blocks=100, names=4)
    index.apply(stored(A, [1, 2, 3], [1, 2, 3]))
    index.apply(stored(B, [11, 12, 13], [4, 5, 6]))
    assert index.stat().names == 4
    assert (scores(index, 1, 2, 3), scores(index, 4, 5, 6)) == ({A: 1}, {B: 3})


def test_flood_of_names_for_one_block_is_bounded(index: Indexer) -> None:
    for name in range(8 + 64):
        index.apply(stored(A, [name], [1]))
    with pytest.raises(EventError, match="no room"):
        index.apply(stored(A, [1000], [1]))
    index.apply(removed(A, *range(1, 8 + 64)))
    assert scores(index, 1) == {A: 1}  # one name is left
    index.apply(removed(A, 0))
    assert index.stat()[:2] == (0, 0)


def test_hostile_events_are_errors_and_leave_no_trace(index: Indexer) -> None:
    bad: list[RouterEvent] = [
        stored(A, [1, 2], [1]),
        stored(A, ["x"], [1]),  # type: ignore[list-item]
        stored(A, [1], [None]),  # type: ignore[list-item]
        stored(A, [1], [1], parent=1),
        stored(A, [1], [2], parent=7),
        removed(A, 1),
        RouterEvent(A, "cleared"),  # type: ignore[arg-type]
    ]
    assert index.apply_all(bad) == len(bad)
    assert index.stat()[:2] == (0, 0)
    index.apply_all(stored(Worker(i), [1], [1]) for i in range(20))
    assert len(index.workers()) == 8
    assert index.counts.invalid >= 12


@pytest.mark.parametrize("limits", [{"workers": 0}, {"workers": 5000}, {"blocks": 0}, {"names": 0}])
def test_impossible_limits_are_refused(limits: dict[str, int]) -> None:
    with pytest.raises(RouterError, match="an index has"):
        Indexer(**limits)


def test_concurrent_lookups_see_whole_events() -> None:
    index = Indexer(workers=4, blocks=10_000)
    hashes = list(range(1, 65))
    stop = threading.Event()
    wrong: list[int] = []

    def look() -> None:
        while not stop.is_set():
            for count in scores(index, *hashes).values():
                if count not in (0, 64):
                    wrong.append(count)

    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(300):
            index.apply(stored(A, hashes, hashes))
            index.apply(stored(B, hashes, hashes))
            index.apply(removed(A, *hashes))
            index.apply(RouterEvent(B, Cleared()))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert index.stat()[:2] == (0, 0)


def test_events_are_written_in_the_format_of_dynamo() -> None:
    assert to_dynamo(RouterEvent(Worker(7, 1), Removed([1, 2]), 3)) == {
        "worker_id": 7,
        "storage_tier": "device",
        "event": {"event_id": 3, "dp_rank": 1, "data": {"removed": {"block_hashes": [1, 2]}}},
    }
    cleared = to_dynamo(RouterEvent(Worker(7), Cleared(), 4))
    assert cleared["event"] == {"event_id": 4, "dp_rank": 0, "data": "cleared"}
    event = to_dynamo(RouterEvent(Worker(7), Stored([9], [5], 8), 5, Tier.SHARED))
    assert event["storage_tier"] == "shared"
    assert event["event"]["data"] == {
        "stored": {"parent_hash": 8, "blocks": [{"block_hash": 9, "tokens_hash": 5}]}
    }


def test_events_that_fail_do_not_flood_the_log(caplog: pytest.LogCaptureFixture) -> None:
    index = Indexer(workers=4, blocks=100)
    for number in range(100):
        assert index.apply_all([stored(A, [number], [1], parent=1000)]) == 1
    assert index.counts.parent_not_found == 100
    [record] = caplog.records
    assert "1 KV events could not be applied; the last: worker" in record.getMessage()


# C may walk a broken tree forever. Only a thread can end that; a signal cannot.

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
    matches = index.find_matches(hashes)
    assert (matches.held, matches.shared) == (held, shared)
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
