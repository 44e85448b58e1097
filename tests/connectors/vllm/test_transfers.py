# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The worker's side: which blocks are saved and loaded; the engine never waits for it."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from vllm_parts import Tensor, layer_major

from beluga import IndexServer, KVCache, Namespace, Pool
from beluga.connectors.vllm.counters import ConnectorCounters, figures
from beluga.connectors.vllm.layout import GroupLayout
from beluga.connectors.vllm.parts import BlockPart
from beluga.connectors.vllm.saves import BATCH_BLOCKS
from beluga.connectors.vllm.settings import VllmSettings
from beluga.connectors.vllm.staging import BlockSource
from beluga.connectors.vllm.steps import BlockRange, Loaded, Orders, StoredCounts
from beluga.connectors.vllm.worker import RankWorker
from beluga.errors import ConnectorError
from beluga.index import BlockState
from beluga.kvcache import PutResult

BLOCKS = 64
NAMESPACE = Namespace.of("transfers")
LONG_S = 60.0


class Side:
    """A worker over two layers of 64 blocks with 2 KiB per block."""

    def __init__(self, pool_name: str, *, part: BlockPart | None = None, **changes: Any) -> None:
        tensors, self.memory = layer_major(2, BLOCKS, 512)
        self.layout = GroupLayout(tensors, block_count=BLOCKS, page_sizes={})
        self.counters = ConnectorCounters()
        settings = VllmSettings(pool=pool_name, timeout_ms=300, retry_s=0.05, **changes)
        self.worker = RankWorker(
            settings, self.layout, NAMESPACE, self.counters, logging.getLogger("test"), part=part
        )

    def fill(self, seed: int) -> None:
        self.memory[...] = np.random.default_rng(seed).integers(
            0, 1 << 16, self.memory.shape, dtype=np.uint16
        )

    def attached(self) -> None:
        assert self.worker.load_connection.wait(LONG_S)
        assert self.worker.save_connection.wait(LONG_S)

    def saved(self, name: str) -> None:
        """Wait until a request's saves have ended."""
        wait_until(lambda: name in self.worker.saves.ended({name}))


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def digests(start: int, count: int) -> bytes:
    return b"".join(bytes([i]) * 32 for i in range(start, start + count))


def blocks(name: str, ids: list[int], start: int = 0) -> BlockRange:
    return BlockRange(name, digests(start, len(ids)), ids)


@pytest.fixture
def side(server: IndexServer, pool_name: str) -> Iterator[Side]:
    side = Side(pool_name)
    side.attached()
    yield side
    side.worker.close()


def test_blocks_of_one_worker_are_loaded_by_another(
    side: Side, server: IndexServer, pool_name: str
) -> None:
    side.fill(1)
    ids = list(range(40))
    side.worker.save(Orders(saves=[blocks("r", ids)]))
    side.saved("r")
    other = Side(pool_name)
    other.attached()
    other.worker.load(Orders(loads=[blocks("s", ids[::-1])]))
    assert np.array_equal(side.memory[:, ids], other.memory[:, ids[::-1]])
    assert other.worker.loads.failed() == set()
    report = other.worker.report()
    assert report.loaded == {"s": Loaded(1, 40)}
    assert other.counters.take()["load_bytes"] == 40 * side.layout.block_size
    assert len(side.worker.report().stored) == 40
    other.worker.close()


def test_present_blocks_are_not_written_again(side: Side) -> None:
    side.fill(1)
    side.worker.save(Orders(saves=[blocks("r", [0, 1, 2])]))
    side.saved("r")
    side.counters.take()
    side.worker.report()
    side.fill(2)
    side.worker.save(Orders(saves=[blocks("s", [0, 1, 2, 3])]))
    side.saved("s")
    counted = side.counters.take()
    assert (counted["save_blocks"], counted["save_present_blocks"]) == (1, 3)
    stored = side.worker.report().stored
    assert stored[digests(0, 1)] == StoredCounts(1, 0)
    assert stored[digests(3, 1)] == StoredCounts(1, 1)


