# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The disk tier with a failing, lying or hanging disk."""

import contextlib
import errno
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.blocks import eventually
from support.commands import captured
from support.disk_faults import (
    SIZE,
    FaultyDisk,
    FaultyEngine,
    LosingEngine,
    PowerCut,
    VolatileEngine,
)
from support.disk_tiers import MIB, is_block, keys_of, payload_of, records_of
from support.emulation import PATIENCE
from support.interrupts import Interrupts

from beluga.errors import TierError
from beluga.tiers import hanging as hanging_calls
from beluga.tiers.disk import DiskTier, SpreadTier
from beluga.tiers.disk.health import DirectionHealth

LENGTH = FaultyDisk.length

LIMIT_S = 0.3
SOON_S = 20.0 * PATIENCE  # limit of a call on a hanging that hangs


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[FaultyDisk]:
    disk = FaultyDisk(tmp_path / "disk")
    yield disk
    disk.tier.close()


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.EIO, "io"),
        (errno.ENOSPC, "full"),
        (errno.EROFS, "read-only"),
        (errno.ENODEV, "vanished"),
    ],
)
def test_a_write_that_fails_saves_nothing(disk: FaultyDisk, code: int, kind: str) -> None:
    assert all(disk.save(range(4)))
    disk.engine.write_error = code
    assert disk.save(range(2, 8)) == [True, True] + [False] * 4
    assert disk.failures("save", kind) == 4
    assert disk.load(range(8)) == [True] * 4 + [False] * 4
    disk.engine.write_error = 0
    assert all(disk.save(range(8)))
    assert all(disk.load(range(8)))


@pytest.mark.parametrize("where", ["index", "data"])
def test_a_short_write_saves_nothing(disk: FaultyDisk, where: str) -> None:
    border = disk.tier._store.file.layout.data_offset
    disk.engine.only = lambda offset: (offset < border) == (where == "index")
    disk.engine.short = True
    assert not any(disk.save(range(4)))
    assert disk.failures("save", "short") == 4
    assert not any(disk.load(range(4)))
    disk.engine.short = False
    assert all(disk.save(range(4)))
    disk.reopen()
    assert all(disk.load(range(4)))


def test_a_disk_that_does_not_sync_saves_nothing(disk: FaultyDisk) -> None:
    disk.engine.sync_error = errno.EIO
    assert not any(disk.save(range(4)))
    assert not any(disk.load(range(4)))
    disk.engine.sync_error = 0
    assert all(disk.save(range(4)))


def test_a_removal_that_a_failed_sync_has_lost_is_written_again(tmp_path: Path) -> None:
    """The next sync succeeds, since the kernel has dropped the failed pages."""
    engines: list[LosingEngine] = []

    def make(fd: int, depth: int) -> LosingEngine:
        engines.append(LosingEngine(fd, depth))
        return engines[-1]

    tier = DiskTier(tmp_path / "disk", SIZE, io=make)
    assert tier.save(records_of(range(2), LENGTH), payload_of(range(2), LENGTH)).all()
    engines[0].sync_error = errno.EIO
    assert not tier.remove_durably(keys_of([0])).any()
    engines[0].sync_error = 0
    assert tier.remove_durably(keys_of([0])).all()
    tier.close()
    tier = DiskTier(tmp_path / "disk", SIZE)
    assert tier.contains(keys_of(range(2))).tolist() == [False, True]
    tier.close()


def test_a_removal_on_a_missing_file_is_not_durable(disk: FaultyDisk) -> None:
    assert all(disk.save(range(2)))
    blocks, away = disk.path / "blocks", disk.path / "away"
    blocks.rename(away)
    assert not disk.tier.remove_durably(keys_of([0])).any()
    away.rename(blocks)
    assert disk.tier.remove_durably(keys_of([0])).all()
    disk.reopen()
    assert disk.load(range(2)) == [False, True]


@pytest.mark.parametrize("fault", ["error", "short"])
def test_a_read_that_fails_is_a_miss_and_the_block_stays(disk: FaultyDisk, fault: str) -> None:
    assert all(disk.save(range(4)))
    disk.engine.read_error, disk.engine.short = errno.EIO * (fault == "error"), fault == "short"
    assert not any(disk.load(range(4)))
    assert disk.failures("load", "io" if fault == "error" else "short") == 4
    disk.engine.read_error, disk.engine.short = 0, False
    assert all(disk.load(range(4)))


