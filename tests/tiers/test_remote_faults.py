# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The remote tier with failing networks, and stores that stop, die and restart."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from byte_proxy import ByteProxy, cut_after, flip_every, intact
from fake_s3 import FakeS3
from redis_server import RedisServer, need_redis_server
from remote_blocks import blocks, same
from support.blocks import eventually

from beluga.metrics import REGISTRY
from beluga.tiers.remote import RemoteSettings, RemoteTier, open_remote

SETTINGS = RemoteSettings(
    operation_s=1, load_s=2, save_s=20, retries=1, backoff_s=0.001, open_s=0.01, open_limit_s=0.05
)


def state(tier: RemoteTier) -> float:
    return REGISTRY.gauge("beluga_tier_breaker_state", "").value(tier=tier.name)


@dataclass
class Scene:
    """A tier, and the proxy between it and its store."""

    tier: RemoteTier
    proxy: ByteProxy

    def __post_init__(self) -> None:
        self.records, self.payload = blocks([30_000] * 12, seed=99)

    def found(self) -> list[bool]:
        return same(self.tier.load(self.records["key"]), self.records, self.payload)

    def saves_all(self) -> bool:
        return bool(self.tier.save(self.records, self.payload).all())

    def recovers(self) -> bool:
        """Return whether all blocks are hits eventually, after at most one save."""
        return eventually(self.saves_all, 60) and eventually(lambda: all(self.found()), 60)


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
    assert made.saves_all()
    assert all(made.found())
    yield made
    proxy.close()
    tier.close()
    server.close() if isinstance(server, FakeS3) else server.kill()


def test_truncated_replies_are_misses(scene: Scene) -> None:
    for limit in (0, 10, 200, 29_000):
        scene.proxy.spoil = cut_after(limit)
        scene.proxy.drop()
        assert not any(scene.found())
        scene.proxy.spoil = intact
        scene.proxy.drop()
        assert eventually(lambda: all(scene.found()), 60)


@pytest.mark.parametrize("period", [300, 20_000, 100_000])
def test_replies_with_flipped_bits_are_misses(scene: Scene, period: int) -> None:
    found = []
    for seed in range(4):
        scene.proxy.spoil = flip_every(period, seed)
        scene.proxy.drop()
        found += scene.found()
    assert not all(found), "the proxy has spoiled nothing"
    scene.proxy.spoil = intact
    scene.proxy.drop()
    assert scene.recovers()


def test_connections_that_break_are_made_again(scene: Scene) -> None:
    """A broken connection is detected at once, so there is time to try again."""
    for _ in range(5):
        scene.proxy.drop()
        assert eventually(lambda: all(scene.found()), 60)


def test_a_silent_store_opens_the_breaker_which_closes_after_recovery(scene: Scene) -> None:
    scene.proxy.flowing.clear()
    assert not any(scene.found())
    assert state(scene.tier) != 0
    begun = time.monotonic()
    for _ in range(200):
        assert not any(scene.found())
        assert not scene.saves_all()
    assert time.monotonic() - begun < 200 * SETTINGS.operation_s / 10
    scene.proxy.flowing.set()
    assert eventually(lambda: all(scene.found()), 60)


def test_a_store_that_trickles_costs_one_deadline(scene: Scene) -> None:
    """No byte of a response takes as long as the timeout, but the whole response does."""

    def drip(data: bytes, before: int) -> bytes:
        time.sleep(0.3)
        return data

    scene.proxy.spoil = drip
    big_records, big = blocks([3 << 20], seed=5)
    begun = time.monotonic()
    scene.tier.save(big_records, big)
    found = same(scene.tier.load(big_records["key"]), big_records, big)
    assert time.monotonic() - begun < SETTINGS.save_s + SETTINGS.load_s + 10
    assert len(found) == 1
    scene.proxy.spoil = intact
    scene.proxy.drop()
    assert eventually(lambda: all(scene.found()), 60)


