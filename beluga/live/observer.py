# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Makes the snapshots of one server, in its process, from the exporter's metrics."""

from __future__ import annotations

import dataclasses
import os
import socket
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

import beluga
from beluga.errors import BelugaError, RpcError
from beluga.exporter import Collector
from beluga.kvcache import KnownNamespace, known_namespaces, namespaces_changed_ns
from beluga.live.snapshot import (
    CellState,
    DeviceFacts,
    LinkFacts,
    Note,
    ServerFacts,
    SessionFacts,
    Snapshot,
    TenantFacts,
    TierFacts,
)
from beluga.metrics import Distribution
from beluga.pool import STRIPE_SIZE, show_size
from beluga.rpc import TracedCall, read_trace

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from beluga.index import IndexServer
    from beluga.metrics import Sample
    from beluga.pool import DeviceView, Pool

WINDOW_S = 5.0
REPORTED_WINDOW_S = 10.5  # two reports of every client
_INTERVAL_S = 0.9  # less than a second, so that a poll every second gets a new one each time
_HISTORY = 300
_REPORTS_S = 5.0  # clients report their bytes every 5 s: a rate over less is often 0
_REPORTED = ("client_", "saved_")  # metrics of what clients report
_ROWS_MAX = 100
_NAME_MAX = 200  # characters; names come from clients
_BREAKER = {0: "closed", 1: "half-open", 2: "open"}
_LANES_SCARCE = 0.9
CELLS_MAX = 4096  # of a device's map
_CELLS_ALL = 8192  # of all devices together
_FILL_MAX = 255
_SLOW_CALLS = 10
# Fractions of a core that bound how often the map and the trace are read.
_MAP_SHARE = 0.002
_TRACE_SHARE = 0.001


class Figures:
    """Metrics at ``at_s``, on the monotonic clock."""

    def __init__(self, samples: Mapping[str, Sample]) -> None:
        self.at_s = time.monotonic()
        self._samples = samples

    def series(self, name: str) -> list[tuple[dict[str, str], float]]:
        """Return the labels and values of a metric, given without a prefix; there may be none."""
        sample = self._samples.get(f"beluga_{name}") or self._samples.get(name)
        if sample is None:
            return []
        return [
            (dict(labels), value)
            for labels, value in sample.series.items()
            if not isinstance(value, Distribution)
        ]

    def total(self, name: str) -> float:
        """Return the sum of all series of a metric."""
        return sum(value for _, value in self.series(name))

    def totals(self) -> dict[str, float]:
        """Return the sums of all metrics but histograms, by name without the prefix."""
        names = (
            name.removeprefix("beluga_")
            for name, sample in self._samples.items()
            if sample.kind != "histogram"
        )
        return {name: self.total(name) for name in names}

    def by(self, name: str, label: str) -> dict[str, float]:
        """Return the sums by the value of a label."""
        sums: dict[str, float] = {}
        for labels, value in self.series(name):
            sums[labels[label]] = sums.get(labels[label], 0.0) + value
        return sums


class RecentFigures:
    """The figures of the last seconds, and at least the latest ones."""

    def __init__(self) -> None:
        self._figures: deque[Figures] = deque()

    def add(self, now: Figures) -> None:
        """Add the current figures. Those of another epoch are dropped: the new server's counters
        began at 0.
        """
        if self._figures and self._figures[-1].total("server_epoch") != now.total("server_epoch"):
            self._figures.clear()
        self._figures.append(now)
        while len(self._figures) > 2 and now.at_s - self._figures[1].at_s > REPORTED_WINDOW_S:
            self._figures.popleft()

    def before(self, now: Figures, window_s: float) -> Figures | None:
        """Return the oldest figures of the window before ``now``, or the ones before it if there
        are none. Figures from before a pause between requests are not returned: a rate over the
        pause would not be a current rate.
        """
        others = [
            figures
            for figures in self._figures
            if figures is not now and now.at_s - figures.at_s <= max(window_s, REPORTED_WINDOW_S)
        ]
        inside = [figures for figures in others if now.at_s - figures.at_s <= window_s]
        return inside[0] if inside else others[-1] if others else None


def rates_between(now: Figures, before: Figures, reported: Figures) -> dict[str, float]:
    """Return the counters' rates since ``before``; of clients' reports, since ``reported``."""
    rates = {}
    for name, value in now.totals().items():
        if name.endswith("_total"):
            since = reported if name.startswith(_REPORTED) else before
            over_s = max(now.at_s - since.at_s, 1e-3)
            rates[name] = max(value - since.total(name), 0.0) / over_s
    return rates


