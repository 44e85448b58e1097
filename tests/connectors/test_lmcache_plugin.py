# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""LMCache's storage plugin over a pool, with a fake of LMCache: chunks, pins,
hints, callbacks, and calls after close.

``test_real_packages.py`` runs LMCache itself, and its own tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import (
    LONG_S,
    SHAPE,
    Allocator,
    ChunkKey,
    Dtype,
    Make,
    MakeAdapter,
    Memory,
    Metadata,
    ObjectKey,
    held_stores,
    no_pins,
    put,
    store,
)
from support.blocks import eventually
from support.memory_tier import MemoryTier, served

from beluga import IndexServer, Pool
from beluga.connectors.lmcache import objects
from beluga.errors import CacheError, ConnectorError
from beluga.rpc import KINDS, report
from beluga.transfer import TransferClass


@pytest.mark.parametrize("remote", [False, True], ids=["known", "remote"])
def test_the_plugin_finds_objects_of_lower_tiers(
    shm: Path, lone_backend: Make, remote: bool
) -> None:
    tier = MemoryTier(remote=remote)
    keys = named("0123")
    with served(shm / "first", tier):
        memories = put(lone_backend(pool=str(shm / "first")), keys)
        assert eventually(lambda: len(tier.blocks) == 5)  # with the generation's record
    with served(shm / "second", tier):
        plugin = lone_backend(pool=str(shm / "second"))
        assert plugin.batched_contains([*keys, ChunkKey("other")]) == 4
        for chunk, memory in zip(plugin.batched_get_blocking(keys), memories, strict=True):
            assert np.array_equal(chunk.data, memory.data)
        plugin.clear()
        assert plugin.batched_contains(keys) == 0


def test_chunks_of_an_engine_are_loaded_at_their_length(
    monkeypatch: pytest.MonkeyPatch, server: IndexServer, backend: Make
) -> None:
    monkeypatch.setattr(report, "INTERVAL_S", 0.0)
    keys = named("0123")
    memories = [Memory((2, 4, 16 if i < 3 else 5, 64), seed=i) for i in range(4)]
    plugin, other = backend(), backend()
    put(plugin, keys, memories)
    assert eventually(lambda: all(memory.references == 1 for memory in memories))
    assert not plugin.exists_in_put_tasks(keys[0])
    assert other.batched_contains([*keys, ChunkKey("other")]) == 4
    none, *chunks = other.batched_get_blocking([ChunkKey("other"), *keys])
    assert none is None
    other.get_blocking(ChunkKey("another"))
    other.get_blocking(keys[3])  # reports the earlier ones
    assert server.reported(KINDS.index("lmcache"))[report.Figure.SAVED_TOKENS] == 3 * 16 + 5
    for chunk, memory in zip(chunks, memories, strict=True):
        assert chunk.shape == memory.shape
        assert np.array_equal(chunk.data, memory.data)
    assert other.remove(keys[1])
    assert [other.contains(key) for key in keys] == [True, False, True, True]
    assert len(asyncio.run(other.batched_get_non_blocking("lookup", keys))) == 1
    assert asyncio.run(other.batched_async_contains("lookup", keys)) == 1
    assert backend(layers=5).batched_contains(keys) == 0
    assert backend(salt="secret").batched_contains(keys) == 0


def named(names: str, configs: Any = None) -> list[ChunkKey]:
    """Make a key for each letter."""
    return [ChunkKey(f"model@1@0@{name}@bf16", configs) for name in names]


def hinted(names: str, hint: object) -> list[ChunkKey]:
    """Make keys of a request whose kv_transfer_params have a hint."""
    return named(names, {"lmcache.beluga": hint, "lmcache.tag.a": 1})


class OtherDtype(Metadata):
    """An engine whose chunks have as many bytes, of another type."""

    def get_dtypes(self) -> list[Any]:
        return [Dtype("float16")]


