# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The contract of LMCache's interfaces: deletions, listeners, pins, callbacks, and calls after
close.

``test_real_packages.py`` runs LMCache's own tests of these interfaces.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import ChunkKey, Memory, ObjectKey
from lmcache_parts import LONG_S, SHAPE, MakeAdapter, blank, chunks, l2, load, lookup, store
from numpy.typing import NDArray
from support.blocks import eventually
from support.memory_tier import MemoryTier, served

from beluga import IndexServer, Pool
from beluga.connectors.connection import Connection
from beluga.connectors.lmcache import objects
from beluga.connectors.lmcache import worker as worker_module
from beluga.connectors.lmcache.worker import JobWorker
from beluga.connectors.settings import PoolSettings
from beluga.errors import CacheError, LayoutError
from beluga.index import IndexClient

OTHER = (2, 4, 64, 16)  # as many bytes as SHAPE
Make = Callable[..., Any]


def put(backend: Any, keys: list[ChunkKey], memories: list[Memory] | None = None) -> None:
    """Put chunks and wait until the pool has them."""
    calls: list[ChunkKey] = []
    memories = memories or [Memory(SHAPE, seed=i) for i in range(len(keys))]
    backend.batched_submit_put_task(keys, memories, None, calls.append)
    assert eventually(lambda: calls == keys, LONG_S)


def test_an_object_is_a_miss_when_its_deletion_returns(
    server: IndexServer, adapter: MakeAdapter
) -> None:
    keys, memories = chunks(3)
    l2_adapter, other = adapter(), adapter()
    store(l2_adapter, keys, memories)
    l2_adapter.delete(keys[1:])
    assert lookup(l2_adapter, keys) == lookup(other, keys) == [True, False, False]
    assert load(other, keys, blank(3)) == [True, False, False]
    assert store(l2_adapter, keys, memories) == 2 * memories[0].get_size()
    assert lookup(other, keys) == [True] * 3


def test_a_deletion_runs_after_earlier_stores(
    server: IndexServer, adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, memories = chunks(2)
    l2_adapter, go, real = adapter(), threading.Event(), objects.store
    monkeypatch.setattr(objects, "store", lambda *given: go.wait(LONG_S) and real(*given))
    l2_adapter.submit_store_task(keys, memories)
    deleting = threading.Thread(target=l2_adapter.delete, args=(keys,))
    deleting.start()
    go.set()
    deleting.join(LONG_S)
    assert lookup(l2_adapter, keys) == [False, False]
    assert [key for key, _ in l2_adapter.stored] == [key for key, _ in l2_adapter.deleted] == keys


def test_listeners_are_called_for_each_deleted_object_with_its_size(
    server: IndexServer, adapter: MakeAdapter
) -> None:
    keys, memories = chunks(2)
    l2_adapter, size = adapter(), memories[0].get_size()
    store(l2_adapter, keys[:1], memories[:1])
    l2_adapter.delete([keys[0], keys[0], keys[1]])
    assert l2_adapter.deleted == [(keys[0], size)]
    l2_adapter.delete(keys)
    assert l2_adapter.deleted == [(keys[0], size)]


def test_an_object_of_another_process_is_deleted_without_a_size(
    server: IndexServer, adapter: MakeAdapter
) -> None:
    keys, memories = chunks(1)
    l2_adapter, other = adapter(), adapter()
    store(other, keys, memories)
    l2_adapter.delete(keys)
    assert l2_adapter.deleted == [(keys[0], 0)]  # this adapter never counted it
    assert lookup(other, keys) == [False]
    other.delete(keys)
    assert other.deleted == [(keys[0], memories[0].get_size())]  # for LMCache it was a hit


def test_objects_are_deleted_in_layouts_unknown_to_this_process(
    server: IndexServer, adapter: MakeAdapter
) -> None:
    keys, memories = chunks(2)
    first = adapter()
    store(first, keys, memories)
    store(first, keys, [Memory(OTHER, seed=7) for _ in keys])
    first.close()
    second = adapter()
    second.delete(keys[:1])
    third = adapter()
    assert lookup(third, keys) == lookup(third, keys, OTHER) == [False, True]


def test_an_object_is_loaded_only_in_its_own_layout(
    server: IndexServer, adapter: MakeAdapter
) -> None:
    keys, memories = chunks(1)
    other = Memory(OTHER, seed=9)
    l2_adapter = adapter()
    store(l2_adapter, keys, memories)
    store(l2_adapter, keys, [other])
    for shape, source in ((SHAPE, memories[0]), (OTHER, other)):
        (target,) = blank(1, shape)
        assert load(l2_adapter, keys, [target]) == [True]
        assert np.array_equal(target.data, source.data)


def test_a_deletion_without_a_server_is_executed_after_the_reattachment(
    pool: Pool, adapter: MakeAdapter
) -> None:
    keys, memories = chunks(2)
    with IndexServer(pool):
        l2_adapter = adapter(timeout_ms=1000)
        store(l2_adapter, keys, memories)
    l2_adapter.delete(keys[:1])
    assert l2_adapter.deleted == []
    with IndexServer(pool):
        other = adapter(timeout_ms=1000)
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
    pool: Pool, adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "OWED_MAX", 2)
    keys, memories = chunks(4)
    elsewhere = ObjectKey(b"a", model_name="other")
    with IndexServer(pool):
        l2_adapter = adapter(timeout_ms=1000)
        store(l2_adapter, [*keys, elsewhere], [*memories, memories[0]])
    l2_adapter.delete(keys[:3])
    with IndexServer(pool):
        other = adapter(timeout_ms=1000)
        assert eventually(lambda: lookup(l2_adapter, [elsewhere]) == [True], LONG_S)
        assert lookup(l2_adapter, keys) == [False] * 4
        assert eventually(lambda: store(l2_adapter, [ObjectKey(b"new")], memories[:1]) > 0, LONG_S)
        assert lookup(other, [*keys, elsewhere]) == [False] * 4 + [True]
        assert {key for key, _ in l2_adapter.deleted} == set(keys)
        assert store(l2_adapter, keys, memories) > 0
        assert lookup(other, keys) == [True] * 4


