# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Removed blocks are not found until they are put again, whatever tier fails, however the server
ends or is killed, and in any order of calls; and no request for blocks waits for all blocks of
another one.
"""

import contextlib
import errno
import logging
import random
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from removal_scene import LENGTH, POOL_BYTES, SETTINGS, FaultyStore, Scene, content, digest
from support import role
from support.blocks import eventually
from support.disk_faults import PowerCut, VolatileEngine
from support.disk_tiers import MIB, keys_of, payload_of, records_of
from support.role import Process
from support.virtual_clock import Clock

from beluga import IndexServer, KVCache, Pool
from beluga.errors import RemovalsFullError
from beluga.tiers import TierService
from beluga.tiers.disk import DiskTier
from beluga.tiers.remote import RefusedError, RemoteTier
from beluga.tiers.service import Retries

Make = Callable[..., Scene]

NAME_COUNT = 6
STEPS = 40

COUNT = 8


@pytest.fixture
def make(shm: Path) -> Iterator[Make]:
    made: list[Scene] = []

    def scene(**options: Any) -> Scene:
        made.append(Scene(shm, **options))
        return made[-1]

    yield scene
    for each in made:
        each.close()


def refusing(scene: Scene, *others: str) -> tuple[Scene, FaultyStore]:
    """Remove a block from a store that has it, and that refuses to delete and the others."""
    store = scene.stored("block")
    store.refused = {"delete", *others}
    scene.remove("block")
    return scene, store


def refuse(scene: Scene) -> None:
    scene.faulty.refused = {"delete"}


def lose(scene: Scene) -> None:
    scene.faulty.lost = {"delete"}


def hang(scene: Scene) -> None:
    scene.faulty.hung = {"delete", "exists"}


def break_open(scene: Scene) -> None:
    """Open the circuit breaker for the rest of the test."""
    scene.faulty.lost = {"get", "put", "delete", "exists"}
    remote = scene.tiers[-1]
    for _ in range(5):
        remote.load(scene.cache.keys([digest("nobody")]))
    assert not remote._breaker.closed


@pytest.mark.parametrize("fault", [refuse, lose, hang, break_open])
@pytest.mark.parametrize("disk", [True, False])
def test_a_removed_block_is_not_loaded_from_a_store_that_kept_it(
    make: Make, fault: Callable[[Scene], None], disk: bool
) -> None:
    scene = make(disk=disk)
    store = scene.stored("block")
    fault(scene)
    assert scene.remove("block") == 1
    assert scene.get("block") is None
    store.heal() if fault is hang else None
    store.refused = {"delete"}
    store.lost.clear()
    assert eventually(lambda: scene.tiers[-1]._breaker.closed or scene.get("x") is not None)
    assert scene.get("block") is None
    scene.restart()
    assert scene.get("block") is None
    assert scene.in_store("block")
    assert scene.pending() >= 1
    store.heal()
    scene.settle()
    assert not scene.in_store("block")
    assert scene.get("block") is None


def test_a_put_after_a_removal_replaces_an_object_that_was_not_deleted(
    make: Make,
) -> None:
    scene, _ = refusing(make(disk=False))
    assert eventually(lambda: scene.server.lower_stat().removal_failed == 1)
    scene.put_surely("block", 1)
    assert scene.has("block", 1)
    scene.settle()  # the save has replaced the object
    scene.evict()
    assert scene.has("block", 1)
    scene.restart()
    scene.evict()
    assert scene.has("block", 1)


def test_saving_a_missing_block_replaces_an_object_that_was_not_deleted(make: Make) -> None:
    scene, store = refusing(make(disk=False), "put")
    scene.put_surely("block", 1)
    scene.offered()  # and not saved
    store.refused = {"delete"}
    assert eventually(lambda: list(scene.service.save_missing(threading.Event())) == [(1, 0)])
    scene.settle()
    scene.evict()
    assert scene.has("block", 1)


def test_a_removed_block_in_a_store_is_no_hit_while_the_disk_fails(
    make: Make,
) -> None:
    scene, _ = refusing(make(), "put")
    scene.put_surely("block", 1)
    scene.evict()
    assert scene.has("block", 1)  # removed from the disk
    scene.evict()
    scene.engine.read_error = errno.EIO
    assert not scene.has("block", 1)
    scene.engine.read_error = 0


def test_a_tombstone_does_not_remove_later_puts(make: Make) -> None:
    scene = make()
    assert scene.store is not None
    for version in range(6):
        scene.put_surely("block", version)
        if version % 2:
            scene.offered()
        assert scene.has("block", version)
        scene.remove("block")
        assert scene.get("block") is None
    scene.put_surely("block", 6)
    scene.offered()
    scene.settle()
    scene.evict()
    assert scene.has("block", 6)
    scene.restart()
    assert scene.has("block", 6)


@pytest.mark.parametrize("fault", ["write", "sync", "hung write", "hung sync"])
@pytest.mark.parametrize("end", ["restart", "anew"])
def test_a_removed_block_is_not_loaded_from_a_disk_that_failed_briefly(
    make: Make, fault: str, end: str
) -> None:
    scene = make(store=False)
    scene.put_surely("block", 0)
    scene.offered()
    engine = scene.engine
    if fault == "write":
        engine.write_error = errno.ENOSPC
    elif fault == "sync":
        engine.sync_error = errno.EIO
    else:
        engine.hung = {fault.split()[1]}
    scene.remove("block")
    assert scene.get("block") is None
    # the pool with the records was destroyed, so the disk must have executed the removal before
    if end == "anew":
        engine.write_error = engine.sync_error = 0
        engine.hung = set()
        engine.gate.set()
        scene.settle()
    else:
        engine.gate.set()
    scene.restart() if end == "restart" else scene.anew()
    assert scene.get("block") is None
    scene.settle()
    scene.put_surely("block", 1)
    assert scene.has("block", 1)


def test_a_removal_has_returned_when_the_disk_has_made_it_durable(make: Make) -> None:
    scene = make(store=False)
    for number in range(20):
        scene.put_surely(number, 0)
    scene.offered()
    assert scene.remove(*range(20)) == 20
    assert not scene.tiers[0].contains(scene.cache.keys([digest(n) for n in range(20)])).any()
    assert scene.pending() == 0
    scene.anew()
    assert [number for number in range(20) if scene.get(number) is not None] == []


def test_a_block_removed_during_its_save_is_not_loaded(make: Make) -> None:
    """The save hangs in its sync while the block is removed, and ends afterwards."""
    scene = make(store=False)
    scene.put_surely("other", 0)
    scene.offered()
    engine = scene.engine
    engine.hung = {"sync"}
    scene.put_surely("block", 0)
    assert eventually(lambda: scene.tiers[0].stat()["used_bytes"] > LENGTH * 3 // 2)
    scene.remove("block")
    engine.hung = set()
    engine.gate.set()
    scene.settle()
    key = scene.cache.keys([digest("block")])
    assert scene.get("block") is None
    assert not scene.tiers[0].contains(key).any()
    scene.restart()
    assert scene.get("block") is None


def test_removals_beyond_the_bound_are_rejected_and_none_is_lost(make: Make) -> None:
    scene = make(disk=False)
    scene.put_surely("last", 0)
    store = scene.stored("block")
    store.refused = {"delete"}
    scene.remove("block")
    limit, pending = scene.server.lower_stat().removal_max, 1

    def fill(session: str) -> None:
        """Remove keys that are stored nowhere: half of the room is for other sessions."""
        nonlocal pending
        pending += (limit - pending + 1) // 2
        with KVCache(scene.pool, namespace="test", timeout_s=0.2) as hasty:
            with pytest.raises(RemovalsFullError, match="beluga stat"):
                hasty.remove([digest((session, number)) for number in range(limit)])
            with pytest.raises(RemovalsFullError):
                hasty.remove([digest("newest")])
            hasty.remove([digest((session, 0)), digest("block")])  # have tombstones
        assert scene.pending() == pending

    for session in ("first", "second", "third"):
        fill(session)
    assert scene.has("last", 0)  # blocks that were not removed are hits
    assert scene.remove("last") == 1
    assert scene.get("block") is None
    pending += 1
    scene.restart()
    assert scene.pending() == pending
    assert scene.get("last") is None
    fill("fourth")
    scene.put_surely("newest", 0)
    assert scene.remove("newest") == 1
    store.heal()
    scene.settle()
    with KVCache(scene.pool, namespace="test", timeout_s=0.2) as fair:  # in the lane of "first"
        assert fair.remove([digest(("first", number)) for number in range(limit // 4)]) == 0


def test_many_removals_wait_for_room_while_the_tiers_execute_them(make: Make) -> None:
    scene = make()
    many = 3 * scene.server.lower_stat().removal_max
    assert scene.remove(*(("none", number) for number in range(many))) == 0
    scene.settle()


def test_a_removal_waits_for_its_tier_also_if_a_server_runs_without_it(make: Make) -> None:
    scene, store = refusing(make())
    scene.away = True
    scene.restart()
    assert scene.get("block") is None
    assert scene.server.lower_stat().removal_parked == 1
    scene.away = False
    scene.restart()
    assert scene.get("block") is None
    store.heal()
    scene.settle()
    assert not scene.in_store("block")


def number_of(store: FaultyStore) -> bytes:
    return store.objects["beluga-store"]


def refusing_swap(scene: Scene, other: FaultyStore) -> FaultyStore:
    """Remove a block from a store that refuses, and start a server over another store behind the
    same URL.
    """
    _, store = refusing(scene)
    scene.store = other
    scene.restart()
    return store


@pytest.mark.parametrize("disk", [True, False])
def test_a_removal_waits_for_its_store_while_another_one_is_at_its_url(
    make: Make, disk: bool
) -> None:
    scene, other = make(disk=disk), FaultyStore()
    store = refusing_swap(scene, other)
    assert scene.server.lower_stat().removal_parked == 1
    assert number_of(store) != number_of(other)
    scene.put_surely("later", 0)
    scene.offered()
    scene.store = store
    store.heal()
    scene.restart()
    assert scene.get("block") is None
    scene.settle()
    assert not scene.in_store("block")
    scene.given_up = ("test://store",)  # the other one, not the server's own
    scene.restart()
    assert scene.server.lower_stat().tier_count == 1 + disk


def test_a_store_whose_marker_was_deleted_is_another_store(make: Make) -> None:
    scene, store = refusing(make(disk=False))
    before = store.objects.pop("beluga-store")
    scene.restart()
    assert number_of(store) != before
    assert scene.server.lower_stat().removal_parked == 1


@pytest.mark.parametrize("fault", ["refused", "lost"])
@pytest.mark.parametrize("marked", [True, False], ids=["marked", "unmarked"])
def test_a_pool_starts_before_its_store_can_be_read(
    shm: Path, make: Make, fault: str, marked: bool
) -> None:
    def unreadable() -> FaultyStore:
        store = FaultyStore()
        if marked:
            store.objects["beluga-store"] = b"1" * 32
        getattr(store, fault).update({"get", "exists", "put"})
        return store

    scene = make(disk=False, make_store=unreadable)
    store = scene.faulty
    scene.remove("block")
    assert scene.pending() == 1
    store.heal()
    scene.settle()
    scene.put_surely("block", 0)
    scene.offered()
    assert eventually(lambda: scene.put("block", 0) and saves(scene, "block"))
    store.refused = {"delete"}
    scene.remove("block")
    for readable in (True, False):  # the number that the pool has chosen stays
        store.lost = set() if readable else {"get", "exists"}
        scene.restart()
        assert scene.server.lower_stat().removal_parked == 0
        assert scene.pending() == 1
        assert scene.get("block") is None
    store.heal()
    scene.settle()
    assert not scene.in_store("block")


def saves(scene: Scene, name: str) -> bool:
    """Whether the store has the block, after another offer of it."""
    list(scene.service.save_missing(threading.Event()))
    return scene.in_store(name)


def test_a_store_that_can_be_read_late_and_is_another_one_is_not_used(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    other = FaultyStore()
    other.objects["beluga-store"] = b"1" * 32
    other.lost = {"get", "exists"}
    scene = make(disk=False)
    key = scene.stored("block")
    other.objects |= {name: data for name, data in key.objects.items() if name != "beluga-store"}
    store = refusing_swap(scene, other)
    assert scene.server.lower_stat().removal_parked == 0
    other.heal()
    assert eventually(lambda: scene.get("block") is not None or "another store" in caplog.text)
    assert scene.get("block") is None
    assert scene.pending() == 1
    assert scene.in_store("block")
    scene.store = store
    store.heal()
    scene.restart()
    scene.settle()
    assert not scene.in_store("block")


@pytest.mark.parametrize("lacking", ["disk", "store"])
def test_a_removal_reaches_a_tier_that_the_server_lacks(
    make: Make, lacking: str, caplog: pytest.LogCaptureFixture
) -> None:
    scene = make()
    for name in ("removed", "twice", "stays"):
        scene.put_surely(name, 0)
    scene.offered()
    scene.evict()
    assert "earlier servers" not in caplog.text
    scene.disk, scene.away = lacking != "disk", lacking == "store"
    scene.restart()
    assert "earlier servers of this pool had 1 lower tiers" in caplog.text
    scene.remove("removed", "twice")
    scene.remove("twice")
    assert scene.server.lower_stat().removal_parked == 2
    assert scene.server.lower_stat().tier_count == 2
    scene.restart()  # the next server may lack it, too
    assert scene.server.lower_stat().removal_parked == 2
    scene.put_surely("twice", 1)
    scene.disk, scene.away = True, False
    scene.restart()
    assert scene.get("removed") is None
    assert scene.has("twice", 1)
    assert scene.has("stays", 0)
    scene.settle()
    scene.evict()
    scene.restart()
    assert scene.get("removed") is None


def test_a_dropped_tier_costs_no_tombstones(make: Make) -> None:
    scene = make()
    scene.put_surely("block", 0)
    scene.away = True
    scene.restart()
    scene.remove("block")
    assert scene.server.lower_stat().removal_parked == 1
    scene.given_up = ("test://store",)
    scene.restart()
    scene.remove("block", "another")
    assert scene.server.lower_stat().removal_parked == 0
    scene.given_up = ()
    scene.restart()
    assert scene.server.lower_stat().tier_count == 1
    scene.remove("a third")
    assert scene.server.lower_stat().removal_parked == 0


def test_a_pool_records_a_bounded_number_of_tiers(shm: Path) -> None:
    with Pool.create([shm / "pool"], device_size=16 << 20, sparse=True) as pool:
        for number in range(8):
            server = IndexServer(pool)
            server.attach_lower(1, wait=False, unknown=0, names=[f"{number} {i}" for i in range(7)])
            server.start()
            assert server.lower_stat().tier_count == 7 * (number + 1)
            server.stop()
        server = IndexServer(pool)
        server.attach_lower(1, wait=False, unknown=0, names=["one more"])
        with pytest.raises(RemovalsFullError):
            server.start()  # gives the pool back
        server = IndexServer(pool)
        server.attach_lower(1, wait=False, unknown=0, names=["one more"])
        server.give_up_tier("0 0")
        server.start()
        assert server.lower_stat().tier_count == 56
        server.stop()


def test_a_put_in_progress_does_not_undo_a_removal(make: Make) -> None:
    """A save hangs, is abandoned, and reaches the store after the block was removed."""
    scene = make(disk=False)
    store = scene.faulty
    store.hung = {"put"}
    scene.put_surely("block", 0)
    assert eventually(lambda: "put" in store.calls)
    scene.offered()
    scene.remove("block")
    assert eventually(lambda: scene.server.lower_stat().removal_failed == 1)
    store.heal()  # the put arrives
    scene.settle()
    assert not scene.in_store("block")
    assert scene.get("block") is None


def test_a_load_started_before_a_removal_stores_nothing_after_it(make: Make) -> None:
    scene = make(disk=False)
    scene.stored("block")
    scene.evict()
    taken, going_on = threading.Event(), threading.Event()
    inner = scene.tiers[0].load

    def load(keys: NDArray[np.uint64]) -> object:
        contained = inner(keys)
        taken.set()
        going_on.wait()
        return contained

    scene.tiers[0].load = load
    assert scene.cache.onboard([digest("block")]) == 1
    assert taken.wait(20)
    scene.remove("block")
    scene.settle()
    assert scene.get("block") is None  # and no caller requests it again before the load has ended
    going_on.set()
    assert eventually(lambda: scene.server.lower_stat().wanted_count == 0)
    assert scene.get("block") is None


def test_a_store_that_confirms_deletes_and_keeps_the_objects_has_not_removed_them(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = make(disk=False)
    store = scene.stored("block")
    monkeypatch.setattr(store, "delete", len)
    scene.remove("block")
    assert eventually(lambda: scene.server.lower_stat().removal_failed == 1)
    scene.restart()
    assert scene.get("block") is None


def test_a_store_that_does_not_answer_after_a_delete_may_still_have_the_block(make: Make) -> None:
    scene = make(disk=False)
    store = scene.stored("block")
    copied = dict(store.objects)
    store.refused = {"exists"}
    scene.remove("block")
    assert eventually(lambda: scene.server.lower_stat().removal_failed == 1)
    store.objects.update(copied)  # the store confirmed removals that it did not execute
    store.heal()
    scene.settle()
    assert not scene.in_store("block")


def test_a_store_that_never_deletes_is_reported_at_the_start(
    shm: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = FaultyStore()
    store.refused = {"delete"}
    with Pool.create([shm / "pool"], device_size=16 << 20, sparse=True) as pool:
        server = IndexServer(pool)
        tier = RemoteTier(store, name="test://stubborn", settings=SETTINGS)
        service = TierService(server, pool, [tier])
        with server, caplog.at_level(logging.WARNING):
            service.start()
            assert eventually(lambda: "does not delete objects" in caplog.text)
            service.stop()
        tier.close()
    assert caplog.text.count("test://stubborn does not delete objects") == 1


@pytest.mark.parametrize("seed", range(25))
def test_no_removed_block_returns_after_a_power_cut(tmp_path: Path, seed: int) -> None:
    """A confirmed ``remove_durably`` survives a power cut at any point."""

    def make(fd: int, depth: int) -> VolatileEngine:
        return VolatileEngine(fd, depth, cut_at=3 + seed * 2, seed=seed)

    tier = DiskTier(tmp_path / "disk", 16 * MIB, io=make)
    removed: list[int] = []
    try:
        for first in range(0, 60, 4):
            numbers = range(first, first + 4)
            tier.save(records_of(numbers, 9000), payload_of(numbers, 9000))
            if tier.remove_durably(keys_of(numbers[:2])).all():
                removed += numbers[:2]
    except PowerCut:
        pass
    tier._store.file.close()
    after = DiskTier(tmp_path / "disk", 16 * MIB)
    assert not after.contains(keys_of(removed)).any() if removed else True
    after.close()


def test_blocks_of_the_test_have_different_contents() -> None:
    assert not np.array_equal(content("a", 0), content("a", 1))


class Model:
    """The scene and its invariants."""

    def __init__(self, scene: Scene, dice: random.Random) -> None:
        self.scene, self.dice = scene, dice
        self.version = dict.fromkeys(range(NAME_COUNT), 0)
        self.was_put = dict.fromkeys(range(NAME_COUNT), False)
        self.actions: list[str] = []

    def step(self) -> None:
        action = self.dice.choices(
            [self.put, self.remove, self.get, self.fault, self.heal, self.evict, self.restart],
            [8, 6, 10, 4, 3, 1, 2],
        )[0]
        self.actions.append(action.__name__)
        action()

    def put(self) -> None:
        name = self.dice.randrange(NAME_COUNT)
        if self.scene.put(name, self.version[name]):
            self.was_put[name] = True

    def remove(self) -> None:
        names = self.dice.sample(range(NAME_COUNT), self.dice.randint(1, 3))
        self.scene.remove(*names)
        for name in names:
            self.version[name] += 1
            self.was_put[name] = False

    def get(self) -> None:
        name = self.dice.randrange(NAME_COUNT)
        is_there = self.scene.has(name, self.version[name])  # another version fails the test
        assert self.was_put[name] or not is_there

    def fault(self) -> None:
        store, engine = self.scene.store, self.scene.engine
        assert store is not None
        operation = self.dice.choice(["get", "put", "exists", "delete"])
        match self.dice.randrange(6):
            case 0:
                store.refused.add(operation)
            case 1:
                store.lost.add(operation)
            case 2:
                store.hung.add(operation)
            case 3:
                engine.write_error = self.dice.choice([errno.ENOSPC, errno.EIO])
            case 4:
                engine.sync_error = errno.EIO
            case _:
                engine.hung.add(self.dice.choice(["write", "sync"]))

    def heal(self) -> None:
        assert self.scene.store is not None
        self.scene.store.heal()
        engine = self.scene.engine
        engine.write_error = engine.sync_error = 0
        engine.hung.clear()
        engine.gate.set()

    def evict(self) -> None:
        self.heal()
        self.scene.evict()

    def restart(self) -> None:
        """Replace the server by one that may lack one of the tiers."""
        self.scene.engine.gate.set()
        self.scene.engine.hung.clear()
        self.scene.disk, self.scene.away = self.dice.choice(
            [(True, False), (True, False), (False, False), (True, True)]
        )
        self.scene.restart()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(4))
def test_nothing_removed_is_ever_read_again(shm: Path, seed: int) -> None:
    scene = Scene(shm, timeout_s=1.0)
    model = Model(scene, random.Random(seed))
    try:
        for _ in range(STEPS):
            model.step()
        model.heal()
        scene.disk, scene.away = True, False
        scene.restart()
        scene.settle()  # every tier has executed its removals
        for name in range(NAME_COUNT):
            assert model.was_put[name] or not scene.has(name, model.version[name])
    finally:
        model.heal()
        scene.close()


class Folder:
    """Objects as files, which cannot be deleted."""

    batch, threads = 64, 4

    def __init__(self, path: Path) -> None:
        self._path = path

    def _file(self, name: str) -> Path:
        return self._path / name.replace("/", "_")

    def get(self, name: str) -> bytes | None:
        file = self._file(name)
        return file.read_bytes() if file.exists() else None

    def put(self, name: str, data: memoryview) -> None:
        part = self._file(f"{name}.{threading.get_ident()}")
        part.write_bytes(data)
        part.replace(self._file(name))

    def exists(self, names: Sequence[str]) -> list[bool]:
        return [self._file(name).exists() for name in names]

    def delete(self, names: Sequence[str]) -> int:
        raise RefusedError("nobody deletes here")

    def close(self) -> None:
        pass


def serve(path: str, *words: str) -> None:
    """Serve a pool over stores that cannot delete, until it is killed. ``-FOLDER`` names a former
    store, which is dropped. Each line returns how many removals wait for absent stores.
    """
    folders = [Path(word) for word in words if not word.startswith("-")]
    with Pool.open([path]) as pool:
        server = IndexServer(pool)
        for word in words:
            if word.startswith("-"):
                server.give_up_tier(word[1:])
        tiers = [RemoteTier(Folder(folder), name=str(folder)) for folder in folders]
        service = TierService(server, pool, tiers)
        server.start()
        service.start()
        for _ in role.lines():
            role.reply(server.lower_stat().removal_parked)


@contextlib.contextmanager
def serving(path: Path, *folders: Path | str, parked: int = 0) -> Iterator[KVCache]:
    """A cache with a server that is killed at the end, and that starts with that many removals in
    absent stores.
    """
    with Process(serve, path, *folders) as child:
        assert child.request("parked") == str(parked)
        with Pool.open([path]) as pool, KVCache(pool, namespace="test", timeout_s=60) as cache:
            yield cache
            child.signal(signal.SIGKILL)


def saved_pool(shm: Path, store: Path) -> tuple[Path, list[bytes]]:
    """Return a pool, and the names of its blocks, which the store has, too."""
    path, names = shm / "pool", [digest(number) for number in range(COUNT)]
    Pool.create([path], device_size=POOL_BYTES, sparse=True).close()
    with serving(path, store) as cache:
        cache.put(names, np.concatenate([content(number, 0) for number in range(COUNT)]))
        assert eventually(lambda: len(list(store.glob("beluga-1*"))) == COUNT)
    return path, names


def test_a_killed_server_loses_no_removal(shm: Path, tmp_path: Path) -> None:
    path, names = saved_pool(shm, tmp_path)
    target = np.zeros((COUNT, LENGTH), np.uint8)
    with serving(path, tmp_path) as cache:
        assert cache.remove(names[:4]) == 4
    for _ in range(2):
        with serving(path, tmp_path) as cache:
            assert [cache.get([name], target[:1]).hits for name in names[:4]] == [0] * 4
            assert cache.get(names[4:], target[4:]).hits == 4
    with serving(path, tmp_path) as cache:
        assert cache.put(names[:1], content(0, 1)).stored == 1
        assert cache.get(names[:1], target[:1]).hits == 1
        assert np.array_equal(target[:1], content(0, 1))


@pytest.mark.long
def test_a_removal_waits_through_kills_for_a_store_that_the_servers_lack(
    shm: Path, tmp_path: Path
) -> None:
    far, near = tmp_path / "away", tmp_path / "here"
    far.mkdir()
    near.mkdir()
    path, names = saved_pool(shm, far)
    target = np.zeros((COUNT, LENGTH), np.uint8)
    with serving(path, near):  # the only record is that there was a store
        pass
    for number in range(4):
        with serving(path, near, parked=number) as cache:
            assert cache.remove(names[number : number + 1]) == 1
    with serving(path, near, far) as cache:  # now under another number
        assert [cache.get([name], target[:1]).hits for name in names[:4]] == [0] * 4
        assert cache.get(names[4:], target[4:]).hits == 4
    with serving(path, near, f"-{far}") as cache:
        assert cache.remove(names[4:5]) == 1
    with serving(path, near):  # and it stays dropped
        pass


def delay_of(retries: Retries, clock: Clock) -> float:
    """Return the seconds until an attempt starts."""
    begun = clock.now_s
    while not retries.begin():
        clock.sleep(0.01)
        assert clock.now_s < begun + 100
    return round(clock.now_s - begun, 2)


def test_one_retry_runs_at_a_time() -> None:
    clock = Clock()
    retries = Retries(clock.monotonic)
    assert retries.begin()
    clock.sleep(1000)
    assert not retries.begin()
    retries.end(done=True)
    assert retries.begin()


def test_a_tier_that_fails_has_longer_delays_until_it_can_remove_again() -> None:
    clock = Clock()
    retries, delays = Retries(clock.monotonic), []
    for _ in range(9):
        delays.append(delay_of(retries, clock))
        retries.end(done=False)
    assert delays == pytest.approx([0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5, 5], abs=0.02)
    delay_of(retries, clock)
    retries.end(done=True)
    assert delay_of(retries, clock) == 0
    retries.end(done=False)
    assert delay_of(retries, clock) == pytest.approx(0.1, abs=0.02)


COLD = 8192  # keys of a long prompt that no tier has


class CountingStore(FaultyStore):
    """Counts the objects that are requested; ``first`` is set by the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.requested: list[str] = []
        self.first = threading.Event()
        self.passes = threading.Semaphore(0)  # gets that may complete while `slow`
        self.slow = False

    def get(self, name: str) -> bytes | None:
        self.requested.append(name)
        self.first.set()
        if self.slow:
            self.passes.acquire()
        return super().get(name)

    def heal(self) -> None:
        super().heal()
        self.slow = False
        self.passes.release(100_000)


