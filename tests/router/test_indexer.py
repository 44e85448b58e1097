# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The rules of Dynamo's radix indexer, R1 to R10, and what the index adds: tiers and limits. The
approximate index, and the feed that restores the order of a publisher's messages.
"""

import random
import threading
from collections.abc import Callable, Iterable, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models.prefix import NaiveIndex
from support.emulation import fewer

from beluga.errors import EventError, RouterError
from beluga.router import Indexer, Overlap, Query, ReplayBuffer, RouterEvent, Stored, Tier, Worker
from beluga.router.approximate import ApproximateIndexer, PredictiveIndexer
from beluga.router.events import Cleared, Removed, tier_of
from beluga.router.feeds import Feed, Replay

# C may walk a broken tree forever. Only a thread can end that; a signal cannot.
pytestmark = pytest.mark.timeout(60, method="thread")

A, B, C = Worker(1), Worker(2), Worker(3)
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


def failures(index: Indexer, events: Iterable[RouterEvent]) -> int:
    """Apply events. Returns how many failed."""
    count = 0
    for event in events:
        try:
            index.apply(event)
        except EventError:
            count += 1
    return count


@pytest.fixture
def index() -> Indexer:
    return Indexer(workers=8, blocks=1000)


def scores(index: Indexer, *hashes: int, early_exit: bool = False) -> dict[Worker, int]:
    matches = index.find_matches(hashes, early_exit=early_exit)
    return {worker: overlap.device for worker, overlap in matches.held.items()}


CHAIN = stored(A, [11, 12, 13], [1, 2, 3])


@pytest.mark.parametrize(
    ("events", "failed", "expected"),
    [
        pytest.param(
            [stored(B, [11], [1]), stored(A, [12, 13], [2, 3], parent=11)],
            1,
            {(1, 2, 3): {B: 1}},
            id="R1: an unknown parent, which only B has announced, drops the whole event",
        ),
        pytest.param(
            [stored(A, [11, 12], [1, 2]), stored(A, [13], [3], parent=12)],
            0,
            {(1, 2, 3): {A: 3}},
            id="R1: a known parent",
        ),
        pytest.param(
            [stored(A, [11], [1]), stored(A, [12, 11], [2, 1], parent=11)],
            1,
            {(1, 2): {A: 1}},
            id="R2: a block that is its own parent",
        ),
        pytest.param(
            [
                stored(A, [11], [1]),
                stored(A, [12], [2], parent=11),
                stored(A, [11], [1], parent=12),  # 11 names the third block from now on
            ],
            0,
            {(1, 2, 1): {}},
            id="a cycle of parents is only a longer path",
        ),
        pytest.param([CHAIN] * 3, 0, {(1, 2, 3): {A: 3}}, id="R3: storing again changes nothing"),
        pytest.param(
            [stored(A, [11, 12], [1, 2]), stored(B, [12, 11], [1, 2]), removed(B, 11)],
            0,
            {(1, 2): {A: 2, B: 1}},
            id="R3: engines have their own hashes of a block",
        ),
        pytest.param(
            [stored(A, [-1], [-2]), stored(A, [5], [6], parent=-1)],
            0,
            {((1 << 64) - 2, 6): {A: 2}, (-2, 6): {A: 2}},
            id="R3: hashes with a sign are read as bits",
        ),
        pytest.param(
            [CHAIN, removed(A, 12), removed(A, 11), stored(A, [11], [1])],
            0,
            {(1, 2, 3): {A: 1}},
            id="R5: blocks after a gap do not count",
        ),
        pytest.param(
            [CHAIN, removed(A, 12), stored(A, [12], [2], parent=11)],
            0,
            {(1, 2, 3): {A: 3}},
            id="R5: blocks after a gap count again when it is filled",
        ),
        pytest.param(
            [*(stored(w, [11, 12], [1, 2]) for w in (A, A1, B)), RouterEvent(A, Cleared())],
            0,
            {(1, 2): {A1: 2, B: 2}},
            id="R6: a clear affects one rank",
        ),
        pytest.param(
            [CHAIN, stored(B, [11], [1]), stored(A1, [22], [2])],
            0,
            {(1, 2, 3, 4): {A: 3, B: 1}, (2, 3): {A1: 1}, (7,): {}, (): {}},
            id="R7: scores are leading blocks",
        ),
    ],
)
def test_the_rules_of_the_reference(
    index: Indexer,
    events: list[RouterEvent],
    failed: int,
    expected: dict[tuple[int, ...], dict[Worker, int]],
) -> None:
    assert failures(index, events) == failed
    assert {hashes: scores(index, *hashes) for hashes in expected} == expected
    for worker in index.workers():
        index.remove_worker(worker.worker_id)
    assert index.stat()[:2] == (0, 0)


def test_r4_removal_continues_after_an_unknown_block(index: Indexer) -> None:
    index.apply(stored(A, [11, 12, 13], [1, 2, 3]))
    with pytest.raises(EventError, match="2 blocks of an event are not in the index"):
        index.apply(removed(A, 99, 13, 98, 12))
    assert scores(index, 1, 2, 3) == {A: 1}
    assert (index.counts.removed, index.counts.unknown) == (2, 2)


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
    for wrong in ("TAPE", "", 7):
        with pytest.raises(EventError, match="tier"):
            tier_of(wrong)  # type: ignore[arg-type]


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
    assert failures(index, bad) == len(bad)
    assert index.stat()[:2] == (0, 0)
    failures(index, (stored(Worker(i), [1], [1]) for i in range(20)))
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

    index = Indexer(workers=6, blocks=1 << 10)
    steps = data.draw(st.integers(1, 12))
    play(lambda: any_event(pick, ranks=3, tiers=4), pick, steps=steps, index=index, look=3)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("ranks", [3, 50])
@pytest.mark.parametrize("engines", [False, True])
def test_long_stream_agrees_with_a_naive_index(seed: int, ranks: int, engines: bool) -> None:
    pick = random.Random(seed).randrange
    index = Indexer(workers=2 * ranks, blocks=1 << 12)  # 100 ranks use two words of bits
    tiers = 3 + seed % 2

    def event() -> RouterEvent:
        if engines:
            return engine_event(pick, ranks=ranks)
        return any_event(pick, ranks=ranks, tiers=tiers)

    play(event, pick, steps=600, index=index, look=5)


# ---- The feed, and the approximate index


@pytest.mark.parametrize("seed", range(5))
def test_replayed_and_live_items_are_in_order(seed: int) -> None:
    rng = random.Random(seed)
    feed: Feed[int] = Feed()
    out: list[int] = []
    sent: list[int] = []
    for number in range(300):
        sent.append(number)
        if rng.random() < 0.2:
            continue  # the message is lost
        ready = feed.offer(number, number)
        assert not ready.restarted
        out += ready.items
        if feed.wanted is not None and rng.random() < 0.3:
            for old in sent[feed.wanted :]:
                out += feed.replayed(old, old)
            out += feed.give_up()
    assert out == list(range(len(out)))
    assert (feed.lost, feed.restarts) == (0, 0)
    assert len(out) > 200


def test_messages_without_a_replay_are_lost() -> None:
    feed: Feed[str] = Feed()
    assert feed.offer(2, "c").items == []
    assert feed.wanted == 0
    assert feed.replayed(1, "b") == []
    assert feed.give_up() == ["b", "c"]
    assert (feed.lost, feed.wanted) == (1, None)
    assert feed.offer(3, "d").items == ["d"]


def test_held_items_are_bounded() -> None:
    feed: Feed[int] = Feed(held_max=10)
    out: list[int] = []
    for number in range(5, 30):
        out += feed.offer(number, number).items
    assert out == list(range(5, 30))
    assert feed.lost == 5
    assert feed.offer((1 << 64) - 2, 0).items == []
    assert feed.give_up() == [0]
    # an implausible number does not block the feed forever
    assert feed.offer(30, 30).restarted


def test_a_live_repetition_of_a_replayed_item_is_not_a_restart() -> None:
    feed: Feed[int] = Feed()
    feed.offer(1, 1)
    assert feed.replayed(0, 0) == [0, 1]
    assert feed.replayed(2, 2) == [2]
    ready = feed.offer(2, 2)  # the message waited in the socket meanwhile
    assert (ready.items, ready.restarted, feed.repeated) == ([], False, 1)
    assert feed.replaced(5, 5) == [5]
    assert not feed.offer(5, 5).restarted
    assert feed.replaced(0, 0) == feed.replayed(0, 0) == []
    assert feed.offer(0, 0).restarted


def test_a_publisher_that_reconnects_is_followed_again() -> None:
    feed: Feed[int] = Feed()
    assert [feed.offer(number, number).items for number in range(3)] == [
        [0],
        [1],
        [2],
    ]
    feed.reset()
    assert feed.offer(3, 3).items == []  # no restart: all are requested again
    assert feed.wanted == 0
    feed.reset()
    assert feed.offer(0, 0).items == [0]
    assert (feed.lost, feed.restarts) == (0, 0)


def test_a_buffer_replays_its_items() -> None:
    buffer: ReplayBuffer[int] = ReplayBuffer(ring=4)
    assert [buffer.add(number) for number in range(10)] == list(range(10))
    assert buffer.replay(8) == Replay([8, 9], 0)
    assert buffer.replay(3) == Replay([6, 7, 8, 9], 3)
    assert buffer.replay(buffer.next_number) == Replay([], 0)
    buffer.skip()
    assert buffer.add(11) == 11
    assert buffer.replay(9) == Replay([11], 2)
    with pytest.raises(RouterError, match="at least one"):
        ReplayBuffer(ring=0)
    of_bytes: ReplayBuffer[bytes] = ReplayBuffer(ring=100, size=len, size_max=10)
    for size in (4, 4, 4, 2):
        of_bytes.add(bytes(size))
    assert of_bytes.replay(0) == Replay([bytes(4), bytes(4), bytes(2)], 1)
    of_bytes.add(bytes(11))
    assert of_bytes.replay(0) == Replay([], 5)


def sent_scores(index: ApproximateIndexer, hashes: list[int], now: float) -> dict[Worker, int]:
    held = index.find_matches(hashes, now).held
    return {worker: overlap.device for worker, overlap in held.items()}


def test_blocks_count_until_their_time_is_up() -> None:
    index = ApproximateIndexer()
    index.routed(A, [1, 2, 3], 0.0)
    index.routed(B, [1, 2], 60.0)
    assert sent_scores(index, [1, 2, 3], 119.9) == {A: 3, B: 2}
    assert sent_scores(index, [1, 2, 3], 120.0) == {B: 2}
    assert sent_scores(index, [1, 2, 3], 180.0) == {}
    assert len(index) == 0


def test_a_repeated_prompt_restarts_the_timer() -> None:
    index = ApproximateIndexer(ttl_s=10)
    index.routed(A, [1, 2, 3], 0.0)
    index.routed(A, [1, 2], 5.0)
    assert sent_scores(index, [1, 2, 3], 12.0) == {A: 2}
    assert len(index) == 2


@pytest.mark.parametrize("seed", range(3))
def test_the_index_agrees_with_a_naive_table(seed: int) -> None:
    rng = random.Random(seed)
    index = ApproximateIndexer(ttl_s=10)
    until: dict[tuple[Worker, tuple[int, ...]], float] = {}
    now = 0.0
    for _ in range(400):
        now += rng.random()
        worker = Worker(rng.randrange(4))
        hashes = [rng.randrange(2) for _ in range(rng.randrange(8))]
        index.routed(worker, hashes, now)
        until |= {(worker, tuple(hashes[: i + 1])): now + 10 for i in range(len(hashes))}
        until = {key: when for key, when in until.items() if when > now}
        requested = [rng.randrange(2) for _ in range(8)]
        expected = {}
        for holder in map(Worker, range(4)):
            run = 0
            while run < 8 and (holder, tuple(requested[: run + 1])) in until:
                run += 1
            if run:
                expected[holder] = run
        assert sent_scores(index, requested, now) == expected
        assert len(index) == len(until)


def test_the_oldest_blocks_are_pruned_down_to_the_ratio() -> None:
    index = ApproximateIndexer(blocks=100)
    for first in range(0, 100, 10):
        index.routed(A if first % 20 else B, list(range(first, first + 10)), float(first))
    assert len(index) == 100
    index.routed(A, [500], 100.0)
    assert len(index) == 80
    # the third oldest loses blocks from its end
    assert sent_scores(index, list(range(20, 30)), 100.0) == {B: 9}
    assert sent_scores(index, list(range(10)), 100.0) == {}
    assert sent_scores(index, [500], 100.0) == {A: 1}
    index.routed(C, list(range(1000, 2000)), 101.0)  # more than there is space for
    assert len(index) == 80


def test_the_end_of_a_prompt_that_was_pruned_is_not_found() -> None:
    index = ApproximateIndexer(blocks=100, ttl_s=10)
    prompt = list(range(1000, 1090))
    index.routed(A, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], 0.0)
    index.routed(A, prompt, 1.0)
    assert len(index) == 80
    assert sent_scores(index, prompt, 1.0) == {A: 80}
    assert sent_scores(index, prompt, 11.0) == {}
    index.routed(A, prompt[:80], 12.0)
    assert sent_scores(index, prompt, 12.0) == {A: 80}  # the rest was sent before, and has expired


def test_a_removed_worker_is_dropped() -> None:
    index = ApproximateIndexer(workers=2)
    index.routed(A, [1, 2], 0.0)
    index.routed(B, [1], 0.0)
    with pytest.raises(EventError, match="exceeds the limit"):
        index.routed(C, [1], 0.0)
    index.remove_worker(1)
    assert (sent_scores(index, [1, 2], 1.0), len(index)) == ({B: 1}, 1)
    index.routed(C, [1], 1.0)
    assert sent_scores(index, [1, 2], 1.0) == {B: 1, C: 1}
    with pytest.raises(RouterError):
        ApproximateIndexer(ttl_s=0)


def test_prompts_with_one_prefix_follow_the_first() -> None:
    events = Indexer(workers=4, blocks=100)
    index = PredictiveIndexer(events)
    events.apply(RouterEvent(B, Stored([1], [1])))
    index.routed(A, [1, 2, 3], 0.0)
    matches = index.find_matches([1, 2, 3], 1.0)
    assert (matches.of(A), matches.of(B)) == (Overlap(device=3), Overlap(device=1))
    assert index.find_matches([1, 2, 3], 5.0).held.keys() == {B}
    events.apply(RouterEvent(A, Stored([1, 2], [1, 2])))
    assert index.find_matches([1, 2, 3], 6.0).of(A) == Overlap(device=2)
    index.remove_worker(1)
    assert index.find_matches([1, 2, 3], 6.0).held.keys() == {B}


def test_predictions_replace_lower_tiers() -> None:
    events = Indexer(workers=4, blocks=100)
    index = PredictiveIndexer(events)
    hashes = list(range(1, 9))
    events.apply(RouterEvent(A, Stored(hashes[:2], hashes[:2])))
    events.apply(RouterEvent(A, Stored(hashes[2:4], hashes[2:4], 2), tier=Tier.HOST))
    events.apply(RouterEvent(A, Stored(hashes[4:6], hashes[4:6], 4), tier=Tier.SHARED))
    assert index.find_matches(hashes, 0.0).of(A) == Overlap(2, 2, 0, 2)
    for sent, expected in ((1, Overlap(2, 2, 0, 2)), (3, Overlap(3, 1, 0, 2)), (8, Overlap(8))):
        index.routed(A, hashes[:sent], 0.0)
        assert index.find_matches(hashes, 0.0).of(A) == expected
