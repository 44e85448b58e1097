# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The disk tier while an operation of the disk does not end, and while its caller is interrupted:
the caller returns, and space that the operation may still write is not reused.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support.blocks import eventually
from support.disk_faults import SIZE, FaultyDisk
from support.disk_tiers import is_block, keys_of, payload_of, records_of
from support.emulation import PATIENCE
from support.interrupts import Interrupts

from beluga.errors import TierError
from beluga.tiers.disk import DiskTier, SpreadTier, health

LENGTH = FaultyDisk.length
LIMIT_S = 0.3
SOON_S = 20.0 * PATIENCE  # limit of a call on a disk that hangs


def go_on(disk: FaultyDisk) -> None:
    """Continue the hanging operations, and wait until they have ended."""
    disk.engine.hung = set()
    disk.engine.gate.set()
    assert eventually(lambda: disk.tier._threads.hung == 0)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[FaultyDisk]:
    disk = FaultyDisk(tmp_path / "disk", LIMIT_S)
    yield disk
    go_on(disk)
    disk.tier.close()


def test_a_hanging_load_is_a_miss_and_suspends_the_disk(disk: FaultyDisk) -> None:
    assert all(disk.save(range(4)))
    disk.engine.hung = {"read"}
    started = time.monotonic()
    assert not any(disk.load(range(4)))
    assert time.monotonic() - started < SOON_S
    assert disk.failures("load", "timeout") == 4
    assert disk.tier.contains(keys_of(range(5))).tolist() == [True] * 4 + [False]
    reads = disk.engine.reads
    assert not any(disk.load(range(4)))
    assert disk.engine.reads == reads
    go_on(disk)
    assert all(disk.load(range(4)))


def test_memory_that_a_late_read_may_write_is_not_used_again(disk: FaultyDisk) -> None:
    assert all(disk.save(range(4)))
    disk.engine.hung = {"read"}
    assert not any(disk.load(range(4)))
    others = [disk.tier._arena.take(4 * 40_960) for _ in range(20)]
    for other in others:
        other[:] = 0xAA
    go_on(disk)
    assert all((other == 0xAA).all() for other in others)


def test_blocks_of_a_late_read_are_not_moved(disk: FaultyDisk) -> None:
    assert all(disk.save(range(4)))
    disk.engine.hung = {"read"}
    assert not any(disk.load(range(4)))
    used = disk.tier.stat()["used_bytes"]
    assert disk.tier.remove(keys_of(range(4))) == 4
    assert disk.tier.stat()["used_bytes"] == used
    go_on(disk)
    assert disk.tier.stat()["used_bytes"] == 0


def test_a_save_that_hangs_is_not_saved_later_with_other_bytes(disk: FaultyDisk) -> None:
    disk.engine.hung = {"write"}
    payload = payload_of(range(4), LENGTH).copy()
    assert not disk.tier.save(records_of(range(4), LENGTH), payload).any()
    assert disk.failures("save", "timeout") == 4
    payload[:] = 0
    go_on(disk)
    assert not any(disk.load(range(4)))
    assert disk.tier.stat()["used_bytes"] == 0
    assert all(disk.save(range(4)))
    assert all(disk.load(range(4)))


def test_space_of_a_late_write_is_not_reused(disk: FaultyDisk) -> None:
    disk.engine.hung = {"write"}
    assert not any(disk.save(range(4)))
    disk.engine.hung = set()
    disk.now += 1000
    saved = range(10, 600)
    for first in range(10, 600, 10):
        assert all(disk.save(range(first, first + 10)))
    go_on(disk)
    there = np.flatnonzero(disk.tier.contains(keys_of(saved)))
    assert len(there) > 100
    assert [n for n in there.tolist() if not all(disk.load(range(n + 10, n + 11)))] == []


@pytest.mark.parametrize("first", ["write", "sync"])
def test_saves_queued_after_a_hanging_one_are_abandoned_too(disk: FaultyDisk, first: str) -> None:
    assert all(disk.save(range(1)))
    disk.engine.hung = {first}
    for number in range(1, 4):
        disk.now += 1000
        assert disk.save(range(number, number + 1)) == [False]
    assert disk.load(range(1)) == [True]  # reads do not hang
    go_on(disk)
    assert all(disk.save(range(8)))
    assert all(disk.load(range(8)))


def test_a_hanging_removal_takes_effect(disk: FaultyDisk) -> None:
    assert all(disk.save(range(4)))
    disk.engine.hung = {"write"}
    assert disk.tier.remove(keys_of(range(3))) == 3
    assert disk.tier.contains(keys_of(range(4))).tolist() == [False] * 3 + [True]
    go_on(disk)


