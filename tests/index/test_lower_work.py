# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The work of lower tiers that the server hands to their service. The test is the service."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from support import role
from support.blocks import eventually
from support.forge import LINE, read, write

from beluga import Client, IndexServer, Pool
from beluga._ffi import ffi, lib
from beluga.errors import BadValueError
from beluga.index import LOWER_NOTE, BlockState, Grant, IndexClient, LowerWork, Removal, Work

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
