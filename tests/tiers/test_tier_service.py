# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The service between a pool and its lower tiers: what is saved and onboarded, in which order, with
their names; and a pool that is served without a disk until it can be opened.
"""

import contextlib
import hashlib
import json
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from support.blocks import eventually
from support.memory_tier import MemoryTier

from beluga import KVCache, Pool
from beluga.errors import BadRequestError, OffloadingError, TierError
from beluga.index import (
    LOWER_NOTE,
    LOWER_RECORD,
    NAME,
    BlockState,
    IndexClient,
    IndexServer,
    LowerWork,
    Work,
    chain_names,
    check_pool,
    read_names,
)
from beluga.metrics import REGISTRY, Labels
from beluga.rpc import Client
from beluga.tiers import BLOCK, LowerTier, StoredBlock, TierService, TierSettings, service
from beluga.tiers.admission import Admission
from beluga.tiers.disk import DiskTier
from beluga.tiers.poolside import add_names, named_length, take_name
from beluga.tiers.remote import RemoteTier
from beluga.tiers.settings import LateTier
from tests.events.test_event_service import free_endpoints

LENGTH = 100_000  # several checksums, not a whole number of pages
MANY = 400  # more blocks than the pool has room for
NAMES = [hashlib.sha256(b"block %d" % i).digest() for i in range(MANY)]


def contents(numbers: range) -> NDArray[np.uint8]:
    return np.stack(
        [np.random.default_rng(i).integers(0, 256, LENGTH, dtype=np.uint8) for i in numbers]
    )


class RecordingTier(MemoryTier):
    """Records the keys of loads. It removes nothing while ``stubborn``, and raises ``unable``."""

    def __init__(self, name: str, *, remote: bool) -> None:
        super().__init__(name, remote=remote)
        self.requested: list[NDArray[np.uint64]] = []
        self.removals = 0
        self.stubborn = False
        self.unable: Exception | None = None

    def load(self, keys: NDArray[np.uint64]) -> list[StoredBlock | None]:
        self.requested.append(keys)
        return super().load(keys)

    def remove_durably(self, keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
        self.removals += 1
        if self.unable is not None:
            raise self.unable
        if not self.stubborn:
            self.remove(keys)
        return ~self.contains(keys).astype(np.bool_)


@pytest.fixture
def tier() -> MemoryTier:
    return MemoryTier()


class OldTier(MemoryTier):
    """A tier of a program without ``remove_durably``, which removes and replaces nothing."""

    def remove(self, keys: NDArray[np.uint64]) -> int:
        return 0

    def save(self, records: NDArray[np.void], payload: NDArray[np.uint8]) -> NDArray[np.bool_]:
        new = ~self.contains(records["key"])
        super().save(records[new], payload[new])
        return np.ones(len(records), np.bool_)


class Served:
    """A pool of 24 MiB, its server, and tiers below it."""

    def __init__(self, pool: Pool, cache: KVCache, service: TierService, server: IndexServer):
        self.pool, self.cache, self.service, self.server = pool, cache, service, server

    def put_all(self, numbers: range, step: int = 20) -> None:
        for first in range(numbers.start, numbers.stop, step):
            group = range(first, min(first + step, numbers.stop))
            remaining = list(group)
            while remaining:  # with wait, blocks are rejected until others were offered
                data = np.stack([contents(range(i, i + 1))[0] for i in remaining])
                result = self.cache.put([NAMES[i] for i in remaining], data)
                refused = np.flatnonzero(result.states == BlockState.REFUSED)
                remaining = [remaining[row] for row in refused]

    def offered(self) -> bool:
        return eventually(lambda: self.server.lower_stat().dirty_count == 0)

    def fill(self, count: int) -> None:
        """Put the first blocks, and wait until they were offered to the tiers."""
        self.put_all(range(count))
        assert self.offered()

    def below(self) -> int:
        """Return the first block that only a tier has."""
        return int(np.flatnonzero(self.cache.lookup(NAMES).tiers == 2)[0])

    def wrong(self, numbers: range) -> list[int]:
        """Return the blocks for which a get is not a hit with the right bytes."""
        present = []
        for number in numbers:
            target = np.zeros((1, LENGTH), np.uint8)
            result = self.cache.get([NAMES[number]], target)
            if result.hits != 1 or not np.array_equal(target, contents(range(number, number + 1))):
                present.append(number)
        return present


@contextlib.contextmanager
def serving(
    directory: Path,
    tiers: list[LowerTier],
    *,
    wait: bool = False,
    admission: Admission | None = None,
    coherence: str = "software",
    timeout_s: float = 5.0,
    fill: int = 0,
) -> Iterator[Served]:
    path = directory / "pool"
    if path.exists():
        pool = Pool.open([path])
    else:
        pool = Pool.create([path], device_size=24 << 20, coherence=coherence, sparse=True)
    with pool:
        server = IndexServer(pool)
        service = TierService(server, pool, tiers, wait=wait, admission=admission)
        with server:
            service.start()
            try:
                with KVCache(pool, namespace="test", timeout_s=timeout_s) as cache:
                    served = Served(pool, cache, service, server)
                    served.fill(fill)
                    yield served
            finally:
                service.stop()


def test_evicted_blocks_are_onboarded(shm: Path, tier: MemoryTier) -> None:
    with serving(shm, [tier], wait=True) as served:
        served.put_all(range(MANY))
        assert served.server.index_stat().evict_count > MANY // 4
        assert served.offered()
        assert len(tier.blocks) == MANY
        assert served.wrong(range(MANY)) == []
        assert served.server.lower_stat().unsaved_count == 0


def test_one_get_onboards_a_whole_chain(shm: Path, tier: MemoryTier) -> None:
    with serving(shm, [tier], wait=True, fill=MANY) as served:
        chain = range(50)
        target = np.zeros((len(chain), LENGTH), np.uint8)
        lookup = served.cache.lookup([NAMES[i] for i in chain])
        assert lookup == len(chain)
        assert set(lookup.tiers.tolist()) <= {1, 2}
        assert 2 in lookup.tiers
        result = served.cache.get([NAMES[i] for i in chain], target)
        assert result.hits == len(chain)
        assert np.array_equal(target, contents(chain))
        assert served.cache.lookup([*NAMES[:2], b"x" * 32]).tiers.tolist() == [1, 1, 0]


def test_without_wait_blocks_evicted_before_their_offload_are_dropped(
    shm: Path, tier: MemoryTier
) -> None:
    with serving(shm, [tier]) as served:
        tier.open.clear()
        served.put_all(range(MANY))  # no put waits for the tier
        tier.open.set()
        assert served.offered()
        assert 0 < len(tier.blocks) < MANY
        assert served.server.lower_stat().unsaved_count > 0
        lost = served.wrong(range(MANY))
        assert 0 < len(lost) < MANY


def test_with_wait_a_put_is_refused_until_other_blocks_are_offered(
    shm: Path, tier: MemoryTier
) -> None:
    with serving(shm, [tier], wait=True) as served:
        tier.open.clear()
        with pytest.raises(OffloadingError):
            for i in range(MANY):
                served.cache.put([NAMES[i]], contents(range(i, i + 1))).raise_for_refused()
        tier.open.set()
        served.put_all(range(MANY))
        assert served.wrong(range(MANY)) == []


def test_a_tier_that_saves_nothing_does_not_stop_the_pool(shm: Path, tier: MemoryTier) -> None:
    tier.full = True
    with serving(shm, [tier], wait=True, fill=MANY) as served:
        assert tier.blocks == {}
        assert len(served.wrong(range(MANY))) > 0


def test_a_restarted_server_offers_the_remaining_blocks_to_its_tiers(
    shm: Path, tier: MemoryTier
) -> None:
    with serving(shm, [tier], wait=True, fill=MANY):
        pass
    for name in list(tier.blocks)[-10:]:
        del tier.blocks[name]  # blocks that are still in the pool
    with serving(shm, [tier], wait=True) as served:
        assert served.wrong(range(MANY)) == []
        assert served.offered()
        assert len(tier.blocks) == MANY


def test_a_remote_store_is_queried_for_unknown_keys(shm: Path) -> None:
    near, far = MemoryTier("near"), MemoryTier("far", remote=True)
    with serving(shm, [near, far], wait=True, fill=20):
        assert eventually(lambda: (len(near.blocks), len(far.blocks)) == (20, 20))
    (shm / "other").mkdir()
    with serving(shm / "other", [MemoryTier("empty"), far]) as other:
        assert other.wrong(range(20)) == []
        assert other.wrong(range(20, 22)) == [20, 21]  # no tier has them, so they soon miss


def test_a_hanging_remote_store_does_not_delay_other_tiers(shm: Path) -> None:
    near, far = MemoryTier("near"), MemoryTier("far", remote=True)
    with serving(shm, [near, far], wait=True, timeout_s=0.3) as served:
        far.open.clear()
        served.fill(MANY)
        assert len(near.blocks) == MANY
        nobody = [hashlib.sha256(b"nobody %d" % i).digest() for i in range(8)]
        caller = threading.Thread(target=lambda: served.cache.onboard(nobody))
        caller.start()
        caller.join()
        assert served.wrong(range(MANY)) == []
        far.open.set()


def test_saves_beyond_the_queue_of_a_slow_tier_are_dropped(shm: Path) -> None:
    near, far = MemoryTier("near"), MemoryTier("far", remote=True)
    dropped = REGISTRY.counter("beluga_offload_dropped_blocks_total", "")
    before = dropped.value(reason="tier is behind")
    with serving(shm, [near, far], wait=True) as served:
        far.open.clear()
        for number in range(10):  # a batch each
            served.put_all(range(number, number + 1))
            assert served.offered()
        far.open.set()
        assert eventually(lambda: len(far.blocks) == 4)
    assert far.saves == [1] * 4
    assert dropped.value(reason="tier is behind") - before == 6


def test_an_onboard_without_space_in_the_pool_is_abandoned(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("beluga.tiers.service._PUT_TRIES_S", 0.0)
    missed = REGISTRY.counter("beluga_onboard_missed_blocks_total", "")
    before = missed.value(reason="no space in the pool")
    tier = MemoryTier()
    with serving(shm, [tier], fill=1):
        pass
    (shm / "other").mkdir()
    with serving(shm / "other", [tier]) as served:
        client, pins = IndexClient(served.cache.client), []
        for number in range(1, MANY):  # until the pool is full
            if not served.cache.put(NAMES[number : number + 1], contents(range(1))).stored:
                break
            pins.append(client.pin(served.cache.keys(NAMES[number : number + 1])))
        assert len(pins) < MANY - 1
        assert served.cache.onboard(NAMES[:1]) == 1
        assert eventually(lambda: served.server.lower_stat().wanted_count == 0)
        assert missed.value(reason="no space in the pool") - before == 1
        for pin in pins:
            client.unpin(pin)


def test_blocks_of_a_disk_are_onboarded_before_those_of_a_store(shm: Path) -> None:
    """Also if one thread loads both, because the store is the first tier."""
    store, disk = RecordingTier("store", remote=True), MemoryTier("disk")
    with serving(shm, [disk], fill=1):
        pass
    store.open.clear()
    with Pool.create([shm / "other"], device_size=24 << 20, sparse=True) as pool:
        server = IndexServer(pool)
        service = TierService(server, pool, [store, disk], onboard_threads=1)
        with server, KVCache(pool, namespace="test") as cache:
            service.start()
            cache.onboard([b"first" * 8])
            assert eventually(lambda: store.waiting == 1)
            cache.onboard([b"cold" * 8])
            cache.onboard(NAMES[:1])
            store.open.set()
            assert eventually(lambda: len(store.requested) == 3)
            service.stop()
            keys = cache.keys([NAMES[0], b"cold" * 8])
    assert [key.tolist() for key in store.requested[1:]] == [keys[:1].tolist(), keys[1:].tolist()]


def test_a_removal_is_retried_after_an_error_of_a_tier(shm: Path) -> None:
    store = RecordingTier("store", remote=True)
    with serving(shm, [store], wait=True, fill=1) as served:
        store.unable = RuntimeError("not now")
        served.cache.remove(NAMES[:1])
        assert eventually(lambda: served.server.lower_stat().removal_failed == 1)
        assert served.wrong(range(1)) == [0]
        store.unable = None
        assert eventually(lambda: served.server.lower_stat().removal_count == 0)
        assert store.blocks == {}


def test_a_tier_without_removal_does_not_overwrite_removed_blocks(shm: Path) -> None:
    """It may mistake a block that it has for the one to save."""
    tier = OldTier()
    with serving(shm, [tier], wait=True, fill=1) as served:
        served.cache.remove(NAMES[:1])
        assert eventually(lambda: served.server.lower_stat().removal_failed == 1)
        served.cache.put(NAMES[:1], contents(range(1, 2)))
        assert served.offered()
        served.put_all(range(1, MANY))
        target = np.zeros((1, LENGTH), np.uint8)
        assert served.cache.get(NAMES[:1], target).hits == 0


def test_a_save_replaces_a_removed_block_that_the_disk_still_has(tmp_path: Path) -> None:
    """Many removals may wait, and the save of a new block come before that of its key."""
    rows = contents(range(2))
    records = np.zeros(1, LOWER_RECORD)
    records["key"], records["length"], records["stale"] = (1, 2), LENGTH, 2
    blocks = np.zeros(1, BLOCK)
    blocks["key"], blocks["length"] = (1, 2), LENGTH
    disk = DiskTier(tmp_path / "disk", 16 << 20)
    try:
        assert disk.save(blocks, rows[:1]).all()
        assert service._saved(disk, 0, records, blocks, rows[1:]).all()
        (block,) = disk.load(np.ascontiguousarray(blocks["key"]))
        assert block is not None and np.array_equal(block.payload, rows[1])
    finally:
        disk.close()


def test_removals_wait_while_missing_blocks_are_saved(shm: Path) -> None:
    """Otherwise a save that has read the block before its removal would follow."""
    tier = MemoryTier("disk")
    with serving(shm, [tier], wait=True, fill=1) as served:
        with served.service._saving:
            served.cache.remove(NAMES[:1])  # waits for the disk
            assert len(tier.blocks) == 1
        assert eventually(lambda: not tier.blocks)


def test_a_removal_that_waited_for_a_save_does_not_remove_the_new_block(shm: Path) -> None:
    """The removal had failed before, and the save has replaced the block to remove."""
    disk, store = MemoryTier("disk"), RecordingTier("store", remote=True)
    with serving(shm, [disk, store], wait=True) as served:
        served.put_all(range(1))
        assert eventually(lambda: len(store.blocks) == 1)
        store.stubborn = True
        served.cache.remove(NAMES[:1])
        stat = served.server.lower_stat
        assert eventually(lambda: stat().removal_count == stat().removal_failed == 1)
        store.open.clear()
        waited = store.waiting
        served.cache.put(NAMES[:1], contents(range(1, 2)))
        assert eventually(lambda: store.waiting > waited)  # the save
        assert eventually(lambda: stat().removal_failed == 0)  # the removal comes after it
        store.stubborn = False
        removals = store.removals
        store.open.set()
        assert eventually(lambda: store.removals > removals)
        ((_, saved),) = store.blocks.values()
        assert saved == contents(range(1, 2)).tobytes()
        assert eventually(lambda: stat().removal_count == 0)


def test_blocks_of_a_remote_store_are_saved_on_the_disk_below_the_pool(shm: Path) -> None:
    far = MemoryTier("far", remote=True)
    with serving(shm, [MemoryTier(), far], wait=True, fill=20):
        assert eventually(lambda: len(far.blocks) == 20)
    (shm / "other").mkdir()
    near, saves = MemoryTier(), len(far.saves)
    with serving(shm / "other", [near, far], wait=True) as other:
        assert other.wrong(range(20)) == []
        assert other.offered()
        assert len(near.blocks) == 20
    assert len(far.saves) == saves


def test_a_lost_block_is_a_miss_and_no_longer_found(shm: Path, tier: MemoryTier) -> None:
    with serving(shm, [tier], wait=True, fill=MANY) as served:
        keys = served.cache.keys(NAMES)
        below = np.flatnonzero(served.cache.lookup(NAMES).tiers == 2)
        first = int(below[0])
        tier.lose(keys[first : first + 1])
        assert served.wrong(range(first, first + 1)) == [first]
        assert served.cache.lookup([NAMES[first]]) == 0
        second = int(below[1])
        tier.remove(keys[second : second + 1])  # without the server
        assert served.wrong(range(second, second + 1)) == [second]
        assert served.cache.lookup([NAMES[second]]) == 0


def test_a_removed_block_is_not_onboarded(shm: Path, tier: MemoryTier) -> None:
    with serving(shm, [tier], wait=True, fill=30) as served:
        served.cache.remove(NAMES[:5])
        assert served.wrong(range(5)) == list(range(5))
        assert eventually(lambda: len(tier.blocks) == 25)
        served.fill(5)
        assert eventually(lambda: len(tier.blocks) == 30)
        assert served.wrong(range(30)) == []


def test_a_block_removed_during_its_save_is_not_onboarded(shm: Path) -> None:
    near, far = MemoryTier("near"), MemoryTier("far", remote=True)
    with serving(shm, [near, far], wait=True) as served:
        near.open.clear()
        far.open.clear()
        served.put_all(range(2))
        assert eventually(lambda: near.waiting == 1)  # the save of both
        served.cache.remove(NAMES[:1])
        near.open.set()
        assert eventually(lambda: far.waiting == 1)
        served.cache.remove(NAMES[1:2])
        far.open.set()
        assert eventually(lambda: served.server.lower_stat().wanted_count == 0)
        assert (near.blocks, far.blocks) == ({}, {})
        assert served.wrong(range(2)) == [0, 1]
        served.fill(2)
        assert served.wrong(range(2)) == []


@pytest.mark.parametrize("anew", [False, True])
def test_a_block_removed_during_its_onboard_is_not_onboarded(shm: Path, anew: bool) -> None:
    tier = MemoryTier()
    with serving(shm, [tier], wait=True, fill=MANY) as served:
        below = served.below()
        names, waiting = NAMES[below : below + 1], tier.waiting
        tier.open.clear()
        assert served.cache.onboard(names) == 1
        assert eventually(lambda: tier.waiting > waiting)
        served.cache.remove(names)
        new = np.full((1, LENGTH), 7, np.uint8)
        if anew:  # another client stores it meanwhile
            assert served.cache.put(names, new).stored == 1
        tier.open.set()
        assert eventually(lambda: served.server.lower_stat().wanted_count == 0)
        assert served.offered()
        target = np.zeros((1, LENGTH), np.uint8)
        assert served.cache.get(names, target).hits == anew
        assert not anew or np.array_equal(target, new)


def test_a_tier_that_cannot_load_for_a_while_is_retried(shm: Path, tier: MemoryTier) -> None:
    with serving(shm, [tier], wait=True, fill=MANY) as served:
        below = served.below()
        tier.failing = True
        loads = len(tier.loads)
        assert served.wrong(range(below, below + 1)) == [below]
        assert len(tier.loads) <= loads + 2  # there are no endless retries
        tier.failing = False
        assert served.cache.lookup(NAMES[below : below + 1]).tiers[0] == 2
        assert eventually(lambda: served.wrong(range(below, below + 1)) == [])


def test_a_block_that_a_tier_evicts_is_offered_again_while_the_pool_has_it(
    shm: Path, tier: MemoryTier
) -> None:
    with serving(shm, [tier], wait=True, fill=MANY) as served:
        on_disk = np.flatnonzero(served.cache.lookup(NAMES).tiers == 1)
        tier.lose(served.cache.keys([NAMES[i] for i in on_disk]))
        assert served.offered()
        assert len(tier.blocks) == MANY
        served.fill(MANY)
        assert served.wrong(range(MANY)) == []


@pytest.mark.parametrize("wait", [False, True])
def test_a_block_that_a_tier_evicts_again_is_offered_once_after_each_hit(
    shm: Path, wait: bool
) -> None:
    tier = MemoryTier()
    with serving(shm, [tier], wait=wait) as served:
        served.put_all(range(1))
        keys = served.cache.keys(NAMES[:1])

        def saved_after_a_loss() -> bool:
            assert eventually(
                lambda: bool(tier.blocks) and served.server.lower_stat().dirty_count == 0
            )
            tier.lose(keys)
            assert served.offered()
            return bool(tier.blocks)

        assert saved_after_a_loss()
        assert served.wrong(range(1)) == []
        assert saved_after_a_loss()
        assert not saved_after_a_loss()


@pytest.mark.parametrize("wait", [False, True])
def test_a_disk_smaller_than_the_pool_is_not_rewritten_endlessly(
    shm: Path, tmp_path: Path, wait: bool
) -> None:
    disk = DiskTier(tmp_path / "disk", 8 << 20)  # room for 500 of the smallest blocks, 80 of these
    saved = REGISTRY.counter("beluga_tier_saved_blocks_total", "")

    def settled() -> float:
        """Return the number of saved blocks once it has not changed for a while."""
        before = -1.0
        while before < (now := saved.value(tier=disk.name)):
            before = now
            assert eventually(lambda: served.server.lower_stat().dirty_count == 0)
            time.sleep(0.2)
        return now

    with serving(shm, [disk], wait=wait) as served:
        served.put_all(range(150))
        assert disk.block_count_max > 150
        first = settled()
        assert 80 < first <= 2 * 150
        assert served.wrong(range(100, 150)) == []  # each may be saved once more
        assert first <= settled() <= 2 * 150 + 50
    disk.close()


def test_an_unbounded_store_leaves_room_for_other_records(shm: Path) -> None:
    near, far = MemoryTier("near"), MemoryTier("far", remote=True)
    with serving(shm, [near, far], wait=True) as served:
        count = near.block_count_max + 100_000  # more than the number of names
        notes = np.zeros(count, LOWER_NOTE)
        notes["key"] = np.random.default_rng(0).integers(0, 1 << 64, (count, 2), np.uint64)
        notes["stored"] = 4  # in the second tier
        served.service.report(notes)
        served.fill(MANY)
        assert eventually(lambda: len(far.blocks) == MANY)
        assert served.server.lower_stat().name_count < count
        assert served.wrong(range(MANY)) == []
        near.blocks.clear()
        assert served.wrong(range(MANY)) == []  # loaded from the store
        served.cache.remove(NAMES)
        assert eventually(lambda: not far.blocks)


@pytest.mark.parametrize("error", [MemoryError("no memory"), RuntimeError("no thread")])
def test_an_error_ends_one_job_and_not_the_service(shm: Path, error: Exception) -> None:
    tier = MemoryTier()
    with serving(shm, [tier], wait=True, timeout_s=0.3, fill=MANY) as served:
        below = served.below()
        tier.error = error
        assert served.cache.put([b"new" * 6], contents(range(1))).stored == 1
        assert served.wrong(range(below, below + 1)) == [below]
        tier.error = None
        assert eventually(lambda: served.wrong(range(below, below + 1)) == [])
        assert served.offered()


def test_blocks_that_are_not_admitted_are_not_saved(shm: Path) -> None:
    class Odd:
        def admit(self, keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
            odd: NDArray[np.bool_] = keys[:, 0] % 2 == 1
            return odd

        def hit(self, count: int) -> None: ...

    tier = MemoryTier()
    with serving(shm, [tier], wait=True, admission=Odd()) as served:
        served.fill(MANY)
        assert tier.blocks
        assert all(key[0] % 2 for key in tier.blocks)


def test_a_get_waits_for_a_slow_tier_until_its_timeout(shm: Path, tier: MemoryTier) -> None:
    with serving(shm, [tier], wait=True, timeout_s=0.3, fill=MANY) as served:
        below = served.below()
        tier.open.clear()
        assert served.wrong(range(below, below + 1)) == [below]
        threading.Timer(0.05, tier.open.set).start()
        assert served.wrong(range(below, below + 1)) == []


def test_prefetched_blocks_are_in_the_pool_before_a_request(shm: Path, tier: MemoryTier) -> None:
    with serving(shm, [tier], wait=True, fill=MANY) as served:
        below = np.flatnonzero(served.cache.lookup(NAMES).tiers == 2)[:8]
        names = [NAMES[i] for i in below]
        assert served.cache.prefetch(names) == len(names)
        assert eventually(lambda: bool((served.cache.lookup(names).tiers == 1).all()))
        assert served.cache.prefetch([b"y" * 32]) == 0


def test_concurrent_gets_all_return_the_blocks(shm: Path, tier: MemoryTier) -> None:
    with serving(shm, [tier], wait=True, fill=MANY) as served:
        wrong: list[int] = []

        def get(numbers: range) -> None:
            with KVCache(served.pool, namespace="test") as cache:
                own = Served(served.pool, cache, served.service, served.server)
                wrong.extend(own.wrong(numbers))

        threads = [threading.Thread(target=get, args=(range(0, MANY, step),)) for step in (3, 3, 4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []


def test_only_the_service_may_take_work_and_report_it(shm: Path) -> None:
    with serving(shm, [MemoryTier()]) as served:
        stranger = LowerWork(served.cache.client, token=1)
        with pytest.raises(BadRequestError):
            stranger.take(Work.ONBOARD, 1)
        with pytest.raises(BadRequestError):
            stranger.report(np.zeros(1, LOWER_NOTE))


def test_blocks_left_at_a_stop_do_not_count_as_offered(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("beluga.tiers.service._ARENA_SIZE", 1)  # a block at a time
    tier = MemoryTier()
    with serving(shm, [tier], wait=True) as served:
        tier.open.clear()
        assert served.cache.put(NAMES[:10], contents(range(10))).stored == 10
        assert eventually(lambda: bool(tier.waiting))
        stop = threading.Thread(target=served.service.stop)
        stop.start()
        assert eventually(served.service._stopping.is_set)
        tier.open.set()
        stop.join()
        assert eventually(lambda: served.server.lower_stat().dirty_count == 10 - len(tier.blocks))
        assert 0 < len(tier.blocks) < 10


def test_a_service_ends_when_it_is_stopped_or_its_pool_is_closed(shm: Path) -> None:
    for end in ("stop", "close"):
        with Pool.create([shm / end], device_size=24 << 20, sparse=True) as pool:
            server = IndexServer(pool)
            service = TierService(server, pool, [MemoryTier()])
            service.stop()  # the service was not started
        with Pool.open([shm / end]) as pool:
            server = IndexServer(pool)
            service = TierService(server, pool, [MemoryTier(), MemoryTier(remote=True)])
            server.start()
            service.start()
            with KVCache(pool, namespace="test") as cache:
                cache.put(NAMES[:3], contents(range(3)))
            if end == "stop":
                server.stop()
            else:
                pool.close()
            service.stop()
            service.stop()
        assert not [t for t in threading.enumerate() if t.name.startswith("beluga-o")]


def test_the_stores_of_a_server_are_queried_at_the_same_time(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool has no server meanwhile. Each query waits here for the others."""
    queries = threading.Barrier(3)

    def number(self: RemoteTier, listed: object) -> int:
        queries.wait(timeout=60)
        return 7

    monkeypatch.setattr(RemoteTier, "store_number", number)
    remotes = tuple(f"file://{shm}/{name}" for name in "abc")
    with Pool.create([shm / "pool"], device_size=24 << 20, sparse=True) as pool:
        TierService(IndexServer(pool), pool, TierSettings(remotes=remotes))
    assert not queries.broken