def test_a_bit_that_flips_once_is_read_again(disk: FaultyDisk) -> None:
    assert all(disk.save(range(4)))
    disk.engine.flip = 2
    assert all(disk.load(range(4)))


def test_bytes_that_stay_wrong_are_dropped_and_reported(disk: FaultyDisk) -> None:
    lost: list[int] = []
    disk.tier.on_lost(lambda keys: lost.extend(keys[:, 0].tolist()))
    assert all(disk.save(range(4)))
    place = disk.tier._store.find(keys_of([2]))[1]
    disk.tier._store.unpin(place)
    disk.engine.only = lambda offset: offset == int(place["offset"][0])
    disk.engine.flip = 2
    assert disk.load(range(4)) == [True, True, False, True]
    assert disk.failures("load", "checksum") == 1
    assert lost == [2]
    assert disk.tier.contains(keys_of([2])).tolist() == [False]
    assert all(disk.save(range(4)))
    assert all(disk.load(range(4)))


@pytest.mark.parametrize("lie", ["drop", "misplace"])
def test_a_disk_that_loses_acknowledged_writes_yields_misses(disk: FaultyDisk, lie: str) -> None:
    assert all(disk.save(range(4)))
    border = disk.tier._store.file.layout.data_offset
    disk.engine.only = lambda offset: offset >= border
    disk.engine.drop, disk.engine.misplace = lie == "drop", 40960 * (lie == "misplace")
    disk.save(range(10, 14))
    disk.engine.drop, disk.engine.misplace = False, 0
    assert disk.load(range(4)) == [True] * 4
    loaded = disk.load(range(10, 14))
    assert not all(loaded)
    assert disk.failures("load", "checksum") == loaded.count(False)


def _flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 16]))


@pytest.mark.parametrize("io", ["uring", "threads"])
def test_a_flipped_bit_in_the_file_is_a_miss(tmp_path: Path, io: str) -> None:
    try:
        tier = DiskTier(tmp_path / "disk", SIZE, io=io)
    except TierError as error:
        pytest.skip(str(error))
    tier.save(records_of(range(6), LENGTH), payload_of(range(6), LENGTH))
    store = tier._store
    assert store is not None
    places = store.find(keys_of(range(6)))[1]
    store.unpin(places)
    _flip(tmp_path / "disk/blocks", int(places["offset"][1]) + 39_999)
    _flip(tmp_path / "disk/blocks", int(places["offset"][4]))
    blocks = tier.load(keys_of(range(6)))
    assert [block is None for block in blocks] == [False, True, False, False, True, False]
    assert all(b is None or is_block(b, n) for n, b in enumerate(blocks))
    tier.close()


def test_a_flipped_bit_in_the_index_is_a_miss(disk: FaultyDisk) -> None:
    assert all(disk.save(range(6)))
    place = disk.tier._store.find(keys_of([2]))[1]
    disk.tier.close()
    for field in range(0, 64, 8):
        offset = 4096 + 64 * int(place["slot"][0]) + field
        _flip(disk.path / "blocks", offset)
        disk.open()
        assert disk.load(range(6)) == [True, True, False, True, True, True]
        assert disk.tier.stat()["damaged"] == 1
        disk.tier.close()
        _flip(disk.path / "blocks", offset)
    disk.open()
    assert all(disk.load(range(6)))


def test_an_entry_of_another_slot_or_store_is_ignored(disk: FaultyDisk, tmp_path: Path) -> None:
    assert all(disk.save(range(2)))
    disk.tier.close()
    file = disk.path / "blocks"
    with file.open("r+b") as blocks:
        blocks.seek(4096)
        entry = blocks.read(64)
        blocks.seek(4096 + 64 * 9)
        blocks.write(entry)
    other = DiskTier(tmp_path / "other", SIZE)
    other.close()
    with (tmp_path / "other/blocks").open("r+b") as blocks:
        blocks.seek(4096)
        blocks.write(entry)
    disk.open()
    assert disk.tier.stat()["damaged"] == 1
    assert all(disk.load(range(2)))
    other = DiskTier(tmp_path / "other", SIZE)
    assert other.stat()["damaged"] == 1
    assert not len(other.keys())
    other.close()


