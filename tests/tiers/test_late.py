# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A pool is served without a disk that cannot be opened yet, and with it as soon as it can be."""

from __future__ import annotations

import hashlib
import json
import re
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from support.blocks import eventually
from support.memory_tier import MemoryTier

from beluga import KVCache, Pool
from beluga.errors import TierError
from beluga.index import IndexServer
from beluga.metrics import REGISTRY, Labels
from beluga.rpc import Client
from beluga.tiers import TierService, TierSettings
from beluga.tiers.disk import DiskTier
from beluga.tiers.settings import LateTier
from tests.events.test_event_service import free_endpoints

Start = Callable[..., "subprocess.Popen[str]"]
Run = Callable[..., "subprocess.CompletedProcess[str]"]

LENGTH = 100_000
DISK = 64 << 20
NAMES = [hashlib.sha256(b"block %d" % i).digest() for i in range(400)]


def content(number: int) -> NDArray[np.uint8]:
    return np.random.default_rng(number).integers(0, 256, LENGTH, dtype=np.uint8)


def put(cache: KVCache, number: int) -> None:
    """Put a block; with --offload wait it may be rejected until others were offered."""
    block = content(number)[np.newaxis]
    assert eventually(lambda: cache.put([NAMES[number]], block).stored == 1)


def has(cache: KVCache, number: int) -> bool:
    """Get a block, and return whether it was a hit; its bytes must be correct."""
    target = np.zeros((1, LENGTH), np.uint8)
    hit = cache.get([NAMES[number]], target).hits == 1
    assert not hit or np.array_equal(target[0], content(number))
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
def serving(
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
    lost: list[NDArray[np.uint64]] = []
    keys = np.array([[1, 2], [3, 4]], np.uint64)
    records = np.zeros(2, [("key", "<u8", (2,)), ("length", "<u4")])
    records["key"] = keys

    def opens() -> MemoryTier:
        if error is not None:
            raise error
        return inner

    tier = LateTier(opens, names=["disk:/a", "disk:/b"], block_count_max=7)
    tier.on_lost(lost.append)
    assert (tier.open(), tier.open(), tier.open()) == (False, False, False)
    assert tier.name == "disk:/a+disk:/b"
    assert tier.block_count_max == 7
    assert breaker(Path("/a")) == breaker(Path("/b")) == 2
    assert not tier.save(records, np.zeros((2, 8), np.uint8)).any()
    assert tier.load(keys) == [None, None]
    assert tier.contains(keys).all()  # the disk may have them
    assert tier.keys() is None
    assert tier.remove(keys[:1]) == 0
    assert tier.remove_durably(keys[:1]).tolist() == [False]  # the caller has to try again
    tier.close()
    assert not [labels for labels in _breakers() if labels[0][1] in ("disk:/a", "disk:/b")]

    inner.blocks.update({(1, 2): b"removed", (3, 4): b"kept"})  # type: ignore[dict-item]
    error = None
    assert tier.open()
    assert tier.remove_durably(keys[:1]).tolist() == [True]
    assert list(inner.blocks) == [(3, 4)]
    assert tier.contains(keys).tolist() == [False, True]
    stored = tier.keys()
    assert stored is not None and stored.tolist() == [[3, 4]]
    inner.lose(keys[1:])
    assert [each.tolist() for each in lost] == [[[3, 4]]]
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "in use" in caplog.text and "is open now" in caplog.text


@pytest.mark.parametrize("offload", ["drop", "wait"])
def test_blocks_of_a_disk_are_hits_once_it_can_be_opened(
    pool: Pool, tmp_path: Path, offload: str
) -> None:
    disk = tmp_path / "disk"
    with serving(pool, disk, patient=False) as (server, cache):
        for number in range(300):  # the pool has room for about 200
            put(cache, number)
        assert eventually(lambda: server.lower_stat().dirty_count == 0)
        lost = [number for number in range(300) if cache.lookup([NAMES[number]]).tiers[0] == 2]
        assert len(lost) > 50
    settings = {"server": pool.id, "smallest_block": LENGTH // 4096 * 4096}
    other = DiskTier(disk, DISK, **settings)  # type: ignore[arg-type]
    with serving(pool, disk, patient=True, offload=offload) as (server, cache):
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
        serving(pool, tmp_path / "disk", patient=False),
    ):
        pass
    other.close()


def test_a_service_ends_while_its_disk_is_not_open(pool: Pool, tmp_path: Path) -> None:
    other = DiskTier(tmp_path / "disk", DISK, server=pool.id)
    with serving(pool, tmp_path / "disk", patient=True) as (_, cache):
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
