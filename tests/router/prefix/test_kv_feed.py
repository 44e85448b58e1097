# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The feed restores the order of a publisher's messages, and a ring keeps them for a replay."""

from __future__ import annotations

import random

import pytest

from beluga.errors import RouterError
from beluga.router import ReplayBuffer, Worker
from beluga.router.feeds import Feed, Replay

A = Worker(1)


@pytest.mark.parametrize("seed", range(5))
def test_replayed_and_live_items_are_in_order(seed: int) -> None:
    rng = random.Random(seed)
    feed: Feed[int] = Feed()
    out: list[int] = []
    kept: list[int] = []
    for number in range(300):
        kept.append(number)
        if rng.random() < 0.2:
            continue  # the message is lost
        ready = feed.offer(number, number, float(number))
        assert not ready.restarted
        out += ready.items
        if feed.wanted is not None and rng.random() < 0.3:
            for old in kept[feed.wanted :]:
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
    kept: ReplayBuffer[int] = ReplayBuffer(ring=4)
    assert [kept.add(number) for number in range(10)] == list(range(10))
    assert kept.replay(8) == Replay([8, 9], 0)
    assert kept.replay(3) == Replay([6, 7, 8, 9], 3)
    assert kept.replay(kept.next_number) == Replay([], 0)
    kept.skip()
    assert kept.add(11) == 11
    assert kept.replay(9) == Replay([11], 2)
    with pytest.raises(RouterError, match="at least one"):
        ReplayBuffer(ring=0)