def test_chunks_of_another_layout_or_engine_are_not_found(backend: Make) -> None:
    key = ChunkKey("a")
    plugin = backend()
    # a put concurrent with the first record of a generation is dropped
    assert not plugin.contains(key)
    put(plugin, [key])
    assert backend(metadata=Metadata()).contains(key)
    same_class = type("Metadata", (OtherDtype,), {})  # so that the types of memory differ alone
    assert not backend(metadata=same_class()).contains(key)
    newer = dataclasses.make_dataclass("Metadata", [("added", int, 1)], bases=(Metadata,))
    assert not backend(metadata=newer()).contains(key)


def test_the_hint_of_a_request_applies_to_its_stored_chunks(
    server: IndexServer, backend: Make, caplog: pytest.LogCaptureFixture
) -> None:
    plugin = backend()
    low = {"priority": "low"}
    put(plugin, named("p"))
    assert server.hints().given_count == 0
    put(plugin, hinted("ab", low))
    assert (server.hints().given_count, server.hints().favored_bytes) == (2, 0)
    put(plugin, hinted("a", low))
    assert server.hints().given_count == 2, "somebody else stored it"
    put(plugin, hinted("c", {"priority": "lowest"}))
    assert "a request's hint is ignored: the priority of a hint is 'lowest'" in caplog.text
    put(plugin, hinted("ad", {"pin": True}))
    assert server.hints().given_count == 4
    assert server.hints().favored_bytes > 0


def test_the_hint_of_a_request_favors_its_loaded_chunks(server: IndexServer, backend: Make) -> None:
    plugin = backend()
    # A put concurrent with the first record of a generation is dropped.
    assert not plugin.contains(ChunkKey("a"))
    put(plugin, named("ab"))
    assert plugin.batched_contains(hinted("ab", {})) == 2
    for hint in {"priority": "low"}, {"ttl": 1}:
        assert plugin.batched_get_blocking(hinted("a", hint)) != [None]
    chunks = plugin.batched_get_blocking(hinted("axb", {"pin": True}))
    assert [memory is not None for memory in chunks] == [True, False, True]
    assert eventually(lambda: server.hints().given_count == 2)