@pytest.mark.parametrize("dispute", ["key", "space"])
def test_the_newer_of_two_entries_for_one_key_or_space_is_used(
    disk: FaultyDisk, dispute: str
) -> None:
    """The disk kept an entry that was cleared, while its key or its space was reused."""
    assert all(disk.save(range(2)))
    at = 4096 + 64 * (dispute == "space")
    with (disk.path / "blocks").open("rb") as file:
        file.seek(at)
        old = file.read(64)
    assert disk.tier.remove(keys_of(range(2))) == 2
    if dispute == "key":
        assert all(disk.save(range(2, 3)))  # the old slot of block 0, which gets another one
        assert all(disk.save(range(1)))
    else:  # a larger block takes the stripe, and block 2 the old slot of block 1
        large = records_of(range(1), 2 * LENGTH), payload_of(range(1), 2 * LENGTH)
        assert disk.tier.save(*large).all()
        assert all(disk.save(range(2, 3)))
    assert all(disk.save(range(3, 20)))
    disk.tier.close()
    with (disk.path / "blocks").open("rb+") as file:
        file.seek(at)
        file.write(old)
    disk.open()
    assert disk.load(range(1, 20)) == [False, False] + [True] * 17
    newer = disk.tier.load(keys_of(range(1)))[0]
    assert newer is not None
    assert len(newer.payload) == LENGTH * (1 + (dispute == "space"))
    assert disk.tier.stat()["damaged"] == 1
    assert disk.tier.stat()["blocks"] == 18
    assert all(disk.save(range(20)))


def test_a_file_cut_short_yields_misses(disk: FaultyDisk) -> None:
    assert all(disk.save(range(8)))
    places = disk.tier._store.find(keys_of(range(8)))[1]
    disk.tier._store.unpin(places)
    os.truncate(disk.path / "blocks", int(places["offset"][4]) + 4096)
    assert disk.load(range(8)) == [True] * 4 + [False] * 4
    assert disk.failures("load", "short") == 4


def test_a_failed_disk_is_disabled_and_used_again_after_recovery(disk: FaultyDisk) -> None:
    assert all(disk.save(range(2)))
    disk.engine.read_error = errno.EIO
    for _ in range(10):
        assert not any(disk.load(range(2)))
    assert disk.engine.reads <= 3 * 4
    before = disk.engine.reads
    assert disk.tier.contains(keys_of(range(3))).tolist() == [True, True, False]
    disk.now += 1000
    assert not any(disk.load(range(2)))
    assert disk.engine.reads > before
    disk.engine.read_error = 0
    assert not any(disk.load(range(2)))
    disk.now += 1000
    assert all(disk.load(range(2)))
    assert all(disk.load(range(2)))


def test_damaged_blocks_are_lost_and_the_others_are_still_read(disk: FaultyDisk) -> None:
    assert all(disk.save(range(8)))
    for number in range(6):
        disk.engine.flip = 2  # on both attempts
        assert disk.load(range(number, number + 1)) == [False]
        assert disk.tier.contains(keys_of([number, 7])).tolist() == [False, True]
    assert disk.load(range(6, 8)) == [True, True]


def test_many_damaged_blocks_in_a_row_are_a_failure_of_the_disk() -> None:
    health = DirectionHealth("disk:test", "load", lambda: 0.0)
    for count in range(3 * 16):
        assert health.allows(), count
        health.failed(errno.EBADMSG)
    assert not health.allows()
    health.succeeded()
    for _ in range(15):
        health.failed(errno.EBADMSG)
    health.failed(errno.EIO)
    health.failed(errno.EIO)
    assert health.allows()
    health.failed(errno.EIO)
    assert not health.allows()


def test_a_warning_is_logged_once_a_minute(
    disk: FaultyDisk, caplog: pytest.LogCaptureFixture
) -> None:
    disk.engine.write_error = errno.EIO
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            disk.save(range(2))
            disk.now += 10
        assert len(caplog.records) == 1
        disk.now += 60
        disk.save(range(2))
    assert len(caplog.records) == 2


def test_a_removed_file_is_created_again(disk: FaultyDisk) -> None:
    lost: list[int] = []
    disk.tier.on_lost(lambda keys: lost.extend(keys[:, 0].tolist()))
    assert all(disk.save(range(4)))
    (disk.path / "blocks").unlink()
    for _ in range(3):
        assert not any(disk.save(range(4, 8)))
    assert disk.failures("save", "vanished") == 12
    disk.now += 1000
    assert all(disk.save(range(4, 8)))
    assert disk.load(range(8)) == [False] * 4 + [True] * 4
    assert sorted(lost) == [0, 1, 2, 3]
    assert len(disk.engines) == 2