class Observer:
    """Observes the server of ``pool``. Thread-safe."""

    def __init__(self, server: IndexServer, pool: Pool) -> None:
        self._server, self._pool = server, pool
        self._collector = Collector(server, pool)
        self._map = SpaceMap(server, pool)
        self._sessions = SessionTable(server)
        self._tenants = TenantTable(pool.runtime_dir)
        self._calls = RecentCalls(pool.runtime_dir)
        self._past = RecentFigures()
        self._history: deque[tuple[float | None, ...]] = deque(maxlen=_HISTORY)
        self._lock = threading.Lock()
        self._last: Snapshot | None = None
        self._due_s = 0.0

    def snapshot(self) -> Snapshot:
        """Return a snapshot that is at most a second old."""
        with self._lock:
            now_s = time.monotonic()
            if self._last is None or now_s >= self._due_s:
                self._last = self._look()
                self._due_s = now_s + _INTERVAL_S
            return self._last

    def _look(self) -> Snapshot:
        now = Figures(self._collector.collect())
        self._past.add(now)
        before = self._past.before(now, WINDOW_S)
        reported = self._past.before(now, REPORTED_WINDOW_S)
        rates = rates_between(now, before, reported) if before and reported else {}
        reported_over_s = now.at_s - reported.at_s if reported else 0.0
        server = self._server_facts(now)
        self._history.append(
            _point(now, rates, server.state == "serving", reported_over_s >= _REPORTS_S)
        )
        try:
            devices = self._map.devices()
        except BelugaError:  # the server has stopped
            devices = ()
        return Snapshot(
            time_s=time.time(),
            server=server,
            figures=now.totals(),
            rates=rates,
            over_s=now.at_s - before.at_s if before else 0.0,
            reported_over_s=reported_over_s,
            devices=devices,
            sessions=self._sessions.rows(),
            tenants=self._tenants.rows(now),
            tiers=tier_facts(now),
            link=link_facts(now, before),
            slow_calls=self._calls.slowest(),
            notes=notes_of(now, before),
            history=tuple(self._history),
        )

    def _server_facts(self, now: Figures) -> ServerFacts:
        serving = now.total("server_serving") == 1
        started_s = now.total("process_start_time_seconds")
        ended = self._server.failure is not None or not now.series("blocks_limit")
        return ServerFacts(
            state="serving" if serving else "stopped" if ended else "standby",
            epoch=int(now.total("server_epoch")),
            version=beluga.__version__,
            pid=os.getpid(),
            machine=socket.gethostname(),
            pool_id=self._pool.id,
            uptime_s=max(time.time() - started_s, 0.0),
        )


def _point(
    now: Figures, rates: Mapping[str, float], serving: bool, has_reports: bool
) -> tuple[float | None, ...]:
    """Return a point of the history."""
    size, lookups = now.total("pool_bytes"), rates.get("lookup_keys_total", 0)
    used = now.total("pool_used_bytes") / size if size else None
    at_s = round(time.time(), 2)
    if not rates or not serving:
        return at_s, None, None, None, None, used, None
    return (
        at_s,
        round(rates.get("rpc_calls_total", 0), 1),
        round(rates.get("lookup_hits_total", 0) / lookups, 4) if lookups else None,
        round(rates.get("client_read_bytes_total", 0)) if has_reports else None,
        round(rates.get("client_written_bytes_total", 0)) if has_reports else None,
        used,
        round(rates.get("evictions_total", 0), 1),
    )


# ---- Current problems, for operators. docs/operate/monitoring.md has alerts for them.


def notes_of(now: Figures, before: Figures | None) -> tuple[Note, ...]:
    """Return the current problems, the most serious first."""
    notes = []
    if retired := int(now.total("pool_retired_bytes")):
        text = f"{show_size(retired)} of memory failed and are never used again: replace it"
        notes.append(Note("bad", text))
    if failures := int(now.total("client_checksum_failures_total")):
        text = (
            f"{failures} blocks do not match their checksums (none was returned): "
            "'beluga pool check --payload' finds them"
        )
        notes.append(Note("bad", text))
    if damaged := int(now.total("damaged_entries_total")):
        notes.append(Note("warn", f"{damaged} damaged entries were dropped at takeover"))
    quarantined = int(now.total("pool_quarantined_bytes"))
    suspect = int(now.total("sessions_suspect"))
    if quarantined or suspect:
        text = (
            f"{show_size(quarantined)} are quarantined and {suspect} sessions are suspect: "
            "a client without a heartbeat may still write; 'beluga stat' shows it"
        )
        notes.append(Note("warn", text))
    lanes, sessions = int(now.total("lanes")), int(now.total("sessions"))
    if lanes and sessions > _LANES_SCARCE * lanes:
        text = f"{sessions} of {lanes} lanes are taken: create the pool with more --lanes"
        notes.append(Note("warn", text))
    return (*notes, *(Note("warn", text) for text in _changes(now, before)))