def counting(make: Make, **options: object) -> tuple[Scene, CountingStore]:
    scene = make(make_store=CountingStore, **options)
    assert isinstance(scene.store, CountingStore)
    return scene, scene.store


def cold(scene: Scene, name: str, count: int = COLD) -> int:
    with KVCache(scene.pool, namespace="test") as other:
        return other.onboard([digest((name, number)) for number in range(count)])


def put_below(scene: Scene, names: list[str]) -> None:
    """Put blocks and evict them, so that only lower tiers have them."""
    for name in names:
        scene.put_surely(name, 0)
    scene.offered()
    scene.evict()


@pytest.mark.parametrize("disk", [True, False])
def test_a_chain_ends_at_its_first_miss(make: Make, disk: bool) -> None:
    scene, store = counting(make, disk=disk)
    with KVCache(scene.pool, namespace="test") as other:
        names = [digest(("cold", number)) for number in range(COLD)]
        assert other.onboard(names, wait_s=20) == 0
    assert eventually(lambda: scene.server.lower_stat().wanted_count == 0)
    assert 0 < len(store.requested) <= 64


def test_hits_of_another_request_do_not_wait_for_a_cold_prompt(
    make: Make,
) -> None:
    scene, store = counting(make, disk=False)
    put_below(scene, [f"mine {number}" for number in range(20)])
    assert eventually(lambda: len(store.objects) >= 110)
    store.slow = True
    store.requested.clear()
    store.first.clear()
    ended = threading.Event()

    def let_pass() -> None:  # a store that serves one get at a time
        while not ended.is_set():
            store.passes.release()
            ended.wait(0.002)

    passing = threading.Thread(target=let_pass)
    passing.start()
    try:
        cold(scene, "cold")
        store.first.wait()
        present = [scene.has(f"mine {number}", 0) for number in range(20)]
    finally:
        ended.set()
        passing.join()
    assert all(present)
    assert len(store.requested) < 400


