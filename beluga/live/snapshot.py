# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The snapshot of a server. ``GET /live`` returns it as JSON, with the same names."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass


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
    started_s: float
    uptime_s: float
    processor_s: float
    memory_bytes: int


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
class PoolFacts:
    """The pool's space for blocks. ``free_bytes`` is neither used by blocks nor quarantined."""

    bytes: int
    used_bytes: int
    payload_bytes: int
    free_bytes: int
    quarantined_bytes: int
    retired_bytes: int
    devices: tuple[DeviceFacts, ...]


@dataclass(frozen=True, slots=True)
class IndexFacts:
    """The block index, since the server took over. ``hit_rate`` is None before any lookup."""

    blocks: int
    blocks_limit: int
    pinned: int
    writing: int
    lookups: int
    hits: int
    hit_rate: float | None
    commits: int
    evictions: int
    table_evictions: int
    removals: int
    refusals: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates per second over the last ``over_s`` seconds. Clients report bytes and tokens every 5
    seconds, so their rates are over ``reported_over_s``.
    """

    over_s: float
    reported_over_s: float
    calls: float
    errors: float
    keys: float
    lookups: float
    hits: float
    hit_rate: float | None
    commits: float
    evictions: float
    refusals: float
    read_bytes: float
    written_bytes: float
    saved_tokens: float
    processor: float
    methods: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """A session. ``pid`` is None where the server cannot see the process, and ``calls_per_s`` in
    the session's first snapshot.
    """

    session: str
    host: int
    pid: int | None
    kind: str
    state: str
    age_s: float
    calls: int
    calls_per_s: float | None
    pins: int
    grants: int
    bytes: int
    quarantined_bytes: int


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
class SlowCall:
    """One of the calls that took longest among the last ones. ``seconds`` is None while it runs."""

    time_s: float
    method: str
    host: int
    pid: int | None
    keys: int
    seconds: float | None
    status: str


@dataclass(frozen=True, slots=True)
class Note:
    """A problem for the operator. ``level`` is warn or bad."""

    level: str
    text: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The whole snapshot. ``rates`` is None in the first one, since a rate needs two.

    ``history`` has the points of the last minutes in which snapshots were requested, oldest first:
    the Unix time, calls per second, hit rate (or None), bytes read and written per second, the used
    share of the pool, and evictions per second.
    """

    time_s: float
    server: ServerFacts
    pool: PoolFacts
    index: IndexFacts
    rates: Rates | None
    saved_tokens: int
    saved_prefill_s: float
    session_count: int
    session_limit: int
    suspect_count: int
    sessions: tuple[SessionFacts, ...]
    tenants: tuple[TenantFacts, ...]
    tiers: tuple[TierFacts, ...]
    link: tuple[LinkFacts, ...]
    slow_calls: tuple[SlowCall, ...]
    notes: tuple[Note, ...]
    history: tuple[tuple[float | None, ...], ...]
