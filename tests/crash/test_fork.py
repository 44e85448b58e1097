# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""In a forked child every call of a session fails, in Python and in C; the parent continues."""

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from one_block import TIMEOUT_NS, batch_of
from support.blocks import keys
from support.emulation import needs_a_cpu
from support.forks import in_child

from beluga._ffi import ffi, lib
from beluga.errors import ForkedSessionError
from beluga.index import IndexClient, IndexServer
from beluga.kvcache import KVCache
from beluga.pool import Pool

FORKED = -1001


@pytest.fixture
def cache(paths: list[Path]) -> Iterator[KVCache]:
    with (
        Pool.create(paths, device_size=16 << 20, sparse=True, max_blocks=64) as pool,
        IndexServer(pool),
        KVCache(pool, namespace="fork") as cache,
    ):
        yield cache


def test_every_python_call_is_rejected_after_a_fork(cache: KVCache) -> None:
    client, index = cache.client, IndexClient(cache.client)
    data = np.arange(512, dtype=np.uint64)
    assert cache.put(keys([1]), [data]).stored == 1
    grants = index.reserve(keys([2]), length=4096)
    pinned = index.lookup(keys([1]), pin=True).hits
    calls: dict[str, Callable[[], object]] = {
        "call": lambda: client.call(0, b"x"),
        "ping": client.ping,
        "stat": client.stat,
        "lookup": lambda: index.lookup(keys([1])),
        "reserve": lambda: index.reserve(keys([3]), length=4096),
        "commit": lambda: index.commit(grants),
        "abort": lambda: index.abort(grants),
        "release": lambda: index.release(pinned),
        "remove": lambda: index.remove(keys([1])),
        "counters": index.stat,
        "put": lambda: cache.put(keys([4]), [data]),
        "get": lambda: cache.get(keys([1]), [np.empty_like(data)]),
        "find": lambda: cache.lookup(keys([1])),
        "forget": lambda: cache.remove(keys([1])),
        "look": cache.stat,
    }

    def refused(call: Callable[[], object]) -> bool:
        try:
            call()
        except ForkedSessionError:
            return True
        return False

    results = in_child(lambda: [name for name, call in calls.items() if not refused(call)])
    assert results == "[]"
    assert index.commit(grants) == [0]
    assert index.release(pinned) == 1
    assert cache.lookup(keys([1, 2])) == 2


def c_calls(session: Any) -> dict[str, Callable[[], int]]:
    """Return every function of csrc/api/ that uses a session, with arguments that it would
    accept.
    """
    key = ffi.new("uint64_t[2]", [1, 2])
    records, commits = ffi.new("bl_block_record[1]"), ffi.new("bl_commit[1]")
    statuses, states = ffi.new("int32_t[1]"), ffi.new("uint8_t[1]")
    data, size = ffi.new("uint8_t[4096]"), ffi.new("uint32_t *")
    word, count = ffi.new("uint32_t *"), ffi.new("uint64_t *")
    message = ffi.new("bl_message *", {"reply": data, "reply_capacity": 64, "reply_size": size})
    pump = ffi.new("bl_pump *", {"requests": data, "count": 1, "size": 8, "depth": 1})
    request = ffi.new("bl_block_request *", {"length": 4096})
    batch = batch_of(data)
    t = TIMEOUT_NS
    return {
        "bl_session_call": lambda: lib.bl_session_call(session, message, t),
        "bl_session_call_bytes": lambda: lib.bl_session_call_bytes(session, 0, b"", 0, data, 64, t),
        "bl_session_pump": lambda: lib.bl_session_pump(session, pump, t),
        "bl_lookup": lambda: lib.bl_lookup(session, key, 1, 0, records, word, t),
        "bl_reserve": lambda: lib.bl_reserve(session, key, 1, request, records, t),
        "bl_commit_blocks": lambda: lib.bl_commit_blocks(session, commits, 1, statuses, t),
        "bl_abort_blocks": lambda: lib.bl_abort_blocks(session, commits, 1, t),
        "bl_release_blocks": lambda: lib.bl_release_blocks(session, records, 1, t),
        "bl_remove_blocks": lambda: lib.bl_remove_blocks(session, key, 1, t),
        "bl_task_withdraw": lambda: lib.bl_task_withdraw(session, key, t),
        "bl_index_get_stat": lambda: lib.bl_index_get_stat(session, ffi.new("bl_index_stat *"), t),
        "bl_kv_put": lambda: lib.bl_kv_put(session, batch[0], states, statuses),
        "bl_kv_get": lambda: lib.bl_kv_get(session, batch[0], states, count),
    }


@needs_a_cpu("it leaves out MADV_WIPEONFORK, by which C knows of a fork")
def test_every_c_call_is_rejected_after_a_fork_without_python_hooks(cache: KVCache) -> None:
    session = cache.client.session
    calls = c_calls(session)
    results = in_child(
        lambda: {name: code for name, call in calls.items() if (code := call()) != FORKED},
        ctypes.PyDLL(None).fork,  # if another thread took the GIL, the child would hang
    )
    assert results == "{}"
    cache.client.ping()
    assert cache.client.stat().reattach_count == 0


def test_a_put_that_fails_half_way_releases_its_grants(cache: KVCache) -> None:
    data = np.arange(1536, dtype=np.uint64)
    fragments = ffi.new("bl_fragment[3]")
    for i, size in enumerate((4096, 4095, 4096)):  # the second one is not a block of 4096 bytes
        fragments[i].address, fragments[i].size = data.ctypes.data + 4096 * i, size
    words = keys([1, 2, 3])
    fields = {"timeout_ns": TIMEOUT_NS, "count": 3, "fragment_count": 1, "length": 4096}
    pointers = {"keys": ffi.from_buffer("uint64_t[]", words), "fragments": fragments}
    batch = ffi.new("bl_kv_batch *", fields | pointers)
    session = cache.client.session
    states, statuses = ffi.new("uint8_t[3]"), ffi.new("int32_t[3]")
    assert lib.bl_kv_put(session, batch, states, statuses) == -22
    stat = cache.stat()
    assert (stat.grant_count, stat.abort_count, stat.block_count) == (0, 3, 0)
    assert stat.free_stripe_count == stat.stripe_count
