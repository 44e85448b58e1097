# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The remote tier over each store: one process or pool loads blocks saved by another one. Networks
fail, and stores stop, die and restart.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from remote_stores import (
    ByteProxy,
    FakeS3,
    RedisServer,
    blocks,
    cut_after,
    flip_every,
    intact,
    need_redis_server,
    same,
)
from support import role
from support.blocks import eventually
from support.role import Process

from beluga import KVCache, Pool
from beluga.index import IndexServer
from beluga.metrics import REGISTRY
from beluga.tiers import TierService
from beluga.tiers.remote import RemoteSettings, RemoteTier, open_remote
from beluga.tiers.remote.store import RefusedError

PATIENT = RemoteSettings(operation_s=20, load_s=40, save_s=40)

COUNT, LENGTH = 40, 100_000
NAMES = [hashlib.sha256(b"block %d" % number).digest() for number in range(COUNT)]

SETTINGS = RemoteSettings(
    operation_s=1, load_s=2, save_s=20, retries=1, backoff_s=0.001, open_s=0.01, open_limit_s=0.05
)


@pytest.fixture(
    params=["memory", "file", pytest.param("redis", marks=pytest.mark.slow)],
)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "redis":
        need_redis_server()
        server = RedisServer()
        yield server.url
        server.kill()
        return
    pytest.importorskip("obstore", reason="obstore is not installed")
    yield "memory:///" if request.param == "memory" else f"file://{tmp_path}/blocks of all"


@pytest.fixture
def tier(url: str) -> Iterator[RemoteTier]:
    made = open_remote(url, settings=PATIENT)
    yield made
    made.close()


def test_saved_blocks_are_loaded_and_others_are_misses(tier: RemoteTier) -> None:
    records, payload = blocks([0, 1, 63, 64, 65, 4096, 100_000, 3 << 20])
    others, _ = blocks([5] * 3, seed=1)
    assert not tier.contains(records["key"]).any()
    assert tier.save(records, payload).all()
    keys = np.concatenate([others["key"], records["key"]])
    assert tier.contains(keys).tolist() == [False] * 3 + [True] * 8
    loaded = tier.load(keys)
    assert loaded[:3] == [None] * 3
    assert all(same(loaded[3:], records, payload))


def test_a_block_is_removed_once(tier: RemoteTier) -> None:
    records, payload = blocks([1000] * 5)
    assert tier.save(records, payload).all()
    assert tier.remove(records["key"][:2]) == 2
    assert tier.remove(records["key"]) == 3
    assert tier.remove(records["key"]) == 0
    assert same(tier.load(records["key"]), records, payload) == [False] * 5


def test_an_empty_batch_sends_no_request(tier: RemoteTier) -> None:
    records, payload = blocks([])
    assert tier.save(records, payload).shape == (0,)
    assert tier.load(records["key"]) == []
    assert tier.contains(records["key"]).shape == (0,)
    assert tier.remove(records["key"]) == 0


def test_a_foreign_object_under_the_key_is_replaced(tier: RemoteTier) -> None:
    """Also through the client: an object that is empty, short, foreign or that of another block."""
    records, payload = blocks([5000] * 6)
    assert tier.save(records, payload).all()
    store = tier._store
    names = [f"beluga-1/{key.tobytes().hex()[:2]}/{key.tobytes().hex()}" for key in records["key"]]
    right = bytes(store.get(names[0]) or b"")
    wrong = [b"", b"short", right[:-1], right + b"x", right[:100] + b"\0\1" + right[102:]]
    for name, contents in zip(names[1:], wrong, strict=True):
        store.put(name, memoryview(contents))
    store.put(names[1], memoryview(right))
    expected = [True] + [False] * 5
    assert same(tier.load(records["key"]), records, payload) == expected
    assert tier.save(records, payload).all()
    assert all(same(tier.load(records["key"]), records, payload))


