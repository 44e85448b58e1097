# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Two pools over one remote store: blocks computed in one rack are hits in another one."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from redis_server import RedisServer, need_redis_server
from support.blocks import eventually

from beluga import KVCache, Pool
from beluga.index import IndexServer
from beluga.tiers import TierService
from beluga.tiers.remote import RemoteSettings, open_remote

COUNT, LENGTH = 40, 100_000
NAMES = [hashlib.sha256(b"block %d" % number).digest() for number in range(COUNT)]
SETTINGS = RemoteSettings(operation_s=20, load_s=40, save_s=40)


@contextlib.contextmanager
def rack(folder: Path, url: str, settings: RemoteSettings) -> Iterator[tuple[KVCache, IndexServer]]:
    """Serve a pool with a remote tier below it."""
    folder.mkdir()
    tier = open_remote(url, settings=settings)
    with Pool.create([folder / "pool"], device_size=24 << 20, sparse=True) as pool:
        server = IndexServer(pool)
        service = TierService(server, pool, [tier])
        with server:
            service.start()
            try:
                with KVCache(pool, namespace="a model", timeout_s=60) as cache:
                    yield cache, server
            finally:
                service.stop()
                tier.close()


@pytest.fixture(params=["file", pytest.param("redis", marks=pytest.mark.slow)])
def url(request: pytest.FixtureRequest, shm: Path) -> Iterator[str]:
    if request.param == "redis":
        need_redis_server()
        redis = RedisServer()
        yield redis.url
        redis.kill()
        return
    pytest.importorskip("obstore", reason="obstore is not installed")
    yield f"file://{shm}/store"


def test_blocks_of_one_pool_are_loaded_into_another(shm: Path, url: str) -> None:
    data = np.random.default_rng(0).integers(0, 256, (COUNT, LENGTH), np.uint8)
    with rack(shm / "a", url, SETTINGS) as (cache, server):
        assert cache.put(NAMES, data).stored == COUNT
        assert eventually(lambda: server.lower_stat().dirty_count == 0, 60)
    with rack(shm / "b", url, SETTINGS) as (cache, server):
        found = np.zeros_like(data)
        assert cache.get(NAMES, found).hits == COUNT
        assert np.array_equal(found, data)


@pytest.mark.slow
def test_a_remote_store_that_is_stopped_keeps_no_hit_of_the_pool(shm: Path) -> None:
    need_redis_server()
    redis = RedisServer()
    data = np.random.default_rng(0).integers(0, 256, (COUNT, LENGTH), np.uint8)
    settings = RemoteSettings(operation_s=2, load_s=4)
    with rack(shm / "a", redis.url, settings) as (cache, server):
        assert cache.put(NAMES, data).stored == COUNT
        assert eventually(lambda: server.lower_stat().dirty_count == 0, 60)
        redis.stop()
        unknown = [hashlib.sha256(b"another %d" % number).digest() for number in range(8)]
        target = np.zeros((8, LENGTH), np.uint8)
        for _ in range(5):
            assert cache.get(unknown, target).hits == 0
        found = np.zeros_like(data)
        for _ in range(20):
            assert cache.get(NAMES, found).hits == COUNT
        assert np.array_equal(found, data)
        redis.go_on()
    redis.kill()