def _changes(now: Figures, before: Figures | None) -> list[str]:
    """Return the problems that show in changes."""
    if before is None:
        return []
    notes = []
    if now.total("table_evictions_total") > before.total("table_evictions_total"):
        notes.append(
            "the block table is full, though space is not: blocks are smaller than the pool "
            "was created for (--max-blocks)"
        )
    earlier = before.by("refusals_total", "reason")
    for reason, count in now.by("refusals_total", "reason").items():
        if count > earlier.get(reason, 0.0):
            notes.append(f"grants are being refused: {reason}")
    for labels, state in now.series("tier_breaker_state"):
        if state:
            notes.append(f"the breaker of tier {labels['tier']} is not closed")
    return notes


# ---- Tables.


class SessionTable:
    """The sessions of a server, and how often each calls."""

    def __init__(self, server: IndexServer) -> None:
        self._server = server
        self._seen: dict[str, tuple[float, int]] = {}

    def rows(self) -> tuple[SessionFacts, ...]:
        """Return the sessions: suspect ones first, then those that call most."""
        try:
            views = self._server.sessions()
        except BelugaError:  # the server has stopped
            return ()
        now_s, before = time.monotonic(), self._seen
        self._seen = {view.nonce: (now_s, view.call_count) for view in views}
        rows = []
        for view in views:
            rate = None
            if view.nonce in before:
                at_s, count = before[view.nonce]
                rate = max(view.call_count - count, 0) / max(now_s - at_s, 1e-3)
            rows.append(SessionFacts(**dataclasses.asdict(view), calls_per_s=rate))
        rows.sort(key=lambda row: (row.state == "live", -(row.calls_per_s or 0.0), row.nonce))
        return tuple(rows[:_ROWS_MAX])


class TenantTable:
    """The tenants of a pool, with the names that processes of this host recorded."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._names: dict[str, str] = {}
        self._changed_ns = -1

    def rows(self, now: Figures) -> tuple[TenantFacts, ...]:
        """Return the tenants with the most bytes first."""
        self._read_names()
        counts = {
            name: {_tenant(labels): int(value) for labels, value in now.series(f"tenant_{name}")}
            for name in ("blocks", "bytes", "commits_total", "hits_total", "evictions_total")
        }
        rows = [
            TenantFacts(
                fingerprint=tenant[0],
                name=self._names.get(tenant[0], ""),
                block_bytes=tenant[1],
                blocks=blocks,
                bytes=counts["bytes"][tenant],
                commits=counts["commits_total"][tenant],
                hits=counts["hits_total"][tenant],
                evictions=counts["evictions_total"][tenant],
            )
            for tenant, blocks in counts["blocks"].items()
        ]
        rows.sort(key=lambda row: (-row.bytes, row.fingerprint, row.block_bytes))
        return tuple(rows[:_ROWS_MAX])

    def _read_names(self) -> None:
        """Read the names again if they have changed."""
        changed_ns = namespaces_changed_ns(self._directory)
        if changed_ns != self._changed_ns:
            namespaces = known_namespaces(self._directory)
            self._names = {f"{space.fingerprint:016x}": _name(space) for space in namespaces}
            self._changed_ns = changed_ns


def _tenant(labels: dict[str, str]) -> tuple[str, int]:
    return labels["tenant"], int(labels["block_bytes"])


def _name(namespace: KnownNamespace) -> str:
    """Return a name that distinguishes a namespace from others."""
    if set(namespace.fields) == {"name"}:
        text = str(namespace.fields["name"])
    else:
        text = " ".join(f"{name}={value}" for name, value in namespace.fields.items())
    return text[:_NAME_MAX]


def tier_facts(now: Figures) -> tuple[TierFacts, ...]:
    """Return the tiers below the pool."""
    columns = {
        name: now.by(f"tier_{name}", "tier")
        for name in (
            "blocks",
            "used_bytes",
            "data_bytes",
            "saved_bytes_total",
            "loaded_bytes_total",
            "missed_blocks_total",
            "breaker_state",
        )
    }

    def figure(name: str, tier: str) -> int | None:
        value = columns[name].get(tier)
        return None if value is None else int(value)

    return tuple(
        TierFacts(
            name=tier[:_NAME_MAX],
            blocks=figure("blocks", tier),
            used_bytes=figure("used_bytes", tier),
            bytes=figure("data_bytes", tier),
            saved_bytes=figure("saved_bytes_total", tier) or 0,
            loaded_bytes=figure("loaded_bytes_total", tier) or 0,
            missed_blocks=figure("missed_blocks_total", tier) or 0,
            breaker=_BREAKER.get(figure("breaker_state", tier) or 0)
            if tier in columns["breaker_state"]
            else None,
        )
        for tier in sorted(set().union(*columns.values()))
    )


def link_facts(now: Figures, before: Figures | None) -> tuple[LinkFacts, ...]:
    """Return the directions of this host's link; none while no engine uses it."""
    over_s = max(now.at_s - before.at_s, 1e-3) if before else 0.0
    rows = []
    for direction, busy_s in now.by("link_busy_seconds_total", "direction").items():
        classes: dict[str, int] = {}
        for labels, value in now.series("link_bytes_total"):
            if labels["direction"] == direction:
                classes[labels["class"]] = int(value)
        busy = moved = None
        if before is not None:
            earlier = before.by("link_busy_seconds_total", "direction").get(direction)
            bytes_before = before.by("link_bytes_total", "direction").get(direction)
            if earlier is not None and bytes_before is not None:
                busy = max(busy_s - earlier, 0.0) / over_s
                moved = max(sum(classes.values()) - bytes_before, 0.0) / over_s
        rows.append(LinkFacts(direction, busy, moved, classes))
    return tuple(rows)