def saver(url: str) -> None:
    tier = open_remote(url)
    for _ in role.lines():
        role.reply(tier.save(*blocks([100_000] * 20, seed=7)).all())


def test_a_block_outlives_the_process_that_saved_it(url: str) -> None:
    """The worked example: two processes, each with a pool of its own, over one store."""
    if url.startswith("memory:"):
        pytest.skip("a memory is of one process")
    records, payload = blocks([100_000] * 20, seed=7)
    with Process(saver, url) as child:
        assert child.request("save") == "True"
        child.kill()
    loader = open_remote(url, settings=PATIENT)
    assert all(same(loader.load(records["key"]), records, payload))
    loader.close()


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_an_object_that_is_too_large_is_not_read(kind: str, tmp_path: Path) -> None:
    """Any client of the store may have written it."""
    pytest.importorskip("obstore", reason="obstore is not installed")
    url = "memory:///" if kind == "memory" else f"file://{tmp_path}/blocks"
    settings = RemoteSettings(block_bytes=4096)
    tier = open_remote(url, settings=settings)
    try:
        limit = settings.object_bytes
        tier._store.put("largest", memoryview(bytes(limit)))
        tier._store.put("larger", memoryview(bytes(limit + 1)))
        content = tier._store.get("largest")
        assert content is not None
        assert len(content) == limit
        with pytest.raises(RefusedError, match=f"an object of {limit + 1} bytes is too large"):
            tier._store.get("larger")
    finally:
        tier.close()


@contextlib.contextmanager
def rack(
    folder: Path, shared_url: str, settings: RemoteSettings
) -> Iterator[tuple[KVCache, IndexServer]]:
    """Serve a pool with a remote tier below it."""
    folder.mkdir()
    tier = open_remote(shared_url, settings=settings)
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
def shared_url(request: pytest.FixtureRequest, shm: Path) -> Iterator[str]:
    if request.param == "redis":
        need_redis_server()
        redis = RedisServer()
        yield redis.url
        redis.kill()
        return
    pytest.importorskip("obstore", reason="obstore is not installed")
    yield f"file://{shm}/store"


def test_blocks_of_one_pool_are_loaded_into_another(shm: Path, shared_url: str) -> None:
    data = np.random.default_rng(0).integers(0, 256, (COUNT, LENGTH), np.uint8)
    with rack(shm / "a", shared_url, PATIENT) as (cache, server):
        assert cache.put(NAMES, data).stored == COUNT
        assert eventually(lambda: server.lower_stat().dirty_count == 0, 60)
    with rack(shm / "b", shared_url, PATIENT) as (cache, server):
        target = np.zeros_like(data)
        assert cache.get(NAMES, target).hits == COUNT
        assert np.array_equal(target, data)


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
        target = np.zeros_like(data)
        for _ in range(20):
            assert cache.get(NAMES, target).hits == COUNT
        assert np.array_equal(target, data)
        redis.go_on()
    redis.kill()


def state(tier: RemoteTier) -> float:
    return REGISTRY.gauge("beluga_tier_breaker_state", "").value(tier=tier.name)


class Stored:
    """A tier with blocks that its store has."""

    def __init__(self, tier: RemoteTier, lengths: list[int], seed: int = 0) -> None:
        self.tier = tier
        self.records, self.payload = blocks(lengths, seed=seed)
        assert self.saves_all()

    def loaded(self) -> list[bool]:
        return same(self.tier.load(self.records["key"]), self.records, self.payload)

    def saves_all(self) -> bool:
        return bool(self.tier.save(self.records, self.payload).all())

    def recovered(self) -> bool:
        return eventually(lambda: all(self.loaded()), 60)

    def recovers(self) -> bool:
        """Return whether all blocks are hits eventually, after at most one save."""
        return eventually(self.saves_all, 60) and self.recovered()