def test_a_pool_has_a_bounded_number_of_tiers(shm: Path) -> None:
    with Pool.create([shm / "pool"], device_size=24 << 20, sparse=True) as pool:
        for tiers in ([], [MemoryTier() for _ in range(8)]):
            with pytest.raises(TierError, match="1 to 7"):
                TierService(IndexServer(pool), pool, tiers)


def chain_of(count: int) -> NDArray[np.void]:
    """Return names of a chain of blocks."""
    hashes = [1000 + i for i in range(count)]
    return chain_names(hashes, [2000 + i for i in range(count)], block_tokens=16, space=9)


def names_in(pool: Pool) -> list[tuple[int, ...]]:
    rows = read_names(pool, check_pool(pool).half)["name"]
    return sorted(tuple(row) for row in rows.tolist())


@pytest.mark.parametrize("kind", ["memory", "disk", "slow"])
def test_blocks_are_onboarded_with_their_names(shm: Path, kind: str) -> None:
    count, plain = 6, 2  # the last two blocks have no names
    numbers = range(count)
    chain = chain_of(count)
    chain[count - plain :] = np.zeros(plain, NAME)
    expected = sorted(tuple(row) for row in chain[: count - plain].tolist())
    with contextlib.ExitStack() as stack:
        tiers: list[LowerTier] = [MemoryTier()]
        if kind == "disk":
            disk = DiskTier(shm / "disk", 64 << 20)
            stack.callback(disk.close)
            tiers = [disk]
        if kind == "slow":  # the first tier saves nothing
            first = MemoryTier("first")
            first.full = True
            tiers = [first, MemoryTier("second")]
        with serving(shm, tiers) as served:
            served.cache.put([NAMES[i] for i in numbers], contents(numbers), names=chain)
            assert served.offered()
            keys = served.cache.keys([NAMES[i] for i in numbers])
            assert eventually(lambda: bool(tiers[-1].contains(keys).all()))
            assert names_in(served.pool) == expected
        (shm / "pool").unlink()  # another pool above the same tiers
        with serving(shm, tiers) as served:
            assert names_in(served.pool) == []
            target = np.zeros((count, LENGTH), np.uint8)
            assert served.cache.get([NAMES[i] for i in numbers], target).hits == count
            assert np.array_equal(target, contents(numbers))
            assert names_in(served.pool) == expected


