# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""LMCache's second level (L2) over a pool, with a fake of LMCache: stores,
lookups, loads, locks, deletions, layouts, and the identity of models.

``test_real_packages.py`` runs LMCache itself, and its own tests.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import select
import sys
import threading
import types
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import (
    LONG_S,
    PACKAGE,
    SHAPE,
    ChunkKey,
    Dtype,
    Make,
    MakeAdapter,
    Memory,
    ObjectKey,
    blank,
    chunks,
    damage,
    filled,
    held_stores,
    l2,
    load,
    lookup,
    no_pins,
    store,
)
from numpy.typing import NDArray
from support.blocks import eventually
from support.memory_tier import MemoryTier, served

from beluga import IndexServer, Namespace, Pool
from beluga.connectors.connection import Attachment
from beluga.connectors.identity import Files, digest_of
from beluga.connectors.lmcache import identity, objects
from beluga.connectors.lmcache import worker as worker_module
from beluga.connectors.settings import PoolSettings
from beluga.errors import CacheError, ConnectorError, LayoutError, QuotaError
from beluga.index import IndexClient
from beluga.rpc import Client
from beluga.transfer import TransferClass

OTHER = (2, 4, 64, 16)  # as many bytes as SHAPE


def test_objects_are_loaded_by_another_server(adapter: MakeAdapter) -> None:
    keys, memories = chunks(8)
    first, second = adapter(), adapter()
    assert store(first, keys, memories) == sum(m.get_size() for m in memories)
    assert [key for key, _ in first.stored] == keys
    assert store(first, keys, memories) == 0  # nothing is written twice
    assert lookup(second, keys) == [True] * 8
    targets = blank(8)
    assert load(second, keys, targets) == [True] * 8
    assert all(np.array_equal(t.data, m.data) for t, m in zip(targets, memories, strict=True))
    assert second.accessed == keys


def test_hits_after_misses_are_found_in_any_layout_of_their_group(adapter: MakeAdapter) -> None:
    keys, memories = chunks(12)
    other = [ObjectKey(key.chunk_hash, kv_rank=2, object_group_id=1) for key in keys]
    stored = [0, 1, 4, 5, 6, 11]
    l2_adapter = adapter()
    store(l2_adapter, [keys[i] for i in stored] + other, [memories[i] for i in stored] + memories)
    expected = [i in stored for i in range(12)] + [True] * 12
    assert lookup(l2_adapter, keys + other) == load(l2_adapter, keys + other, blank(24)) == expected
    undescribed, absent = (ObjectKey(name, object_group_id=5) for name in (b"a", b"absent"))
    store(l2_adapter, [undescribed], [Memory(OTHER, seed=1)])
    assert lookup(l2_adapter, [keys[0], undescribed, absent]) == [True, True, False]


@pytest.mark.usefixtures("records_unpinned")
@pytest.mark.parametrize("remote", [False, True], ids=["known", "remote"])
def test_blocks_of_a_lower_tier_are_onboarded_and_locked_if_the_engine_waits(
    shm: Path, lmcache: Any, remote: bool
) -> None:
    tier = MemoryTier(remote=remote)
    with served(shm / "first", tier), l2(lmcache, shm / "first") as l2_adapter:
        _, keys, memories = filled(l2_adapter, 8)
        assert eventually(lambda: len(tier.blocks) == 9)  # with the layout's record
    with served(shm / "hasty", tier), l2(lmcache, shm / "hasty", onboard_ms=0) as l2_adapter:
        assert lookup(l2_adapter, keys) == load(l2_adapter, keys, blank(8)) == [False] * 8
        assert remote or tier.loads == []
    absent = ObjectKey(b"x" * 8)
    requested = [*keys[:3], absent, *keys[3:]]
    with served(shm / "second", tier) as pool, l2(lmcache, shm / "second") as l2_adapter:
        assert lookup(l2_adapter, requested) == [key is not absent for key in requested]
        with Client(pool) as client:
            assert IndexClient(client).stat().pinned_count == 8
        targets = blank(8)
        assert load(l2_adapter, keys, targets) == [True] * 8
        assert all(np.array_equal(t.data, m.data) for t, m in zip(targets, memories, strict=True))


