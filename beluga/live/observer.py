# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Makes the snapshots of one server, in its process."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

import beluga
from beluga.errors import BelugaError
from beluga.exporter import Collector
from beluga.live.calls import RecentCalls
from beluga.live.figures import REPORTED_WINDOW_S, WINDOW_S, Figures, RecentFigures, rates_between
from beluga.live.notes import notes_of
from beluga.live.snapshot import IndexFacts, PoolFacts, Rates, ServerFacts, Snapshot
from beluga.live.space_map import SpaceMap
from beluga.live.tables import SessionTable, TenantTable, link_facts, tier_facts

if TYPE_CHECKING:
    from beluga.index import IndexServer
    from beluga.pool import Pool

_INTERVAL_S = 0.9  # less than a second, so that a poll every second gets a new one each time
_HISTORY = 300
_REPORTS_S = 5.0  # clients report their bytes every 5 s: a rate over less is often 0


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
        rates = rates_between(now, before, reported) if before and reported else None
        server, pool, index = self._server_facts(now), self._pool_facts(now), _index(now)
        self._history.append(_point(server, pool, rates))
        return Snapshot(
            time_s=time.time(),
            server=server,
            pool=pool,
            index=index,
            rates=rates,
            saved_tokens=now.count("saved_tokens_total"),
            saved_prefill_s=now.total("saved_prefill_seconds_total"),
            session_count=now.count("sessions"),
            session_limit=now.count("lanes"),
            suspect_count=now.count("sessions_suspect"),
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
            epoch=now.count("server_epoch"),
            version=beluga.__version__,
            pid=os.getpid(),
            machine=socket.gethostname(),
            pool_id=self._pool.id,
            started_s=started_s,
            uptime_s=max(time.time() - started_s, 0.0),
            processor_s=now.total("process_cpu_seconds_total"),
            memory_bytes=now.count("process_resident_memory_bytes"),
        )

    def _pool_facts(self, now: Figures) -> PoolFacts:
        try:
            devices = self._map.devices()
        except BelugaError:  # the server has stopped
            devices = ()
        return PoolFacts(
            bytes=now.count("pool_bytes"),
            used_bytes=now.count("pool_used_bytes"),
            payload_bytes=now.count("pool_payload_bytes"),
            free_bytes=now.count("pool_free_bytes"),
            quarantined_bytes=now.count("pool_quarantined_bytes"),
            retired_bytes=now.count("pool_retired_bytes"),
            devices=devices,
        )


def _index(now: Figures) -> IndexFacts:
    lookups, hits = now.count("lookup_keys_total"), now.count("lookup_hits_total")
    refusals = now.by("refusals_total", "reason")
    return IndexFacts(
        blocks=now.count("blocks"),
        blocks_limit=now.count("blocks_limit"),
        pinned=now.count("blocks_pinned"),
        writing=now.count("grants"),
        lookups=lookups,
        hits=hits,
        hit_rate=hits / lookups if lookups else None,
        commits=now.count("commits_total"),
        evictions=now.count("evictions_total"),
        table_evictions=now.count("table_evictions_total"),
        removals=now.count("removals_total"),
        refusals={reason: int(count) for reason, count in refusals.items() if count},
    )


def _point(server: ServerFacts, pool: PoolFacts, rates: Rates | None) -> tuple[float | None, ...]:
    """Return a point of the history."""
    used = pool.used_bytes / pool.bytes if pool.bytes else None
    at_s = round(time.time(), 2)
    if rates is None or server.state != "serving":
        return at_s, None, None, None, None, used, None
    has_reports = rates.reported_over_s >= _REPORTS_S
    return (
        at_s,
        round(rates.calls, 1),
        None if rates.hit_rate is None else round(rates.hit_rate, 4),
        round(rates.read_bytes) if has_reports else None,
        round(rates.written_bytes) if has_reports else None,
        used,
        round(rates.evictions, 1),
    )