class SpaceMap:
    """Draws the devices of a server's pool."""

    def __init__(self, server: IndexServer, pool: Pool) -> None:
        self._server, self._pool = server, pool
        devices = len(pool.devices)
        rows = max(device.stripe_count - 1 for device in pool.devices)
        self.cell_count = min(rows, CELLS_MAX, max(_CELLS_ALL // devices, 64))
        self._drawn: tuple[DeviceFacts, ...] = ()
        self._due_s = 0.0

    def devices(self) -> tuple[DeviceFacts, ...]:
        """Return the devices; their maps may be some seconds old where pools are large."""
        now_s = time.monotonic()
        if now_s < self._due_s:
            return self._drawn
        started_s = time.thread_time()
        cells = self._server.space_map(self.cell_count)
        self._drawn = tuple(
            _draw(device, cells[device.index][: device.stripe_count - 1])
            for device in self._pool.devices
        )
        self._due_s = now_s + (time.thread_time() - started_s) / _MAP_SHARE
        return self._drawn


def _draw(device: DeviceView, cells: NDArray[np.void]) -> DeviceFacts:
    """Return a device and its map."""
    space = np.maximum(cells["stripe_count"].astype(np.int64) * STRIPE_SIZE, 1)
    fill = np.minimum(cells["used_bytes"] * _FILL_MAX // space, _FILL_MAX).astype(np.uint8)
    states = np.full(len(cells), CellState.FREE, np.uint8)
    states[cells["used_bytes"] > 0] = CellState.USED
    states[cells["kept_count"] > 0] = CellState.KEPT
    states[cells["table_count"] * 2 > cells["stripe_count"]] = CellState.TABLES
    states[cells["held_bytes"] > 0] = CellState.QUARANTINED
    states[cells["retired_count"] > 0] = CellState.RETIRED
    return DeviceFacts(
        path=str(device.path),
        bytes=device.size,
        used_bytes=int(cells["used_bytes"].sum()),
        free_bytes=int(cells["free_count"].sum()) * STRIPE_SIZE,
        table_bytes=int(cells["table_count"].sum()) * STRIPE_SIZE,
        quarantined_bytes=int(cells["held_bytes"].sum()),
        retired_bytes=int(cells["retired_count"].sum()) * STRIPE_SIZE,
        cell_bytes=-(-(device.stripe_count - 1) // len(cells)) * STRIPE_SIZE,
        states=(states + ord("0")).tobytes().decode("ascii"),
        fill=fill.tobytes().hex(),
    )


class RecentCalls:
    """Reads the trace of a runtime directory. The interval bounds the CPU time."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._slowest: tuple[TracedCall, ...] = ()
        self._due_s = 0.0

    def slowest(self) -> tuple[TracedCall, ...]:
        """Return the slowest calls of the trace, the slowest first."""
        if time.monotonic() >= self._due_s:
            started_s = time.thread_time()
            self._slowest = self._read()
            spent_s = time.thread_time() - started_s
            self._due_s = time.monotonic() + spent_s / _TRACE_SHARE
        return self._slowest

    def _read(self) -> tuple[TracedCall, ...]:
        try:
            return tuple(read_trace(self._directory).slowest(_SLOW_CALLS))
        except (RpcError, OSError):  # the server could not create a trace, or it stands by
            return ()
