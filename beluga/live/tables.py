# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The rows of the snapshot's tables: sessions, tenants, tiers and the link."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from beluga.errors import BelugaError
from beluga.kvcache import KnownNamespace, known_namespaces, namespaces_changed_ns
from beluga.live.snapshot import LinkFacts, SessionFacts, TenantFacts, TierFacts

if TYPE_CHECKING:
    from pathlib import Path

    from beluga.index import IndexServer
    from beluga.live.figures import Figures

_ROWS_MAX = 100
_BREAKER = {0: "closed", 1: "half-open", 2: "open"}
_NAME_MAX = 200  # characters; names come from clients


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
            rows.append(
                SessionFacts(
                    session=view.nonce,
                    host=view.host,
                    pid=view.pid,
                    kind=view.kind,
                    state=view.state,
                    age_s=view.since_s,
                    calls=view.call_count,
                    calls_per_s=rate,
                    pins=view.pin_count,
                    grants=view.grant_count,
                    bytes=view.bytes,
                    quarantined_bytes=view.held_bytes,
                )
            )
        rows.sort(key=lambda row: (row.state == "live", -(row.calls_per_s or 0.0), row.session))
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
            name: {_place(labels): int(value) for labels, value in now.series(f"tenant_{name}")}
            for name in ("blocks", "bytes", "commits_total", "hits_total", "evictions_total")
        }
        rows = [
            TenantFacts(
                fingerprint=place[0],
                name=self._names.get(place[0], ""),
                block_bytes=place[1],
                blocks=blocks,
                bytes=counts["bytes"][place],
                commits=counts["commits_total"][place],
                hits=counts["hits_total"][place],
                evictions=counts["evictions_total"][place],
            )
            for place, blocks in counts["blocks"].items()
        ]
        rows.sort(key=lambda row: (-row.bytes, row.fingerprint, row.block_bytes))
        return tuple(rows[:_ROWS_MAX])

    def _read_names(self) -> None:
        """Read the names again if they have changed."""
        changed_ns = namespaces_changed_ns(self._directory)
        if changed_ns != self._changed_ns:
            known = known_namespaces(self._directory)
            self._names = {f"{one.fingerprint:016x}": _name(one) for one in known}
            self._changed_ns = changed_ns


def _place(labels: dict[str, str]) -> tuple[str, int]:
    return labels["tenant"], int(labels["block_bytes"])


def _name(known: KnownNamespace) -> str:
    """Return a name that distinguishes a namespace from others."""
    if set(known.fields) == {"name"}:
        text = str(known.fields["name"])
    else:
        text = " ".join(f"{name}={value}" for name, value in known.fields.items())
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

    def known(name: str, tier: str) -> int | None:
        value = columns[name].get(tier)
        return None if value is None else int(value)

    return tuple(
        TierFacts(
            name=tier[:_NAME_MAX],
            blocks=known("blocks", tier),
            used_bytes=known("used_bytes", tier),
            bytes=known("data_bytes", tier),
            saved_bytes=known("saved_bytes_total", tier) or 0,
            loaded_bytes=known("loaded_bytes_total", tier) or 0,
            missed_blocks=known("missed_blocks_total", tier) or 0,
            breaker=_BREAKER.get(known("breaker_state", tier) or 0)
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
