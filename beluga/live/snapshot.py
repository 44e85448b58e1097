# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The snapshot of a server. ``GET /live`` returns it as JSON, with the same names."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from beluga.index import SessionView
from beluga.rpc import TracedCall


class CellState(enum.IntEnum):
    """The state of a cell of the map: the most serious state of its stripes."""

    FREE = 0
    USED = 1
    KEPT = 2
    TABLES = 3
    QUARANTINED = 4
    RETIRED = 5


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """The server's process. ``state`` is serving, standby or stopped."""

    state: str
    epoch: int
    version: str
    pid: int
    machine: str
    pool_id: str
    uptime_s: float


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """A device and its map: cells of ``cell_bytes`` each (the last may have less), from the first
    stripe to the last. ``states`` has a digit for each cell, a :class:`CellState`; ``fill`` has two
    hexadecimal digits for each: how much of it blocks use, from 00 to ff.
    """

    path: str
    bytes: int
    used_bytes: int
    free_bytes: int
    table_bytes: int
    quarantined_bytes: int
    retired_bytes: int
    cell_bytes: int
    states: str
    fill: str


@dataclass(frozen=True, slots=True)
class SessionFacts(SessionView):
    """A session. ``calls_per_s`` is None in its first snapshot."""

    calls_per_s: float | None


@dataclass(frozen=True, slots=True)
class TenantFacts:
    """The blocks of a namespace and a size. ``name`` is "" if no process of this host opened it."""

    fingerprint: str
    name: str
    block_bytes: int
    blocks: int
    bytes: int
    commits: int
    hits: int
    evictions: int


@dataclass(frozen=True, slots=True)
class TierFacts:
    """A tier below the pool. A figure that a tier does not count is None."""

    name: str
    blocks: int | None
    used_bytes: int | None
    bytes: int | None
    saved_bytes: int
    loaded_bytes: int
    missed_blocks: int
    breaker: str | None


@dataclass(frozen=True, slots=True)
class LinkFacts:
    """A direction of this host's link, by class of transfer: the bytes that were admitted."""

    direction: str
    busy: float | None
    bytes_per_s: float | None
    classes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Note:
    """A problem for the operator. ``level`` is warn or bad."""

    level: str
    text: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The whole snapshot.

    ``figures`` are the server's metrics without the prefix ``beluga_``, summed over their labels.
    ``rates`` are the counters among them, per second over the last ``over_s`` seconds. Clients
    report every 5 seconds, so the rates of what they count are over ``reported_over_s``. The first
    snapshot has no rates, since a rate needs two.

    ``history`` has the points of the last minutes in which snapshots were requested, oldest first:
    the Unix time, calls per second, hit rate (or None), bytes read and written per second, the used
    share of the pool, and evictions per second.
    """

    time_s: float
    server: ServerFacts
    figures: Mapping[str, float]
    rates: Mapping[str, float]
    over_s: float
    reported_over_s: float
    devices: tuple[DeviceFacts, ...]
    sessions: tuple[SessionFacts, ...]
    tenants: tuple[TenantFacts, ...]
    tiers: tuple[TierFacts, ...]
    link: tuple[LinkFacts, ...]
    slow_calls: tuple[TracedCall, ...]
    notes: tuple[Note, ...]
    history: tuple[tuple[float | None, ...], ...]

    def figure(self, name: str) -> int:
        """Return a figure as a whole number; 0 if the server does not have it."""
        return int(self.figures.get(name, 0))

    @property
    def hit_rate(self) -> float | None:
        """The share of looked-up keys that hit since the takeover; None before any lookup."""
        return _share(self.figures)

    @property
    def recent_hit_rate(self) -> float | None:
        """The same over the last seconds."""
        return _share(self.rates)


def _share(counts: Mapping[str, float]) -> float | None:
    lookups = counts.get("lookup_keys_total", 0)
    return counts.get("lookup_hits_total", 0) / lookups if lookups else None