def test_a_miss_is_reported_by_its_blocks(side: Side) -> None:
    side.worker.save(Orders(saves=[blocks("r", [0, 1])]))
    side.saved("r")
    side.worker.load(Orders(loads=[blocks("s", [10, 11, 12, 13])]))
    assert side.worker.loads.failed() == {12, 13}
    assert side.worker.loads.failed() == set()
    assert side.counters.take()["load_failed_blocks"] == 2


def test_ranges_after_a_failed_one_of_their_request_are_reported(side: Side) -> None:
    """They are not read, although the pool has them: the engine computes on the failed ones."""
    side.worker.save(Orders(saves=[blocks("r", [0, 1, 2, 3])]))
    side.saved("r")
    behind = [blocks("s", [14, 15], start=2), blocks("t", [16], start=3)]
    side.worker.load(Orders(loads=[blocks("s", [10, 11], start=8), *behind]))
    assert side.worker.loads.failed() == {10, 11, 14, 15}
    assert side.worker.report().loaded == {"s": Loaded(1, 0), "t": Loaded(1, 1)}
    assert side.counters.take()["load_failed_blocks"] == 4


def test_a_damaged_block_is_a_miss_and_leaves_the_pool(
    side: Side, pool: Pool, server: IndexServer
) -> None:
    side.fill(3)
    side.worker.save(Orders(saves=[blocks("r", [0, 1, 2])]))
    side.saved("r")
    needle = side.memory[0, 1].tobytes()[:64]
    for device in pool.devices:
        content = device.path.read_bytes()
        if (offset := content.find(needle)) >= 0:
            with device.path.open("r+b") as file:
                file.seek(offset)
                file.write(bytes([needle[0] ^ 1]))
    side.worker.load(Orders(loads=[blocks("s", [10, 11, 12])]))
    assert side.worker.loads.failed() == {11, 12}
    assert side.counters.take()["mismatches"] == 1
    with KVCache(pool, namespace=NAMESPACE) as cache:
        assert cache.lookup([bytes([i]) * 32 for i in range(3)]) == 1


def test_without_a_server_loads_fail_and_saves_are_skipped(pool_name: str) -> None:
    side = Side(pool_name)
    side.worker.load(Orders(loads=[blocks("s", [4, 5])]))
    assert side.worker.loads.failed() == {4, 5}
    side.worker.save(Orders(saves=[blocks("r", [0, 1])]))
    side.saved("r")
    counted = side.counters.take()
    assert counted["save_skipped_blocks"] == 2
    assert (counted["load_failures"], counted["save_failures"]) == (1, 1)
    side.worker.close()


class Gate(BlockSource):
    """A source that blocks reads until it is opened."""

    def __init__(self, *layouts: GroupLayout) -> None:
        super().__init__(*layouts)
        self.reading, self.go = threading.Event(), threading.Event()

    def read(self, block_ids: Any, group: int = 0) -> Any:
        self.reading.set()
        assert self.go.wait(LONG_S)
        return super().read(block_ids, group)


@pytest.fixture
def gate(side: Side) -> Iterator[Gate]:
    gate = Gate(side.layout)
    side.worker.saves._source = gate
    yield gate
    gate.go.set()


def test_the_engine_does_not_wait_for_saves_and_blocks_are_held_until_they_end(
    side: Side, gate: Gate
) -> None:
    side.worker.save(Orders(saves=[blocks("r", [0, 1])]))
    assert gate.reading.wait(LONG_S)
    assert side.worker.saves.ended({"r", "unknown"}) == set()
    gate.go.set()
    wait_until(lambda: side.worker.saves.ended(set()) == {"r"})
    assert side.worker.saves.ended({"r"}) == set()  # each end is reported once


def test_a_preemption_drops_queued_saves_and_waits_for_running_ones(side: Side, gate: Gate) -> None:
    side.worker.save(Orders(saves=[blocks("r", [0]), blocks("s", [2], 9), blocks("r", [3], 50)]))
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