def test_a_name_that_was_never_written_is_a_miss() -> None:
    record = np.zeros(1, BLOCK)
    record["length"], record["chunk_size"] = LENGTH, 4096
    rows = np.ones((1, named_length(LENGTH)), np.uint8)
    plain = StoredBlock(record[0].copy(), rows[0, :LENGTH])
    assert take_name(plain) is plain
    add_names(record, rows, chain_of(1))
    name = take_name(StoredBlock(record[0], rows[0]))
    assert name is not None
    assert name.name == chain_of(1)[0]
    assert (name.record["length"], name.record["chunk_size"]) == (LENGTH, 4096)
    assert name.payload.tolist() == [1] * LENGTH
    assert take_name(StoredBlock(record[0], rows[0, :-1])) is None
    rows[0, -64:] = 0
    assert take_name(StoredBlock(record[0], rows[0])) is None
    record["length"] = 10
    assert take_name(StoredBlock(record[0], rows[0, :10])) is None


# ---- A disk that cannot be opened yet


Start = Callable[..., "subprocess.Popen[str]"]
Run = Callable[..., "subprocess.CompletedProcess[str]"]

DISK = 64 << 20


def put(cache: KVCache, number: int) -> None:
    """Put a block; with --offload wait it may be rejected until others were offered."""
    block = contents(range(number, number + 1))
    assert eventually(lambda: cache.put([NAMES[number]], block).stored == 1)