def test_chunks_that_cannot_be_read_release_their_memory(
    backend: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failed(*_: object) -> None:
        raise CacheError("made up")

    plugin, keys = backend(), named("ab")
    put(plugin, keys)
    monkeypatch.setattr(objects, "load", lambda *_: [False])
    assert plugin.get_blocking(keys[0]) is None
    monkeypatch.setattr(objects, "load", failed)
    assert plugin.batched_get_blocking(keys) == [None, None]
    assert [memory.references for memory in plugin.local_cpu_backend.made] == [0, 0, 0]


def test_the_plugin_without_a_server_misses(lone_backend: Make) -> None:
    plugin = lone_backend(timeout_ms=200, attached=False)
    memory = Memory(SHAPE, seed=1)
    plugin.batched_submit_put_task([ChunkKey("a")], [memory])
    assert not plugin.contains(ChunkKey("a"))
    assert plugin.batched_get_blocking([ChunkKey("a"), ChunkKey("b")]) == [None, None]
    assert eventually(lambda: memory.references == 1)


def test_cleared_chunks_are_found_by_no_engine(backend: Make) -> None:
    keys = [ChunkKey("a")]
    plugin, other, third = backend(), backend(), backend(model_name="other")
    put(plugin, keys)
    put(third, keys)
    assert other.contains(keys[0])
    assert plugin.clear() == 0
    cleared = plugin, other, backend()
    assert [each.contains(keys[0]) for each in (*cleared, third)] == [False] * 3 + [True]
    put(other, keys)
    assert plugin.contains(keys[0])


def test_chunks_that_a_get_would_confuse_are_not_stored(
    backend: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, calls = named("abc"), list[ChunkKey]()
    memories = [Memory(SHAPE, seed=i) for i in range(3)]
    monkeypatch.setattr(memories[0], "get_memory_format", lambda: "KV_MLA_FMT")
    monkeypatch.setattr(memories[1], "get_size", lambda: memories[2].get_size() + 2)
    plugin = backend()
    plugin.batched_submit_put_task(keys, memories, None, calls.append)
    assert eventually(lambda: calls == keys[2:])
    assert [plugin.contains(key) for key in keys] == [False, False, True]


def test_a_chunk_longer_than_the_engines_is_a_miss(backend: Make) -> None:
    plugin, key = backend(), ChunkKey("a")
    put(plugin, [key])
    plugin.metadata.chunk_size = 15
    plugin._namespaces.clear()
    assert plugin.get_blocking(key) is None
    assert plugin.local_cpu_backend.made == []


def test_a_failed_memory_allocation_of_lmcache_is_a_miss(
    backend: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin, keys = backend(), named("ab")
    memories = put(plugin, keys)
    allocated = [None, Memory(SHAPE)]
    monkeypatch.setattr(plugin.local_cpu_backend, "allocate", lambda *_, **__: allocated.pop(0))
    first, second = plugin.batched_get_blocking(keys)
    assert first is None
    assert np.array_equal(second.data, memories[1].data)


def test_the_plugin_reports_its_properties(backend: Make) -> None:
    plugin, key = backend(), ChunkKey("a")
    assert plugin.get_allocator_backend() is plugin.local_cpu_backend
    assert not plugin.remove(key)
    (memory,) = put(plugin, [key])
    assert plugin.get_blocking(key) is not None
    moved = plugin.transfer_stats()
    # the record of the generation is included
    assert moved[TransferClass.OFFLOAD].bytes > memory.get_size()
    assert moved[TransferClass.ONBOARD].bytes > memory.get_size()
    assert plugin.remove(key)


def test_plugins_without_a_worker_or_for_layers_are_refused(
    lmcache: Any, lone_backend: Make
) -> None:
    config = types.SimpleNamespace(extra_config=None, use_layerwise=False)
    for missing in range(3):
        given = [config, Metadata(), Allocator()]
        given[missing] = None
        with pytest.raises(ConnectorError, match="needs a worker's memory"):
            lmcache.BelugaBackend("cpu", *given, None)
    with pytest.raises(ConnectorError, match="whole chunks"):
        lone_backend(layerwise=True)


@pytest.mark.usefixtures("records_unpinned")
def test_a_plugin_pins_the_requested_chunks_that_the_pool_has(
    server: IndexServer, backend: Make
) -> None:
    keys, missing = named("abc"), ChunkKey("missing")
    plugin = backend()
    put(plugin, keys)
    assert plugin.contains(keys[0])
    assert not plugin.contains(missing, pin=True)
    assert not plugin.pin(missing)
    assert not plugin.unpin(missing)
    assert server.index_stat().pinned_count == 0
    assert plugin.contains(keys[0], pin=True)
    assert plugin.pin(keys[1])
    assert server.index_stat().pinned_count == 2
    assert plugin.remove(keys[1])
    assert not plugin.pin(keys[1])
    assert plugin.unpin(keys[0])
    assert plugin.unpin(keys[1])  # the pin that it had
    assert not plugin.unpin(keys[1])
    assert server.index_stat().pinned_count == 0
    assert plugin.unpin(keys[0])  # the key exists


@pytest.mark.usefixtures("records_unpinned")
def test_a_plugin_pins_only_the_leading_chunks(server: IndexServer, backend: Make) -> None:
    plugin, keys = backend(), named("abcd")
    put(plugin, [keys[0], keys[1], keys[3]])
    assert plugin.batched_contains(keys, pin=True) == 2
    assert server.index_stat().pinned_count == 2
    assert plugin.batched_contains(keys[:2], pin=True) == 2  # each chunk is pinned twice
    assert [plugin.unpin(key) for key in keys] == [True, True, False, True]
    assert server.index_stat().pinned_count == 2
    assert [plugin.unpin(key) for key in keys[:2]] == [True, True]
    assert server.index_stat().pinned_count == 0


def test_a_pinned_chunk_outlives_eviction(server: IndexServer, backend: Make) -> None:
    plugin, first = backend(), ChunkKey("first")
    put(plugin, [first])
    assert plugin.pin(first)
    cache = plugin._connection._attachment.cache(next(iter(plugin._namespaces.values())))
    for i in range(24):
        cache.put([bytes([i]) * 16], [np.zeros((8 << 20) - 8192, np.uint8)])
    assert server.index_stat().evict_count > 0
    assert server.index_stat().pinned_count == 2  # with the record of the generation
    assert plugin.contains(first)
    assert plugin.unpin(first)


def test_a_pin_refused_by_the_quota_is_not_reported_as_held(
    backend: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin, key = backend(), ChunkKey("a")
    put(plugin, [key])
    no_pins(monkeypatch)
    assert plugin.contains(key, pin=True)
    assert not plugin.pin(key)
    assert len(plugin._pins) == 0


def test_a_put_after_close_holds_no_memory(server: IndexServer, backend: Make) -> None:
    plugin, key, memory = backend(), ChunkKey("a"), Memory(SHAPE, seed=1)
    assert server.stat().live_count == 1
    plugin.close()
    plugin.close()
    assert server.stat().live_count == 0
    plugin.batched_submit_put_task([key], [memory])
    assert memory.references == 1
    assert not plugin.exists_in_put_tasks(key)
    assert not plugin.contains(key)
    assert plugin.get_blocking(key) is None
    assert not plugin.pin(key)
    assert not plugin.remove(key)


def test_puts_that_wait_when_the_plugin_is_closed_are_finished(
    backend: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin, other, go = backend(), backend(), held_stores(monkeypatch)
    keys, memories = named("ab"), [Memory(SHAPE, seed=i) for i in range(2)]
    for key, memory in zip(keys, memories, strict=True):
        plugin.batched_submit_put_task([key], [memory])
    closing = threading.Thread(target=plugin.close)
    closing.start()
    go.set()
    closing.join(LONG_S)
    assert [memory.references for memory in memories] == [1, 1]
    assert other.batched_contains(keys) == 2


def test_a_key_is_being_put_until_its_last_put_has_ended(
    backend: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin, key, ended = backend(), ChunkKey("a"), list[ChunkKey]()
    steps, real = threading.Semaphore(0), objects.store
    monkeypatch.setattr(
        objects, "store", lambda *given: steps.acquire(timeout=LONG_S) and real(*given)
    )
    for _ in range(2):
        plugin.batched_submit_put_task([key], [Memory(SHAPE, seed=1)], None, ended.append)
    steps.release()
    assert eventually(lambda: len(ended) == 1, LONG_S)
    assert plugin.exists_in_put_tasks(key)
    steps.release()
    assert eventually(lambda: not plugin.exists_in_put_tasks(key), LONG_S)
    assert plugin.contains(key)


def test_a_callback_that_raises_stops_no_other(backend: Make) -> None:
    keys, calls = named("abc"), list[ChunkKey]()

    def callback(key: ChunkKey) -> None:
        calls.append(key)
        raise ValueError("made up")

    memories = [Memory(SHAPE, seed=i) for i in range(3)]
    backend().batched_submit_put_task(keys, memories, None, callback)
    assert eventually(lambda: calls == keys, LONG_S)


def test_a_chunk_that_is_being_put_is_removed_after_that(
    backend: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin, key, go = backend(), ChunkKey("a"), held_stores(monkeypatch)
    plugin.batched_submit_put_task([key], [Memory(SHAPE, seed=1)])
    removed: list[bool] = []
    begun, finish, remove = threading.Event(), plugin._connection.finish, objects.remove
    monkeypatch.setattr(
        plugin._connection, "finish", lambda call, **k: (begun.set(), finish(call, **k))[1]
    )
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


def test_batches_of_unequal_length_hold_no_memory(backend: Make, adapter: MakeAdapter) -> None:
    plugin, keys, memory = backend(), [ChunkKey("a"), ChunkKey("b")], Memory(SHAPE, seed=1)
    plugin.batched_submit_put_task(keys, [memory])
    assert eventually(lambda: not any(map(plugin.exists_in_put_tasks, keys)), LONG_S)
    assert memory.references == 1
    assert plugin.batched_contains(keys) == 0
    assert store(adapter(), [ObjectKey(b"a"), ObjectKey(b"b")], [memory]) == -1


@pytest.mark.usefixtures("records_unpinned")
def test_pins_of_a_lost_session_are_dropped(pool: Pool, lone_backend: Make) -> None:
    key = ChunkKey("a")
    with IndexServer(pool):
        plugin = lone_backend(timeout_ms=1000)
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