def test_a_listener_may_delete(server: IndexServer, adapter: MakeAdapter) -> None:
    keys, memories = chunks(2)
    l2_adapter = adapter()
    notify = l2_adapter._notify_keys_stored

    def stored(new: list[Any], sizes: list[int]) -> None:
        notify(new, sizes)
        l2_adapter.delete(new[:1])

    l2_adapter._notify_keys_stored = stored
    assert store(l2_adapter, keys, memories) > 0
    assert lookup(l2_adapter, keys) == [False, True]


def test_an_evicted_object_that_is_stored_again_counts_once(
    server: IndexServer, adapter: MakeAdapter
) -> None:
    keys, memories = chunks(1)
    l2_adapter, evicting = adapter(), adapter()
    size = memories[0].get_size()
    store(l2_adapter, keys, memories)
    evicting.delete(keys)
    store(l2_adapter, keys, memories)
    used = sum(n for _, n in l2_adapter.stored) - sum(n for _, n in l2_adapter.deleted)
    assert used == size


def test_evicted_objects_leave_the_usage_count(
    server: IndexServer, adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "CHECK_MIN", 4)
    keys, memories = chunks(6)
    l2_adapter, evicting = adapter(), adapter()
    store(l2_adapter, keys[:3], memories[:3])
    evicting.delete(keys[:2])
    assert l2_adapter.deleted == []
    store(l2_adapter, keys[3:], memories[3:])
    assert [key for key, _ in l2_adapter.deleted] == keys[:2]
    assert len(list(l2_adapter._ledger)) == 4


