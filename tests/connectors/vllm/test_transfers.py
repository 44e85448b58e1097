# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The worker's side: which blocks are saved and loaded; the engine never waits for it."""

from __future__ import annotations

import _thread
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from fake_vllm import Tensor
from scene import LOGGER, LONG_S, NAMESPACE, Gate, Rank, blocks, digests, wait_for

from beluga import IndexServer, KVCache, Pool
from beluga.connectors.connection import Side
from beluga.connectors.vllm.counters import ConnectorCounters, figures
from beluga.connectors.vllm.layout import GroupLayout
from beluga.connectors.vllm.saves import BATCH_BLOCKS
from beluga.connectors.vllm.settings import VllmSettings
from beluga.connectors.vllm.steps import BlockRange, Loaded, Orders, StoredCounts
from beluga.connectors.vllm.worker import RankWorker
from beluga.errors import ConnectorError
from beluga.index import BlockState
from beluga.kvcache import PutResult

MakeRank = Callable[..., Rank]


@pytest.fixture
def side(server: IndexServer, make_rank: MakeRank) -> Rank:
    return make_rank()


def test_blocks_of_one_worker_are_loaded_by_another(side: Rank, make_rank: MakeRank) -> None:
    side.fill(1)
    ids = list(range(40))
    side.save("r", ids)
    other = make_rank()
    other.load(blocks("s", ids[::-1]))
    assert np.array_equal(side.memory[:, ids], other.memory[:, ids[::-1]])
    assert other.worker.loads.failed() == set()
    report = other.worker.report()
    assert report.loaded == {"s": Loaded(1, 40)}
    assert other.counters.take()["load_bytes"] == 40 * side.layout.block_size
    assert len(side.worker.report().stored) == 40


def test_present_blocks_are_not_written_again(side: Rank) -> None:
    before = figures()["save_blocks"]
    side.fill(1)
    side.save("r", [0, 1, 2])
    side.counters.take()
    assert figures()["save_blocks"] == before + 3  # of the process
    side.worker.report()
    side.fill(2)
    side.save("s", [0, 1, 2, 3])
    counted = side.counters.take()
    assert (counted["save_blocks"], counted["save_present_blocks"]) == (1, 3)
    stored = side.worker.report().stored
    assert stored[digests(0, 1)] == StoredCounts(1, 0)
    assert stored[digests(3, 1)] == StoredCounts(1, 1)


def test_a_miss_and_what_its_request_loads_after_it_are_reported_by_their_blocks(
    side: Rank,
) -> None:
    side.save("r", [0, 1, 2, 3])
    side.load(blocks("s", [10, 11, 12, 13], start=2))
    assert side.worker.loads.failed() == {12, 13}
    assert side.worker.loads.failed() == set()
    assert side.counters.take()["load_failed_blocks"] == 2
    side.worker.report()
    # ranges after a failed one are not read, although the pool has them
    behind = [blocks("s", [14, 15], start=2), blocks("t", [16], start=3)]
    side.load(blocks("s", [10, 11], start=8), *behind)
    assert side.worker.loads.failed() == {10, 11, 14, 15}
    assert side.worker.report().loaded == {"s": Loaded(1, 0), "t": Loaded(1, 1)}
    assert side.counters.take()["load_failed_blocks"] == 4


def test_a_damaged_block_is_a_miss_and_leaves_the_pool(
    side: Rank, pool: Pool, server: IndexServer
) -> None:
    side.fill(3)
    side.save("r", [0, 1, 2])
    needle = side.memory[0, 1].tobytes()[:64]
    for device in pool.devices:
        content = device.path.read_bytes()
        if (offset := content.find(needle)) >= 0:
            with device.path.open("r+b") as file:
                file.seek(offset)
                file.write(bytes([needle[0] ^ 1]))
    side.load(blocks("s", [10, 11, 12]))
    assert side.worker.loads.failed() == {11, 12}
    assert side.counters.take()["mismatches"] == 1
    with KVCache(pool, namespace=NAMESPACE) as cache:
        assert cache.lookup([bytes([i]) * 32 for i in range(3)]) == 1


