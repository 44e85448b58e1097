# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Removals reach the disks that a server lacks, whichever disks it has in their place."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from support.blocks import eventually
from support.disk_tiers import payload_of, records_of

from beluga import IndexServer, KVCache, Pool
from beluga.tiers import TierService, TierSettings
from beluga.tiers.disk import DiskTier, file

LENGTH = 100_000
LONG_S = 60.0
SIZE = 16 << 20


def digest(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def content(name: str) -> NDArray[np.uint8]:
    seed = int.from_bytes(digest(name)[:4], "little")
    return np.random.default_rng(seed).integers(0, 256, (1, LENGTH), np.uint8)


class Served:
    """A cache of a served pool over some disks."""

    def __init__(self, cache: KVCache, server: IndexServer, service: TierService) -> None:
        self.cache, self.server, self._service = cache, server, service

    def save(self, *names: str) -> None:
        """Put blocks, and wait until the disk has them."""
        for name in names:
            assert self.cache.put([digest(name)], content(name)).stored
        assert eventually(lambda: self.server.lower_stat().dirty_count == 0, LONG_S)

    def has(self, name: str) -> bool:
        """Return whether a block is found with its bytes."""
        target = np.zeros((1, LENGTH), np.uint8)
        self.cache.onboard([digest(name)], wait_s=LONG_S)
        found = self.cache.get([digest(name)], target).hits == 1
        assert not found or (target == content(name)).all()
        return found

    def on_disk(self, name: str) -> bool:
        """Return whether a disk has a block."""
        return bool(self._service.tiers[0].contains(self.cache.keys([digest(name)]))[0])

    def remove(self, *names: str) -> None:
        self.cache.remove([digest(name) for name in names])


@contextmanager
def serving(path: Path, *disks: Path, forget: str = "") -> Iterator[Served]:
    """Serve the pool over these disks."""
    names = tuple(map(str, disks))
    tiers = TierSettings(disks=names, disk_bytes=SIZE * len(names), admission="always")
    with Pool.open([path]) as pool:
        server = IndexServer(pool)
        if forget:
            server.give_up_tier(forget)
        service = TierService(server, pool, tiers)
        with server:
            service.start()
            try:
                with KVCache(pool, namespace="test", timeout_s=20) as cache:
                    yield Served(cache, server, service)
            finally:
                service.stop()


@pytest.fixture
def pool(shm: Path) -> Path:
    Pool.create([shm / "pool"], device_size=24 << 20, sparse=True).close()
    return shm / "pool"


def test_a_removal_reaches_a_disk_that_another_one_has_replaced(pool: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    with serving(pool, first) as served:
        served.save("removed", "stays")
    with serving(pool, second) as served:
        served.remove("removed")
        assert not served.has("removed")
    with serving(pool, first) as served:
        assert not served.has("removed")
        assert served.has("stays") and served.on_disk("stays")


def test_a_removal_that_a_disk_has_refused_waits_for_that_disk(pool: Path, tmp_path: Path) -> None:
    """The tombstone is not cleared by another disk, which has no such block."""
    first, second = tmp_path / "first", tmp_path / "second"
    with serving(pool, first) as served:
        served.save("removed")
        (first / "blocks").rename(first / "away")  # the file system is gone for a while
        served.remove("removed")
    with serving(pool, second) as served:
        assert not served.has("removed")
        assert served.server.lower_stat().removal_parked == 1
    (first / "away").rename(first / "blocks")
    with serving(pool, first) as served:
        assert not served.has("removed")
        assert eventually(lambda: served.server.lower_stat().removal_count == 0, LONG_S)


def test_a_file_that_was_replaced_and_restored_has_no_blocks(pool: Path, tmp_path: Path) -> None:
    """A removal that the file in its place has executed is not one of the file that comes back."""
    disk = tmp_path / "disk"
    with serving(pool, disk) as served:
        served.save("removed")
        (disk / "blocks").rename(disk / "away")
    with serving(pool, disk) as served:  # with a new file
        served.remove("removed")
        served.save("other")
    (disk / "blocks").rename(disk / "between")
    (disk / "away").rename(disk / "blocks")
    with serving(pool, disk) as served:
        assert not served.has("removed")


def test_more_disks_and_fewer_are_the_same_set(pool: Path, tmp_path: Path) -> None:
    one, other, third = (tmp_path / name for name in ("one", "other", "third"))
    with serving(pool, one) as served:
        served.save("a", "b")
    with serving(pool, one, other) as served:
        assert served.has("a") and served.has("b")
        served.remove("a")
    with serving(pool, one) as served:
        assert not served.has("a")
        assert served.on_disk("b")
        assert served.server.lower_stat().tier_count == 2  # this disk has left the set of both
    with serving(pool, third) as served:
        served.save("c")
    with serving(pool, one, third) as served:  # a disk of another set is formatted again
        assert served.on_disk("b")
        assert not served.has("a")
        assert served.server.lower_stat().tier_count == 3


def test_disks_removed_for_good_are_dropped_at_once(pool: Path, tmp_path: Path) -> None:
    for number in range(3):
        with serving(pool, tmp_path / f"{number}") as served:
            served.save(f"{number}")
    with serving(pool, tmp_path / "2") as served:
        served.remove("2")
        stat = served.server.lower_stat()
        assert (stat.tier_count, stat.removal_parked) == (3, 2)
    with serving(pool, tmp_path / "2", forget="disk") as served:
        stat = served.server.lower_stat()
        assert (stat.tier_count, stat.removal_count) == (1, 0)
        assert not served.has("2")


def test_a_disk_of_a_release_without_sets_keeps_its_blocks(
    pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = tmp_path / "disk"
    with monkeypatch.context() as patch:
        patch.setattr(file, "new_set", lambda: 0)
        with serving(pool, disk) as served:
            served.save("a", "b")
    with serving(pool, disk) as served:
        served.remove("a")
        assert served.has("b")
        assert served.server.lower_stat().tier_count == 1
    with serving(pool, tmp_path / "new") as served:
        served.remove("b")
    with serving(pool, disk) as served:
        assert not served.has("a")
        assert not served.has("b")


def test_a_disk_of_another_set_is_empty(tmp_path: Path) -> None:
    """It may have missed removals of the set that it is in now."""
    for number, has in ((1, 0), (1, 3), (None, 3), (2, 0), (1, 0), (None, 3)):
        disk_set = None if number is None else file.DiskSet(number, 1)
        tier = DiskTier(tmp_path / "disk", SIZE, disk_set=disk_set)
        assert len(tier.keys()) == has, number
        assert tier.save(records_of(range(3), 4096), payload_of(range(3), 4096)).all()
        tier.close()


NAMES = [f"block {number}" for number in range(8)]


@pytest.mark.parametrize("order", ["away", "away and here", "here and away"])
def test_a_removal_reaches_a_disk_that_was_taken_out_of_the_set(
    pool: Path, tmp_path: Path, order: str
) -> None:
    disks = {name: tmp_path / name for name in ("away", "here")}
    with serving(pool, disks["away"]) as served:
        served.save(*NAMES)
    with serving(pool, *disks.values()) as served:
        assert all(served.has(name) for name in NAMES)
    with serving(pool, disks["here"]) as served:
        served.remove(*NAMES)
    with serving(pool, *(disks[name] for name in order.split(" and "))) as served:
        assert not any(served.has(name) for name in NAMES)


@pytest.mark.parametrize("forget", ["", "disk"])
def test_a_disk_that_leaves_a_set_executes_its_removals(
    pool: Path, tmp_path: Path, forget: str
) -> None:
    """They are pending, because a disk of the set has refused them."""
    disks = [tmp_path / name for name in ("here", "away")]
    with serving(pool, disks[0]) as served:
        served.save(*NAMES)
    with serving(pool, *disks) as served:
        for disk in disks:
            (disk / "blocks").rename(disk / "away")
        served.remove(*NAMES[:4])
        assert served.server.lower_stat().removal_count > 0
    for disk in disks:
        (disk / "away").replace(disk / "blocks")
    with serving(pool, disks[0], forget=forget) as served:
        assert not any(served.has(name) for name in NAMES[:4])
        assert any(served.on_disk(name) for name in NAMES[4:])
    with serving(pool, disks[0]) as served:
        assert not any(served.has(name) for name in NAMES[:4])