def until_it_is_reopened(disk: FaultyDisk, number: int) -> None:
    """Save block ``number`` until the file at the path is open."""
    for _ in range(3):
        assert not any(disk.save(range(number, number + 1)))
    disk.now += 1000
    assert all(disk.save(range(number, number + 1)))


def test_a_removed_and_restored_file_has_no_blocks(disk: FaultyDisk) -> None:
    """A file system was unmounted and is mounted again: the file has missed removals, and another
    file has executed them.
    """
    assert all(disk.save(range(4)))
    first, away = disk.path / "blocks", disk.path / "away"
    first.rename(away)
    until_it_is_reopened(disk, 20)
    assert not disk.tier.remove_durably(keys_of(range(1))).any()  # the former file may come back
    first.rename(disk.path / "between")
    away.rename(first)
    until_it_is_reopened(disk, 30)
    assert disk.load(range(4)) == [False] * 4
    assert disk.tier.remove_durably(keys_of(range(1))).all()
    disk.reopen()
    assert disk.load(range(4)) == [False] * 4
    assert disk.load(range(30, 31)) == [True]


def test_a_file_whose_blocks_cannot_be_dropped_is_not_used(disk: FaultyDisk) -> None:
    other = FaultyDisk(disk.path.parent / "other")
    assert all(other.save(range(4)))
    other.tier.close()
    (disk.path / "blocks").unlink()
    (other.path / "blocks").rename(disk.path / "blocks")
    make = disk.tier._settings.maker

    def read_only(fd: int, depth: int) -> FaultyEngine:
        made = make(fd, depth)
        made.write_error = errno.EROFS
        return made

    disk.tier._settings = replace(disk.tier._settings, maker=read_only)
    for _ in range(4):
        assert not any(disk.save(range(4, 5)))
        disk.now += 1000
    assert disk.load(range(4)) == [False] * 4


# ---- The file when it is opened


def _damage_header(file: Path) -> None:
    _flip(file, 30)


def _newer(file: Path) -> None:
    with file.open("r+b") as blocks:
        blocks.seek(8)
        blocks.write(bytes([99]))


def _cut(file: Path) -> None:
    os.truncate(file, 8192)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (_damage_header, "header of .* is damaged; remove it"),
        (_newer, "version 99, .* remove it"),
        (_cut, "is truncated"),
    ],
)
def test_files_of_other_programs_are_not_changed(
    disk: FaultyDisk, change: Callable[[Path], None], text: str
) -> None:
    disk.save(range(2))
    disk.tier.close()
    file = disk.path / "blocks"
    change(file)
    before = file.read_bytes()
    with pytest.raises(TierError, match=text):
        DiskTier(disk.path, SIZE)
    assert file.read_bytes() == before


def test_invalid_arguments_are_rejected(tmp_path: Path) -> None:
    for change, text in (
        ({"size": MIB}, "too small"),
        ({"size": 1 << 60}, "bytes free"),
        ({"io": "magic"}, "uring or threads"),
        ({"eviction": "best"}, "lru"),
        ({"path": tmp_path / "no/such/folder"}, "cannot be created"),
    ):
        arguments = {"path": tmp_path / "disk", "size": SIZE, **change}
        with pytest.raises(TierError, match=text):
            DiskTier(**arguments)


def test_the_path_of_a_living_process_is_refused_with_its_number(disk: FaultyDisk) -> None:
    code = f"from beluga.tiers.disk import DiskTier; DiskTier({str(disk.path)!r}, {SIZE})"
    done = captured([sys.executable, "-c", code], timeout=60 * PATIENCE)
    assert f"is in use by process {os.getpid()}; give each server" in done.stderr


