# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The snapshot of a server: its figures, its rates and its map."""

import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from beluga import IndexServer, KVCache, Pool
from beluga.admin import Admin, request, server_routes
from beluga.live import Observer, Snapshot, observer
from beluga.live.snapshot import CellState
from beluga.pool import STRIPE_SIZE
from beluga.rpc import report
from tests.rpc.other_machine import OtherMachine

LENGTH = 64 << 10
DEVICE = 32 << 20

Look = Callable[[], Snapshot]


@pytest.fixture(params=[1, 3])
def pool(shm: Path, request: pytest.FixtureRequest) -> Iterator[Pool]:
    paths = [shm / f"device{number}" for number in range(request.param)]
    with Pool.create(
        paths, device_size=DEVICE, sparse=True, coherence="software", max_blocks=512
    ) as pool:
        yield pool


@pytest.fixture
def look(server: IndexServer, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> Look:
    """Request a snapshot each time; clients report with each call."""
    monkeypatch.setattr(report, "INTERVAL_S", 0.0)
    monkeypatch.setattr(observer, "_INTERVAL_S", 0.0)
    for name in ("_MAP_SHARE", "_TRACE_SHARE"):
        monkeypatch.setattr(observer, name, 1e9)
    return Observer(server, pool).snapshot


def names(count: int, *, start: int = 0) -> list[bytes]:
    return [number.to_bytes(16, "little") for number in range(start, start + count)]


def payload(count: int, length: int = LENGTH) -> np.ndarray:
    return np.ones((count, length), np.uint8)


class At(observer.Figures):
    """The figures at one time, on a virtual clock."""

    def __init__(self, at_s: float) -> None:
        super().__init__({})
        self.at_s = at_s


def test_a_rate_does_not_span_a_pause_between_snapshots() -> None:
    past = observer.RecentFigures()
    for at_s in (100.0, 101.0, 102.0):
        past.add(At(at_s))
    now = At(103.0)
    past.add(now)
    earlier = past.before(now, observer.WINDOW_S)
    assert earlier is not None and earlier.at_s == 100.0
    later = At(1000.0)
    past.add(later)
    assert past.before(later, observer.WINDOW_S) is None
    slow = At(1009.0)  # a snapshot every nine seconds
    past.add(slow)
    earlier = past.before(slow, observer.WINDOW_S)
    assert earlier is not None and earlier.at_s == 1000.0


def test_byte_rates_start_at_the_first_client_report(
    look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rate over less than one report interval is mostly 0, which would look like a drop."""
    look()
    bytes_of = [point[3:5] for point in look().history]
    assert bytes_of == [(None, None), (None, None)]
    monkeypatch.setattr(observer, "_REPORTS_S", 0.0)
    assert look().history[-1][3:5] == (0, 0)


def test_figures_and_rates_match_the_server(pool: Pool, look: Look) -> None:
    first = look()
    assert first.rates == {}
    assert (first.server.state, first.server.epoch, first.server.pid) == ("serving", 1, os.getpid())
    assert first.hit_rate is None
    with KVCache(pool, namespace="a") as cache:
        cache.put(names(6), payload(6))
        assert cache.get(names(8), payload(8)).hits == 6
        cache.client.report.saved(96, 0.5)
        cache.get(names(1), payload(1))
        snapshot = look()
    counts = [snapshot.figure(f"{name}") for name in ("blocks", "lookup_keys_total")]
    assert (*counts, snapshot.figure("lookup_hits_total")) == (6, 8 + 1, 6 + 1)
    assert snapshot.hit_rate == 7 / 9
    assert round(snapshot.rates["commits_total"] * snapshot.over_s) == 6
    assert round(snapshot.rates["lookup_hits_total"] * snapshot.over_s) == 7
    assert snapshot.recent_hit_rate == pytest.approx(7 / 9)
    over_s = snapshot.reported_over_s
    assert round(snapshot.rates["client_written_bytes_total"] * over_s) == 6 * LENGTH
    assert round(snapshot.rates["client_read_bytes_total"] * over_s) == 7 * LENGTH
    assert snapshot.figure("saved_tokens_total") == 96
    assert len(snapshot.history) == 2
    (tenant,) = snapshot.tenants
    assert (tenant.name, tenant.blocks, tenant.bytes) == ("a", 6, 6 * LENGTH)
    (session,) = snapshot.sessions
    assert (session.pid, session.state, snapshot.figure("sessions")) == (os.getpid(), "live", 1)
    assert session.calls_per_s is None
    assert {call.method for call in snapshot.slow_calls} >= {"reserve", "commit", "lookup"}


def test_a_sessions_calls_are_counted_between_two_snapshots(pool: Pool, look: Look) -> None:
    with KVCache(pool, namespace="a") as cache:
        before = look()
        for _ in range(50):
            cache.lookup(names(1))
        after = look()
    (session,) = after.sessions
    assert session.call_count >= before.sessions[0].call_count + 50
    assert session.calls_per_s
    assert session.calls_per_s >= 50 / (after.time_s - before.time_s + 1)


def test_the_map_adds_up_and_shows_block_locations(pool: Pool, look: Look) -> None:
    empty = look()
    with KVCache(pool, namespace="a") as cache:
        cache.put(names(100), payload(100))
        snapshot = look()
    geometry = pool.geometry
    assert [device.path for device in snapshot.devices] == [
        str(device.path) for device in pool.devices
    ]
    for device in snapshot.devices:
        assert len(device.states) == len(device.fill) // 2 == DEVICE // STRIPE_SIZE - 1
    tables = sum(device.table_bytes for device in snapshot.devices)
    assert tables == geometry.data_offset
    free = sum(device.free_bytes for device in empty.devices)
    assert free == empty.figure("pool_free_bytes") == geometry.stripe_count * STRIPE_SIZE
    assert all(set(device.states) <= {"0", "3"} for device in empty.devices)
    used = sum(device.used_bytes for device in snapshot.devices)
    assert (
        abs(used - snapshot.figure("pool_used_bytes")) < 1000
    )  # shares of stripes are whole numbers
    full = sum(
        int(device.fill[at : at + 2], 16)
        for device in snapshot.devices
        for at in range(0, len(device.fill), 2)
    )
    assert full * STRIPE_SIZE / 255 == pytest.approx(snapshot.figure("pool_used_bytes"), rel=0.05)
    assert sum(device.states.count(str(CellState.USED.value)) for device in snapshot.devices) == 4


def test_large_devices_have_a_bounded_number_of_cells(shm: Path) -> None:
    with (
        Pool.create([shm / "large"], device_size=16 << 30, sparse=True, max_blocks=512) as pool,
        IndexServer(pool) as server,
    ):
        drawn = observer.SpaceMap(server, pool)
        (device,) = drawn.devices()
    assert len(device.states) == observer.CELLS_MAX
    assert device.free_bytes + device.table_bytes == (16 << 30) - STRIPE_SIZE
    assert device.cell_bytes == 2 * STRIPE_SIZE


@pytest.mark.parametrize("pool", [1], indirect=True)
def test_quarantine_is_on_the_map_and_in_the_notes(pool: Pool) -> None:
    with IndexServer(pool), KVCache(pool, namespace="a") as cache:
        cache.put(names(4), payload(4))
        assert OtherMachine(pool, host=3, boot_id=(7, 9)).attach(0x5EED) == 0
    with IndexServer(pool) as server:
        snapshot = Observer(server, pool).snapshot()
    assert snapshot.figure("pool_quarantined_bytes") > 0
    assert snapshot.figure("sessions_suspect") == 1
    (device,) = snapshot.devices
    assert device.quarantined_bytes == pytest.approx(
        snapshot.figure("pool_quarantined_bytes"), abs=100
    )
    assert str(CellState.QUARANTINED.value) in device.states
    (note,) = [note for note in snapshot.notes if "quarantined" in note.text]
    assert note.level == "warn"


@pytest.mark.parametrize("pool", [1], indirect=True)
def test_refusals_are_noted_while_they_happen(pool: Pool, look: Look) -> None:
    with KVCache(pool, namespace="a") as cache, KVCache(pool, namespace="b") as reader:
        reader.put(names(512), payload(512, 4096))
        pins = reader.pin(names(512))
        look()
        assert cache.put(names(2), payload(2, 4096)).refused == 2
        assert any("table full" in note.text for note in look().notes)
        reader.release(pins)


def test_requests_within_a_second_get_the_same_snapshot(server: IndexServer, pool: Pool) -> None:
    watched = Observer(server, pool)
    assert watched.snapshot() is watched.snapshot()


def test_a_stopped_server_and_a_standby_are_reported(server: IndexServer, pool: Pool) -> None:
    standby = IndexServer(pool)
    assert Observer(standby, pool).snapshot().server.state == "standby"
    standby.stop()
    watched = Observer(server, pool)
    server.stop()
    snapshot = watched.snapshot()
    assert snapshot.server.state == "stopped"
    assert snapshot.sessions == snapshot.devices == ()


def test_the_response_is_the_snapshot_with_history_on_request(
    server: IndexServer, pool: Pool
) -> None:
    admin = Admin(server_routes(server, pool), directory=pool.runtime_dir)
    admin.start()
    admin.claim()
    try:
        plain = request(pool.runtime_dir, "/live").body
        whole = request(pool.runtime_dir, "/live?history=1").body
    finally:
        admin.stop()
    snapshot = msgspec.json.decode(whole, type=Snapshot)
    assert len(snapshot.history) == 1
    assert msgspec.json.decode(plain, type=Snapshot) == dataclasses.replace(snapshot, history=())