def test_locked_objects_survive_eviction_until_unlocked(
    server: IndexServer, adapter: MakeAdapter
) -> None:
    shape = (2, 4, 1023, 512)  # 8 MiB: twelve of them exceed the pool
    keys = [ObjectKey(bytes([i]) * 8) for i in range(24)]
    l2_adapter = adapter()
    first = Memory(shape, seed=1)
    assert store(l2_adapter, keys[:1], [first]) == first.get_size()
    assert lookup(l2_adapter, keys[:1], shape) == [True]
    for key in keys[1:]:
        store(l2_adapter, [key], [Memory(shape, seed=2)])
    assert lookup(l2_adapter, keys[1:2], shape) == [False]  # the block was evicted
    target = blank(1, shape)
    assert load(l2_adapter, keys[:1], target) == [True]
    assert np.array_equal(target[0].data, first.data)
    pinned = server.index_stat().pinned_count
    l2_adapter.submit_unlock(keys[:1])
    assert eventually(lambda: server.index_stat().pinned_count == pinned - 1)


@pytest.mark.usefixtures("records_unpinned")
def test_an_unlocked_lookup_leaves_no_pins(server: IndexServer, adapter: MakeAdapter) -> None:
    l2_adapter, memory = adapter(), Memory(SHAPE, seed=1)
    assert store(l2_adapter, [ObjectKey(b"a")], [memory]) > 0
    key = ObjectKey(b"a")
    known = weakref.ref(key)
    assert lookup(l2_adapter, [key]) == lookup(l2_adapter, [key]) == [True]
    assert load(l2_adapter, [ObjectKey(b"a")], blank(1)) == [True]
    l2_adapter.submit_unlock([key])
    l2_adapter.submit_unlock([ObjectKey(b"a")])
    assert lookup(l2_adapter, [ObjectKey(b"b")]) == [False]  # nor of the last job
    del key
    assert eventually(lambda: known() is None)
    assert server.index_stat().pinned_count == 0


def test_objects_of_another_owner_configuration_layout_or_version_are_misses(
    adapter: MakeAdapter,
) -> None:
    l2_adapter, keys, _ = filled(adapter())
    none = [False, False]
    owners = {"model_name": "other", "kv_rank": 7, "object_group_id": 1, "cache_salt": "tenant"}
    for name, value in owners.items():
        others = [dataclasses.replace(key, **{name: value}) for key in keys]
        assert lookup(l2_adapter, others) == load(l2_adapter, others, blank(2)) == none, name
    for settings in {"salt": "secret"}, {"variant": "fp8_e5m2"}:
        assert lookup(adapter(**settings), keys) == none, settings
    assert lookup(l2_adapter, keys, OTHER) == load(l2_adapter, keys, blank(2, OTHER)) == none
    sys.modules[f"{PACKAGE}.l2"].lmcache_version = "0.5.7"  # type: ignore[attr-defined]
    assert lookup(adapter(), keys) == none
    assert lookup(l2_adapter, keys) == [True, True]


def test_an_adapter_that_starts_without_a_server_misses_and_does_not_wait(
    lone_adapter: MakeAdapter,
) -> None:
    keys, memories = chunks(4)
    l2_adapter = lone_adapter(timeout_ms=200, attached=False)
    assert store(l2_adapter, keys, memories) == -1
    assert lookup(l2_adapter, keys) == load(l2_adapter, keys, blank(4)) == [False] * 4
    l2_adapter.submit_unlock(keys)
    l2_adapter.delete(keys)
    status = l2_adapter.report_status()
    assert (status["is_healthy"], status["attached"]) == (True, False)
    assert status["failure_count"] > 0


def test_damaged_bytes_are_a_miss_and_can_be_stored_again(pool: Pool, adapter: MakeAdapter) -> None:
    l2_adapter, keys, memories = filled(adapter(), 3)
    damage(pool, memories[1].data)
    assert load(l2_adapter, keys, blank(3)) == [True, False, True]
    assert lookup(l2_adapter, keys) == [True, False, True]
    assert store(l2_adapter, keys, memories) == memories[1].get_size()
    targets = blank(3)
    assert load(l2_adapter, keys, targets) == [True] * 3
    assert np.array_equal(targets[1].data, memories[1].data)


def test_invalid_settings_and_arguments_are_refused(adapter: MakeAdapter) -> None:
    with pytest.raises(ConnectorError, match="has no setting adress"):
        adapter(adress="here")
    assert store(adapter(), chunks(1)[0], [None]) == -1