def has(cache: KVCache, number: int) -> bool:
    """Get a block, and return whether it was a hit; its bytes must be correct."""
    target = np.zeros((1, LENGTH), np.uint8)
    hit = cache.get([NAMES[number]], target).hits == 1
    assert not hit or np.array_equal(target, contents(range(number, number + 1)))
    return hit


def breaker(disk: Path) -> float:
    """Return the state of the disk's circuit breaker, as exported to Prometheus. A disk that was
    just closed in this process has none.
    """
    state = _breakers().get((("tier", f"disk:{disk}"),), 2)
    assert isinstance(state, float | int)
    return state


def _breakers() -> Mapping[Labels, object]:
    return REGISTRY.snapshot()["beluga_tier_breaker_state"].series


@contextmanager
def serving_late(
    pool: Pool, disk: Path, *, patient: bool, offload: str = "drop"
) -> Iterator[tuple[IndexServer, KVCache]]:
    server = IndexServer(pool)
    settings = TierSettings(
        disks=(str(disk),), disk_bytes=DISK, offload=offload, admission="always"
    )
    service = TierService(server, pool, settings, patient=patient)
    with server:
        try:
            service.start()
            with KVCache(pool, namespace="test", timeout_s=20) as cache:
                yield server, cache
        finally:
            service.stop()