def test_threads_that_hang_are_bounded(disk: FaultyDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_HUNG_MAX", 2)
    assert all(disk.save(range(1)))
    disk.engine.hung = {"read"}
    reads = disk.engine.reads
    for _ in range(5):
        disk.now += 1000
        assert disk.load(range(1)) == [False]
    assert disk.engine.reads == reads + 2
    assert disk.tier._threads.hung == 2
    go_on(disk)
    disk.now += 1000
    assert disk.load(range(1)) == [True]


def test_a_tier_that_hangs_is_closed_and_stays_locked_until_it_continues(tmp_path: Path) -> None:
    disk = FaultyDisk(tmp_path / "disk", LIMIT_S)
    assert all(disk.save(range(2)))
    disk.engine.hung = {"read"}
    assert not any(disk.load(range(2)))
    started = time.monotonic()
    disk.tier.close()
    assert time.monotonic() - started < SOON_S
    assert disk.tier.load(keys_of(range(2))) == [None, None]
    with pytest.raises(TierError, match="in use"):
        DiskTier(tmp_path / "disk", SIZE)
    go_on(disk)
    tiers: list[DiskTier] = []

    def opens() -> bool:
        try:
            tiers.append(DiskTier(tmp_path / "disk", SIZE))
        except TierError:
            return False
        return True

    assert eventually(opens)
    assert all(is_block(b, n) for n, b in enumerate(tiers[0].load(keys_of(range(2)))))
    tiers[0].close()


def test_a_disk_that_hangs_does_not_stop_the_others(tmp_path: Path) -> None:
    disks = [FaultyDisk(tmp_path / f"disk{i}", LIMIT_S) for i in range(2)]
    tier = SpreadTier([disk.tier for disk in disks])
    keys = keys_of(range(40))
    assert tier.save(records_of(range(40), LENGTH), payload_of(range(40), LENGTH)).all()
    healthy = disks[1].tier.contains(keys)
    disks[0].engine.hung = {"read", "write", "sync"}
    threads = [threading.Thread(target=tier.load, args=(keys,)) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON_S)
        assert not thread.is_alive()
    disks[0].tier._threads.limit_s = 1000.0  # from here on, waiting for it would be detected
    blocks = tier.load(keys)
    assert [block is not None for block in blocks] == healthy.tolist()
    assert tier.contains(keys).all()
    disks[0].tier._threads.limit_s = LIMIT_S
    for first in range(100, 200, 20):
        numbers = range(first, first + 20)
        saved = tier.save(records_of(numbers, LENGTH), payload_of(numbers, LENGTH))
        assert saved.all()
        blocks = tier.load(keys_of(numbers))
        assert all(is_block(b, n) for n, b in zip(numbers, blocks, strict=True))
    go_on(disks[0])
    assert all(is_block(b, n) for n, b in enumerate(tier.load(keys)))
    tier.close()


def test_the_wait_of_a_save_for_another_one_is_bounded(disk: FaultyDisk) -> None:
    store = disk.tier._store
    assert store is not None
    places = store.reserve(records_of(range(1), LENGTH))
    started = time.monotonic()
    assert disk.save(range(3)) == [False, True, True]
    assert time.monotonic() - started < SOON_S
    store.abort(places)
    assert all(disk.save(range(3)))


# ---- Interrupts


def settled(tier: DiskTier) -> None:
    assert eventually(lambda: not tier._store.users)


def interrupted_everywhere(tier: DiskTier, call: Callable[[], object]) -> int:
    """Interrupt a call at each of its points in turn; return how many there were."""
    with Interrupts(called=True) as interrupts:
        call()
    for at in range(1, interrupts.count + 1):
        with Interrupts({at}, called=True), contextlib.suppress(KeyboardInterrupt):
            call()
        settled(tier)
    return interrupts.count


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a finalizer
@pytest.mark.timeout(120)
def test_an_interrupted_save_leaves_nothing_behind(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "disk", SIZE, limit_s=SOON_S)
    records, payload = records_of(range(3), LENGTH), payload_of(range(3), LENGTH)

    def save() -> None:
        tier.remove(records["key"])
        tier.save(records, payload)

    assert interrupted_everywhere(tier, save) > 10
    assert tier.save(records, payload).all()
    assert all(is_block(b, n) for n, b in enumerate(tier.load(records["key"])))
    assert tier.remove(records["key"]) == 3
    assert tier.stat()["used_bytes"] == 0
    tier.close()
    DiskTier(tmp_path / "disk", SIZE).close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a finalizer
@pytest.mark.timeout(120)
def test_an_interrupted_load_leaves_nothing_behind(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "disk", SIZE, limit_s=SOON_S)
    keys = keys_of(range(3))
    assert tier.save(records_of(range(3), LENGTH), payload_of(range(3), LENGTH)).all()
    assert interrupted_everywhere(tier, lambda: (tier.load(keys), tier.contains(keys))) > 10
    assert all(is_block(b, n) for n, b in enumerate(tier.load(keys)))
    assert tier.remove(keys) == 3
    assert tier.stat()["used_bytes"] == 0  # no block is pinned
    tier.close()
    DiskTier(tmp_path / "disk", SIZE).close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a finalizer
@pytest.mark.timeout(120)
def test_interrupted_calls_of_several_disks_leave_nothing_behind(tmp_path: Path) -> None:
    disks = [DiskTier(tmp_path / f"disk{i}", SIZE, limit_s=SOON_S) for i in range(2)]
    tier = SpreadTier(disks)
    numbers = range(8)
    records, payload = records_of(numbers, LENGTH), payload_of(numbers, LENGTH)

    def save_and_load() -> None:
        for disk in disks:
            disk.remove(records["key"])
        tier.save(records, payload)
        tier.load(records["key"])

    with Interrupts(called=True) as interrupts:
        save_and_load()
    for at in range(1, interrupts.count + 1):
        with Interrupts({at}, called=True), contextlib.suppress(KeyboardInterrupt):
            save_and_load()
    for disk in disks:
        settled(disk)
    assert tier.save(records, payload).all()
    assert all(is_block(b, n) for n, b in enumerate(tier.load(records["key"])))
    tier.remove(records["key"])
    assert [disk.stat()["used_bytes"] for disk in disks] == [0, 0]
    tier.close()