def test_without_a_server_objects_miss_until_it_is_back(
    pool: Pool, lone_adapter: MakeAdapter
) -> None:
    with IndexServer(pool):
        l2_adapter, keys, memories = filled(lone_adapter(timeout_ms=1000))
        expected = {"is_healthy": True, "type": "BelugaL2Adapter", "attached": True}
        assert l2_adapter.report_status() == expected | {"failure_count": 0}
        assert load(l2_adapter, keys, blank(2)) == lookup(l2_adapter, keys) == [True, True]
        moved = l2_adapter.transfer_stats()
        # the record of the layout is included
        assert 0 <= moved[TransferClass.OFFLOAD].bytes - 2 * memories[0].get_size() < 128
        assert 0 <= moved[TransferClass.ONBOARD].bytes - 2 * memories[0].get_size() < 128
    assert lookup(l2_adapter, keys) == load(l2_adapter, keys, blank(2)) == [False, False]
    assert store(l2_adapter, keys, memories) == -1
    l2_adapter.submit_unlock(keys)
    status = l2_adapter.report_status()
    assert (status["is_healthy"], status["attached"]) == (True, False)
    assert status["failure_count"] >= 1
    with IndexServer(pool):
        assert eventually(lambda: lookup(l2_adapter, keys) == [True, True], LONG_S)


def test_the_descriptors_signal_completed_work(adapter: MakeAdapter) -> None:
    keys, memories = chunks(1)
    l2_adapter = adapter()
    stores, lookups, loads = (
        l2_adapter.get_store_event_fd(),
        l2_adapter.get_lookup_and_lock_event_fd(),
        l2_adapter.get_load_event_fd(),
    )

    def readable(descriptor: int, within_s: float = LONG_S) -> bool:
        return bool(select.select([descriptor], [], [], within_s)[0])

    assert len({stores, lookups, loads}) == 3
    assert not any(readable(each, 0) for each in (stores, lookups, loads))
    first = l2_adapter.submit_store_task(keys, memories)
    assert readable(stores)
    assert set(l2_adapter.pop_completed_store_tasks()) == {first}
    layout = types.SimpleNamespace(shapes=[SHAPE], dtypes=[Dtype()])
    second = l2_adapter.submit_lookup_and_lock_task(keys, {0: layout})
    assert second != first
    assert readable(lookups)
    assert l2_adapter.query_lookup_and_lock_result(second).bits == [True]
    assert l2_adapter.query_lookup_and_lock_result(second) is None  # a result is returned once
    assert not readable(loads, 0)
    l2_adapter.submit_load_task(keys, blank(1))
    assert readable(loads)


def test_after_close_tasks_fail_and_sessions_and_descriptors_are_closed_once(
    server: IndexServer, adapter: MakeAdapter
) -> None:
    l2_adapter, (keys, memories) = adapter(timeout_ms=60_000), chunks(1)
    stores, *others = (
        l2_adapter.get_store_event_fd(),
        l2_adapter.get_lookup_and_lock_event_fd(),
        l2_adapter.get_load_event_fd(),
    )
    assert server.stat().live_count == 1
    l2_adapter.close()
    assert server.stat().live_count == 0
    for descriptor in (stores, *others):
        with pytest.raises(OSError, match="descriptor"):
            os.fstat(descriptor)
    again = os.dup2(os.open(os.devnull, os.O_RDONLY), stores)
    try:
        l2_adapter.close()
        os.fstat(again)  # the object with that number now was not closed
    finally:
        os.close(again)
    assert store(l2_adapter, keys, memories) == -1
    assert lookup(l2_adapter, keys) == load(l2_adapter, keys, blank(1)) == [False]
    l2_adapter.submit_unlock(keys)
    l2_adapter.delete(keys)


# ---- Deletions and layouts


def test_an_object_is_a_miss_when_its_deletion_returns(adapter: MakeAdapter) -> None:
    (l2_adapter, keys, memories), other = filled(adapter(), 3), adapter()
    l2_adapter.delete(keys[1:])
    assert lookup(l2_adapter, keys) == lookup(other, keys) == [True, False, False]
    assert load(other, keys, blank(3)) == [True, False, False]
    assert store(l2_adapter, keys, memories) == 2 * memories[0].get_size()
    assert lookup(other, keys) == [True] * 3


