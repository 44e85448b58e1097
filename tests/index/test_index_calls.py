# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Calls of the index from Python: the arguments that they reject, their waits, and their errors."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plants import Ground
from support.blocks import hasty_client, keys, put
from support.watched_core import WatchedCore

from beluga.errors import BelugaError, RpcError, ServerAliveError
from beluga.index import IndexClient, IndexServer, TaskClient, TaskRecord, check_devices, check_pool
from beluga.index import check as check_module
from beluga.index.repair import repair_pool
from beluga.pool import Pool
from beluga.rpc import Client

SIZE = 32 << 20
RECORD = TaskRecord(keys([1]), generation=1, block=0, length=64, deliveries=1)


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> WatchedCore:
    core = WatchedCore()
    for module in ("check", "client", "repair", "server", "work"):
        monkeypatch.setattr(f"beluga.index.{module}.lib", core)
    return core


@pytest.mark.parametrize(
    "wrong",
    [
        [[1, 2]],
        np.zeros((1, 2)),
        np.zeros((1, 2), np.int64),
        np.zeros(2, np.uint64),
        np.zeros((1, 1), np.uint64),
        np.zeros((1, 3), np.uint64),
        np.zeros((1, 2, 2), np.uint64),
    ],
    ids=["list", "float", "signed", "flat", "narrow", "wide", "deep"],
)
@pytest.mark.parametrize("name", ["lookup", "pin", "remove", "reserve"])
def test_keys_of_another_kind_or_shape_are_refused(
    index: IndexClient, name: str, wrong: Any
) -> None:
    options = {"length": 64} if name == "reserve" else {}
    with pytest.raises(ValueError, match=r"uint64 array of shape \(count, 2\)"):
        getattr(index, name)(wrong, **options)


def test_strided_keys_equal_contiguous_keys(index: IndexClient) -> None:
    put(index, range(4))
    assert len(index.lookup(keys(range(8))[0:4:2]).hits) == 2
    assert len(index.lookup(np.asfortranarray(keys(range(4)))).hits) == 4