def test_a_preemption_within_a_long_range_waits_for_one_batch_only(side: Side, gate: Gate) -> None:
    side.worker.save(Orders(saves=[blocks("r", list(range(3 * BATCH_BLOCKS)))]))
    assert gate.reading.wait(LONG_S)
    thread = threading.Thread(target=side.worker.preempt, args=(Orders(preempted=["r"]),))
    thread.start()
    wait_until(lambda: "r" in side.worker.saves._cancelled)
    gate.go.set()
    thread.join()
    counted = side.counters.take()
    assert counted["save_blocks"] == BATCH_BLOCKS
    assert counted["save_skipped_blocks"] == 2 * BATCH_BLOCKS


def test_blocks_beyond_the_queue_are_skipped(server: IndexServer, pool_name: str) -> None:
    side = Side(pool_name, save_queue=4)
    side.attached()
    gate = Gate(side.layout)
    side.worker.saves._source = gate
    side.worker.save(Orders(saves=[blocks("r", [0, 1, 2]), blocks("s", [3, 4], 10)]))
    assert side.counters.take()["save_skipped_blocks"] == 2
    assert side.worker.saves.ended({"s"}) == {"s"}
    gate.go.set()
    side.saved("r")
    side.worker.save(Orders(saves=[blocks("t", [3, 4], 10)]))
    side.saved("t")
    assert side.counters.take()["save_blocks"] == 5
    side.worker.close()


def test_loads_in_a_thread_complete_later(side: Side, server: IndexServer, pool_name: str) -> None:
    side.fill(5)
    side.worker.save(Orders(saves=[blocks("r", [0, 1, 2])]))
    side.saved("r")
    other = Side(pool_name, load="async")
    other.attached()
    other.worker.load(Orders(loads=[blocks("s", [7, 8, 9, 10])]))
    wait_until(lambda: other.worker.loads.arrived() == {"s"})
    assert other.worker.loads.failed() == {10}
    assert np.array_equal(side.memory[:, [0, 1, 2]], other.memory[:, [7, 8, 9]])
    other.worker.close()


def ordered(side: Side, pool: Pool, name: str, ids: list[int], *, concurrent: bool) -> BlockRange:
    """Return an order with the places of the blocks, which another session has pinned."""
    order = blocks(name, ids)
    with KVCache(pool, namespace=NAMESPACE) as finder:
        order.records = finder.pin(list(order.packed())).records().tobytes()
    order.concurrent = concurrent
    return order


class SlowSource(BlockSource):
    """A source whose loads wait until they are released."""

    def __init__(self, *layouts: GroupLayout) -> None:
        super().__init__(*layouts)
        self.go = threading.Event()

    def write(self, block_ids: Any, group: int = 0) -> Any:
        assert self.go.wait(LONG_S)
        return super().write(block_ids, group)


def test_a_short_load_does_not_wait_for_a_long_one(side: Side, pool: Pool) -> None:
    side.fill(5)
    right = side.memory[:, [0, 1, 2]].copy()
    side.worker.save(Orders(saves=[blocks("r", [0, 1, 2])]))
    side.saved("r")
    slow = SlowSource(side.layout)
    side.worker.loads.sides[1]._source = slow
    long = ordered(side, pool, "long", [10, 11, 12], concurrent=True)
    short = ordered(side, pool, "short", [20, 21, 22], concurrent=False)
    side.worker.load(Orders(loads=[long, short]))
    assert (side.memory[:, [20, 21, 22]] == right).all()
    assert side.worker.loads.arrived() == set()
    assert side.worker.report().loaded == {"short": Loaded(1, 3)}
    slow.go.set()
    wait_until(lambda: side.worker.loads.arrived() == {"long"})
    assert (side.memory[:, [10, 11, 12]] == right).all()
    assert side.worker.report().loaded == {"long": Loaded(1, 3)}
    assert side.worker.loads.failed() == set()
    counted = side.counters.take()
    assert (counted["loads"], counted["loads_beside"]) == (2, 1)