def test_a_model_has_a_bounded_number_of_layouts(
    server: IndexServer, adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
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


def test_concurrently_added_layouts_are_found_by_all_processes(
    server: IndexServer, adapter: MakeAdapter
) -> None:
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


def test_tasks_after_close_fail_and_descriptors_are_closed_once(
    server: IndexServer, adapter: MakeAdapter
) -> None:
    keys, memories = chunks(1)
    l2_adapter = adapter()
    descriptor = l2_adapter.get_store_event_fd()
    l2_adapter.close()
    again = os.dup2(os.open(os.devnull, os.O_RDONLY), descriptor)
    try:
        l2_adapter.close()
        os.fstat(again)  # the object with that number now was not closed
    finally:
        os.close(again)
    assert store(l2_adapter, keys, memories) == -1
    assert lookup(l2_adapter, keys) == load(l2_adapter, keys, blank(1)) == [False]
    l2_adapter.submit_unlock(keys)
    l2_adapter.delete(keys)


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
    keys, memories = chunks(2)
    l2_adapter = adapter()
    store(l2_adapter, keys, memories)
    assert lookup(l2_adapter, keys) == [True, True]
    assert server.index_stat().pinned_count == 2
    monkeypatch.setattr(worker_module, "PIN_S", 0.0)
    lookup(l2_adapter, [ObjectKey(b"x")])
    assert server.index_stat().pinned_count == 0
    assert len(l2_adapter._pins) == 0


@pytest.mark.usefixtures("records_unpinned")
def test_a_plugin_pins_the_requested_chunks(server: IndexServer, backend: Make) -> None:
    keys = [ChunkKey(name) for name in "abc"]
    plugin = backend()
    put(plugin, keys)
    assert plugin.contains(keys[0])
    assert server.index_stat().pinned_count == 0
    assert plugin.contains(keys[0], pin=True)
    assert plugin.pin(keys[1])
    assert server.index_stat().pinned_count == 2
    assert plugin.unpin(keys[0])
    assert plugin.unpin(keys[1])
    assert server.index_stat().pinned_count == 0
    assert plugin.unpin(keys[0])  # the key exists


@pytest.mark.usefixtures("records_unpinned")
def test_a_plugin_does_not_pin_missing_chunks(server: IndexServer, backend: Make) -> None:
    plugin, key = backend(), ChunkKey("a")
    assert not plugin.pin(key)
    assert not plugin.unpin(key)
    assert not plugin.contains(key, pin=True)
    put(plugin, [key])
    plugin.pin(key)
    assert plugin.remove(key)
    assert not plugin.pin(key)
    assert plugin.unpin(key)  # the pin that it had
    assert not plugin.unpin(key)
    assert server.index_stat().pinned_count == 0


@pytest.mark.usefixtures("records_unpinned")
def test_a_plugin_pins_only_the_leading_chunks(server: IndexServer, backend: Make) -> None:
    keys = [ChunkKey(name) for name in "abcd"]
    plugin = backend()
    put(plugin, [keys[0], keys[1], keys[3]])
    assert plugin.batched_contains(keys, pin=True) == 2
    assert server.index_stat().pinned_count == 2
    assert plugin.batched_contains(keys[:2], pin=True) == 2  # each chunk is pinned twice
    assert [plugin.unpin(key) for key in keys] == [True, True, False, True]
    assert server.index_stat().pinned_count == 2
    for key in keys[:2]:
        assert plugin.unpin(key)
    assert server.index_stat().pinned_count == 0


def test_a_pinned_chunk_outlives_eviction(server: IndexServer, backend: Make) -> None:
    plugin, first = backend(), ChunkKey("first")
    put(plugin, [first])
    assert plugin.pin(first)
    cache = plugin._reader._attachment.cache(next(iter(plugin._namespaces.values())))
    for i in range(24):
        cache.put([bytes([i]) * 16], [np.zeros((8 << 20) - 8192, np.uint8)])
    assert server.index_stat().evict_count > 0
    assert server.index_stat().pinned_count == 2  # with the record of the generation
    assert plugin.contains(first)
    assert plugin.unpin(first)


def test_a_pin_refused_by_the_quota_is_not_reported_as_held(
    server: IndexServer, backend: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    from beluga.errors import PinLimitError

    real = IndexClient.lookup

    def lookup_(index: IndexClient, keys: Any, *, pin: bool = False) -> Any:
        if pin:
            raise PinLimitError("made up")
        return real(index, keys)

    plugin, key = backend(), ChunkKey("a")
    put(plugin, [key])
    monkeypatch.setattr(IndexClient, "lookup", lookup_)
    assert plugin.contains(key, pin=True)
    assert not plugin.pin(key)
    assert len(plugin._pins) == 0


def test_a_put_after_close_holds_no_memory(server: IndexServer, backend: Make) -> None:
    plugin, key, memory = backend(), ChunkKey("a"), Memory(SHAPE, seed=1)
    plugin.close()
    plugin.close()
    plugin.batched_submit_put_task([key], [memory])
    assert memory.references == 1
    assert not plugin.exists_in_put_tasks(key)
    assert not plugin.contains(key)
    assert plugin.get_blocking(key) is None
    assert not plugin.pin(key)
    assert not plugin.remove(key)


def test_puts_that_wait_when_the_plugin_is_closed_are_finished(
    server: IndexServer, backend: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin, other, go = backend(), backend(), threading.Event()
    keys, memories = [ChunkKey("a"), ChunkKey("b")], [Memory(SHAPE, seed=i) for i in range(2)]
    real = objects.store
    monkeypatch.setattr(objects, "store", lambda *given: go.wait(LONG_S) and real(*given))
    for key, memory in zip(keys, memories, strict=True):
        plugin.batched_submit_put_task([key], [memory])
    closing = threading.Thread(target=plugin.close)
    closing.start()
    go.set()
    closing.join(LONG_S)
    assert [memory.references for memory in memories] == [1, 1]
    assert other.batched_contains(keys) == 2


def test_a_key_is_being_put_until_its_last_put_has_ended(
    server: IndexServer, backend: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin, key = backend(), ChunkKey("a")
    steps, real = threading.Semaphore(0), objects.store
    monkeypatch.setattr(
        objects, "store", lambda *given: steps.acquire(timeout=LONG_S) and real(*given)
    )
    ended: list[ChunkKey] = []
    for _ in range(2):
        plugin.batched_submit_put_task([key], [Memory(SHAPE, seed=1)], None, ended.append)
    steps.release()
    assert eventually(lambda: len(ended) == 1, LONG_S)
    assert plugin.exists_in_put_tasks(key)
    steps.release()
    assert eventually(lambda: not plugin.exists_in_put_tasks(key), LONG_S)


def test_a_callback_that_raises_stops_no_other(server: IndexServer, backend: Make) -> None:
    keys, calls = [ChunkKey(name) for name in "abc"], list[ChunkKey]()

    def callback(key: ChunkKey) -> None:
        calls.append(key)
        raise ValueError("made up")

    backend().batched_submit_put_task(
        keys, [Memory(SHAPE, seed=i) for i in range(3)], None, callback
    )
    assert eventually(lambda: calls == keys, LONG_S)


def test_a_chunk_that_is_being_put_is_removed_after_that(
    server: IndexServer, backend: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin, key, go = backend(), ChunkKey("a"), threading.Event()
    real = objects.store
    monkeypatch.setattr(objects, "store", lambda *given: go.wait(LONG_S) and real(*given))
    plugin.batched_submit_put_task([key], [Memory(SHAPE, seed=1)])
    removed: list[bool] = []
    begun, call, remove = threading.Event(), plugin._writer.call, objects.remove
    monkeypatch.setattr(plugin._writer, "call", lambda doing: (begun.set(), call(doing))[1])
    monkeypatch.setattr(
        objects, "remove", lambda *given: (result := remove(*given), begun.set(), result)[-1]
    )
    removing = threading.Thread(target=lambda: removed.append(plugin.remove(key)))
    removing.start()
    assert begun.wait(LONG_S)  # the close has begun: it may already wait for the put
    go.set()
    removing.join(LONG_S)
    assert removed == [True]
    assert not plugin.contains(key)


def test_batches_of_unequal_length_hold_no_memory(
    server: IndexServer, backend: Make, adapter: MakeAdapter
) -> None:
    plugin, keys, memory = backend(), [ChunkKey("a"), ChunkKey("b")], Memory(SHAPE, seed=1)
    plugin.batched_submit_put_task(keys, [memory])
    assert eventually(lambda: not any(map(plugin.exists_in_put_tasks, keys)), LONG_S)
    assert memory.references == 1
    assert plugin.batched_contains(keys) == 0
    assert store(adapter(), [ObjectKey(b"a"), ObjectKey(b"b")], [memory]) == -1


@pytest.mark.parametrize("error", [RuntimeError, TypeError, ValueError])
def test_an_object_without_memory_is_refused(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(_: Memory) -> memoryview:
        raise error("Cannot access data pointer of Tensor")

    monkeypatch.setattr(Memory, "byte_array", property(none))
    with pytest.raises(LayoutError, match="has no memory"):
        objects.bytes_of(Memory(SHAPE))
    with pytest.raises(LayoutError, match="CPU memory"):
        objects.bytes_of(Memory(SHAPE, device="meta"))


@pytest.mark.usefixtures("records_unpinned")
def test_pins_of_a_lost_session_are_dropped(pool: Pool, backend: Make) -> None:
    key = ChunkKey("a")
    with IndexServer(pool):
        plugin = backend(timeout_ms=1000)
        put(plugin, [key])
        assert plugin.pin(key)
    with contextlib.suppress(CacheError):
        plugin.contains(key)
    with IndexServer(pool) as server:
        assert eventually(lambda: plugin.contains(key), LONG_S)
        assert plugin.unpin(key)
        assert server.index_stat().pinned_count == 0
        assert plugin.pin(key)
        assert plugin.unpin(key)
        assert server.index_stat().pinned_count == 0


@pytest.fixture
def worker(server: IndexServer, pool_name: str) -> JobWorker:
    settings = PoolSettings(pool=pool_name, timeout_ms=5000)
    worker = JobWorker(settings, name="test", logger=logging.getLogger("test"))
    assert worker.connection.wait(LONG_S)
    return worker


def test_submitted_work_is_done_in_order_before_the_session_ends(worker: JobWorker) -> None:
    go, done = threading.Event(), list[tuple[int, bool]]()

    def first(connection: Connection) -> None:
        assert go.wait(LONG_S)
        done.append((1, connection.attached))

    worker.submit(first)
    worker.submit(lambda connection: done.append((2, connection.attached)))
    threading.Timer(0.05, go.set).start()
    worker.close()
    assert done == [(1, True), (2, True)]
    assert not worker.connection.attached


def test_a_job_that_raises_is_logged_and_the_next_is_done(
    worker: JobWorker, caplog: pytest.LogCaptureFixture
) -> None:
    done = threading.Event()

    def wrong(_: Connection) -> None:
        raise ZeroDivisionError

    worker.submit(wrong)
    worker.submit(lambda _: done.set())
    assert done.wait(LONG_S)
    worker.close()
    assert "a job of beluga's failed" in caplog.text
    assert "ZeroDivisionError" in caplog.text