def test_without_a_server_loads_fail_and_saves_are_skipped(make_rank: MakeRank) -> None:
    side = make_rank(attached=False, timeout_ms=300)
    side.load(blocks("s", [4, 5]))
    assert side.worker.loads.failed() == {4, 5}
    side.save("r", [0, 1])
    counted = side.counters.take()
    assert counted["save_skipped_blocks"] == 2
    assert (counted["load_failures"], counted["save_failures"]) == (1, 1)


@pytest.fixture
def gate(side: Rank) -> Iterator[Gate]:
    gate = Gate(side.layout)
    side.worker.saves._source = gate
    yield gate
    gate.go.set()


def test_the_engine_does_not_wait_for_saves_and_blocks_are_held_until_they_end(
    side: Rank, gate: Gate
) -> None:
    side.begin_save(blocks("r", [0, 1]))
    assert gate.reading.wait(LONG_S)
    assert side.worker.saves.ended({"r", "unknown"}) == set()
    gate.go.set()
    wait_for(lambda: side.worker.saves.ended(set()) == {"r"})
    assert side.worker.saves.ended({"r"}) == set()  # each end is reported once


def test_a_preemption_drops_queued_saves_and_waits_for_running_ones(side: Rank, gate: Gate) -> None:
    side.begin_save(blocks("r", [0]), blocks("s", [2], 9), blocks("r", [3], 50))
    assert gate.reading.wait(LONG_S)
    ended = threading.Event()

    def preempt() -> None:
        side.worker.preempt(Orders(preempted=["r"]))
        ended.set()

    thread = threading.Thread(target=preempt)
    thread.start()
    assert not ended.wait(0.2)
    gate.go.set()
    assert ended.wait(LONG_S)
    thread.join()
    side.saved("s")
    counted = side.counters.take()
    assert counted["save_blocks"] == 2
    assert counted["save_skipped_blocks"] == 1
    assert side.worker.saves.ended({"r"}) == {"r"}


def test_a_preemption_within_a_long_range_waits_for_one_batch_only(side: Rank, gate: Gate) -> None:
    side.begin_save(blocks("r", list(range(3 * BATCH_BLOCKS))))
    assert gate.reading.wait(LONG_S)
    thread = threading.Thread(target=side.worker.preempt, args=(Orders(preempted=["r"]),))
    thread.start()
    wait_for(lambda: side.worker.saves._cancelling)
    gate.go.set()
    thread.join()
    counted = side.counters.take()
    assert counted["save_blocks"] == BATCH_BLOCKS
    assert counted["save_skipped_blocks"] == 2 * BATCH_BLOCKS


def test_blocks_beyond_the_queue_are_skipped_until_saves_end_or_are_dropped(
    server: IndexServer, make_rank: MakeRank
) -> None:
    side = make_rank(save_queue=4)
    gate = Gate(side.layout)
    side.worker.saves._source = gate
    side.begin_save(blocks("r", [0]), blocks("s", [1, 2], 10), blocks("t", [3, 4], 20))
    assert side.counters.take()["save_skipped_blocks"] == 2
    assert side.worker.saves.ended({"t"}) == {"t"}
    assert gate.reading.wait(LONG_S)
    side.worker.preempt(Orders(preempted=["s"]))
    side.begin_save(blocks("u", [3, 4, 5], 20))
    gate.go.set()
    side.saved("u")
    side.save("v", [6, 7, 8], 30)
    assert side.counters.take()["save_blocks"] == 7


def test_loads_in_a_thread_complete_later(side: Rank, make_rank: MakeRank) -> None:
    side.fill(5)
    side.save("r", [0, 1, 2])
    other = make_rank(load="async")
    other.load(blocks("s", [7, 8, 9, 10]))
    wait_for(lambda: other.worker.loads.arrived() == {"s"})
    assert other.worker.loads.failed() == {10}
    assert np.array_equal(side.memory[:, [0, 1, 2]], other.memory[:, [7, 8, 9]])


def ordered(side: Rank, pool: Pool, name: str, ids: list[int], *, concurrent: bool) -> BlockRange:
    """Return an order with the places of the blocks, which another session has pinned."""
    order = blocks(name, ids)
    with KVCache(pool, namespace=NAMESPACE) as finder:
        order.records = finder.pin(list(order.packed())).records().tobytes()
    order.concurrent = concurrent
    return order