class Scene(Stored):
    """A tier with blocks, and the proxy between it and its store."""

    def __init__(self, tier: RemoteTier, proxy: ByteProxy) -> None:
        super().__init__(tier, [30_000] * 12, seed=99)
        self.proxy = proxy


@pytest.fixture
def s3() -> Iterator[tuple[FakeS3, Stored]]:
    pytest.importorskip("obstore", reason="obstore is not installed")
    server = FakeS3()
    with contextlib.closing(open_remote(server.url(), settings=SETTINGS)) as tier:
        yield server, Stored(tier, [100] * 5)
    server.close()


@pytest.fixture(params=["s3", pytest.param("redis", marks=pytest.mark.slow)])
def scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    server: FakeS3 | RedisServer
    if request.param == "s3":
        pytest.importorskip("obstore", reason="obstore is not installed")
        server = FakeS3()
        proxy = ByteProxy(server.port)
        url = server.url(proxy.port)
    else:
        need_redis_server()
        server = RedisServer()
        proxy = ByteProxy(server.port)
        url = f"redis://127.0.0.1:{proxy.port}/0"
    tier = open_remote(url, settings=SETTINGS)
    made = Scene(tier, proxy)
    assert all(made.loaded())
    yield made
    proxy.close()
    tier.close()
    server.close() if isinstance(server, FakeS3) else server.kill()


def test_truncated_replies_are_misses(scene: Scene) -> None:
    for limit in (0, 10, 200, 29_000):
        scene.proxy.spoil = cut_after(limit)
        scene.proxy.drop()
        assert not any(scene.loaded())
        scene.proxy.spoil = intact
        scene.proxy.drop()
        assert scene.recovered()


@pytest.mark.parametrize("period", [300, 20_000, 100_000])
def test_replies_with_flipped_bits_are_misses(scene: Scene, period: int) -> None:
    results = []
    for seed in range(4):
        scene.proxy.spoil = flip_every(period, seed)
        scene.proxy.drop()
        results += scene.loaded()
    assert not all(results), "the proxy has spoiled nothing"
    scene.proxy.spoil = intact
    scene.proxy.drop()
    assert scene.recovers()


def test_connections_that_break_are_made_again(scene: Scene) -> None:
    """A broken connection is detected at once, so there is time to try again."""
    for _ in range(5):
        scene.proxy.drop()
        assert scene.recovered()


def test_a_silent_store_opens_the_breaker_which_closes_after_recovery(scene: Scene) -> None:
    scene.proxy.flowing.clear()
    assert not any(scene.loaded())
    assert state(scene.tier) != 0
    begun = time.monotonic()
    for _ in range(200):
        assert not any(scene.loaded())
        assert not scene.saves_all()
    assert time.monotonic() - begun < 200 * SETTINGS.operation_s / 10
    scene.proxy.flowing.set()
    assert scene.recovered()


def test_a_store_that_trickles_costs_one_deadline(scene: Scene) -> None:
    """No byte of a response takes as long as the timeout, but the whole response does."""

    def drip(data: bytes, before: int) -> bytes:
        time.sleep(0.3)
        return data

    scene.proxy.spoil = drip
    big_records, big = blocks([3 << 20], seed=5)
    begun = time.monotonic()
    scene.tier.save(big_records, big)
    hits = same(scene.tier.load(big_records["key"]), big_records, big)
    assert time.monotonic() - begun < SETTINGS.save_s + SETTINGS.load_s + 10
    assert len(hits) == 1
    scene.proxy.spoil = intact
    scene.proxy.drop()
    assert scene.recovered()


@pytest.mark.parametrize("status", [403, 500, 503])
def test_an_error_reply_is_a_miss(s3: tuple[FakeS3, Stored], status: int) -> None:
    server, stored = s3
    server.status = status
    assert not any(stored.loaded())
    assert not stored.tier.save(*blocks([100] * 5, seed=1)).any()
    # 403 shows that the store is available, and 5xx that it is not.
    assert (state(stored.tier) == 0) == (status == 403)
    server.status = 0
    assert stored.recovered()
    assert stored.tier.remove(stored.records["key"]) == 5
    assert not server.objects