def test_a_deletion_runs_after_earlier_stores(
    adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    l2_adapter, (keys, memories), go = adapter(), chunks(2), held_stores(monkeypatch)
    l2_adapter.submit_store_task(keys, memories)
    deleting = threading.Thread(target=l2_adapter.delete, args=(keys,))
    deleting.start()
    go.set()
    deleting.join(LONG_S)
    assert lookup(l2_adapter, keys) == [False, False]
    assert [key for key, _ in l2_adapter.stored] == [key for key, _ in l2_adapter.deleted] == keys


def test_an_object_with_a_pending_deletion_is_a_miss(
    adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    l2_adapter, keys, _ = filled(adapter())
    with monkeypatch.context() as patch:
        patch.setattr(l2_adapter, "_settle", lambda: False)  # the pool is busy
        l2_adapter.delete(keys[:1])
        assert lookup(l2_adapter, keys) == load(l2_adapter, keys, blank(2)) == [False, True]
    assert lookup(l2_adapter, keys) == [False, True]


def test_listeners_are_called_for_each_deleted_object_with_its_size_and_may_delete(
    adapter: MakeAdapter,
) -> None:
    l2_adapter, (key,), (memory,) = filled(adapter(), 1)
    l2_adapter.delete([key, key, ObjectKey(b"absent")])
    l2_adapter.delete([key])
    assert l2_adapter.deleted == [(key, memory.get_size())]
    other = adapter()
    store(l2_adapter, [key], [memory])
    other.delete([key])
    assert other.deleted == [(key, 0)]  # this adapter never counted it
    assert lookup(l2_adapter, [key]) == [False]
    l2_adapter.delete([key])
    assert l2_adapter.deleted == [(key, memory.get_size())] * 2  # for LMCache it was a hit
    l2_adapter._notify_keys_stored = lambda stored, _: l2_adapter.delete(stored[:1])
    keys, memories = chunks(2)
    assert store(l2_adapter, keys, memories) > 0
    assert lookup(l2_adapter, keys) == [False, True]


def test_a_deletion_without_a_server_is_executed_after_the_reattachment(
    pool: Pool, lone_adapter: MakeAdapter
) -> None:
    keys, memories = chunks(2)
    with IndexServer(pool):
        l2_adapter = lone_adapter(timeout_ms=1000)
        store(l2_adapter, keys, memories)
    l2_adapter.delete(keys[:1])
    assert l2_adapter.deleted == []
    with IndexServer(pool):
        other = lone_adapter(timeout_ms=1000)
        assert eventually(lambda: lookup(l2_adapter, keys) == [False, True], LONG_S)
        assert load(l2_adapter, keys, blank(2)) == [False, True]
        assert eventually(lambda: lookup(l2_adapter, keys) and bool(l2_adapter.deleted), LONG_S)
        assert [key for key, _ in l2_adapter.deleted] == keys[:1]
        assert lookup(other, keys) == [False, True]
        assert store(l2_adapter, keys[:1], memories[:1]) > 0
        assert lookup(l2_adapter, keys) == [True, True]


class Stubborn(MemoryTier):
    """A store that rejects every deletion."""

    def remove(self, keys: NDArray[np.uint64]) -> int:
        raise OSError("made up")


@pytest.mark.parametrize("remote", [False, True], ids=["known", "remote"])
def test_a_deleted_object_is_not_loaded_from_a_tier_without_deletion(
    shm: Path, lmcache: Any, remote: bool
) -> None:
    tier = Stubborn(remote=remote)
    keys, memories = chunks(3)
    with served(shm / "pool", tier), l2(lmcache, shm / "pool") as l2_adapter:
        store(l2_adapter, keys, memories)
        assert eventually(lambda: len(tier.blocks) == 4)  # with the layout's record
        l2_adapter.delete(keys[:1])
        assert lookup(l2_adapter, keys) == [False, True, True]
        with l2(lmcache, shm / "pool") as other:
            assert lookup(other, keys) == [False, True, True]
            assert load(other, keys, blank(3)) == [False, True, True]
            assert store(other, keys[:1], memories[:1]) > 0
            assert lookup(l2_adapter, keys) == [True] * 3


def test_a_late_reply_of_a_tier_is_a_miss_and_deletes_nothing(shm: Path, lmcache: Any) -> None:
    tier = MemoryTier(remote=True)
    keys, memories = chunks(2)
    with served(shm / "first", tier), l2(lmcache, shm / "first") as l2_adapter:
        store(l2_adapter, keys, memories)
        assert eventually(lambda: len(tier.blocks) == 3)
    tier.open.clear()
    with (
        served(shm / "second", tier),
        l2(lmcache, shm / "second", timeout_ms=300, onboard_ms=50) as l2_adapter,
    ):
        try:
            assert lookup(l2_adapter, keys) == [False, False]
            l2_adapter.delete(keys[:1])  # the layouts are not known yet
            assert l2_adapter.deleted == []
        finally:
            tier.open.set()
        assert eventually(lambda: lookup(l2_adapter, keys) == [False, True], LONG_S)
        assert eventually(
            lambda: lookup(l2_adapter, keys) == [False, True] and not l2_adapter._owed, LONG_S
        )
        with l2(lmcache, shm / "second") as other:
            assert eventually(lambda: lookup(other, keys) == [False, True], LONG_S)


def test_beyond_the_bound_a_whole_model_is_dropped(
    pool: Pool, lone_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "OWED_MAX", 2)
    keys, memories = chunks(4)
    elsewhere = ObjectKey(b"a", model_name="other")
    with IndexServer(pool):
        l2_adapter = lone_adapter(timeout_ms=1000)
        store(l2_adapter, [*keys, elsewhere], [*memories, memories[0]])
    l2_adapter.delete(keys[:3])
    with IndexServer(pool):
        other = lone_adapter(timeout_ms=1000)
        assert eventually(lambda: lookup(l2_adapter, [elsewhere]) == [True], LONG_S)
        assert lookup(l2_adapter, keys) == [False] * 4
        assert eventually(lambda: store(l2_adapter, [ObjectKey(b"new")], memories[:1]) > 0, LONG_S)
        assert lookup(other, [*keys, elsewhere]) == [False] * 4 + [True]
        assert {key for key, _ in l2_adapter.deleted} == set(keys)
        assert store(l2_adapter, keys, memories) > 0
        assert lookup(other, keys) == [True] * 4


def test_evicted_objects_leave_the_usage_count(
    adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "CHECK_MIN", 4)
    keys, memories = chunks(6)
    l2_adapter, evicting = adapter(), adapter()
    store(l2_adapter, keys[:3], memories[:3])
    evicting.delete(keys[:1])
    store(l2_adapter, keys[:1], memories[:1])  # counts once
    used = sum(n for _, n in l2_adapter.stored) - sum(n for _, n in l2_adapter.deleted)
    assert used == 3 * memories[0].get_size()
    before = len(l2_adapter.deleted)
    evicting.delete(keys[:2])
    assert len(l2_adapter.deleted) == before
    store(l2_adapter, keys[3:], memories[3:])
    assert {key for key, _ in l2_adapter.deleted[before:]} == set(keys[:2])
    assert len(list(l2_adapter._ledger)) == 4


def test_the_objects_of_a_server_are_listed_in_pages(adapter: MakeAdapter) -> None:
    keys, memories = chunks(5)
    keys = [dataclasses.replace(key, model_name=f"m{i % 2}") for i, key in enumerate(keys)]
    l2_adapter = adapter()
    assert l2_adapter.list_l2_keys() == ((), None)
    store(l2_adapter, keys, memories)
    listed: list[Any] = []
    token = None
    while not listed or token is not None:
        entries, token = l2_adapter.list_l2_keys(page_size=2, cursor=token)
        l2_adapter.delete([entry.key for entry in entries])  # skips no other
        listed += entries
    assert sorted(repr(entry.key) for entry in listed) == sorted(map(repr, keys))
    assert {entry.size_bytes for entry in listed} == {memories[0].get_size()}
    store(l2_adapter, keys, memories)
    assert len(l2_adapter.list_l2_keys("m1").entries) == 2
    with pytest.raises(ValueError, match="page_size is 0; give at least 1"):
        l2_adapter.list_l2_keys(page_size=0)


def test_a_pool_that_is_not_declared_as_shared_is_reported(
    adapter: MakeAdapter, caplog: pytest.LogCaptureFixture
) -> None:
    l2_adapter = adapter()
    l2_adapter.set_backend_identity("plugin", True)
    assert (l2_adapter.identity, caplog.text) == (("beluga", True), "")
    l2_adapter.set_backend_identity("plugin")
    assert l2_adapter.identity == ("beluga", False)
    assert 'add "shared": true to' in caplog.text


def test_an_object_is_loaded_in_its_own_layout_and_deleted_in_all(adapter: MakeAdapter) -> None:
    l2_adapter, keys, memories = filled(adapter())
    others = [Memory(OTHER, seed=7 + i) for i in range(2)]
    store(l2_adapter, keys, others)
    for shape, sources in ((SHAPE, memories), (OTHER, others)):
        targets = blank(2, shape)
        assert load(l2_adapter, keys, targets) == [True, True]
        assert all(np.array_equal(t.data, s.data) for t, s in zip(targets, sources, strict=True))
    l2_adapter.close()
    adapter().delete(keys[:1])  # which knows no layout yet
    third = adapter()
    assert lookup(third, keys) == lookup(third, keys, OTHER) == [False, True]


def test_salts_leave_a_bounded_number_of_namespaces(adapter: MakeAdapter) -> None:
    l2_adapter = adapter()
    for number in range(5_000):
        l2_adapter._namespace(ObjectKey(b"a", cache_salt=str(number)))
    assert l2_adapter._namespace_of.cache_info().currsize == 1024


def test_a_model_has_a_bounded_number_of_layouts(
    adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "LAYOUTS_MAX", 2)
    key, l2_adapter = ObjectKey(b"a"), adapter()
    shapes = [(2, 4, 16, n) for n in (16, 32, 64)]
    assert [store(l2_adapter, [key], [Memory(shape, seed=1)]) > 0 for shape in shapes] == [
        True,
        True,
        False,
    ]
    assert [lookup(l2_adapter, [key], shape) for shape in shapes] == [[True], [True], [False]]


def test_concurrently_added_layouts_are_found_by_all_processes(adapter: MakeAdapter) -> None:
    made = [adapter() for _ in range(4)]
    key = ObjectKey(b"a")
    shapes = [(2, 4, 16, 16 * (n + 1)) for n in range(len(made))]
    together = threading.Barrier(len(made))

    def add(l2_adapter: Any, shape: tuple[int, ...]) -> None:
        together.wait(LONG_S)
        # another adapter adds one at this moment
        while store(l2_adapter, [key], [Memory(shape, seed=1)]) < 0:
            pass

    threads = [threading.Thread(target=add, args=each) for each in zip(made, shapes, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    for l2_adapter in made:
        assert [lookup(l2_adapter, [key], shape) for shape in shapes] == [[True]] * len(shapes)
    made[0].delete([key])
    assert [lookup(made[1], [key], shape) for shape in shapes] == [[False]] * len(shapes)


@pytest.mark.usefixtures("records_unpinned")
def test_an_unlock_that_fails_is_done_later(
    server: IndexServer, adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, memories = chunks(2)
    l2_adapter, real, failed = adapter(), objects.release, threading.Event()

    def release(*given: Any) -> int:
        if failed.is_set():
            return real(*given)
        failed.set()
        raise CacheError("made up")

    store(l2_adapter, keys, memories)
    assert lookup(l2_adapter, keys) == [True, True]
    monkeypatch.setattr(objects, "release", release)
    l2_adapter.submit_unlock(keys)
    assert failed.wait(LONG_S)
    lookup(l2_adapter, [ObjectKey(b"x")])
    assert server.index_stat().pinned_count == 0


@pytest.mark.usefixtures("records_unpinned")
def test_locks_of_requests_that_never_end_expire(
    server: IndexServer, adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    l2_adapter, keys, _ = filled(adapter())
    assert lookup(l2_adapter, keys) == [True, True]
    assert server.index_stat().pinned_count == 2
    monkeypatch.setattr(worker_module, "PIN_S", 0.0)
    lookup(l2_adapter, [ObjectKey(b"x")])
    assert server.index_stat().pinned_count == 0
    assert len(l2_adapter._pins) == 0


# ---- Batches of objects


@pytest.fixture
def attachment(server: IndexServer, pool_name: str) -> Iterator[Attachment]:
    attachment = Attachment(PoolSettings(pool=pool_name, timeout_ms=5000))
    yield attachment
    attachment.close()


def test_objects_among_many_misses_are_found_with_few_calls(
    server: IndexServer, attachment: Attachment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the row of a hybrid model's states: 1,000 keys, of which every 250th is there. Keys
    after a miss are looked up in one call.
    """
    items = [(Namespace.of("test"), b"%d" % i) for i in range(1000)]
    there = items[249::250]
    objects.store(attachment, there, [np.ones(64, dtype=np.uint8)] * len(there))
    before = server.stat().call_count
    hits = objects.find(attachment, items, pin=True)
    calls = server.stat().call_count - before
    assert [i for i, hit in enumerate(hits) if hit] == [249, 499, 749, 999]
    assert calls <= 1000 / 256 * 2 + len(there) + 3
    assert objects.release(attachment, [hit.grant for hit in hits if hit]) == 4
    requests, real = list[int](), objects._lookup

    def lookup(meta: Any, keys: Any, *, pin: bool) -> Any:
        requests.append(len(keys))
        return real(meta, keys, pin=pin)

    monkeypatch.setattr(objects, "_lookup", lookup)
    there = [items[0], *items[2:100]]
    objects.store(attachment, there, [np.ones(64, dtype=np.uint8)] * len(there))
    hits = objects.find(attachment, items[:100], pin=False)
    assert [grant is not None for grant in hits] == [True, False] + [True] * 98
    assert requests == [100, 98]


def test_pins_are_released_when_a_batch_fails_half_way(
    server: IndexServer, attachment: Attachment, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = [(Namespace.of(name), b"a") for name in ("one", "other")]
    requests, real = list[int](), objects._lookup

    def second_fails(meta: Any, keys: Any, *, pin: bool) -> Any:
        requests.append(len(keys))
        if len(requests) == 2:
            raise CacheError("made up")
        return real(meta, keys, pin=pin)

    monkeypatch.setattr(objects, "_lookup", second_fails)
    objects.store(attachment, items, [np.ones(64, dtype=np.uint8)] * 2)
    with pytest.raises(CacheError, match="made up"):
        objects.find(attachment, items, pin=True)
    assert server.index_stat().pinned_count == 0


def test_objects_are_found_although_the_pin_quota_is_exhausted(
    attachment: Attachment, monkeypatch: pytest.MonkeyPatch
) -> None:
    item, requests = (Namespace.of("one"), b"a"), list[bool]()
    objects.store(attachment, [item], [np.ones(64, dtype=np.uint8)])
    no_pins(monkeypatch)
    assert objects.find(attachment, [item], pin=True)[0] is not None

    def refused(_: IndexClient, keys: Any, *, pin: bool = False) -> Any:
        requests.append(pin)
        raise QuotaError("made up")

    monkeypatch.setattr(IndexClient, "lookup", refused)
    with pytest.raises(QuotaError, match="made up"):
        objects.find(attachment, [item], pin=False)
    assert requests == [False]  # it is not tried again


@pytest.mark.parametrize("error", [RuntimeError, TypeError, ValueError])
def test_objects_outside_of_cpu_memory_are_refused(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(_: Memory) -> memoryview:
        raise error("Cannot access data pointer of Tensor")

    for device in ("cuda", "meta"):
        with pytest.raises(LayoutError, match="CPU memory"):
            objects.bytes_of(Memory(SHAPE, device=device))
    monkeypatch.setattr(Memory, "byte_array", property(none))
    with pytest.raises(LayoutError, match="has no memory"):
        objects.bytes_of(Memory(SHAPE))


# ---- The identity of models


def model(folder: Path, content: bytes = b"w") -> str:
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(content)
    return str(folder)


def chunks_of(name: str) -> tuple[list[ObjectKey], list[Memory]]:
    keys, memories = chunks(2)
    return [dataclasses.replace(key, model_name=name) for key in keys], memories


def identified(connector: Any, name: str) -> Any:
    """Wait until the connector has identified the model."""
    assert eventually(lambda: connector._models.digest(name) != "", LONG_S)
    return connector


def test_a_model_in_a_folder_is_identified_by_its_bytes(
    adapter: MakeAdapter, backend: Make, tmp_path: Path
) -> None:
    name = model(tmp_path / "model")
    keys, memories = chunks_of(name)
    l2_adapter = identified(adapter(identity=""), name)
    assert store(l2_adapter, keys, memories) > 0
    plugin, chunk = identified(backend(identity="", model_name=name), name), ChunkKey("a")

    def stored() -> bool:  # a put while the other connector writes its first record is dropped
        plugin.batched_submit_put_task([chunk], [Memory((2, 4, 16, 64), seed=1)])
        return bool(plugin.contains(chunk))

    assert eventually(stored, LONG_S)
    for connector in (l2_adapter, plugin):
        connector.close()
    model(tmp_path / "model", b"other weights")
    assert lookup(identified(adapter(identity=""), name), keys) == [False, False]
    assert not identified(backend(identity="", model_name=name), name).contains(chunk)
    assert lookup(adapter(identity="a test"), keys) == [False, False]


def test_a_model_whose_files_change_is_not_used_until_the_server_is_restarted(
    adapter: MakeAdapter,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    """LMCache's server outlives engines, and cannot detect which files one of them has loaded."""
    monkeypatch.setattr(identity, "CHECK_S", 0.0)
    name = model(tmp_path / "model")
    keys, memories = chunks_of(name)
    l2_adapter = identified(adapter(identity=""), name)
    assert store(l2_adapter, keys, memories) > 0
    assert lookup(l2_adapter, keys) == [True, True]
    model(tmp_path / "model", b"other weights")
    assert lookup(l2_adapter, keys) == [False, False]
    assert store(l2_adapter, keys, memories) == -1
    assert "the files of the model" in caplog.text and "restart LMCache's server" in caplog.text
    l2_adapter.delete(keys[:1])  # of the model that it was
    model(tmp_path / "model")
    assert lookup(l2_adapter, keys) == [False, False]
    assert lookup(identified(adapter(identity=""), name), keys) == [False, True]
    named = adapter(identity="a test")  # by the operator
    assert store(named, keys, memories) > 0
    model(tmp_path / "model", b"third weights")
    assert lookup(named, keys) == [True, True]


def test_before_a_model_is_identified_lookups_miss_and_saves_are_skipped(
    adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name, go = model(tmp_path / "model"), threading.Event()
    real = Files.digest
    monkeypatch.setattr(Files, "digest", lambda self, hashed: (go.wait(), real(self, hashed))[1])
    l2_adapter, (keys, memories) = adapter(identity=""), chunks_of(name)
    assert store(l2_adapter, keys, memories) == -1
    assert lookup(l2_adapter, keys) == [False, False]
    l2_adapter.delete(keys)  # returns once the keys to delete are resolved
    go.set()
    assert store(identified(l2_adapter, name), keys, memories) > 0
    assert lookup(l2_adapter, keys) == [True, True]


def test_a_model_name_without_weights_is_rejected_in_one_line(
    adapter: MakeAdapter, backend: Make, caplog: pytest.LogCaptureFixture
) -> None:
    l2_adapter, (keys, memories) = adapter(identity=""), chunks(2)
    for _ in range(2):
        assert store(l2_adapter, keys, memories) == -1
        assert lookup(l2_adapter, keys) == [False, False]
    messages = [record.getMessage() for record in caplog.records]
    (line,) = (message for message in messages if "setting identity" in message)
    assert "only the model's name 'model'" in line
    with pytest.raises(ConnectorError, match=r"name 'org/name', .*setting identity"):
        backend(identity="", model_name="org/name")


def test_metadata_of_an_engine_are_part_of_the_identity_and_those_of_a_worker_are_not() -> None:
    names = "worker_id local_worker_id role engine_id kv_connector_extra_config use_mla chunk_size"
    kind = dataclasses.make_dataclass("LMCacheMetadata", [(name, int, 0) for name in names.split()])
    newer = dataclasses.make_dataclass("LMCacheMetadata", [("added", int, 1)], bases=(kind,))
    base = digest_of(kind())
    for name in names.split():
        assert (digest_of(kind(**{name: 1})) == base) is (name not in ("use_mla", "chunk_size"))
    assert len({base, digest_of(newer()), digest_of(newer(added=2))}) == 3


def test_lmcache_is_not_imported_before_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lmcache", None)
    module = importlib.import_module(PACKAGE)
    assert not hasattr(module, "BelugaL2AdapterConfig")  # LMCache searches for one
    with pytest.raises(ImportError):
        _ = module.BelugaL2Adapter
