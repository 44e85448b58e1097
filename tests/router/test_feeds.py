# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The feed restores the order of a publisher's messages, and a ring keeps them for a replay.

The approximate index: what workers may hold, from sent requests; alone and together with an
index of events.
"""

from __future__ import annotations

import random

import pytest

from beluga.errors import EventError, RouterError
from beluga.router import Indexer, Overlap, ReplayBuffer, RouterEvent, Stored, Tier, Worker
from beluga.router.approximate import ApproximateIndexer, PredictiveIndexer
from beluga.router.feeds import Feed, Replay


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
        ready = feed.offer(number, number, float(number))
        assert not ready.restarted
        out += ready.items
        if feed.wanted is not None and rng.random() < 0.3:
            for old in sent[feed.wanted :]:
                out += feed.replayed(old, old, old)
            out += feed.give_up()
    assert out == list(range(len(out)))
    assert (feed.lost, feed.restarts) == (0, 0)
    assert len(out) > 200


def test_messages_without_a_replay_are_lost() -> None:
    feed: Feed[str] = Feed()
    assert feed.offer(2, "c", 1.0).items == []
    assert feed.wanted == 0
    assert feed.replayed(1, "b", 1) == []
    assert feed.give_up() == ["b", "c"]
    assert (feed.lost, feed.wanted) == (1, None)
    assert feed.offer(3, "d", 2.0).items == ["d"]


def test_held_items_are_bounded() -> None:
    feed: Feed[int] = Feed(held_max=10)
    out: list[int] = []
    for number in range(5, 30):
        out += feed.offer(number, number, float(number)).items
    assert out == list(range(5, 30))
    assert feed.lost == 5
    assert feed.offer((1 << 64) - 2, 0, 99.0).items == []
    assert feed.give_up() == [0]
    # an implausible number does not block the feed forever
    assert feed.offer(30, 30, 100.0).restarted


def test_a_live_repetition_of_a_replayed_item_is_not_a_restart() -> None:
    feed: Feed[int] = Feed()
    feed.offer(1, 1, 1.0)
    assert feed.replayed(0, 0, 0.0) == [0, 1]
    assert feed.replayed(2, 2, 2.0) == [2]
    ready = feed.offer(2, 2, 2.0)  # the message waited in the socket meanwhile
    assert (ready.items, ready.restarted, feed.repeated) == ([], False, 1)
    assert feed.replaced(5, 5, 5.0) == [5]
    assert not feed.offer(5, 5, 5.0).restarted
    assert feed.replaced(0, 0, 9.0) == feed.replayed(0, 0, 9.0) == []
    assert feed.offer(0, 0, 8.0).restarted  # items that were not read do not count for the delay


def test_a_publisher_that_reconnects_is_followed_again() -> None:
    feed: Feed[int] = Feed()
    assert [feed.offer(number, number, 5.0 + number).items for number in range(3)] == [
        [0],
        [1],
        [2],
    ]
    feed.reset()
    assert feed.offer(3, 3, 8.0).items == []  # no restart: all are requested again
    assert feed.wanted == 0
    feed.reset()
    assert feed.offer(0, 0, 1.0).items == [0]  # a restart, and the clock was set back
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


A, B, C = Worker(1), Worker(2), Worker(3)


def scores(index: ApproximateIndexer, hashes: list[int], now: float) -> dict[Worker, int]:
    held = index.find_matches(hashes, now).held
    return {worker: overlap.device for worker, overlap in held.items()}


def test_blocks_count_until_their_time_is_up() -> None:
    index = ApproximateIndexer()
    index.routed(A, [1, 2, 3], 0.0)
    index.routed(B, [1, 2], 60.0)
    assert scores(index, [1, 2, 3], 119.9) == {A: 3, B: 2}
    assert scores(index, [1, 2, 3], 120.0) == {B: 2}
    assert scores(index, [1, 2, 3], 180.0) == {}
    assert len(index) == 0


def test_a_repeated_prompt_restarts_the_timer() -> None:
    index = ApproximateIndexer(ttl_s=10)
    index.routed(A, [1, 2, 3], 0.0)
    index.routed(A, [1, 2], 5.0)
    assert scores(index, [1, 2, 3], 12.0) == {A: 2}
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
        assert scores(index, requested, now) == expected
        assert len(index) == len(until)


def test_the_oldest_blocks_are_pruned_down_to_the_ratio() -> None:
    index = ApproximateIndexer(blocks=100)
    for first in range(0, 100, 10):
        index.routed(A if first % 20 else B, list(range(first, first + 10)), float(first))
    assert len(index) == 100
    index.routed(A, [500], 100.0)
    assert len(index) == 80
    # the third oldest loses blocks from its end
    assert scores(index, list(range(20, 30)), 100.0) == {B: 9}
    assert scores(index, list(range(10)), 100.0) == {}
    assert scores(index, [500], 100.0) == {A: 1}
    index.routed(C, list(range(1000, 2000)), 101.0)  # more than there is space for
    assert len(index) == 80


def test_the_end_of_a_prompt_that_was_pruned_is_not_found() -> None:
    index = ApproximateIndexer(blocks=100, ttl_s=10)
    prompt = list(range(1000, 1090))
    index.routed(A, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], 0.0)
    index.routed(A, prompt, 1.0)
    assert len(index) == 80
    assert scores(index, prompt, 1.0) == {A: 80}
    assert scores(index, prompt, 11.0) == {}
    index.routed(A, prompt[:80], 12.0)
    assert scores(index, prompt, 12.0) == {A: 80}  # the rest was sent before, and has expired


def test_a_removed_worker_is_dropped() -> None:
    index = ApproximateIndexer(workers=2)
    index.routed(A, [1, 2], 0.0)
    index.routed(B, [1], 0.0)
    with pytest.raises(EventError, match="exceeds the limit"):
        index.routed(C, [1], 0.0)
    index.remove_worker(1)
    assert (scores(index, [1, 2], 1.0), len(index)) == ({B: 1}, 1)
    index.routed(C, [1], 1.0)
    assert scores(index, [1, 2], 1.0) == {B: 1, C: 1}
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