def test_a_file_path_works_like_a_folder(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    raw.touch()
    tier = DiskTier(raw, SIZE)
    assert tier.save(records_of(range(3), LENGTH), payload_of(range(3), LENGTH)).all()
    tier.close()
    tier = DiskTier(raw, SIZE)
    assert all(is_block(b, n) for n, b in enumerate(tier.load(keys_of(range(3)))))
    tier.close()


def test_a_forked_child_leaves_the_file_to_its_parent(disk: FaultyDisk) -> None:
    assert all(disk.save(range(2)))
    if (child := os.fork()) == 0:
        os._exit(disk.tier.load(keys_of(range(2))) != [None, None])
    assert os.waitpid(child, 0)[1] == 0
    assert all(disk.load(range(2)))


# ---- Power cuts


@pytest.mark.parametrize("seed", range(40))
def test_a_power_cut_loses_nothing_that_was_saved(tmp_path: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    path, size = tmp_path / "disk", 6 * MIB
    DiskTier(path, size).close()
    cut_at = int(random.integers(1, 60))
    tier = DiskTier(path, size, io=lambda fd, depth: VolatileEngine(fd, depth, cut_at, seed))
    saved: set[int] = set()
    lengths = [20_000, 20_000, 300_000] if seed % 2 else [100_000]
    try:
        for first in range(0, 400, 4):
            numbers = range(first, first + 4)
            length = int(random.choice(lengths))
            done = tier.save(records_of(numbers, length), payload_of(numbers, length))
            saved.update(n for n, ok in zip(numbers, done.tolist(), strict=True) if ok)
    except PowerCut:
        pass
    expected = [n for n in saved if tier.contains(keys_of([n]))[0]]
    tier.close()
    tier = DiskTier(path, size)
    assert not [n for n in expected if not is_block(tier.load(keys_of([n]))[0], n)]
    for number in tier.keys()[:, 0].tolist():
        block = tier.load(keys_of([number]))[0]
        assert block is None or is_block(block, number)
    tier.close()


# ---- Several disks


def test_blocks_are_spread_and_found_on_all_disks(tmp_path: Path) -> None:
    disks = [DiskTier(tmp_path / f"disk{i}", SIZE) for i in range(3)]
    tier = SpreadTier(disks)
    numbers = range(90)
    assert tier.save(records_of(numbers, LENGTH), payload_of(numbers, LENGTH)).all()
    assert all(20 <= disk.stat()["blocks"] <= 40 for disk in disks)
    assert all(is_block(b, n) for n, b in enumerate(tier.load(keys_of(numbers))))
    assert tier.contains(keys_of([3, 1000])).tolist() == [True, False]
    assert tier.save(records_of(numbers, LENGTH), payload_of(numbers, LENGTH)).all()
    assert sum(disk.stat()["blocks"] for disk in disks) == 90 == len(tier.keys())
    assert tier.remove(keys_of(range(10))) == 10
    tier.close()


@pytest.fixture
def disks(tmp_path: Path) -> list[FaultyDisk]:
    return [FaultyDisk(tmp_path / f"disk{i}") for i in range(2)]


@pytest.fixture
def spread(disks: list[FaultyDisk]) -> Iterator[SpreadTier]:
    """A tier over two disks with 20 blocks."""
    tier = SpreadTier([disk.tier for disk in disks])
    assert tier.save(records_of(range(20), LENGTH), payload_of(range(20), LENGTH)).all()
    yield tier
    tier.close()


def test_a_failed_disk_gets_no_blocks(disks: list[FaultyDisk], spread: SpreadTier) -> None:
    disks[0].engine.write_error = disks[0].engine.read_error = errno.EIO
    writes = []
    for first in range(20, 120, 20):
        numbers = range(first, first + 20)
        assert spread.save(records_of(numbers, LENGTH), payload_of(numbers, LENGTH)).all()
        writes.append(disks[0].engine.writes)
    assert writes[1] < writes[2] == writes[3] == writes[4]
    assert all(is_block(b, n) for n, b in zip(numbers, spread.load(keys_of(numbers)), strict=True))
    assert disks[0].failures("save", "io") > 0


@pytest.mark.parametrize("number", [0, 1])
def test_a_removal_is_durable_once_every_disk_has_synced_it(
    disks: list[FaultyDisk], spread: SpreadTier, number: int
) -> None:
    disks[number].engine.sync_error = errno.EIO
    assert not spread.remove_durably(keys_of(range(20))).any()
    disks[number].engine.sync_error = 0
    assert spread.remove_durably(keys_of(range(20))).all()


def test_blocks_of_a_failed_disk_stay_indexed_and_are_saved_to_another(
    disks: list[FaultyDisk], spread: SpreadTier
) -> None:
    keys = keys_of(range(20))
    disks[0].engine.read_error = errno.EIO
    for _ in range(4):
        blocks = spread.load(keys)
        assert 0 < sum(block is None for block in blocks) < 20
        assert spread.contains(keys).all()
    assert not disks[0].tier.loads.allows()
    assert spread.save(records_of(range(20), LENGTH), payload_of(range(20), LENGTH)).all()
    assert all(is_block(b, n) for n, b in enumerate(spread.load(keys)))


def go_on(hanging: FaultyDisk) -> None:
    """Continue the hanging operations, and wait until they have ended."""
    hanging.engine.hung = set()
    hanging.engine.gate.set()
    assert eventually(lambda: hanging.tier._threads.hung == 0)


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[FaultyDisk]:
    hanging = FaultyDisk(tmp_path / "disk", LIMIT_S)
    yield hanging
    go_on(hanging)
    hanging.tier.close()


def test_a_hanging_load_is_a_miss_and_suspends_the_disk(hanging: FaultyDisk) -> None:
    """Memory that the late read may write is not used again, and its blocks are not moved."""
    assert all(hanging.save(range(4)))
    hanging.engine.hung = {"read"}
    started = time.monotonic()
    assert not any(hanging.load(range(4)))
    assert time.monotonic() - started < SOON_S
    assert hanging.failures("load", "timeout") == 4
    assert hanging.tier.contains(keys_of(range(5))).tolist() == [True] * 4 + [False]
    reads = hanging.engine.reads
    assert not any(hanging.load(range(4)))
    assert hanging.engine.reads == reads
    others = [hanging.tier._arena.take(4 * 40_960) for _ in range(20)]
    for other in others:
        other[:] = 0xAA
    used = hanging.tier.stat()["used_bytes"]
    assert hanging.tier.remove(keys_of(range(1))) == 1
    assert hanging.tier.stat()["used_bytes"] == used
    go_on(hanging)
    assert all((other == 0xAA).all() for other in others)
    assert hanging.tier.stat()["used_bytes"] == used * 3 // 4
    assert hanging.load(range(4)) == [False] + [True] * 3


def test_a_save_that_hangs_is_not_saved_later_with_other_bytes(hanging: FaultyDisk) -> None:
    hanging.engine.hung = {"write"}
    payload = payload_of(range(4), LENGTH).copy()
    assert not hanging.tier.save(records_of(range(4), LENGTH), payload).any()
    assert hanging.failures("save", "timeout") == 4
    payload[:] = 0
    go_on(hanging)
    assert not any(hanging.load(range(4)))
    assert hanging.tier.stat()["used_bytes"] == 0
    assert all(hanging.save(range(4)))
    assert all(hanging.load(range(4)))


def test_space_of_a_late_write_is_not_reused(hanging: FaultyDisk) -> None:
    hanging.engine.hung = {"write"}
    assert not any(hanging.save(range(4)))
    hanging.engine.hung = set()
    hanging.now += 1000
    saved = range(10, 600)
    for first in range(10, 600, 10):
        assert all(hanging.save(range(first, first + 10)))
    go_on(hanging)
    there = np.flatnonzero(hanging.tier.contains(keys_of(saved)))
    assert len(there) > 100
    assert [n for n in there.tolist() if not all(hanging.load(range(n + 10, n + 11)))] == []


@pytest.mark.parametrize("first", ["write", "sync"])
def test_saves_queued_after_a_hanging_one_are_abandoned_too(
    hanging: FaultyDisk, first: str
) -> None:
    assert all(hanging.save(range(1)))
    hanging.engine.hung = {first}
    for number in range(1, 4):
        hanging.now += 1000
        assert hanging.save(range(number, number + 1)) == [False]
    assert hanging.load(range(1)) == [True]  # reads do not hang
    go_on(hanging)
    assert all(hanging.save(range(8)))
    assert all(hanging.load(range(8)))


def test_a_hanging_removal_takes_effect(hanging: FaultyDisk) -> None:
    assert all(hanging.save(range(4)))
    hanging.engine.hung = {"write"}
    assert hanging.tier.remove(keys_of(range(3))) == 3
    assert hanging.tier.contains(keys_of(range(4))).tolist() == [False] * 3 + [True]
    go_on(hanging)


def test_threads_that_hang_are_bounded(
    hanging: FaultyDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hanging_calls, "_HUNG_MAX", 2)
    assert all(hanging.save(range(1)))
    hanging.engine.hung = {"read"}
    reads = hanging.engine.reads
    for _ in range(5):
        hanging.now += 1000
        assert hanging.load(range(1)) == [False]
    assert hanging.engine.reads == reads + 2
    assert hanging.tier._threads.hung == 2
    go_on(hanging)
    hanging.now += 1000
    assert hanging.load(range(1)) == [True]


def test_a_tier_that_hangs_is_closed_and_stays_locked_until_it_continues(tmp_path: Path) -> None:
    hanging = FaultyDisk(tmp_path / "disk", LIMIT_S)
    assert all(hanging.save(range(2)))
    hanging.engine.hung = {"read"}
    assert not any(hanging.load(range(2)))
    started = time.monotonic()
    hanging.tier.close()
    assert time.monotonic() - started < SOON_S
    assert hanging.tier.load(keys_of(range(2))) == [None, None]
    with pytest.raises(TierError, match="in use"):
        DiskTier(tmp_path / "disk", SIZE)
    go_on(hanging)
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
    tier = SpreadTier([hanging.tier for hanging in disks])
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


def test_the_wait_of_a_save_for_another_one_is_bounded(hanging: FaultyDisk) -> None:
    store = hanging.tier._store
    assert store is not None
    places = store.reserve(records_of(range(1), LENGTH))
    started = time.monotonic()
    assert hanging.save(range(3)) == [False, True, True]
    assert time.monotonic() - started < SOON_S
    store.abort(places)
    assert all(hanging.save(range(3)))


# ---- Interrupts


def interrupting(test: Callable[[Path], None]) -> Callable[[Path], None]:
    unraisable = "ignore::pytest.PytestUnraisableExceptionWarning"  # in a finalizer
    return pytest.mark.timeout(120)(pytest.mark.filterwarnings(unraisable)(test))


def interrupted_everywhere(tiers: list[DiskTier], call: Callable[[], object]) -> int:
    """Interrupt a call at each of its points in turn; return how many there were."""
    with Interrupts(called=True) as interrupts:
        call()
    for at in range(1, interrupts.count + 1):
        with Interrupts({at}, called=True), contextlib.suppress(KeyboardInterrupt):
            call()
        for tier in tiers:
            assert eventually(lambda tier=tier: not tier._store.users)
    return interrupts.count


@interrupting
def test_an_interrupted_save_leaves_nothing_behind(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "disk", SIZE, limit_s=SOON_S)
    records, payload = records_of(range(3), LENGTH), payload_of(range(3), LENGTH)

    def save() -> None:
        tier.remove(records["key"])
        tier.save(records, payload)

    assert interrupted_everywhere([tier], save) > 10
    assert tier.save(records, payload).all()
    assert all(is_block(b, n) for n, b in enumerate(tier.load(records["key"])))
    assert tier.remove(records["key"]) == 3
    assert tier.stat()["used_bytes"] == 0
    tier.close()
    DiskTier(tmp_path / "disk", SIZE).close()


@interrupting
def test_an_interrupted_load_leaves_nothing_behind(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "disk", SIZE, limit_s=SOON_S)
    keys = keys_of(range(3))
    assert tier.save(records_of(range(3), LENGTH), payload_of(range(3), LENGTH)).all()
    assert interrupted_everywhere([tier], lambda: (tier.load(keys), tier.contains(keys))) > 10
    assert all(is_block(b, n) for n, b in enumerate(tier.load(keys)))
    assert tier.remove(keys) == 3
    assert tier.stat()["used_bytes"] == 0  # no block is pinned
    tier.close()
    DiskTier(tmp_path / "disk", SIZE).close()


@interrupting
def test_interrupted_calls_of_several_disks_leave_nothing_behind(tmp_path: Path) -> None:
    disks = [DiskTier(tmp_path / f"disk{i}", SIZE, limit_s=SOON_S) for i in range(2)]
    tier = SpreadTier(disks)
    numbers = range(8)
    records, payload = records_of(numbers, LENGTH), payload_of(numbers, LENGTH)

    def save_and_load() -> None:
        for hanging in disks:
            hanging.remove(records["key"])
        tier.save(records, payload)
        tier.load(records["key"])

    assert interrupted_everywhere(disks, save_and_load) > 10
    assert tier.save(records, payload).all()
    assert all(is_block(b, n) for n, b in enumerate(tier.load(records["key"])))
    tier.remove(records["key"])
    assert [hanging.stat()["used_bytes"] for hanging in disks] == [0, 0]
    tier.close()