@pytest.fixture
def pool(shm: Path) -> Iterator[Pool]:
    with Pool.create([shm / "a"], device_size=24 << 20, sparse=True) as pool:
        yield pool


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("beluga.tiers.service._OPEN_PERIOD_S", 0.05)


def test_a_tier_that_is_not_open_misses_and_saves_nothing_until_it_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    inner, error = MemoryTier(), TierError("in use")
    keys = np.array([[1, 2], [3, 4]], np.uint64)

    def opens() -> MemoryTier:
        if error is not None:
            raise error
        return inner

    tier = LateTier(opens, names=["disk:/a", "disk:/b"], block_count_max=7)
    assert [tier.open() for _ in range(3)] == [None] * 3
    assert (tier.name, tier.block_count_max) == ("disk:/a+disk:/b", 7)
    assert breaker(Path("/a")) == breaker(Path("/b")) == 2
    assert not tier.save(np.zeros(2, BLOCK), np.zeros((2, 8), np.uint8)).any()
    assert tier.load(keys) == [None, None]
    assert tier.contains(keys).all()  # the disk may have them
    assert tier.keys() is None
    assert tier.remove(keys[:1]) == 0
    assert tier.remove_durably(keys[:1]).tolist() == [False]  # the caller has to try again
    tier.close()
    assert not [labels for labels in _breakers() if labels[0][1] in ("disk:/a", "disk:/b")]
    error = None
    assert tier.open() is inner
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "in use" in caplog.text and "is open now" in caplog.text