CALLS: dict[str, Callable[..., object]] = {
    "lookup": lambda index, hits, pins: index.lookup(keys([1])),
    "pin": lambda index, hits, pins: index.pin(keys([1])),
    "unpin": lambda index, hits, pins: index.unpin(pins),
    "reserve": lambda index, hits, pins: index.reserve(keys([1]), length=64),
    "commit": lambda index, hits, pins: index.commit(hits),
    "abort": lambda index, hits, pins: index.abort(hits),
    "release": lambda index, hits, pins: index.release(hits),
    "remove": lambda index, hits, pins: index.remove(keys([1])),
    "stat": lambda index, hits, pins: index.stat(),
    "claim": lambda index, hits, pins: TaskClient(index._client).claim(1, visible_s=1),
    "extend": lambda index, hits, pins: TaskClient(index._client).extend(RECORD, visible_s=1),
    "count": lambda index, hits, pins: TaskClient(index._client).count(1),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_call_reports_a_missing_server(pool: Pool, name: str) -> None:
    with IndexServer(pool), Client(pool) as client:
        put(IndexClient(client), [1])
        index = IndexClient(client)
        hits, pins = index.lookup(keys([1])).hits, index.pin(keys([1]))
    with IndexServer(pool) as server, hasty_client(pool, 0.05) as client:
        index = IndexClient(client)
        server.stop()
        with pytest.raises(RpcError):  # no server, or none in time
            CALLS[name](index, hits, pins)


def test_calls_use_the_timeout_of_their_client(
    pool: Pool, server: IndexServer, core: WatchedCore
) -> None:
    with Client(pool, timeout_s=1.5) as client:
        IndexClient(client).lookup(keys([1]))
        TaskClient(client).count(1)
    assert core.last("bl_lookup")[-1] == core.last("bl_task_count")[-1] == 1_500_000_000


def test_a_grant_has_by_default_no_fingerprint_and_no_chunks(
    index: IndexClient, core: WatchedCore
) -> None:
    (grant,) = index.reserve(keys([1]), length=4096)
    requested = core.last("bl_reserve")[3]
    assert (requested.length, requested.fingerprint, requested.chunk_size) == (4096, 0, 0)
    index.reserve(keys([2]), length=4096, fingerprint=7, chunk_size=64)
    requested = core.last("bl_reserve")[3]
    assert (requested.fingerprint, requested.chunk_size) == (7, 64)
    index.commit([grant])
    assert core.last("bl_commit_blocks")[1][0].checksums_crc == 0


def test_pins_are_dropped_once_each(index: IndexClient) -> None:
    put(index, range(3))
    one, three = index.pin(keys([0])), index.pin(keys(range(5)))
    assert (one.count, three.count) == (1, 3)
    assert index.stat().pinned_count == 3
    assert [index.unpin(three), index.unpin(three), index.unpin(one)] == [3, 0, 1]
    assert index.stat().pinned_count == 0
    assert index.unpin(index.pin(keys([9]))) == 0


@pytest.mark.parametrize(
    ("visible_s", "ms"), [(0.25, 250), (2, 2000), (0, 0), (-1.0, 0), (1e6, 600_000)]
)
def test_claims_have_lifetimes_in_milliseconds(
    index: IndexClient, core: WatchedCore, visible_s: float, ms: int
) -> None:
    assert TaskClient(index._client).claim(1, visible_s=visible_s) is None
    assert core.last("bl_task_claim")[2] == ms


# ---- Servers.


def test_by_default_no_process_is_declared_gone_and_heartbeats_time_out_after_5_s(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = WatchedCore()
    monkeypatch.setattr("beluga.rpc.server.lib", core)
    IndexServer(pool).stop()
    assert core.last("bl_server_heartbeat_lost")[1] == 5_000_000_000
    assert "bl_server_declare_gone" not in core.names()


def test_the_index_is_freed_with_its_server(pool: Pool, core: WatchedCore) -> None:
    server = IndexServer(pool)
    server.stop()
    server.stop()
    assert core.names().count("bl_index_destroy") == 1


def test_a_failed_creation_of_an_index_is_an_error(pool: Pool, core: WatchedCore) -> None:
    core.fails["bl_index_create"] = -errno.ENOMEM
    with pytest.raises((OSError, BelugaError, MemoryError)):
        IndexServer(pool)
    pool.close()


# ---- Checks and repairs.


def test_the_report_of_damaged_superblocks_omits_later_tables(
    shm: Path,
) -> None:
    path = shm / "a"
    Pool.create([path], device_size=16 << 20, sparse=True).close()
    with Pool.open([path]) as pool:
        epoch, half = check_pool(pool).epoch, check_pool(pool).half
    assert check_devices([path]) == check_module.CheckReport(epoch, half, False, 0, 0, 0, 0, 0, ())
    with path.open("r+b") as file:
        file.write(bytes(4096))
    report = check_devices([path])
    assert (report.finding_count, len(report.findings)) == (1, 1)
    assert report == check_module.CheckReport(0, 0, False, 0, 0, 0, 0, 1, report.findings)


def test_devices_are_checked_with_payload_on_request_only(
    pool: Pool, paths: list[Path], core: WatchedCore
) -> None:
    check_devices(paths)
    assert not core.last("bl_check_pool")[1]
    check_devices(paths, payload=True)
    assert core.last("bl_check_pool")[1]
    repair_pool(pool)
    assert not any(arguments[1] for name, arguments in core.calls[2:] if name == "bl_check_pool")


def test_findings_beyond_the_buffer_are_counted(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with IndexServer(pool):
        pass  # the half of the second epoch is the first half in the pool
    with IndexServer(pool), Client(pool) as client:
        put(IndexClient(client), range(8))
    ground = Ground(pool)
    for block in range(8):
        ground.flip(ground.entry(block), 8)
    monkeypatch.setattr(check_module, "FINDINGS_MAX", 5)
    report = check_pool(pool)
    assert (report.finding_count, len(report.findings)) == (8, 5)
    ground.undo()


def test_a_check_or_repair_that_fails_is_an_error(pool: Pool, core: WatchedCore) -> None:
    core.fails["bl_check_pool"] = -errno.EAGAIN
    for look in (check_pool, repair_pool):
        with pytest.raises((OSError, BelugaError)):
            look(pool)


def test_a_server_of_another_host_stops_a_repair(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pool, "refuse_in_use", lambda _: None)  # this host does not have its locks
    paths = [shm / "a"]
    with (
        Pool.create(paths, device_size=SIZE, sparse=True, coherence="software") as pool,
        IndexServer(pool),
        pytest.raises(ServerAliveError, match="--declare-gone"),
    ):
        repair_pool(pool)