@pytest.mark.parametrize("status", [403, 500, 503])
def test_an_error_reply_is_a_miss(status: int) -> None:
    pytest.importorskip("obstore", reason="obstore is not installed")
    server = FakeS3()
    tier = open_remote(server.url(), settings=SETTINGS)
    records, payload = blocks([100] * 5)
    assert tier.save(records, payload).all()
    server.status = status
    assert not any(same(tier.load(records["key"]), records, payload))
    assert not tier.save(*blocks([100] * 5, seed=1)).any()
    # 403 shows that the store is available, and 5xx that it is not.
    assert (state(tier) == 0) == (status == 403)
    server.status = 0
    assert eventually(lambda: all(same(tier.load(records["key"]), records, payload)), 60)
    assert tier.remove(records["key"]) == 5
    assert not server.objects
    tier.close()
    server.close()


@pytest.mark.parametrize(("status", "is_of_one"), [(400, True), (413, True), (429, False)])
def test_a_rejected_object_does_not_stop_others(status: int, is_of_one: bool) -> None:
    pytest.importorskip("obstore", reason="obstore is not installed")
    server = FakeS3()
    tier = open_remote(server.url(), settings=SETTINGS)
    records, payload = blocks([100] * 5)
    assert tier.save(records, payload).all()
    server.put_status = status
    for seed in range(1, 4):
        assert not tier.save(*blocks([100] * 5, seed=seed)).any()
    assert (state(tier) == 0) == is_of_one
    if is_of_one:
        assert all(same(tier.load(records["key"]), records, payload))
    tier.close()
    server.close()


def test_a_folder_that_vanishes_or_cannot_be_read_is_a_miss(tmp_path: Path) -> None:
    pytest.importorskip("obstore", reason="obstore is not installed")
    tier = open_remote(f"file://{tmp_path}/blocks", settings=SETTINGS)
    records, payload = blocks([100] * 5)
    assert tier.save(records, payload).all()
    (tmp_path / "blocks").rename(tmp_path / "elsewhere")
    (tmp_path / "blocks").write_text("no folder")
    assert tier.load(records["key"]) == [None] * 5
    assert not tier.save(*blocks([100] * 5, seed=1)).any()
    assert state(tier) == 0
    (tmp_path / "blocks").unlink()
    (tmp_path / "elsewhere").rename(tmp_path / "blocks")
    assert all(same(tier.load(records["key"]), records, payload))
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
    tier = open_remote(redis.url, settings=settings)
    records, payload = blocks([100_000] * 16)
    assert tier.save(records, payload).all()
    redis.stop()
    assert not any(same(tier.load(records["key"]), records, payload))
    assert state(tier) != 0
    begun = time.monotonic()
    for _ in range(100):
        assert not any(same(tier.load(records["key"]), records, payload))
    assert time.monotonic() - begun < settings.operation_s, "they did not wait"
    redis.go_on()
    assert eventually(lambda: all(same(tier.load(records["key"]), records, payload)), 60)
    tier.close()


@pytest.mark.slow
def test_a_restarted_redis_is_used_again(redis: RedisServer) -> None:
    tier = open_remote(redis.url, settings=SETTINGS)
    records, payload = blocks([100_000] * 16)
    assert tier.save(records, payload).all()
    redis.kill()
    for _ in range(10):
        assert not any(same(tier.load(records["key"]), records, payload))
    redis.start()
    assert eventually(lambda: bool(tier.save(records, payload).all()), 60)
    assert all(same(tier.load(records["key"]), records, payload))
    tier.close()


@pytest.mark.slow
def test_a_full_redis_serves_its_blocks() -> None:
    need_redis_server()
    server = RedisServer("--maxmemory", "8mb", "--maxmemory-policy", "noeviction")
    tier = open_remote(server.url, settings=SETTINGS)
    records, payload = blocks([500_000] * 30)
    saved = tier.save(records, payload)
    assert 0 < saved.sum() < 30
    assert state(tier) == 0
    found = same(tier.load(records["key"]), records, payload)
    assert found == saved.tolist()
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