def test_a_short_load_does_not_wait_for_a_long_one(side: Rank, pool: Pool) -> None:
    side.fill(5)
    right = side.memory[:, [0, 1, 2]].copy()
    side.save("r", [0, 1, 2])
    slow = Gate(side.layout)
    loads = side.worker.loads
    loads.concurrent, loads._sides[slow] = slow, Side()
    long = ordered(side, pool, "long", [10, 11, 12], concurrent=True)
    short = ordered(side, pool, "short", [20, 21, 22], concurrent=False)
    side.load(long, short)
    assert (side.memory[:, [20, 21, 22]] == right).all()
    assert side.worker.loads.arrived() == set()
    assert side.worker.report().loaded == {"short": Loaded(1, 3)}
    slow.go.set()
    wait_for(lambda: side.worker.loads.arrived() == {"long"})
    assert (side.memory[:, [10, 11, 12]] == right).all()
    assert side.worker.report().loaded == {"long": Loaded(1, 3)}
    assert side.worker.loads.failed() == set()
    counted = side.counters.take()
    assert (counted["loads"], counted["loads_beside"]) == (2, 1)


@pytest.mark.parametrize("concurrent", [False, True])
def test_blocks_evicted_during_a_load_fail_and_the_others_are_loaded(
    side: Rank, pool: Pool, server: IndexServer, concurrent: bool
) -> None:
    side.fill(6)
    side.save("r", [0, 1, 2, 3])
    order = ordered(side, pool, "s", [10, 11, 12, 13], concurrent=concurrent)
    with KVCache(pool, namespace=NAMESPACE) as other:
        other.remove([bytes([2]) * 32])
    side.load(order)
    loaded: dict[str, Loaded] = {}
    wait_for(lambda: (loaded.update(side.worker.report().loaded), loaded)[1])
    assert loaded == {"s": Loaded(1, 2)}
    assert side.worker.loads.failed() == {12, 13}
    assert np.array_equal(side.memory[:, [0, 1]], side.memory[:, [10, 11]])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"load": "lazy"}, "auto, sync, async"),
        ({"save_queue": 0}, "greater than 0"),
        ({"onboard_ms": -1}, "onboard_ms"),
    ],
    ids=str,
)
def test_settings_are_checked(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConnectorError, match=message):
        VllmSettings(**given)


def test_saves_of_preempted_requests_only_are_dropped(side: Rank, gate: Gate) -> None:
    ranges = [blocks("r", [0]), blocks("s", [1, 2], 9), blocks("t", [3], 50), blocks("u", [4], 60)]
    side.begin_save(*ranges)
    assert gate.reading.wait(LONG_S)
    side.worker.preempt(Orders(preempted=["s", "u"]))  # neither is being read, so there is no wait
    assert side.worker.saves.ended({"s", "u"}) == {"s", "u"}
    gate.go.set()
    side.saved("r")
    side.saved("t")
    counted = side.counters.take()
    assert (counted["save_blocks"], counted["save_skipped_blocks"]) == (2, 3)
    assert set(side.worker.report().stored) == {digests(0, 1), digests(50, 1)}


