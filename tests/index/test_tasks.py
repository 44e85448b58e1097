# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Tasks that clients claim, and the work of lower tiers that the server hands to their service. The
test is the service.
"""

import ctypes
import os
import struct
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from models.structures import Tasks
from native._sim import ffi as sim_ffi
from native._sim import lib as sim_lib
from numpy.typing import NDArray
from support import role, roles
from support.blocks import eventually
from support.forge import LINE, read, write
from support.role import Process

from beluga import Client, IndexServer, Pool
from beluga._ffi import ffi, lib
from beluga.errors import BadRequestError, BadValueError, NoGrantError, QueueFullError
from beluga.index import (
    LOWER_NOTE,
    BlockState,
    Grant,
    IndexClient,
    LowerWork,
    Removal,
    TaskClient,
    Work,
)
from beluga.kvcache import KVCache, hash_keys

CAPACITY, QUEUES, LANES = 6, 3, 3
LONG_S = 500.0
TASK_SIZE = 4096


def create(count: int) -> Any:
    out = sim_ffi.new("bl_tasks **")
    assert sim_lib.bl_tasks_create(out, count) == 0
    return sim_ffi.gc(out[0], sim_lib.bl_tasks_destroy)


STEP = st.tuples(
    st.sampled_from(["add", "add", "remove", "claim", "claim", "extend", "gone", "count"]),
    st.integers(0, CAPACITY - 1),  # a task, or the rank of a generation
    st.integers(0, QUEUES - 1),
    st.integers(0, LANES - 1),
    st.integers(0, 4),  # elapsed time
    st.integers(0, 6),  # duration of a claim
)


@given(st.lists(STEP, max_size=60))
def test_tasks_agree_with_a_sorted_dictionary(steps: list[Any]) -> None:
    tasks, model, now, made = create(CAPACITY), Tasks(), 1, 0
    for name, which, queue, lane, passing, holding in steps:
        now += passing
        live = sorted(model.tasks)
        for slot in live:
            assert sim_lib.bl_tasks_waits(tasks, slot, now) == model.waits(slot, now)
        if name == "add":
            slot = sim_lib.bl_tasks_take(tasks, which)
            assert (slot < 0) == (len(live) == CAPACITY)
            if slot >= 0:
                made += 1
                # some clients commit later than others
                generation = 100 + 10 * made - 25 * (which == 0)
                assert sim_lib.bl_tasks_add(tasks, slot, queue, generation, now) == 0
                model.add(slot, queue, generation, now)
                assert sim_lib.bl_tasks_block(tasks, slot) == which
        elif name == "claim":
            slot = sim_lib.bl_tasks_claim(tasks, queue, lane, now, now + holding)
            assert slot == model.claim(queue, lane, now, now + holding)
            if slot >= 0:
                deliveries = sim_lib.bl_tasks_deliveries(tasks, slot)
                assert deliveries == model.tasks[slot].deliveries
        elif name == "gone":
            sim_lib.bl_tasks_lane_gone(tasks, lane)
            model.lane_gone(lane)
        elif name == "count":
            waiting, claimed = sim_ffi.new("uint32_t *"), sim_ffi.new("uint32_t *")
            sim_lib.bl_tasks_count(tasks, queue, now, waiting, claimed)
            assert (waiting[0], claimed[0]) == model.count(queue, now)
        elif live and name == "remove":
            sim_lib.bl_tasks_remove(tasks, live[which % len(live)])
            model.remove(live[which % len(live)])
        elif live:
            slot = live[which % len(live)]
            extended = sim_lib.bl_tasks_extend(tasks, slot, lane, now, now + holding) == 0
            assert extended == model.extend(slot, lane, now, now + holding)


def test_too_many_queues_are_rejected_and_existing_tasks_are_found() -> None:
    tasks = create(100)
    for queue in range(65):
        slot = sim_lib.bl_tasks_take(tasks, queue)
        added = sim_lib.bl_tasks_add(tasks, slot, 1000 + queue, queue, 10 + queue)
        assert (added == 0) == (queue < 64)
    assert sim_lib.bl_tasks_older(tasks, 10) == -1
    assert sim_lib.bl_tasks_older(tasks, 11) == 0
    sim_lib.bl_tasks_remove(tasks, 0)
    assert sim_lib.bl_tasks_older(tasks, 11) == -1


class Queue:
    """A queue of tasks with its own session."""

    def __init__(self, pool: Pool) -> None:
        self.client = Client(pool)
        self.cache = KVCache(self.client, namespace="tasks", kept=True, chunk_size=2 << 20)
        self.tasks = TaskClient(self.client)

    def key(self, name: str) -> Any:
        return self.cache.keys(hash_keys([name]))

    def put(self, name: str, size: int = TASK_SIZE) -> None:
        payload = np.full(size, len(name), np.uint8)
        self.cache.put(self.key(name), [payload]).raise_for_refused()

    def claim(self, visible_s: float = LONG_S) -> Any:
        return self.tasks.claim(self.cache.fingerprint, visible_s=visible_s)

    def named(self, visible_s: float = LONG_S, names: str = "abcdef") -> str:
        """Return the name of the task that is claimed."""
        record = self.claim(visible_s)
        return next((name for name in names if record and (self.key(name) == record.key).all()), "")

    def count(self) -> tuple[int, int]:
        return self.tasks.count(self.cache.fingerprint)


@pytest.fixture
def queues(pool: Pool, server: IndexServer) -> Iterator[tuple[Queue, Queue]]:
    with ExitStack() as stack:
        made = Queue(pool), Queue(pool)
        for queue in made:
            stack.callback(queue.client.close)
        yield made


def test_each_task_is_delivered_to_one_worker_in_order(queues: tuple[Queue, Queue]) -> None:
    first, second = queues
    for name in "abc":
        first.put(name)
    assert first.count() == (3, 0)
    assert [first.named(), second.named(), first.named(), second.named()] == ["a", "b", "c", ""]
    assert second.count() == (0, 3)
    assert first.cache.remove(first.key("b")) == 1
    assert first.count() == (0, 2)


def test_only_the_claiming_session_can_complete_a_task(queues: tuple[Queue, Queue]) -> None:
    first, second = queues
    first.put("a")
    record = first.claim()
    assert not second.tasks.extend(record, visible_s=LONG_S)
    assert first.tasks.extend(record, visible_s=LONG_S)
    first.client.close()
    assert eventually(lambda: second.named() == "a")


def test_an_old_claim_does_not_apply_to_a_reused_block(
    queues: tuple[Queue, Queue],
) -> None:
    queue, _ = queues
    queue.put("a")
    old = queue.claim()
    queue.cache.remove(queue.key("a"))
    for number in range(10000):  # numbers are not reused at once
        queue.put(f"b{number}")
        new = queue.claim()
        if new.block == old.block:
            break
        queue.cache.remove(queue.key(f"b{number}"))
    assert new.block == old.block
    assert not queue.tasks.extend(old, visible_s=LONG_S)
    assert queue.tasks.extend(new, visible_s=LONG_S)


def test_a_claim_expires(queues: tuple[Queue, Queue]) -> None:
    first, second = queues
    first.put("a")
    record = first.claim(visible_s=0.05)
    assert eventually(lambda: second.named() == "a")
    assert not first.tasks.extend(record, visible_s=LONG_S)


def test_tasks_are_not_evicted(pool: Pool, queues: tuple[Queue, Queue]) -> None:
    queue, _ = queues
    for name in "abc":
        queue.put(name)
    with KVCache(pool, namespace="blocks") as blocks:
        payload = np.zeros((8, 256 << 10), np.uint8)
        # twice the pool's capacity, and more blocks than its table has lines
        for batch in range(60):
            names = [f"{batch} {i}" for i in range(8)]
            blocks.put(blocks.keys(hash_keys(names)), payload)
            assert queue.cache.lookup(queue.key("b")) == 1  # lookups do not affect it, either
        assert blocks.stat().evict_count > 0
    assert [queue.named() for _ in "abc"] == ["a", "b", "c"]


def test_tasks_survive_server_restarts(pool: Pool, paths: list[Path]) -> None:
    server = Process(roles.serve_index, paths)
    queue = Queue(pool)
    for name in "abc":
        queue.put(name)
    assert queue.named() == "a"
    for _ in range(3):
        server.kill()
        server = Process(roles.serve_index, paths)
    assert queue.count() == (3, 0)  # the first server had the claim
    with KVCache(pool, namespace="blocks") as blocks:
        payload = np.zeros((8, 256 << 10), np.uint8)
        for batch in range(60):
            blocks.put(blocks.keys(hash_keys([f"{batch} {i}" for i in range(8)])), payload)
    assert [queue.named() for _ in "abc"] == ["a", "b", "c"]
    queue.client.close()
    server.kill()


def test_a_task_is_withdrawn_until_a_worker_claims_it(queues: tuple[Queue, Queue]) -> None:
    sender, worker = queues
    for name in "ab":
        sender.put(name)
    assert not sender.tasks.withdraw(sender.key("c"))
    assert sender.tasks.withdraw(sender.key("a"))
    assert not sender.tasks.withdraw(sender.key("a"))
    assert sender.count() == (1, 0)
    claim = worker.claim()
    assert (sender.key("b") == claim.key).all()
    assert not sender.tasks.withdraw(sender.key("b"))
    assert worker.tasks.extend(claim, visible_s=0)
    assert sender.tasks.withdraw(sender.key("b"))
    assert worker.claim() is None


def test_a_block_that_is_not_a_task_is_not_withdrawn(
    pool: Pool, queues: tuple[Queue, Queue]
) -> None:
    queue, _ = queues
    with KVCache(pool, namespace="blocks") as blocks:
        key = blocks.keys(hash_keys(["block"]))
        assert blocks.put(key, [np.zeros(TASK_SIZE, np.uint8)]).stored == 1
        granted = IndexClient(blocks.client).reserve(blocks.keys(hash_keys(["begun"])), length=4096)
        assert not queue.tasks.withdraw(key)
        assert not queue.tasks.withdraw(np.array([granted[0].key], np.uint64))
        assert blocks.lookup(key) == 1


def test_tasks_cannot_fill_the_pool(pool: Pool, queues: tuple[Queue, Queue]) -> None:
    queue, _ = queues
    with pytest.raises(QueueFullError, match="full"):
        for number in range(30):
            queue.put(str(number), size=1 << 20)
    with pytest.raises(QueueFullError, match="full"):  # the rejected one leaves no trace
        queue.put(str(number), size=1 << 20)
    waiting, _ = queue.count()
    assert waiting == pool.geometry.stripe_count * 2 // 8
    queue.cache.remove(queue.key("0"))
    with pytest.raises(QueueFullError, match="full"):
        for number in range(1000):
            queue.put(f"small {number}")
    assert queue.count()[0] <= 64  # a quarter of the table's lines
    with KVCache(pool, namespace="blocks") as blocks:
        put = blocks.put(blocks.keys(hash_keys(["block"])), [np.zeros(1 << 20, np.uint8)])
        assert put.stored == 1


def test_completed_tasks_free_their_space(pool: Pool, queues: tuple[Queue, Queue]) -> None:
    queue, _ = queues
    names = [str(n) for n in range(pool.geometry.stripe_count * 2 // 8)]
    for name in names:
        queue.put(name, size=1 << 20)  # the largest number of tasks
    for name in names:
        queue.cache.remove(queue.key(name))
    with KVCache(pool, namespace="blocks") as blocks:
        blocks.put(blocks.keys(hash_keys(names)), np.zeros((len(names), 1 << 20), np.uint8))
        queue.put("elsewhere", size=1 << 20)


@pytest.mark.parametrize("method", [9, 10, 11])
@pytest.mark.parametrize(
    "request_bytes",
    [
        b"",
        b"x" * 23,
        struct.pack("<QQII", 1, 1, 1, lib.BL_TASK_VISIBLE_MAX_MS + 1),
        b"\xff" * 24,
    ],
    ids=["nothing", "short", "for too long", "ones"],
)
def test_foreign_requests_are_refused(
    pool: Pool, server: IndexServer, method: int, request_bytes: bytes
) -> None:
    with Client(pool) as client, pytest.raises(BadRequestError):
        client.call(method, request_bytes)


def test_a_missing_claim_cannot_be_extended(pool: Pool, server: IndexServer) -> None:
    with Client(pool) as client:
        for block in (0, 255, 256, 2**32 - 1):
            with pytest.raises((NoGrantError, BadRequestError)):
                client.call(10, struct.pack("<QQII", 1, 0, block, 1))


DISK, STORE = 2, 4  # bits of the tiers
FIRST, TURN = 16, 8  # cold keys of a new chain; keys of one turn of a chain (csrc/index/lower.c)


def keys(*numbers: int) -> NDArray[np.uint64]:
    return np.array([(number, number) for number in numbers], np.uint64)


def notes(*numbers: int, **fields: int) -> NDArray[np.void]:
    made = np.zeros(len(numbers), LOWER_NOTE)
    made["key"], made["block"] = keys(*numbers), lib.BL_LOWER_NO_BLOCK
    for name, value in fields.items():
        made[name] = value
    return made


class Below:
    """A server with a disk, which has the keys from 0 to 99, and a store."""

    def __init__(self, pool: Pool) -> None:
        self.pool, self.server = pool, IndexServer(pool)
        self.token = self.server.attach_lower(200, wait=False, unknown=STORE, names=["a", "b"])
        self.server.start()
        self.client = Client(pool)
        self.index = IndexClient(self.client)
        self.serve()
        self.work.report(notes(*range(100), stored=DISK))
        self.server.lower_reported()

    def serve(self) -> None:
        self.service = Client(self.pool)
        self.work = LowerWork(self.service, self.token)

    def take(self, kind: Work, count: int, **more: int) -> list[int]:
        return [int(key[0]) for key in self.work.take(kind, count, **more)["key"]]

    def removals(self) -> tuple[NDArray[np.void], NDArray[np.void]]:
        """Take the removals of key 1 by both tiers. Returns them, and the notes that report them as
        done.
        """
        taken, done = self.work.take(Work.REMOVE, 10), notes(1, 1, removal=Removal.DONE)
        done["generation"], done["block"] = taken["generation"], taken["block"]
        return taken, done

    def reserve_brought(self, number: int) -> Grant:
        """Reserve a block of a lower tier, as its service does."""
        request = ffi.new("bl_block_request *", {"length": 4096, "flags": lib.BL_RESERVE_BROUGHT})
        record = ffi.new("bl_block_record *")
        key = ffi.from_buffer("uint64_t[]", keys(number))
        assert lib.bl_reserve(self.service.session, key, 1, request, record, 10**10) == 0
        assert record.state == BlockState.GRANTED
        state, extent = BlockState.GRANTED, (record.offset, record.length, record.generation)
        return Grant(state, *extent, record.block, record.status, (number, number))

    def close(self) -> None:
        self.service.close()
        self.client.close()
        self.server.stop()


@pytest.fixture
def below(shm: Path) -> Iterator[Below]:
    with Pool.create([shm / "pool"], device_size=16 << 20, sparse=True) as pool:
        made = Below(pool)
        yield made
        made.close()


def test_a_damaged_tombstone_is_dropped(shm: Path) -> None:
    other = np.array([(4, 5)], np.uint64)  # the key of the damaged lines
    with Pool.create([shm / "pool"], device_size=16 << 20, sparse=True) as pool:
        made, count = Below(pool), pool.geometry.block_count_max
        made.index.remove(keys(5))
        assert made.index.removing(keys(5)) == [DISK | STORE]
        first = pool.geometry.table_offset + made.server.stat().epoch % 2 * count * LINE
        made.close()
        for offset in range(first, first + count * LINE, LINE):
            line = read(pool, offset)
            if line[:16] == keys(5).tobytes():
                write(pool, offset, other.tobytes() + line[16:])
        made = Below(pool)
        try:
            assert made.index.removing(other) == [0]
            assert made.index.removing(keys(5)) == [0]
        finally:
            made.close()


def test_few_cold_keys_of_a_chain_are_requested_until_some_arrive(below: Below) -> None:
    assert below.index.onboard(keys(*range(1000, 1100))) == 100
    assert below.take(Work.COLD, 200) == list(range(1000, 1000 + FIRST))
    below.work.report(notes(1000, stored=STORE, ended=1))
    more = below.take(Work.COLD, 200)
    assert more == list(range(1000 + FIRST, 1000 + FIRST + 1 + FIRST))  # the window has doubled


def test_chains_are_served_in_turn(below: Below) -> None:
    with Client(below.pool) as other:
        below.index.onboard(keys(*range(50)))
        IndexClient(other).onboard(keys(*range(50, 100)))
        turns = [first + position for first in (0, 50, TURN, 50 + TURN) for position in range(TURN)]
        assert below.take(Work.ONBOARD, 4 * TURN) == turns


def test_onboards_have_priority_over_prefetches_also_from_a_store(below: Below) -> None:
    below.index.onboard(keys(1000, 1001), prefetch=True)
    below.index.onboard(keys(2000, 2001))
    assert below.take(Work.COLD, 4) == [2000, 2001, 1000, 1001]


def test_requests_of_an_ended_client_are_dropped(below: Below) -> None:
    with Client(below.pool) as other:
        IndexClient(other).onboard(keys(*range(50)))
        assert below.server.lower_stat().wanted_count == 50
    below.index.lookup(keys(1))  # after the end of the session
    assert below.take(Work.ONBOARD, 100) == []
    assert below.server.lower_stat().wanted_count == 0


def test_nothing_is_onboarded_while_the_pool_is_drained(below: Below) -> None:
    below.server.drain()
    assert eventually(lambda: below.index.onboard(keys(1)) == 0)
    below.server.drain(False)
    assert eventually(lambda: below.index.onboard(keys(1)) == 1)


@pytest.mark.parametrize("size", [4, 16384], ids=["many calls", "large calls"])
def test_no_session_takes_all_requests(below: Below, size: int) -> None:
    starts = iter(range(1000, 1 << 20, size))

    def fill(index: IndexClient) -> int:
        """Request keys until a call is cut short. Returns how many keys were requested."""
        total = 0
        while (count := index.onboard(keys(*range(start := next(starts), start + size)))) == size:
            total += count
        return total + count

    assert fill(below.index) == 32768
    with Client(below.pool) as second, Client(below.pool) as third:
        assert fill(IndexClient(second)) == 16384
        assert fill(IndexClient(third)) == 8192
    assert eventually(lambda: below.server.lower_stat().wanted_count == 32768)
    assert fill(below.index) == 0


def test_a_tier_with_a_pending_removal_of_a_key_is_not_read(below: Below) -> None:
    assert below.index.tiers(keys(1))[0] == DISK
    below.index.remove(keys(1))
    assert below.index.tiers(keys(1))[0] == 0
    below.index.onboard(keys(1))  # the store may have the key again
    assert below.take(Work.ONBOARD, 1) == []  # the disk is not searched
    assert below.take(Work.COLD, 1) == []  # nor the store, before it has removed the key
    assert below.index.lookup(keys(1)).state == BlockState.MISS
    below.work.report(below.removals()[1])
    assert below.index.onboard(keys(1)) == 1
    assert below.take(Work.COLD, 1) == [1]


def test_a_key_that_its_disk_has_not_removed_is_work_of_the_store(below: Below) -> None:
    below.index.remove(keys(1))
    removals, done = below.removals()
    done["removal"] = np.where(removals["tiers"] == STORE, Removal.DONE, Removal.FAILED)
    below.work.report(done)
    assert below.index.onboard(keys(1)) == 1
    assert below.take(Work.ONBOARD, 1) == []
    assert below.work.take(Work.COLD, 1)[["tiers", "stale"]].tolist() == [(0, DISK)]


def test_a_block_removed_during_its_onboard_is_not_committed(below: Below) -> None:
    below.index.onboard(keys(1))
    assert below.take(Work.ONBOARD, 1) == [1]
    grant = below.reserve_brought(1)
    below.index.remove(keys(1))
    assert IndexClient(below.service).commit([grant]) == [-lib.BL_ERROR_NO_GRANT]
    below.work.report(notes(1, ended=1))
    assert below.index.lookup(keys(1)).state == BlockState.MISS


def test_a_key_removed_during_an_offload_is_requested_after_the_report(below: Below) -> None:
    below.index.onboard(keys(1))
    assert below.take(Work.ONBOARD, 1) == [1]
    below.index.remove(keys(1))
    below.work.report(below.removals()[1])
    assert below.index.onboard(keys(1)) == 0
    below.work.report(notes(1, ended=1))
    assert below.index.onboard(keys(1)) == 1


def test_a_late_result_does_not_end_a_later_removal(below: Below) -> None:
    below.index.remove(keys(1))
    first, late = below.removals()
    assert sorted(first["tiers"].tolist()) == [DISK, STORE]
    below.index.remove(keys(1))
    below.work.report(late)
    below.work.report(
        notes(1, stored=DISK, removal=Removal.REPLACED, generation=int(first["generation"].min()))
    )
    assert below.index.removing(keys(1))[0] == DISK | STORE
    assert below.server.lower_stat().removal_count == 2


def test_removals_of_an_ended_service_are_requested_again(below: Below) -> None:
    below.index.remove(keys(1))
    assert below.take(Work.REMOVE, 10) == [1, 1]
    assert below.take(Work.REMOVE, 10) == []
    below.service.close()
    below.serve()
    assert below.take(Work.REMOVE, 10) == [1, 1]


def test_too_many_tiers_to_drop_are_rejected(pool: Pool) -> None:
    server = IndexServer(pool)
    with pytest.raises(BadValueError, match="drop fewer"):
        for number in range(100):
            server.give_up_tier(f"disk:{number}")


def aged_chains(path: str) -> None:
    """Print which requested keys the service takes: at once, just before a minute has passed, and
    after it, by the clock of ``wound_clock.c``.
    """
    wind = ctypes.CDLL(None).wind
    with Pool.create([path], device_size=16 << 20, sparse=True) as pool:
        server = IndexServer(pool)
        token = server.attach_lower(10, wait=False, unknown=DISK, names=["store"])
        with server, Client(pool) as client:
            server.lower_reported()
            work = LowerWork(client, token)
            for first, seconds in ((0, 0), (10, 50), (20, 70)):
                numbers = range(first, first + 3)
                IndexClient(client).onboard(np.array([(n, n) for n in numbers], np.uint64))
                wind(seconds)
                role.reply([int(key[0]) for key in work.take(Work.COLD, 10)["key"]])
            role.reply(server.lower_stat().wanted_count)


def test_requested_keys_expire_after_a_minute(shm: Path, tmp_path: Path) -> None:
    clock = tmp_path / "clock.so"
    source = Path(__file__).with_name("wound_clock.c")
    command = ["cc", "-shared", "-fPIC", "-o", str(clock), str(source)]
    subprocess.run(command, check=True)
    done = role.run(aged_chains, shm / "pool", env=os.environ | {"LD_PRELOAD": str(clock)})
    assert done.stdout.splitlines() == ["[0, 1, 2]", "[10, 11, 12]", "[]", "6"], done.stderr