@pytest.mark.parametrize("offload", ["drop", "wait"])
def test_blocks_of_a_disk_are_hits_once_it_can_be_opened(
    pool: Pool, tmp_path: Path, offload: str
) -> None:
    disk = tmp_path / "disk"
    with serving_late(pool, disk, patient=False) as (server, cache):
        for number in range(300):  # the pool has room for about 200
            put(cache, number)
        assert eventually(lambda: server.lower_stat().dirty_count == 0)
        lost = [number for number in range(300) if cache.lookup([NAMES[number]]).tiers[0] == 2]
        assert len(lost) > 50
    settings = {"server": pool.id, "smallest_block": LENGTH // 4096 * 4096}
    other = DiskTier(disk, DISK, **settings)  # type: ignore[arg-type]
    with serving_late(pool, disk, patient=True, offload=offload) as (server, cache):
        assert breaker(disk) == 2
        assert not has(cache, lost[0])
        assert not has(cache, 399)
        cache.remove([NAMES[lost[1]]])
        for number in range(300, 390):  # each evicts another one
            put(cache, number)
        assert has(cache, 389)
        assert not has(cache, lost[0])
        other.close()
        assert eventually(lambda: breaker(disk) == 0)
        assert eventually(lambda: has(cache, lost[0]))
        assert eventually(lambda: server.lower_stat().name_count > 200)
        assert all(has(cache, number) for number in lost[2:])
        assert not has(cache, lost[1])
        assert not has(cache, 399)
        put(cache, 399)
        assert eventually(lambda: server.lower_stat().dirty_count == 0)


def test_a_server_that_is_not_a_standby_rejects_an_unopened_disk(
    pool: Pool, tmp_path: Path
) -> None:
    other = DiskTier(tmp_path / "disk", DISK, server=pool.id)
    with (
        pytest.raises(TierError, match="in use by process"),
        serving_late(pool, tmp_path / "disk", patient=False),
    ):
        pass
    other.close()


def test_a_service_ends_while_its_disk_is_not_open(pool: Pool, tmp_path: Path) -> None:
    other = DiskTier(tmp_path / "disk", DISK, server=pool.id)
    with serving_late(pool, tmp_path / "disk", patient=True) as (_, cache):
        put(cache, 0)
    other.close()
    DiskTier(tmp_path / "disk", DISK, server=pool.id).close()


def test_a_standby_replaces_a_stopped_server_and_gets_its_disk_and_endpoints(
    start: Start, run: Run, shm: Path, tmp_path: Path
) -> None:
    pytest.importorskip("zmq")
    Pool.create([shm / "p"], device_size=32 << 20, sparse=True, lane_count=32).close()
    live, again = free_endpoints()
    where = ["--pool", shm / "p"]
    below = ["--disk", tmp_path / "disk", "--disk-bytes", "16M", "--admission", "always"]
    events = ["--events", live, "--events-replay", again]
    first = start("serve", *where, *below, *events)
    assert first.stderr and first.stderr.readline().startswith("serving, epoch 1")
    assert eventually(lambda: state_of_disk(run, where) == ["closed"])
    assert eventually(lambda: is_bound(live))  # the server serves before it has these two
    run("put", "key", "-", *where, stdin="some bytes")
    second = start("serve", *where, *below, *events, "--standby", "--silent", "0.5")
    assert second.stderr and second.stderr.readline().startswith("standing by")
    first.send_signal(signal.SIGSTOP)
    assert second.stderr.readline().startswith("took over, epoch 2")
    output = second.stderr.readline()
    assert re.search(r"served without a tier until it opens: .* in use by process", output)
    assert "will be retried: no events can be published" in second.stderr.readline()
    assert run("get", "key", *where).stdout == "some bytes"
    assert state_of_disk(run, where) == ["open"]

    first.kill()
    output = second.stderr.readline() + second.stderr.readline()
    assert "has now started; before: no events can be published" in output
    assert f"disk:{tmp_path / 'disk'} is open now" in output
    assert eventually(lambda: state_of_disk(run, where) == ["closed"])
    second.send_signal(signal.SIGTERM)
    assert second.wait(timeout=60) == 0


def test_a_standby_serves_although_no_lane_is_left_for_its_tiers(
    start: Start, run: Run, shm: Path, tmp_path: Path
) -> None:
    with Pool.create([shm / "p"], device_size=32 << 20, sparse=True, lane_count=7) as pool:
        where = ["--pool", shm / "p"]
        below = ["--disk", tmp_path / "disk", "--disk-bytes", "16M", "--admission", "always"]
        first = start("serve", *where)
        assert first.stderr and first.stderr.readline().startswith("serving, epoch 1")
        with ExitStack() as clients:
            cache = clients.enter_context(KVCache(pool, namespace="test", timeout_s=20))
            for _ in range(3):
                clients.enter_context(Client(pool))
            put(cache, 0)
            second = start("serve", *where, *below, "--standby")
            assert second.stderr and second.stderr.readline().startswith("standing by")
            first.kill()
            assert second.stderr.readline().startswith("took over, epoch 2")
            assert "will be retried: attaching to the pool's server" in second.stderr.readline()
            assert has(cache, 0)
        assert "has now started; before: attaching" in second.stderr.readline()
        assert state_of_disk(run, where) == ["closed"]


def state_of_disk(run: Run, where: list[object]) -> list[str]:
    shown = json.loads(run("stat", *where, "--json").stdout)["lower_tiers"]["tiers"]
    return [tier["breaker_state"] for tier in shown.values()]


def is_bound(endpoint: str) -> bool:
    with socket.socket() as connection:
        host, _, port = endpoint.removeprefix("tcp://").partition(":")
        return connection.connect_ex((host, int(port))) == 0