def test_hits_on_the_disk_do_not_wait_for_a_store_that_hangs(
    make: Make,
) -> None:
    scene, store = counting(make)
    put_below(scene, [f"mine {number}" for number in range(20)])
    store.slow = True  # and no later get completes first
    for name in "abc":
        cold(scene, name)
    store.first.wait()
    names = [digest(f"mine {number}") for number in range(20)]
    target = np.zeros((20, LENGTH), np.uint8)
    assert scene.cache.get(names, target).hits == 20
    assert np.array_equal(target, np.concatenate([content(f"mine {n}", 0) for n in range(20)]))


def test_many_chains_are_served_in_turn(make: Make) -> None:
    """No chain has more keys in flight than its share while another chain waits for its first
    key.
    """
    scene, store = counting(make, disk=False)
    store.slow = True
    for name in range(6):
        assert cold(scene, f"chain {name}", 100) == 100
    store.passes.release(1000)
    assert eventually(lambda: scene.server.lower_stat().wanted_count == 0)
    assert len(store.requested) <= 6 * 32


def test_a_chain_of_hits_is_complete(make: Make) -> None:
    scene = make(disk=False)
    names = [f"mine {number}" for number in range(40)]
    put_below(scene, names)
    target = np.zeros((len(names), LENGTH), np.uint8)
    assert scene.cache.get([digest(name) for name in names], target).hits == len(names)
    assert np.array_equal(target, np.concatenate([content(name, 0) for name in names]))