@pytest.mark.parametrize(("status", "is_of_one"), [(400, True), (413, True), (429, False)])
def test_a_rejected_object_does_not_stop_others(
    s3: tuple[FakeS3, Stored], status: int, is_of_one: bool
) -> None:
    server, stored = s3
    server.put_status = status
    for seed in range(1, 4):
        assert not stored.tier.save(*blocks([100] * 5, seed=seed)).any()
    assert (state(stored.tier) == 0) == is_of_one
    if is_of_one:
        assert all(stored.loaded())


def test_a_folder_that_vanishes_or_cannot_be_read_is_a_miss(tmp_path: Path) -> None:
    pytest.importorskip("obstore", reason="obstore is not installed")
    tier = open_remote(f"file://{tmp_path}/blocks", settings=SETTINGS)
    stored = Stored(tier, [100] * 5)
    (tmp_path / "blocks").rename(tmp_path / "elsewhere")
    (tmp_path / "blocks").write_text("no folder")
    assert not any(stored.loaded())
    assert not tier.save(*blocks([100] * 5, seed=1)).any()
    assert state(tier) == 0
    (tmp_path / "blocks").unlink()
    (tmp_path / "elsewhere").rename(tmp_path / "blocks")
    assert all(stored.loaded())
    tier.close()


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    need_redis_server()
    server = RedisServer()
    yield server
    server.go_on()
    server.kill()


@pytest.mark.slow
def test_a_stopped_redis_costs_one_deadline(redis: RedisServer) -> None:
    settings = RemoteSettings(operation_s=2, load_s=4, open_s=0.5, open_limit_s=0.5)
    with contextlib.closing(open_remote(redis.url, settings=settings)) as tier:
        stored = Stored(tier, [100_000] * 16)
        redis.stop()
        assert not any(stored.loaded())
        assert state(tier) != 0
        begun = time.monotonic()
        for _ in range(100):
            assert not any(stored.loaded())
        assert time.monotonic() - begun < settings.operation_s, "they did not wait"
        redis.go_on()
        assert stored.recovered()


@pytest.mark.slow
def test_a_restarted_redis_is_used_again(redis: RedisServer) -> None:
    with contextlib.closing(open_remote(redis.url, settings=SETTINGS)) as tier:
        stored = Stored(tier, [100_000] * 16)
        redis.kill()
        for _ in range(10):
            assert not any(stored.loaded())
        redis.start()
        assert eventually(stored.saves_all, 60)
        assert all(stored.loaded())


@pytest.mark.slow
def test_a_full_redis_serves_its_blocks() -> None:
    need_redis_server()
    server = RedisServer("--maxmemory", "8mb", "--maxmemory-policy", "noeviction")
    tier = open_remote(server.url, settings=SETTINGS)
    records, payload = blocks([500_000] * 30)
    saved = tier.save(records, payload)
    assert 0 < saved.sum() < 30
    assert state(tier) == 0
    loaded = same(tier.load(records["key"]), records, payload)
    assert loaded == saved.tolist()
    tier.close()
    server.kill()


@pytest.mark.slow
def test_a_value_of_another_type_is_a_miss_until_it_is_saved_again(redis: RedisServer) -> None:
    import redis as client

    tier = open_remote(redis.url, settings=SETTINGS)
    records, payload = blocks([1000])
    assert tier.save(records, payload).all()
    other = client.Redis(port=redis.port)
    (name,) = other.keys()
    other.delete(name)
    other.lpush(name, "not", "a", "block")
    assert tier.load(records["key"]) == [None]
    assert state(tier) == 0
    assert tier.save(records, payload).all()
    assert same(tier.load(records["key"]), records, payload) == [True]
    other.close()
    tier.close()