@pytest.mark.parametrize("concurrent", [False, True])
def test_blocks_evicted_during_a_load_fail_and_the_others_are_loaded(
    side: Side, pool: Pool, server: IndexServer, concurrent: bool
) -> None:
    side.fill(6)
    side.worker.save(Orders(saves=[blocks("r", [0, 1, 2, 3])]))
    side.saved("r")
    order = ordered(side, pool, "s", [10, 11, 12, 13], concurrent=concurrent)
    with KVCache(pool, namespace=NAMESPACE) as other:
        other.remove([bytes([2]) * 32])
    side.worker.load(Orders(loads=[order]))
    loaded: dict[str, Loaded] = {}
    wait_until(lambda: (loaded.update(side.worker.report().loaded), loaded)[1])
    assert loaded == {"s": Loaded(1, 2)}
    assert side.worker.loads.failed() == {12, 13}
    assert np.array_equal(side.memory[:, [0, 1]], side.memory[:, [10, 11]])


def test_blocks_of_another_namespace_are_misses(
    side: Side, server: IndexServer, pool: Pool
) -> None:
    side.worker.save(Orders(saves=[blocks("r", [0, 1])]))
    side.saved("r")
    with KVCache(pool, namespace="another") as cache:
        assert cache.lookup([bytes([0]) * 32]) == 0


def test_figures_are_sums_of_the_process(side: Side) -> None:
    before = figures()["save_blocks"]
    side.worker.save(Orders(saves=[blocks("r", [0, 1])]))
    side.saved("r")
    side.counters.take()
    assert figures()["save_blocks"] == before + 2


@pytest.mark.parametrize(
    ("given", "message"),
    [({"load": "lazy"}, "auto, sync, async"), ({"save_queue": 0}, "greater than 0")],
)
def test_settings_are_checked(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConnectorError, match=message):
        VllmSettings(**given)


def test_saves_of_preempted_requests_only_are_dropped(side: Side, gate: Gate) -> None:
    ranges = [blocks("r", [0]), blocks("s", [1, 2], 9), blocks("t", [3], 50), blocks("u", [4], 60)]
    side.worker.save(Orders(saves=ranges))
    assert gate.reading.wait(LONG_S)
    side.worker.preempt(Orders(preempted=["s", "u"]))  # neither is being read, so there is no wait
    assert side.worker.saves.ended({"s", "u"}) == {"s", "u"}
    gate.go.set()
    side.saved("r")
    side.saved("t")
    counted = side.counters.take()
    assert (counted["save_blocks"], counted["save_skipped_blocks"]) == (2, 3)
    assert set(side.worker.report().stored) == {digests(0, 1), digests(50, 1)}


def test_dropped_saves_free_their_space_in_the_queue(server: IndexServer, pool_name: str) -> None:
    side = Side(pool_name, save_queue=3)
    side.attached()
    gate = Gate(side.layout)
    side.worker.saves._source = gate
    side.worker.save(Orders(saves=[blocks("r", [0]), blocks("s", [1, 2], 10)]))
    assert gate.reading.wait(LONG_S)
    side.worker.preempt(Orders(preempted=["s"]))
    side.worker.save(Orders(saves=[blocks("t", [3, 4], 20)]))
    gate.go.set()
    side.saved("t")
    assert side.counters.take()["save_blocks"] == 3
    side.worker.close()