def test_blocks_without_room_in_the_pool_are_counted_as_skipped(
    server: IndexServer, pool_name: str, side: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    attachment: Any = side.worker.connection._attachment
    cache = attachment.cache(NAMESPACE, side.worker.saves._side)
    states = np.array([BlockState.GRANTED, BlockState.REFUSED, BlockState.PENDING], dtype=np.uint8)
    statuses = np.zeros(3, dtype=np.int32)
    monkeypatch.setattr(cache, "put", lambda *_, **__: PutResult(states, statuses))
    side.save("r", [0, 1, 2])
    counted = side.counters.take()
    assert (counted["save_blocks"], counted["save_skipped_blocks"]) == (1, 2)
    assert side.worker.report().stored == {digests(0, 1): StoredCounts(1, 1)}


def test_closing_a_worker_ends_its_threads_and_sessions(side: Rank) -> None:
    before = _thread._count()
    side.fill(1)
    side.save("r", [0, 1])
    side.worker.close()
    assert _thread._count() < before
    assert not side.worker.connection.attached


@pytest.fixture
def hybrid(server: IndexServer, pool_name: str) -> Iterator[Hybrid]:
    hybrid = Hybrid(pool_name)
    yield hybrid
    hybrid.worker.close()


class Hybrid(Rank):
    """A worker with two groups over the same memory: pages, and states that fill half of one."""

    def __init__(self, pool_name: str) -> None:
        self.memory = np.zeros((64, 32), dtype=np.uint16)
        full, state = (
            GroupLayout({"layer": Tensor(view)}, block_count=64, page_sizes={})
            for view in (self.memory, self.memory[:, :16])
        )
        settings = VllmSettings(pool=pool_name, timeout_ms=500, retry_s=0.05, load="async")
        self.counters = ConnectorCounters()
        state.states = True
        self.worker = RankWorker(
            settings, full, NAMESPACE, self.counters, LOGGER, more=[state], whole=True
        )
        self.worker.settle()

    def arrived(self, name: str) -> set[str]:
        """Wait for a load. Returns the requests whose load has failed."""
        wait_for(lambda: name in self.worker.loads.loaded())
        arrived: set[str] = set()
        wait_for(lambda: name in (arrived.update(self.worker.loads.arrived()) or arrived))
        return self.worker.loads.failed_whole(arrived)


def part(group: int, ids: list[int], ticket: int = 0) -> BlockRange:
    digests = b"".join(bytes([100 * group + block]) * 32 for block in ids)
    return BlockRange("r", digests, ids, group=group, ticket=ticket)


def test_each_group_copies_its_own_bytes(hybrid: Hybrid) -> None:
    hybrid.memory[:] = 7
    hybrid.begin_save(part(0, [1, 2], 5), part(1, [3], 6))
    ended: Counter[int] = Counter()
    wait_for(lambda: (ended.update(hybrid.worker.report().ended), len(ended) == 2)[1])
    assert ended == {5: 1, 6: 1}
    counted = hybrid.counters.take()
    assert (counted["save_blocks"], counted["save_bytes"]) == (3, 2 * 64 + 32)
    assert (counted["save_states"], counted["save_state_bytes"]) == (1, 32)
    hybrid.memory[:] = 0
    hybrid.load(part(0, [1, 2]), part(1, [3]))
    assert hybrid.arrived("r") == set()
    assert (hybrid.memory[[1, 2]] == 7).all()
    assert (hybrid.memory[3, :16] == 7).all()
    assert not hybrid.memory[3, 16:].any()
    assert not hybrid.memory[[0, 4]].any()


def test_a_load_fails_if_a_block_of_one_group_is_missing(hybrid: Hybrid) -> None:
    hybrid.begin_save(part(0, [1, 2]), part(1, [3]))
    wait_for(lambda: hybrid.worker.saves.ended({"r"}) == {"r"})
    for loads in ([part(0, [1, 2]), part(1, [3, 4])], [part(0, [1, 9]), part(1, [3])]):
        hybrid.load(*loads)
        assert hybrid.arrived("r") == {"r"}
    # an id does not show to which request a block belongs
    assert hybrid.worker.loads.failed() == set()
    hybrid.load(part(0, []))
    assert hybrid.arrived("r") == {"r"}


def test_skipped_and_canceled_saves_return_their_tickets(
    hybrid: Hybrid,
) -> None:
    gate = Gate(*hybrid.worker.saves._source.layouts)
    hybrid.worker.saves._source = gate
    hybrid.begin_save(part(0, [1], 1), part(0, [2], 2))
    assert gate.reading.wait(LONG_S)
    hybrid.worker.saves._room = 0
    hybrid.begin_save(part(0, [3], 3))
    assert hybrid.worker.saves.tickets() == {3: 1}
    ended = threading.Thread(target=hybrid.worker.saves.cancel, args=[["r"]])
    ended.start()
    gate.go.set()
    ended.join()
    assert hybrid.worker.saves.tickets() == {1: 1, 2: 1}
