# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""LMCache's plugins over a pool, with a fake of LMCache."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import os
import select
import sys
import threading
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fakes
import numpy as np
import pytest
from fakes import ChunkKey, Memory, ObjectKey, damage
from lmcache_parts import (
    LONG_S,
    PACKAGE,
    SHAPE,
    Allocator,
    MakeAdapter,
    Metadata,
    blank,
    chunks,
    l2,
    load,
    lookup,
    store,
)
from support.blocks import eventually
from support.memory_tier import MemoryTier, served

from beluga import IndexServer, Namespace, Pool
from beluga.connectors.connection import Attachment
from beluga.connectors.identity import Files, digest_of
from beluga.connectors.lmcache import identity, objects
from beluga.connectors.settings import PoolSettings
from beluga.errors import CacheError, ConnectorError, LayoutError, PinLimitError, QuotaError
from beluga.index import IndexClient
from beluga.rpc import KINDS, Client, report
from beluga.transfer import TransferClass


def test_objects_are_loaded_by_another_server(server: IndexServer, adapter: MakeAdapter) -> None:
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


def test_hits_after_misses_are_found(server: IndexServer, adapter: MakeAdapter) -> None:
    keys, memories = chunks(12)
    other = [ObjectKey(key.chunk_hash, kv_rank=2, object_group_id=1) for key in keys]
    stored = [0, 1, 4, 5, 6, 11]
    l2_adapter = adapter()
    store(l2_adapter, [keys[i] for i in stored] + other, [memories[i] for i in stored] + memories)
    expected = [i in stored for i in range(12)]
    assert lookup(l2_adapter, keys + other) == expected + [True] * 12
    assert load(l2_adapter, keys + other, blank(24)) == expected + [True] * 12


@pytest.mark.usefixtures("records_unpinned")
@pytest.mark.parametrize("remote", [False, True], ids=["known", "remote"])
def test_blocks_of_a_lower_tier_are_onboarded_and_locked(
    shm: Path, lmcache: Any, remote: bool
) -> None:
    tier = MemoryTier(remote=remote)
    keys, memories = chunks(8)
    with served(shm / "first", tier), l2(lmcache, shm / "first") as l2_adapter:
        store(l2_adapter, keys, memories)
        assert eventually(lambda: len(tier.blocks) == 9)  # with the layout's record
    absent = ObjectKey(b"x" * 8)
    requested = [*keys[:3], absent, *keys[3:]]
    with served(shm / "second", tier) as pool, l2(lmcache, shm / "second") as l2_adapter:
        assert lookup(l2_adapter, requested) == [key is not absent for key in requested]
        with Client(pool) as client:
            assert IndexClient(client).stat().pinned_count == 8
        targets = blank(8)
        assert load(l2_adapter, keys, targets) == [True] * 8
        assert all(np.array_equal(t.data, m.data) for t, m in zip(targets, memories, strict=True))


def test_no_block_is_onboarded_for_an_engine_that_does_not_wait(shm: Path, lmcache: Any) -> None:
    tier = MemoryTier()
    keys, memories = chunks(2)
    with served(shm / "first", tier), l2(lmcache, shm / "first") as l2_adapter:
        store(l2_adapter, keys, memories)
        assert eventually(lambda: len(tier.blocks) == 3)  # with the layout's record
    with served(shm / "second", tier), l2(lmcache, shm / "second", onboard_ms=0) as l2_adapter:
        assert lookup(l2_adapter, keys) == [False] * 2
        assert load(l2_adapter, keys, blank(2)) == [False] * 2
    assert tier.loads == []


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


@pytest.mark.parametrize(
    "difference",
    [
        {"model_name": "other"},
        {"kv_rank": 7},
        {"object_group_id": 1},
        {"cache_salt": "tenant"},
    ],
    ids=str,
)
def test_objects_of_another_owner_are_misses(
    server: IndexServer, adapter: MakeAdapter, difference: dict[str, Any]
) -> None:
    keys, memories = chunks(2)
    l2_adapter = adapter()
    store(l2_adapter, keys, memories)
    others = [ObjectKey(**(vars(key) | difference)) for key in keys]
    assert lookup(l2_adapter, others) == [False, False]
    assert load(l2_adapter, others, blank(2)) == [False, False]
    assert lookup(l2_adapter, keys) == [True, True]