def test_blocks_without_room_in_the_pool_are_counted_as_skipped(
    server: IndexServer, pool_name: str, side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = side.worker.save_connection._attachment.cache(NAMESPACE)  # type: ignore[union-attr]
    states = np.array([BlockState.GRANTED, BlockState.REFUSED, BlockState.PENDING], dtype=np.uint8)
    statuses = np.zeros(3, dtype=np.int32)
    monkeypatch.setattr(cache, "put", lambda *_, **__: PutResult(states, statuses))
    side.worker.save(Orders(saves=[blocks("r", [0, 1, 2])]))
    side.saved("r")
    counted = side.counters.take()
    assert (counted["save_blocks"], counted["save_skipped_blocks"]) == (1, 2)
    assert side.worker.report().stored == {digests(0, 1): StoredCounts(1, 1)}


def test_closing_a_worker_ends_its_threads_and_sessions(side: Side) -> None:
    own = {"beluga-saves", "beluga-loads"}
    assert own <= {thread.name for thread in threading.enumerate()}
    side.worker.close()
    assert not own & {thread.name for thread in threading.enumerate()}
    assert not side.worker.load_connection.attached
    assert not side.worker.save_connection.attached


@pytest.fixture
def hybrid(server: IndexServer, pool_name: str) -> Iterator[Hybrid]:
    hybrid = Hybrid(pool_name)
    yield hybrid
    hybrid.worker.close()


class Hybrid:
    """A worker with two groups over the same memory: pages, and states that fill half of one."""

    def __init__(self, pool_name: str) -> None:
        self.memory = np.zeros((BLOCKS, 32), dtype=np.uint16)
        full, state = (
            GroupLayout({"layer": Tensor(view)}, block_count=BLOCKS, page_sizes={})
            for view in (self.memory, self.memory[:, :16])
        )
        settings = VllmSettings(pool=pool_name, timeout_ms=500, retry_s=0.05, load="async")
        logger, self.counters = logging.getLogger("test"), ConnectorCounters()
        state.states = True
        self.worker = RankWorker(
            settings, full, NAMESPACE, self.counters, logger, more=[state], whole=True
        )
        self.worker.settle()

    def arrived(self, name: str) -> set[str]:
        """Wait for a load. Returns the requests whose load has failed."""
        wait_until(lambda: name in self.worker.loads.loaded())
        arrived: set[str] = set()

        def came() -> bool:
            arrived.update(self.worker.loads.arrived())
            return name in arrived

        wait_until(came)
        return self.worker.loads.failed_whole(arrived)


def part(group: int, ids: list[int], ticket: int = 0) -> BlockRange:
    digests = b"".join(bytes([100 * group + block]) * 32 for block in ids)
    return BlockRange("r", digests, ids, group=group, ticket=ticket)


def test_each_group_copies_its_own_bytes(hybrid: Hybrid) -> None:
    hybrid.memory[:] = 7
    hybrid.worker.save(Orders(saves=[part(0, [1, 2], 5), part(1, [3], 6)]))
    ended: Counter[int] = Counter()
    wait_until(lambda: (ended.update(hybrid.worker.report().ended), len(ended) == 2)[1])
    assert ended == {5: 1, 6: 1}
    counted = hybrid.counters.take()
    assert (counted["save_blocks"], counted["save_bytes"]) == (3, 2 * 64 + 32)
    assert (counted["save_states"], counted["save_state_bytes"]) == (1, 32)
    hybrid.memory[:] = 0
    hybrid.worker.load(Orders(loads=[part(0, [1, 2]), part(1, [3])]))
    assert hybrid.arrived("r") == set()
    assert (hybrid.memory[[1, 2]] == 7).all()
    assert (hybrid.memory[3, :16] == 7).all()
    assert not hybrid.memory[3, 16:].any()
    assert not hybrid.memory[[0, 4]].any()


def test_a_load_fails_if_a_block_of_one_group_is_missing(hybrid: Hybrid) -> None:
    hybrid.worker.save(Orders(saves=[part(0, [1, 2]), part(1, [3])]))
    wait_until(lambda: hybrid.worker.saves.ended({"r"}) == {"r"})
    for loads in ([part(0, [1, 2]), part(1, [3, 4])], [part(0, [1, 9]), part(1, [3])]):
        hybrid.worker.load(Orders(loads=loads))
        assert hybrid.arrived("r") == {"r"}
    # an id does not show to which request a block belongs
    assert hybrid.worker.loads.failed() == set()
    hybrid.worker.load(Orders(loads=[part(0, [])]))
    assert hybrid.arrived("r") == {"r"}


def test_skipped_and_canceled_saves_return_their_tickets(
    hybrid: Hybrid,
) -> None:
    gate = Gate(*hybrid.worker.saves._source.layouts)
    hybrid.worker.saves._source = gate
    hybrid.worker.save(Orders(saves=[part(0, [1], 1), part(0, [2], 2)]))
    assert gate.reading.wait(LONG_S)
    hybrid.worker.saves._room = 0
    hybrid.worker.save(Orders(saves=[part(0, [3], 3)]))
    assert hybrid.worker.saves.tickets() == {3: 1}
    ended = threading.Thread(target=hybrid.worker.saves.cancel, args=[["r"]])
    ended.start()
    gate.go.set()
    ended.join()
    assert hybrid.worker.saves.tickets() == {1: 1, 2: 1}
