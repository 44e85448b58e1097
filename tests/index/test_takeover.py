# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A server or a client dies; the next server serves all committed blocks in their order, and grants
no space in use: a free file lock does not prove that a writer is gone. A metadata device that
hardware keeps coherent serves data under software coherence.
"""

import contextlib
import fcntl
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from damage import LINE, STRIPE, Ground
from support import role, roles
from support.blocks import eventually, held, keys, put, states
from support.emulation import long
from support.role import Process

from beluga import KVCache
from beluga._ffi import ffi, lib
from beluga.errors import CallTimeoutError
from beluga.index import BlockState, IndexClient, IndexServer, check_pool, repair_pool
from beluga.pool import STRIPE_SIZE, Pool
from beluga.rpc import Client, Server
from beluga.verify import verify_pool

MIB = 1 << 20

BlockPlace = tuple[int, int, int, int]

RECOVERED = 20
ROUNDS = 40
REMOVED = 9


def located(index: IndexClient, numbers: range) -> dict[int, BlockPlace]:
    """Return where each block is, by its number."""
    return {
        number: (hit.offset, hit.length, hit.generation, hit.block)
        for number in numbers
        for hit in index.lookup(keys([number])).hits
    }


@contextmanager
def serving(pool: Pool) -> Iterator[tuple[IndexServer, IndexClient]]:
    with IndexServer(pool) as server, Client(pool) as client:
        yield server, IndexClient(client)


def conserved(index: IndexClient) -> bool:
    """Check that only committed and granted blocks use space."""
    stat = index.stat()
    return stat.used_bytes == stat.block_bytes + stat.grant_count * MIB and stat.held_bytes == 0


@pytest.fixture
def first(pool: Pool, paths: list[Path]) -> Iterator[Process]:
    with Process(roles.serve_index, paths) as server:
        yield server


@pytest.mark.parametrize("deaths", [1, 2, long(3), long(4)])
def test_every_committed_block_survives_kills_of_the_server(
    pool: Pool, paths: list[Path], first: Process, deaths: int
) -> None:
    with Client(pool) as client:
        index = IndexClient(client)
        put(index, range(20))
        put(index, range(20, 30), length=5 * MIB // 2)
        index.remove(keys(range(5, 25)))
        before = located(index, range(40))
        assert set(before) == {*range(5), *range(25, 30)}
    first.kill()
    for _ in range(deaths - 1):
        Process(roles.serve_index, paths).kill()
    with serving(pool) as (server, index):
        assert server.stat().epoch == deaths + 1
        assert located(index, range(40)) == before
        assert index.stat().damaged_count == 0
        assert eventually(lambda: index.stat().held_bytes == 0)
        assert index.stat().used_bytes == index.stat().block_bytes


@pytest.mark.parametrize("deaths", [long(1), 2, long(3)])
def test_a_client_continues_its_puts_across_server_deaths(
    pool: Pool, paths: list[Path], first: Process, deaths: int
) -> None:
    server = first
    with Client(pool) as client:
        index = IndexClient(client)
        for turn in range(deaths):
            put(index, range(turn * 5, turn * 5 + 5))
            server.kill()
            server = Process(roles.serve_index, paths)
        stored = range(deaths * 5)
        assert held(index, stored) == set(stored)
        assert eventually(lambda: conserved(index))
        generations = [generation for _, _, generation, _ in located(index, stored).values()]
        assert sorted(set(generations)) == generations
    server.kill()


def test_a_clean_stop_loses_no_blocks(pool: Pool) -> None:
    with serving(pool) as (_, index):
        put(index, range(10))
        before = located(index, range(10))
    for _ in range(3):
        with serving(pool) as (_, index):
            assert located(index, range(10)) == before


def test_grants_of_a_live_client_are_not_reassigned(
    pool: Pool, paths: list[Path], first: Process
) -> None:
    with Process(roles.hold_blocks, paths) as writer:
        assert set(json.loads(writer.request('["reserve", [1, 2, 3]]'))) == {"GRANTED"}
        with Client(pool) as client:
            (new_block,) = put(IndexClient(client), [100])
        first.kill()
        with serving(pool) as (server, index):
            assert server.stat().inherited_count >= 1
            assert index.stat().held_bytes > 0
            # The writer may still write there, so no session gets this space.
            grants = index.reserve(keys(range(1000, 1070)), length=MIB)
            given = {grant.offset for grant in grants if grant.state is BlockState.GRANTED}
            assert not given & {new_block.offset - (3 - i) * MIB for i in range(3)}
            assert given
            index.abort(grants)
            # The client makes a call: it has a new session, and its old grants have ended.
            assert (
                json.loads(writer.request('["commit", [1, 2, 3]]')) == [-lib.BL_ERROR_NO_GRANT] * 3
            )
            assert eventually(lambda: index.stat().held_bytes == 0)
            assert server.stat().inherited_count == 0
            assert states(index.reserve(keys([1, 2, 3]), length=MIB)) == ["GRANTED"] * 3


def test_grants_of_a_dead_client_are_free_soon_after_a_takeover(
    pool: Pool, paths: list[Path], first: Process
) -> None:
    with Process(roles.hold_blocks, paths) as writer:
        writer.request('["reserve", [1, 2, 3]]')
        first.kill()
        writer.kill()
    with serving(pool) as (server, index):
        assert eventually(lambda: index.stat().held_bytes == 0)
        assert server.stat().inherited_count == 0
        assert index.stat().used_bytes == 0
        assert states(index.reserve(keys([1, 2, 3]), length=MIB)) == ["GRANTED"] * 3


def test_a_commit_repeated_to_the_next_server_succeeds(
    pool: Pool, paths: list[Path], first: Process
) -> None:
    with Client(pool) as client:
        index = IndexClient(client)
        grants = put(index, [1, 2])
        first.kill()
        with pytest.raises(CallTimeoutError):
            client.ping(timeout_s=0.05)
        with Process(roles.serve_index, paths):
            assert index.commit(grants) == [0, 0]
            assert index.stat().commit_count == 0


def test_the_order_of_eviction_starts_by_generation(
    pool: Pool, paths: list[Path], first: Process
) -> None:
    with Client(pool) as client:
        put(IndexClient(client), range(50))
    first.kill()
    with serving(pool) as (_, index):
        assert eventually(lambda: index.stat().held_bytes == 0)
        put(index, range(100, 120))
        there = held(index, range(50))
        assert there == set(range(50 - len(there), 50))
        assert len(there) < 50


def test_a_damaged_entry_is_dropped_and_counted(pool: Pool) -> None:
    with serving(pool) as (_, index):
        grants = put(index, range(3))
    address = lib.bl_pool_address(
        pool.handle, pool.geometry.table_offset + (pool.geometry.block_count_max + 1) * 64
    )  # epoch 1 wrote half 1
    assert grants[1].block == 1
    damaged = bytearray(ffi.buffer(ffi.cast("char *", address), 64))
    damaged[20] ^= 1
    lib.bl_ntstore_copy(address, bytes(damaged), 64)
    with serving(pool) as (_, index):
        assert held(index, range(3)) == {0, 2}
        assert index.stat().damaged_count == 1
        put(index, [1])


def test_a_damaged_open_mark_only_affects_its_extent(pool: Pool) -> None:
    with serving(pool) as (_, index):
        put(index, range(6))  # two in an extent of one stripe
    stripes = pool.geometry.stripe_count
    address = lib.bl_pool_address(pool.handle, pool.geometry.extent_offset + stripes * 64)
    damaged = bytearray(ffi.buffer(ffi.cast("char *", address), 64))  # of epoch 1, stripe 0
    mark = ffi.from_buffer("bl_extent_line *", damaged)
    assert (mark.state, mark.first_stripe, mark.stripe_count) == (lib.BL_EXTENT_OPEN, 0, 1)
    mark.stripe_count = 64
    lib.bl_ntstore_copy(address, bytes(damaged), 64)
    with serving(pool) as (_, index):
        assert held(index, range(6)) == {2, 3, 4, 5}


def test_a_full_table_is_taken_over(shm: Path) -> None:
    count = 50_000
    paths = [shm / "a"]
    with Pool.create(paths, device_size=512 * MIB, sparse=True, max_blocks=count) as pool:
        with Process(roles.serve_index, paths) as server, Client(pool) as client:
            index = IndexClient(client)
            for first in range(0, count, 1000):
                numbers = keys(range(first, first + 1000))
                index.commit(index.reserve(numbers, length=4096))
            assert index.stat().block_count == count
            server.kill()
        with serving(pool) as (_, index):
            assert index.stat().block_count == count
            assert len(index.lookup(keys(range(count))).hits) == count


def test_after_restarts_the_oldest_blocks_are_evicted_first(pool: Pool) -> None:
    """Numbers and space are reused in another order; generations of several epochs differ in many
    bits, so that a sort by some of the bits would fail.
    """
    with serving(pool) as (_, index):
        put(index, range(RECOVERED))
        index.remove(keys([3, 11, 7]))
        for number in range(ROUNDS):
            index.abort(index.reserve(keys(range(1000, 1064)), length=4096))
            if number % 10 == 0:
                put(index, [100 + number])
    with serving(pool) as (_, index):
        index.remove(keys([0, 110]))
        put(index, [200, 201, 202])
    old = [n for n in range(1, RECOVERED) if n not in (3, 11, 7)]
    order = [*old, 100, 120, 130, 200, 201, 202]
    with serving(pool) as (server, index):
        assert server.index_stat().block_count == len(order)
        for number in range(300, 400):
            put(index, [number])
            if server.index_stat().evict_count == REMOVED:
                break
        assert held(index, order) == set(order[REMOVED:])


def numbers(index: IndexClient, names: list[int]) -> set[int]:
    return {index.lookup(keys([name])).hits[0].block for name in names}


def test_after_a_restart_new_blocks_fill_the_gaps_and_then_the_end(pool: Pool) -> None:
    with serving(pool) as (_, index):
        put(index, range(RECOVERED))
        first = numbers(index, [*range(RECOVERED)])
        index.remove(keys([3, 7]))
    permanent = [name for name in range(RECOVERED) if name not in (3, 7)]
    with serving(pool) as (_, index):
        put(index, [103, 107])
        assert numbers(index, [*permanent, 103, 107]) == first
        put(index, [200, 201])
        assert numbers(index, [200, 201]) == {max(first) + 1, max(first) + 2}


@pytest.mark.parametrize("unused", [1, 2, 3, 4, 7, 8, 63, 64, 100])
def test_blocks_after_numbers_without_entries_survive_restarts(pool: Pool, unused: int) -> None:
    with serving(pool) as (_, index):
        grants = index.reserve(keys(range(1000, 1000 + unused)), length=4096)
        assert states(grants) == ["GRANTED"] * unused
        put(index, [0], length=4096)
    for epoch in range(1, 5):
        with serving(pool) as (server, index):
            assert held(index, range(epoch)) == set(range(epoch))
            assert server.index_stat().block_count == epoch
            put(index, [epoch], length=4096)


def test_blocks_removed_in_any_epoch_do_not_return(pool: Pool) -> None:
    for epoch, count in enumerate([5, 0, 40, 3, 1, 0, 100, 0, 0, 0]):
        with serving(pool) as (server, index):
            assert server.index_stat().block_count == 0
            mine = [1000 * epoch + number for number in range(count)]
            put(index, mine, length=4096)
            assert index.remove(keys(mine)) == count


def order_of_allocation(pool: Pool) -> dict[int, tuple[int, range]]:
    """Store blocks, restart the server, and return each one's number and stripes. Both halves have
    the blocks then, and half 0 is the valid one.
    """
    with serving(pool) as (_, index):
        put(index, range(RECOVERED))
    with serving(pool) as (_, index):
        hits = {name: index.lookup(keys([name])).hits[0] for name in range(RECOVERED)}
    start = pool.geometry.data_offset
    return {
        name: (
            hit.block,
            range(
                (hit.offset - start) // STRIPE, (hit.offset + hit.length - start - 1) // STRIPE + 1
            ),
        )
        for name, hit in hits.items()
    }


def found_after_restarts(pool: Pool) -> set[int]:
    """Return the blocks that a server finds. Its successor finds the same."""
    names_held = []
    for _ in range(2):
        with serving(pool) as (_, index):
            names_held.append(held(index, range(RECOVERED)))
    assert names_held[0] == names_held[1]
    return names_held[0]


@pytest.mark.parametrize("milestone", [1, 2, 4, 8, 16])
def test_an_entry_that_lost_its_bytes_does_not_end_the_table(pool: Pool, milestone: int) -> None:
    """If it is a milestone, its copy of two epochs ago is the second look of bl_table_ends()."""
    lost = {name for name, (block, _) in order_of_allocation(pool).items() if block == milestone}
    assert len(lost) == 1
    ground = Ground(pool)
    ground.at(ground.entry(milestone))[:] = bytes(LINE)
    assert found_after_restarts(pool) == set(range(RECOVERED)) - lost


@pytest.mark.parametrize("milestone", [1, 2, 4, 8])
def test_a_mark_that_lost_its_bytes_does_not_end_the_table(pool: Pool, milestone: int) -> None:
    """If no extent begins at a milestone, its mark is free, and nothing is lost."""
    where = order_of_allocation(pool)
    ground = Ground(pool)
    mark = ground.read("bl_extent_line", ground.mark(milestone))
    stripes = range(milestone, milestone + mark.stripe_count)
    lost = {name for name, (_, own) in where.items() if own.start in stripes or own[-1] in stripes}
    assert any(own.start >= stripes.stop for _, own in where.values()), "there is content behind it"
    ground.at(ground.mark(milestone))[:] = bytes(LINE)
    assert found_after_restarts(pool) == set(range(RECOVERED)) - lost


def resident(kind: str) -> int:
    """Return this process's memory of a kind (Anon: private, Shmem: of pools), in bytes."""
    match = re.search(rf"Rss{kind}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) << 10


def test_a_restart_takes_no_memory_for_unused_numbers(shm: Path) -> None:
    """The table of 64 GiB has 24 MiB of numbers; nearly all of it is empty."""
    taken = []
    with Pool.create([shm / "a"], device_size=64 << 30, sparse=True) as pool:
        for _ in range(3):
            before = resident("Anon")
            with serving(pool) as (_, index):
                put(index, [len(taken)])
                taken.append(resident("Anon") - before)
    first, *later = taken
    assert max(later) < first + (12 << 20)


def test_a_restart_touches_the_used_part_of_the_tables(shm: Path) -> None:
    """The tables of 64 GiB have 36 MiB of entries and marks; nearly all of them are empty."""
    with Pool.create([shm / "a"], device_size=64 << 30, sparse=True) as pool:
        for number in range(3):
            with serving(pool) as (_, index):
                put(index, [number])
    with Pool.open([shm / "a"]) as pool:
        before = resident("Shmem")
        with serving(pool) as (_, index):
            assert held(index, range(3)) == {0, 1, 2}
        assert resident("Shmem") - before < 4 << 20


def test_grants_pins_and_lane_of_a_killed_client_are_released(
    server: IndexServer, index: IndexClient, paths: list[Path]
) -> None:
    put(index, [1, 2])
    for _ in range(9):  # more often than there are lanes
        with Process(roles.hold_blocks, paths) as client:
            assert json.loads(client.request('["pin", [1, 2]]')) == ["HIT", "HIT"]
            assert json.loads(client.request('["reserve", [3, 4, 5]]')) == ["GRANTED"] * 3
            assert states(index.reserve(keys([3]), length=MIB)) == ["PENDING"]
            client.kill()
        assert eventually(lambda: server.stat().live_count == 1)
        stat = index.stat()
        assert (stat.grant_count, stat.pinned_count, stat.held_bytes) == (0, 0, 0)
        assert stat.used_bytes == 2 * MIB
    assert states(index.reserve(keys([3, 4, 5]), length=MIB)) == ["GRANTED"] * 3


def test_committed_blocks_of_a_killed_client_stay(
    server: IndexServer, index: IndexClient, paths: list[Path]
) -> None:
    with Process(roles.hold_blocks, paths) as client:
        client.request('["reserve", [1, 2, 3]]')
        assert json.loads(client.request('["commit", [1, 2]]')) == [0, 0]
        client.kill()
    assert eventually(lambda: index.stat().grant_count == 0)
    assert held(index, [1, 2, 3]) == {1, 2}


def test_a_block_removed_while_pinned_is_freed_when_its_reader_dies(
    index: IndexClient, paths: list[Path]
) -> None:
    put(index, [1])
    with Process(roles.hold_blocks, paths) as reader:
        reader.request('["pin", [1]]')
        index.remove(keys([1]))
        assert index.stat().used_bytes == MIB
        reader.kill()
    assert eventually(lambda: index.stat().used_bytes == 0)


def test_closing_a_session_ends_its_grants_and_pins(attach: Callable[[], IndexClient]) -> None:
    first_client, second_client = attach(), attach()
    put(first_client, [1])
    first_client.lookup(keys([1]), pin=True)
    first_client.reserve(keys([2]), length=MIB)
    first_client._client.close()
    stat = second_client.stat()
    assert (stat.grant_count, stat.pinned_count, stat.abort_count) == (0, 0, 1)


def test_a_stopped_client_keeps_its_grants_and_pins(index: IndexClient, paths: list[Path]) -> None:
    put(index, [1])
    with Process(roles.hold_blocks, paths) as client:
        client.request('["pin", [1]]')
        client.request('["reserve", [2]]')
        client.signal(signal.SIGSTOP)
        time.sleep(6)  # longer than the heartbeat timeout
        assert (index.stat().grant_count, index.stat().pinned_count) == (1, 1)
        client.signal(signal.SIGCONT)
        assert json.loads(client.request('["commit", [2]]')) == [0]
    assert held(index, [1, 2]) == {1, 2}


class BusyDevice:
    """A copy engine in the middle of a copy, until the input ends. Lines of the input make it
    release the locks of its process ("unlock"), or name the process by the number that another pid
    namespace has for it ("move").
    """

    name = "device"
    fault = None
    piece_size = 0

    def gather_write(self, plan: object) -> None:
        for line in role.lines():
            for file in [*Path("/proc/self/fd").iterdir()]:
                with contextlib.suppress(FileNotFoundError):
                    if "/alive-" not in str(file.readlink()):
                        continue
                    lock = int(file.name)
                    if line == "unlock":
                        fcntl.flock(lock, fcntl.LOCK_UN)
                    elif os.fstat(lock).st_size:
                        os.pwrite(lock, (1).to_bytes(8, "little"), 0)
            role.reply("done")

    def close(self) -> None: ...


def put_by_a_device(paths: list[str]) -> None:
    """Two sessions: one without grants, and one that is in the middle of a put."""
    engine: Any = BusyDevice()
    with (
        Pool.open(paths) as pool,
        Client(pool),
        KVCache(pool, namespace="", engine=engine) as cache,
    ):
        words = np.arange(1 << 16, dtype=np.uint64).reshape(1, -1)
        cache.put(np.array([[7, os.getpid()]], dtype=np.uint64), words)


@pytest.fixture
def writer(paths: list[Path]) -> Iterator[Callable[[], Process]]:
    """Return a function that starts a writer, a child of this process, and waits until its device
    writes.
    """
    with contextlib.ExitStack() as started:
        yield lambda: started.enter_context(Process(put_by_a_device, paths, prefix=["env"]))


def end_as_zombie(process: Process) -> None:
    """Kill a process, so that it stays a zombie: no process waits for it."""
    process.signal(signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


def _start_unseen(server: IndexServer) -> None:
    Server.start(server)
    for socket in server._pool.runtime_dir.glob("pidfds-*"):
        socket.unlink()


@pytest.fixture(params=["pidfd", "lock file"])
def pidfds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether servers of this process get pidfds; otherwise there is no socket to connect to, and
    the lock file has the pid.
    """
    if request.param == "lock file":
        monkeypatch.setattr("beluga.index.server.IndexServer.start", _start_unseen)
    return bool(request.param == "pidfd")


def test_a_free_lock_does_not_end_a_session_whose_device_may_write(
    pidfds: bool, server: IndexServer, index: IndexClient, writer: Callable[[], Process]
) -> None:
    process = writer()
    assert server.stat().live_count == 3
    assert pidfds or server.stat().watched_count == 0
    assert process.request("unlock") == "done"
    assert eventually(lambda: server.stat().live_count == 2)  # the session that has no device
    assert index.stat().grant_count == 1
    end_as_zombie(process)
    assert eventually(lambda: server.stat().live_count == 1)
    assert (index.stat().grant_count, index.stat().used_bytes) == (0, 0)


def test_a_successor_reads_the_list_of_devices(
    pool: Pool, paths: list[Path], writer: Callable[[], Process]
) -> None:
    with Process(roles.serve_index, paths) as first:
        process = writer()
        first.kill()
    assert process.request("unlock") == "done"
    with IndexServer(pool) as server, Client(pool) as client:
        index = IndexClient(client)
        assert eventually(lambda: server.stat().inherited_count == 1)
        assert index.stat().held_bytes > 0
        end_as_zombie(process)
        assert eventually(lambda: server.stat().inherited_count == 0)
        assert index.stat().held_bytes == 0


def test_a_client_that_dies_with_its_server_is_proven_gone_by_the_next(
    pool: Pool, paths: list[Path], writer: Callable[[], Process]
) -> None:
    with Process(roles.serve_index, paths) as first:
        process = writer()
        first.signal(signal.SIGSTOP)  # the server cannot detect the death
        process.kill()
        first.kill()
    with IndexServer(pool) as server, Client(pool) as client:
        assert eventually(lambda: server.stat().inherited_count == 0)
        assert states(IndexClient(client).reserve(keys([1]), length=1 << 20)) == ["GRANTED"]


def test_a_process_of_another_pid_namespace_stays_suspect(
    pool: Pool, paths: list[Path], writer: Callable[[], Process]
) -> None:
    with Process(roles.serve_index, paths) as first:
        process, other = writer(), writer()
        first.kill()
    assert process.request("move") == "done"
    process.kill()
    other.kill()
    with IndexServer(pool) as server, Client(pool) as client:
        assert eventually(lambda: server.stat().inherited_count == 1)
        assert IndexClient(client).stat().held_bytes > 0


def test_a_closed_session_is_not_suspect(pool: Pool, paths: list[Path]) -> None:
    """Without a server, a process that releases its lock and continues has detached."""
    with Process(roles.serve_index, paths) as first, Process(roles.close_a_cache, paths) as client:
        assert client.request("put") == "1"
        first.kill()
        assert client.request("close") == "closed"
        with IndexServer(pool) as server:
            assert eventually(lambda: server.stat().inherited_count == 0)


@pytest.fixture
def metadata_paths(shm: Path) -> list[Path]:
    """The devices, the metadata device in the middle."""
    return [shm / "a", shm / "metadata", shm / "b"]


@pytest.fixture
def metadata_pool(metadata_paths: list[Path]) -> Iterator[Pool]:
    with Pool.create(
        [metadata_paths[0], metadata_paths[2]],
        device_size=32 * MIB,
        coherence="software",
        metadata=metadata_paths[1],
        metadata_coherence="hardware",
        sparse=True,
        max_blocks=256,
    ) as metadata_pool:
        yield metadata_pool


def test_hosts_share_the_pool(metadata_pool: Pool) -> None:
    with (
        IndexServer(metadata_pool, host=2),
        Client(metadata_pool, host=1) as client,
        Client(metadata_pool, host=3) as other,
    ):
        put(IndexClient(client), range(10))
        assert held(IndexClient(other), range(12)) == set(range(10))
        IndexClient(other).remove(keys(range(4)))
        assert held(IndexClient(client), range(12)) == set(range(4, 10))


def test_blocks_survive_a_kill_and_a_restart(
    metadata_pool: Pool, metadata_paths: list[Path]
) -> None:
    with Process(roles.serve_index, metadata_paths) as first, Client(metadata_pool) as client:
        index = IndexClient(client)
        put(index, range(20))
        index.remove(keys(range(5)))
        first.kill()
        with Process(roles.serve_index, metadata_paths) as second:
            assert held(index, range(20)) == set(range(5, 20))
            put(index, range(30, 40))
            assert second.end() == 0
        with IndexServer(metadata_pool):
            assert held(index, range(40)) == {*range(5, 20), *range(30, 40)}
    report = check_pool(metadata_pool, payload=True)
    assert (report.finding_count, report.block_count) == (0, 25)


def test_all_space_of_the_data_devices_is_for_blocks(metadata_pool: Pool) -> None:
    with IndexServer(metadata_pool) as server, Client(metadata_pool) as client:
        put(IndexClient(client), range(40))
        cells = server.space_map(15)
        tables, used = cells["table_count"].sum(axis=1), cells["used_bytes"].sum(axis=1)
        own = metadata_pool.devices[0].stripe_count - 1
        assert tables.tolist() == [own, 0, 0]
        assert cells["stripe_count"].sum(axis=1).tolist() == [own, 15, 15]
        assert used[0] == 0
        assert min(used[1:]) > 0
        assert server.index_stat().used_bytes == used.sum()


def test_damage_on_the_metadata_device_is_found_and_dropped(metadata_pool: Pool) -> None:
    with IndexServer(metadata_pool), Client(metadata_pool) as client:
        put(IndexClient(client), range(6))
    report = check_pool(metadata_pool)
    line = metadata_pool.geometry.table_offset
    line += (report.half * metadata_pool.geometry.block_count_max + 2) * 64
    with metadata_pool.devices[0].path.open("r+b") as file:
        file.seek(STRIPE_SIZE + line + 8)
        file.write(b"\xff" * 8)
    assert check_pool(metadata_pool).finding_count > 0
    acts, after = repair_pool(metadata_pool)
    assert acts
    assert (after.finding_count, after.block_count) == (0, 5)


def test_the_metadata_device_is_verified_too(metadata_pool: Pool) -> None:
    report = verify_pool(metadata_pool, seconds=0.2)
    assert {finding.device for finding in report.findings} == {0, 1, 2}
    assert report.good
    with IndexServer(metadata_pool), Client(metadata_pool) as client:
        put(IndexClient(client), range(3))  # nothing of the pool was overwritten
    assert check_pool(metadata_pool).finding_count == 0