def test_an_adapter_that_is_closed_has_no_session_and_no_descriptor(
    server: IndexServer, lmcache: Any, pool_name: str
) -> None:
    adapter = lmcache.BelugaL2Adapter(
        {"pool": pool_name, "timeout_ms": 60_000, "identity": "a test"}
    )
    descriptors = [
        adapter.get_store_event_fd(),
        adapter.get_lookup_and_lock_event_fd(),
        adapter.get_load_event_fd(),
    ]
    assert server.stat().live_count == 2
    adapter.close()
    assert server.stat().live_count == 0
    for descriptor in descriptors:
        with pytest.raises(OSError, match="descriptor"):
            os.fstat(descriptor)


@pytest.mark.parametrize("difference", [{"salt": "secret"}, {"variant": "fp8_e5m2"}], ids=str)
def test_objects_of_another_configuration_are_misses(
    server: IndexServer, adapter: MakeAdapter, difference: dict[str, str]
) -> None:
    keys, memories = chunks(2)
    assert store(adapter(), keys, memories) > 0
    assert lookup(adapter(**difference), keys) == [False, False]


def test_objects_of_another_layout_of_the_same_size_are_misses(
    server: IndexServer, adapter: MakeAdapter
) -> None:
    keys, memories = chunks(2)
    l2_adapter, other = adapter(), (2, 4, 64, 16)
    assert store(l2_adapter, keys, memories) > 0
    assert lookup(l2_adapter, keys, other) == [False, False]
    assert load(l2_adapter, keys, blank(2, other)) == [False, False]


def test_objects_of_another_version_of_lmcache_are_misses(
    server: IndexServer, adapter: MakeAdapter
) -> None:
    keys, memories = chunks(2)
    assert store(adapter(), keys, memories) > 0
    sys.modules[f"{PACKAGE}.l2"].lmcache_version = "0.5.7"  # type: ignore[attr-defined]
    assert lookup(adapter(), keys) == [False, False]


def test_without_a_server_everything_misses_and_nothing_waits(adapter: MakeAdapter) -> None:
    keys, memories = chunks(4)
    l2_adapter = adapter(timeout_ms=200, attached=False)
    assert store(l2_adapter, keys, memories) == -1
    assert lookup(l2_adapter, keys) == [False] * 4
    assert load(l2_adapter, keys, blank(4)) == [False] * 4
    l2_adapter.submit_unlock(keys)
    l2_adapter.delete(keys)
    assert l2_adapter.report_status()["attached"] is False
    assert l2_adapter.report_status()["is_healthy"] is True
    assert l2_adapter.report_status()["failure_count"] > 0


def test_a_restarted_server_is_reattached(pool: Pool, adapter: MakeAdapter) -> None:
    keys, memories = chunks(4)
    with IndexServer(pool):
        l2_adapter = adapter(timeout_ms=2000)
        assert store(l2_adapter, keys, memories) > 0
        assert lookup(l2_adapter, keys) == [True] * 4
    assert lookup(l2_adapter, keys) == [False] * 4
    assert load(l2_adapter, keys, blank(4)) == [False] * 4
    l2_adapter.submit_unlock(keys)
    with IndexServer(pool):
        assert eventually(lambda: lookup(l2_adapter, keys) == [True] * 4, LONG_S)


def test_deleted_objects_are_misses(server: IndexServer, adapter: MakeAdapter) -> None:
    keys, memories = chunks(3)
    l2_adapter = adapter()
    store(l2_adapter, keys, memories)
    l2_adapter.delete(keys[1:])
    assert eventually(lambda: lookup(l2_adapter, keys) == [True, False, False])


def test_an_object_with_a_pending_deletion_is_a_miss(
    server: IndexServer, adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    l2_adapter, (keys, memories) = adapter(), chunks(2)
    store(l2_adapter, keys, memories)
    with monkeypatch.context() as patch:
        patch.setattr(l2_adapter, "_settle", lambda connection: False)  # the pool is busy
        l2_adapter.delete(keys[:1])
        assert lookup(l2_adapter, keys) == [False, True]
        assert load(l2_adapter, keys, blank(2)) == [False, True]
    assert lookup(l2_adapter, keys) == [False, True]


def test_damaged_bytes_are_a_miss_and_can_be_stored_again(
    server: IndexServer, pool: Pool, adapter: MakeAdapter
) -> None:
    keys, memories = chunks(3)
    l2_adapter = adapter()
    store(l2_adapter, keys, memories)
    damage(pool, memories[1].data)
    assert load(l2_adapter, keys, blank(3)) == [True, False, True]
    assert lookup(l2_adapter, keys) == [True, False, True]
    assert store(l2_adapter, keys, memories) == memories[1].get_size()
    targets = blank(3)
    assert load(l2_adapter, keys, targets) == [True] * 3
    assert np.array_equal(targets[1].data, memories[1].data)


def test_memory_of_a_device_is_refused() -> None:
    with pytest.raises(LayoutError, match="CPU memory"):
        objects.bytes_of(Memory(SHAPE, device="cuda"))


def test_a_task_ends_even_with_invalid_arguments_of_lmcache(
    server: IndexServer, adapter: MakeAdapter
) -> None:
    keys, _ = chunks(1)
    assert store(adapter(), keys, [None]) == -1


def test_settings_are_checked(adapter: MakeAdapter) -> None:
    with pytest.raises(ConnectorError, match="has no setting adress"):
        adapter(adress="here")


def test_objects_among_many_misses_are_found_with_few_calls(
    server: IndexServer, pool_name: str
) -> None:
    """As in the row of a hybrid model's states: 1,000 keys, of which every 250th is there."""
    attachment = Attachment(PoolSettings(pool=pool_name, timeout_ms=5000))
    try:
        items = [(Namespace.of("test"), b"%d" % i) for i in range(1000)]
        there = items[249::250]
        objects.store(attachment, there, [np.ones(64, dtype=np.uint8)] * len(there))
        before = server.stat().call_count
        hits = objects.find(attachment, items, pin=True)
        calls = server.stat().call_count - before
        assert [i for i, hit in enumerate(hits) if hit] == [249, 499, 749, 999]
        assert calls <= 1000 / 256 * 2 + len(there) + 3
        assert objects.release(attachment, [hit.grant for hit in hits if hit]) == 4
    finally:
        attachment.close()


def test_keys_after_a_miss_are_looked_up_in_one_call(
    server: IndexServer, pool_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attachment = Attachment(PoolSettings(pool=pool_name, timeout_ms=5000))
    requests: list[int] = []
    real = objects._lookup

    def lookup(meta: Any, keys: Any, *, pin: bool) -> Any:
        requests.append(len(keys))
        return real(meta, keys, pin=pin)

    monkeypatch.setattr(objects, "_lookup", lookup)
    try:
        items = [(Namespace.of("test"), b"%d" % i) for i in range(100)]
        there = items[:1] + items[2:]
        objects.store(attachment, there, [np.ones(64, dtype=np.uint8)] * len(there))
        hits = objects.find(attachment, items, pin=False)
        assert [grant is not None for grant in hits] == [True, False] + [True] * 98
        assert requests == [100, 98]
    finally:
        attachment.close()


def test_pins_are_released_when_a_batch_fails_half_way(
    server: IndexServer, pool_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attachment = Attachment(PoolSettings(pool=pool_name, timeout_ms=5000))
    item, other = ((Namespace.of(name), b"a") for name in ("one", "other"))
    real = objects._lookup
    requests: list[int] = []

    def second_fails(meta: Any, keys: Any, *, pin: bool) -> Any:
        requests.append(len(keys))
        if len(requests) == 2:
            raise CacheError("made up")
        return real(meta, keys, pin=pin)

    monkeypatch.setattr(objects, "_lookup", second_fails)
    try:
        objects.store(attachment, [item, other], [np.ones(64, dtype=np.uint8)] * 2)
        with pytest.raises(CacheError, match="made up"):
            objects.find(attachment, [item, other], pin=True)
        assert server.index_stat().pinned_count == 0
    finally:
        attachment.close()


def test_objects_are_found_although_the_pin_quota_is_exhausted(
    server: IndexServer, pool_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = IndexClient.lookup

    def lookup(index: IndexClient, keys: Any, *, pin: bool = False) -> Any:
        if pin:
            raise PinLimitError("made up")
        return real(index, keys)

    attachment = Attachment(PoolSettings(pool=pool_name, timeout_ms=5000))
    item = (Namespace.of("one"), b"a")
    try:
        objects.store(attachment, [item], [np.ones(64, dtype=np.uint8)])
        monkeypatch.setattr(IndexClient, "lookup", lookup)
        assert objects.find(attachment, [item], pin=True)[0] is not None
    finally:
        attachment.close()


def test_a_lookup_without_pins_that_is_refused_is_not_tried_again(
    server: IndexServer, pool_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[bool] = []

    def refused(_: IndexClient, keys: Any, *, pin: bool = False) -> Any:
        requests.append(pin)
        raise QuotaError("made up")

    attachment = Attachment(PoolSettings(pool=pool_name, timeout_ms=5000))
    monkeypatch.setattr(IndexClient, "lookup", refused)
    try:
        with pytest.raises(QuotaError, match="made up"):
            objects.find(attachment, [(Namespace.of("one"), b"a")], pin=False)
        assert requests == [False]
    finally:
        attachment.close()


def test_an_adapter_reports_its_status(pool: Pool, adapter: MakeAdapter) -> None:
    keys, memories = chunks(2)
    with IndexServer(pool):
        l2_adapter = adapter(timeout_ms=1000)
        expected = {"is_healthy": True, "type": "BelugaL2Adapter", "attached": True}
        assert l2_adapter.report_status() == expected | {"failure_count": 0}
        assert store(l2_adapter, keys, memories) > 0
        assert load(l2_adapter, keys, blank(2)) == [True, True]
        moved = l2_adapter.transfer_stats()
        # the record of the layout is included
        assert 0 <= moved[TransferClass.OFFLOAD].bytes - 2 * memories[0].get_size() < 128
        assert 0 <= moved[TransferClass.ONBOARD].bytes - 2 * memories[0].get_size() < 128
    assert load(l2_adapter, keys, blank(2)) == [False, False]
    assert store(l2_adapter, keys, memories) == -1
    status = l2_adapter.report_status()
    assert (status["is_healthy"], status["attached"]) == (True, False)
    assert status["failure_count"] >= 2


def test_the_descriptors_signal_completed_work(server: IndexServer, adapter: MakeAdapter) -> None:
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
    layout = types.SimpleNamespace(shapes=[SHAPE], dtypes=[fakes.Dtype()])
    second = l2_adapter.submit_lookup_and_lock_task(keys, {0: layout})
    assert second != first
    assert readable(lookups)
    assert l2_adapter.query_lookup_and_lock_result(second).bits == [True]
    assert l2_adapter.query_lookup_and_lock_result(second) is None  # a result is returned once
    assert not readable(loads, 0)
    l2_adapter.submit_load_task(keys, blank(1))
    assert readable(loads)


def test_objects_of_a_group_that_is_not_described_are_found_in_any_layout(
    server: IndexServer, adapter: MakeAdapter
) -> None:
    keys, memories = chunks(2)
    keys = [keys[0], ObjectKey(keys[1].chunk_hash, object_group_id=5)]
    l2_adapter = adapter()
    store(l2_adapter, keys[:1], memories[:1])
    store(l2_adapter, keys[1:], [Memory((2, 4, 64, 16), seed=1)])
    assert lookup(l2_adapter, [*keys, ObjectKey(b"other", object_group_id=5)]) == [
        True,
        True,
        False,
    ]


@pytest.mark.parametrize("remote", [False, True], ids=["known", "remote"])
def test_the_plugin_finds_objects_of_lower_tiers(
    shm: Path, backend: Callable[..., Any], remote: bool
) -> None:
    tier = MemoryTier(remote=remote)
    keys = [ChunkKey(f"model@1@0@{i}@bf16") for i in range(4)]
    memories = [Memory((2, 4, 16, 64), seed=i) for i in range(4)]
    with served(shm / "first", tier):
        backend(pool=str(shm / "first")).batched_submit_put_task(keys, memories)
        assert eventually(lambda: len(tier.blocks) == 5)  # with the generation's record
    with served(shm / "second", tier):
        plugin = backend(pool=str(shm / "second"))
        assert plugin.batched_contains([*keys, ChunkKey("other")]) == 4
        chunks = plugin.batched_get_blocking(keys)
        for got, put in zip(chunks, memories, strict=True):
            assert np.array_equal(got.data, put.data)
        plugin.clear()
        assert plugin.batched_contains(keys) == 0


def test_chunks_of_an_engine_are_loaded_at_their_length(
    monkeypatch: pytest.MonkeyPatch, server: IndexServer, backend: Callable[..., Any]
) -> None:
    monkeypatch.setattr(report, "INTERVAL_S", 0.0)
    keys = [ChunkKey(f"model@1@0@{i}@bf16") for i in range(4)]
    memories = [Memory((2, 4, 16 if i < 3 else 5, 64), seed=i) for i in range(4)]
    plugin, other = backend(), backend()
    calls: list[ChunkKey] = []
    plugin.batched_submit_put_task(keys, memories, on_complete_callback=calls.append)
    assert eventually(lambda: calls == keys)
    assert eventually(lambda: all(memory.references == 1 for memory in memories))
    assert not plugin.exists_in_put_tasks(keys[0])
    assert other.batched_contains([*keys, ChunkKey("other")]) == 4
    chunks = other.batched_get_blocking([ChunkKey("other"), *keys])
    assert chunks[0] is None
    other.get_blocking(ChunkKey("another"))
    other.get_blocking(keys[3])  # reports the earlier ones
    assert server.reported(KINDS.index("lmcache"))[report.Figure.SAVED_TOKENS] == 3 * 16 + 5
    for got, put in zip(chunks[1:], memories, strict=True):
        assert got.shape == put.shape
        assert np.array_equal(got.data, put.data)
    assert other.remove(keys[1])
    assert [other.contains(key) for key in keys] == [True, False, True, True]
    assert len(asyncio.run(other.batched_get_non_blocking("lookup", keys))) == 1
    assert asyncio.run(other.batched_async_contains("lookup", keys)) == 1
    assert backend(layers=5).batched_contains(keys) == 0
    assert backend(salt="secret").batched_contains(keys) == 0


def hinted(name: str, hint: object) -> ChunkKey:
    """Make a key of a request whose kv_transfer_params have a hint."""
    return ChunkKey(f"model@1@0@{name}@bf16", {"lmcache.beluga": hint, "lmcache.tag.a": 1})


class OtherDtype(Metadata):
    """An engine whose chunks have as many bytes, of another type."""

    def get_dtypes(self) -> list[Any]:
        return [fakes.Dtype("float16")]


def test_chunks_of_another_layout_or_engine_are_not_found(
    server: IndexServer, backend: Callable[..., Any]
) -> None:
    key = ChunkKey("a")
    plugin = backend()
    assert not plugin.contains(
        key
    )  # a put concurrent with the first record of a generation is dropped
    plugin.batched_submit_put_task([key], [Memory(SHAPE, seed=1)])
    assert eventually(lambda: plugin.contains(key), LONG_S)
    assert backend(metadata=Metadata()).contains(key)
    same_class = type("Metadata", (OtherDtype,), {})  # so that the types of memory differ alone
    assert not backend(metadata=same_class()).contains(key)
    newer = dataclasses.make_dataclass("Metadata", [("added", int, 1)], bases=(Metadata,))
    assert not backend(metadata=newer()).contains(key)


def test_the_hint_of_a_request_applies_to_its_stored_chunks(
    server: IndexServer, backend: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    plugin = backend()
    stored: list[ChunkKey] = []

    def put(*keys: ChunkKey) -> None:
        plugin.batched_submit_put_task(
            list(keys), [Memory(SHAPE, seed=1)] * len(keys), on_complete_callback=stored.append
        )
        assert eventually(lambda: stored[-len(keys) :] == list(keys))

    put(ChunkKey("model@1@0@plain@bf16"))
    assert server.hints().given_count == 0
    put(hinted("a", {"priority": "low"}), hinted("b", {"priority": "low"}))
    assert (server.hints().given_count, server.hints().favored_bytes) == (2, 0)
    put(hinted("a", {"priority": "low"}))
    assert server.hints().given_count == 2, "somebody else stored it"
    put(hinted("c", {"priority": "lowest"}))
    assert "a request's hint is ignored: the priority of a hint is 'lowest'" in caplog.text
    put(hinted("a", {"pin": True}), hinted("d", {"pin": True}))
    assert server.hints().given_count == 4
    assert server.hints().favored_bytes > 0


def test_the_hint_of_a_request_favors_its_loaded_chunks(
    server: IndexServer, backend: Callable[..., Any]
) -> None:
    plugin = backend()
    # A put concurrent with the first record of a generation is dropped.
    assert not plugin.contains(ChunkKey("a"))
    plugin.batched_submit_put_task(
        [ChunkKey(f"model@1@0@{name}@bf16") for name in "ab"], [Memory(SHAPE, seed=1)] * 2
    )
    assert eventually(lambda: plugin.batched_contains([hinted("a", {}), hinted("b", {})]) == 2)
    for hint in {"priority": "low"}, {"ttl": 1}:
        assert plugin.get_blocking(hinted("a", hint)) is not None
    chunks = plugin.batched_get_blocking([hinted(name, {"pin": True}) for name in "axb"])
    assert [memory is not None for memory in chunks] == [True, False, True]
    assert eventually(lambda: server.hints().given_count == 2)


def test_an_unreadable_chunk_releases_its_memory(
    pool: Pool, backend: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    key = ChunkKey("model@1@0@0@bf16")
    with IndexServer(pool):
        plugin = backend()
        calls: list[ChunkKey] = []
        plugin.batched_submit_put_task([key], [Memory(SHAPE, seed=1)], None, calls.append)
        assert eventually(lambda: calls == [key])
        monkeypatch.setattr(objects, "load", lambda *_: [False])
        assert plugin.get_blocking(key) is None
        assert [memory.references for memory in plugin.local_cpu_backend.made] == [0]


def test_a_failed_batch_releases_the_memory_of_its_chunks(
    server: IndexServer, backend: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin, calls = backend(), list[ChunkKey]()
    keys = [ChunkKey("a"), ChunkKey("b")]
    memories = [Memory(SHAPE, seed=i) for i in range(2)]
    plugin.batched_submit_put_task(keys, memories, None, calls.append)
    assert eventually(lambda: calls == keys)

    def failed(*_: object) -> None:
        raise CacheError("made up")

    monkeypatch.setattr(objects, "load", failed)
    assert plugin.batched_get_blocking(keys) == [None, None]
    assert [memory.references for memory in plugin.local_cpu_backend.made] == [0, 0]


def test_a_plugin_that_is_closed_has_no_session(
    server: IndexServer, backend: Callable[..., Any]
) -> None:
    plugin = backend()
    assert server.stat().live_count == 2
    plugin.close()
    assert server.stat().live_count == 0


def test_the_plugin_without_a_server_misses(backend: Callable[..., Any]) -> None:
    plugin = backend(timeout_ms=200, attached=False)
    memory = Memory(SHAPE, seed=1)
    plugin.batched_submit_put_task([ChunkKey("a")], [memory])
    assert not plugin.contains(ChunkKey("a"))
    assert plugin.batched_get_blocking([ChunkKey("a"), ChunkKey("b")]) == [None, None]
    assert eventually(lambda: memory.references == 1)


def test_cleared_chunks_are_found_by_no_engine(
    server: IndexServer, backend: Callable[..., Any]
) -> None:
    def put(plugin: Any) -> None:
        calls: list[ChunkKey] = []
        plugin.batched_submit_put_task(keys, [Memory(SHAPE, seed=1)], None, calls.append)
        assert eventually(lambda: calls == keys)

    keys = [ChunkKey("a")]
    plugin, other, third = backend(), backend(), backend(model_name="other")
    put(plugin)
    put(third)
    assert other.contains(keys[0])
    assert plugin.clear() == 0
    assert [each.contains(keys[0]) for each in (plugin, other, backend(), third)] == [False] * 3 + [
        True
    ]
    put(other)
    assert plugin.contains(keys[0])


def test_chunks_that_a_get_would_confuse_are_not_stored(
    server: IndexServer, backend: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [ChunkKey(name) for name in "abc"]
    memories = [Memory(SHAPE, seed=i) for i in range(3)]
    monkeypatch.setattr(memories[0], "get_memory_format", lambda: "KV_MLA_FMT")
    monkeypatch.setattr(memories[1], "get_size", lambda: memories[2].get_size() + 2)
    plugin = backend()
    calls: list[ChunkKey] = []
    plugin.batched_submit_put_task(keys, memories, None, calls.append)
    assert eventually(lambda: calls == keys[2:])
    assert [plugin.contains(key) for key in keys] == [False, False, True]


def test_a_chunk_longer_than_the_engines_is_a_miss(
    server: IndexServer, backend: Callable[..., Any]
) -> None:
    plugin, key, calls = backend(), ChunkKey("a"), list[ChunkKey]()
    plugin.batched_submit_put_task([key], [Memory((2, 4, 16, 64), seed=1)], None, calls.append)
    assert eventually(lambda: calls == [key])
    plugin.metadata.chunk_size = 15
    plugin._namespaces.clear()
    assert plugin.get_blocking(key) is None
    assert plugin.local_cpu_backend.made == []


def test_a_failed_memory_allocation_of_lmcache_is_a_miss(
    server: IndexServer, backend: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin, keys, calls = backend(), [ChunkKey("a"), ChunkKey("b")], list[ChunkKey]()
    memories = [Memory(SHAPE, seed=i) for i in range(2)]
    plugin.batched_submit_put_task(keys, memories, None, calls.append)
    assert eventually(lambda: calls == keys)
    answers = [None, Memory(SHAPE)]
    monkeypatch.setattr(plugin.local_cpu_backend, "allocate", lambda *_, **__: answers.pop(0))
    first, second = plugin.batched_get_blocking(keys)
    assert first is None
    assert np.array_equal(second.data, memories[1].data)


def test_the_plugin_reports_its_properties(
    server: IndexServer, backend: Callable[..., Any]
) -> None:
    plugin, key, calls = backend(), ChunkKey("a"), list[ChunkKey]()
    assert plugin.get_allocator_backend() is plugin.local_cpu_backend
    assert not plugin.remove(key)
    memory = Memory(SHAPE, seed=1)
    plugin.batched_submit_put_task([key], [memory], None, calls.append)
    assert eventually(lambda: calls == [key])
    assert plugin.get_blocking(key) is not None
    moved = plugin.transfer_stats()
    # the record of the generation is included
    assert moved[TransferClass.OFFLOAD].bytes > memory.get_size()
    assert moved[TransferClass.ONBOARD].bytes > memory.get_size()
    assert plugin.remove(key)


def test_a_plugin_without_a_worker_is_rejected(lmcache: Any) -> None:
    config = types.SimpleNamespace(extra_config=None, use_layerwise=False)
    for missing in range(3):
        given = [config, Metadata(), Allocator()]
        given[missing] = None
        with pytest.raises(ConnectorError, match="needs a worker's memory"):
            lmcache.BelugaBackend("cpu", *given, None)


def test_a_pending_put_is_tracked_until_it_ends(
    server: IndexServer, backend: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin, key, go = backend(), ChunkKey("a"), threading.Event()
    real = objects.store
    monkeypatch.setattr(objects, "store", lambda *given: go.wait(LONG_S) and real(*given))
    plugin.batched_submit_put_task([key], [Memory(SHAPE, seed=1)])
    assert plugin.exists_in_put_tasks(key)
    go.set()
    assert eventually(lambda: not plugin.exists_in_put_tasks(key))
    assert eventually(lambda: plugin.contains(key))


def test_layerwise_storing_is_refused(backend: Callable[..., Any]) -> None:
    with pytest.raises(ConnectorError, match="whole chunks"):
        backend(layerwise=True)


def test_lmcache_is_not_imported_before_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lmcache", None)
    module = importlib.import_module(PACKAGE)
    assert not hasattr(module, "BelugaL2AdapterConfig")  # LMCache searches for one
    with pytest.raises(ImportError):
        _ = module.BelugaL2Adapter


def model(folder: Path, content: bytes = b"w") -> str:
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(content)
    return str(folder)


def test_a_model_in_a_folder_is_identified_by_its_bytes(
    server: IndexServer, adapter: MakeAdapter, backend: Callable[..., Any], tmp_path: Path
) -> None:
    name = model(tmp_path / "model")
    objects, memories = chunks(2)
    keys = [dataclasses.replace(key, model_name=name) for key in objects]
    l2_adapter = adapter(identity="")
    assert eventually(lambda: l2_adapter._models.digest(name) != "", LONG_S)
    assert store(l2_adapter, keys, memories) > 0
    plugin, chunk = backend(identity="", model_name=name), ChunkKey("a")
    assert eventually(lambda: plugin._models.digest(name) != "", LONG_S)

    def stored() -> bool:  # a put while the other connector writes its first record is dropped
        plugin.batched_submit_put_task([chunk], [Memory((2, 4, 16, 64), seed=1)])
        return bool(plugin.contains(chunk))

    assert eventually(stored, LONG_S)
    for connector in (l2_adapter, plugin):
        connector.close()
    model(tmp_path / "model", b"other weights")
    l2_adapter, plugin = adapter(identity=""), backend(identity="", model_name=name)
    for models in (l2_adapter._models, plugin._models):
        assert eventually(lambda models=models: models.digest(name) != "", LONG_S)
    assert lookup(l2_adapter, keys) == [False, False]
    assert not plugin.contains(chunk)
    assert lookup(adapter(identity="a test"), keys) == [False, False]


def test_a_model_whose_files_change_is_not_used_until_the_server_is_restarted(
    server: IndexServer,
    adapter: MakeAdapter,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    """LMCache's server outlives engines, and cannot detect which files one of them has loaded."""
    monkeypatch.setattr(identity, "CHECK_S", 0.0)
    name = model(tmp_path / "model")
    objects, memories = chunks(2)
    keys = [dataclasses.replace(key, model_name=name) for key in objects]
    l2_adapter = adapter(identity="")
    assert eventually(lambda: l2_adapter._models.digest(name) != "", LONG_S)
    assert store(l2_adapter, keys, memories) > 0
    assert lookup(l2_adapter, keys) == [True, True]
    model(tmp_path / "model", b"other weights")
    assert lookup(l2_adapter, keys) == [False, False]
    assert store(l2_adapter, keys, memories) == -1
    assert "the files of the model" in caplog.text and "restart LMCache's server" in caplog.text
    l2_adapter.delete(keys[:1])  # of the model that it was
    model(tmp_path / "model")
    assert lookup(l2_adapter, keys) == [False, False]
    again = adapter(identity="")
    assert eventually(lambda: again._models.digest(name) != "", LONG_S)
    assert lookup(again, keys) == [False, True]
    named = adapter(identity="a test")  # by the operator
    assert store(named, keys, memories) > 0
    model(tmp_path / "model", b"third weights")
    assert lookup(named, keys) == [True, True]


def test_before_a_model_is_identified_lookups_miss_and_saves_are_skipped(
    server: IndexServer, adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name, go = model(tmp_path / "model"), threading.Event()
    real = Files.digest
    monkeypatch.setattr(Files, "digest", lambda self, hashed: (go.wait(), real(self, hashed))[1])
    objects, memories = chunks(2)
    keys = [dataclasses.replace(key, model_name=name) for key in objects]
    l2_adapter = adapter(identity="")
    assert store(l2_adapter, keys, memories) == -1
    assert lookup(l2_adapter, keys) == [False, False]
    l2_adapter.delete(keys)  # returns once the keys to delete are resolved
    go.set()
    assert eventually(lambda: l2_adapter._models.digest(name) != "", LONG_S)
    assert store(l2_adapter, keys, memories) > 0
    assert lookup(l2_adapter, keys) == [True, True]


def test_a_model_name_without_weights_is_rejected_in_one_line(
    server: IndexServer,
    adapter: MakeAdapter,
    backend: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    keys, memories = chunks(2)
    l2_adapter = adapter(identity="")
    for _ in range(2):
        assert store(l2_adapter, keys, memories) == -1
        assert lookup(l2_adapter, keys) == [False, False]
    lines = [
        record.getMessage()
        for record in caplog.records
        if "setting identity" in record.getMessage()
    ]
    assert len(lines) == 1 and "only the model's name 'model'" in lines[0]
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
