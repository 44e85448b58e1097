# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The server with the block index."""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from beluga import choices
from beluga._ffi import core, ffi, lib, record_dtype
from beluga.arguments import of_type
from beluga.errors import BadValueError, RpcError, raise_for_status
from beluga.index.stat import HintStat, IndexStat, LowerStat, Tenant
from beluga.index.tables import CHANGE, read_entries
from beluga.index.views import (
    SessionView,
    TenantShare,
    check_budget,
    check_shares,
    give_shares,
    read_shares,
)
from beluga.rpc import Quota, Server, nanoseconds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from beluga.pool import Pool

_COUNT_MAX = (1 << 31) - 1
_NUMBER = (1 << 32) - 1  # the bits of a tier's number in its id
_logger = logging.getLogger(__name__)

MAP_CELL = record_dtype("bl_map_cell")
"""The fields of ``bl_map_cell`` (``csrc/api/index.h``)."""
EVICTIONS = dict(
    zip(
        choices.EVICTIONS,
        (lib.BL_EVICT_LRU, lib.BL_EVICT_S3FIFO),
        strict=True,
    )
)
"""The eviction policies of a server (csrc/index/evict.h)."""

REFUSALS = {
    "no space": lib.BL_ERROR_NO_SPACE,
    "table full": lib.BL_ERROR_TABLE_FULL,
    "too large": lib.BL_ERROR_TOO_LARGE,
    "quarantine": lib.BL_ERROR_QUARANTINE,
    "quota": lib.BL_ERROR_QUOTA,
    "queue full": lib.BL_ERROR_QUEUE_FULL,
    "offloading": lib.BL_ERROR_OFFLOADING,
    "draining": lib.BL_ERROR_DRAINING,
}
"""The reasons for which a grant is refused."""


class IndexServer(Server):
    """Serves the calls of the block index (lookup, reserve, commit, abort, release, remove, stat)
    and the program's own handlers.

    ``eviction`` is one of :data:`EVICTIONS`. It applies to this server only and is not stored in
    the pool. :meth:`start` takes over the blocks that earlier servers of the pool committed.

    ``shares`` are the parts of the pool guaranteed to tenants, as fractions: ``{"acme": 0.3}``. A
    tenant may use more while there is space. A key is the name of a tenant, of a namespace that has
    only a name, or a namespace's fingerprint in 16 hexadecimal digits. All others share the rest.
    ``hint_budget`` is the part of each share that hints may favor.

    Raises BadTypeError and BadValueError.
    """

    def __init__(  # noqa: PLR0913  keyword-only but the first
        self,
        pool: Pool,
        *,
        host: int | None = None,
        declared_gone: bool = False,
        heartbeat_lost_s: float = 5.0,
        quota: Quota | None = None,
        eviction: str = "lru",
        shares: Mapping[str, float] | None = None,
        hint_budget: float = 0.25,
    ) -> None:
        budget = check_budget(hint_budget)
        self._shares = check_shares({} if shares is None else shares)
        of_type("eviction", eviction, str)
        if eviction not in EVICTIONS:
            raise BadValueError(
                f"there is no eviction policy {eviction!r}; choose one of {', '.join(EVICTIONS)}"
            )
        self._index: core.bl_index | core.Null = ffi.NULL
        self._tier_count = 0
        self._changes = np.empty(0, CHANGE)  # the buffer of take_changes
        super().__init__(
            pool,
            host=host,
            declared_gone=declared_gone,
            heartbeat_lost_s=heartbeat_lost_s,
            quota=quota,
        )
        out = ffi.new("bl_index **")
        with self._running() as server:
            status = lib.bl_index_create(server, EVICTIONS[eviction], out)
            raise_for_status(status, "creating the block index")
            self._index = out[0]
            give_shares(self._index, self._shares)
            lib.bl_index_hint_part(self._index, budget)

    def attach_lower(
        self,
        count_max: int,
        *,
        wait: bool,
        unknown: int,
        names: Sequence[str] | None = None,
        numbers: Sequence[int] | None = None,
    ) -> int:
        """Attach lower tiers, before :meth:`start`.

        With ``wait``, a block is evicted only after it was offered to them. ``unknown`` has, as
        bits, the tiers that may hold keys that were never reported to the server; the others hold
        at most ``count_max`` blocks. ``names`` are the names of the tiers in order: a removal that
        a tier has not executed waits for the tier of that name (default: that of the same number).
        ``numbers`` are 32 bits that tell tiers of equal names apart: the number of a set of disks,
        and of a store.
        Returns the token of their service (:class:`~beluga.index.LowerWork`).
        """
        token = secrets.randbits(64)
        count = min(max(count_max, 0), _COUNT_MAX)
        if names is None:
            tiers = unknown | (2 if count_max > 0 else 0)
            names = [str(number) for number in range(1, tiers.bit_length())]
        self._tier_count = len(names)
        ids = np.zeros(8, np.uint64)
        ids[1 : len(names) + 1] = list(map(_tier_id, names, numbers or [0] * len(names)))
        with self._running():
            raise_for_status(
                lib.bl_lower_attach(self._index, count, wait, unknown, token),
                "attaching lower tiers",
            )
            lib.bl_lower_name_tiers(self._index, ffi.from_buffer("uint64_t[]", ids))
        return token

    def give_up_tier(self, name: str) -> None:
        """Drop the lower tiers of a name that this server does not have, with their pending
        removals: all sets of disks, or all stores of this name, but its own.

        Call this before :meth:`start`. The tier's contents must never be used below this pool
        again.

        Raises BadValueError for too many tiers.
        """
        with self._running():
            for tier in sorted({_tier_id(name), *self._listed(name)}):
                if lib.bl_lower_give_up(self._index, tier) < 0:
                    raise BadValueError("too many lower tiers are dropped in one start; drop fewer")

    def pending_removals(self, name: str, number: int) -> NDArray[np.uint64]:
        """Return the keys whose removal from the tier of this name and number may be pending, from
        the lines of this server and of its predecessor.
        """
        keys = [np.zeros((0, 2), np.uint64)]
        for half in range(2):
            for lines in read_entries(self._pool, half):
                of_tier = lines["fingerprint"] == _tier_id(name, number)
                keys.append(lines["key"][of_tier & (lines["state"] == lib.BL_ENTRY_REMOVED)])
        return np.unique(np.concatenate(keys), axis=0)

    def tier_numbers(self, name: str) -> list[int]:
        """Return the numbers of the tiers of this name that the pool lists, the latest first."""
        tiers = self._listed(name)
        return [tier & _NUMBER for tier in sorted(tiers, key=tiers.__getitem__, reverse=True)]

    def _listed(self, name: str) -> dict[int, int]:
        """Return the ids of the tiers of this name that the pool lists, and when each was listed:
        its generation.
        """
        tiers: dict[int, int] = {}
        for half in range(2):
            for lines in read_entries(self._pool, half):
                listed = lines[lines["state"] == lib.BL_ENTRY_TIER]
                ids, times = listed["fingerprint"].tolist(), listed["generation"].tolist()
                tiers.update(zip(ids, times, strict=True))
        return {tier: when for tier, when in tiers.items() if tier >> 32 == _tier_id(name) >> 32}

    def lower_reported(self) -> None:
        """Mark that all keys of the lower tiers have been reported. Until then, the server assumes
        that they may have any key.
        """
        with self._running():
            lib.bl_lower_reported(self._index)

    def wait_lower(self, kinds: int, timeout_s: float) -> int:
        """Wait until the lower tiers have work of one of these kinds, as bits ``1 << Work``.

        Returns the kinds with work, possibly none after ``timeout_s``. Raises RpcError once the
        server has stopped.
        """
        with self._running():
            return int(lib.bl_lower_wait(self._index, kinds, nanoseconds(timeout_s)))

    def lower_stat(self) -> LowerStat:
        """Return the counters of the lower tiers' work. They are not a consistent snapshot."""
        out = ffi.new("bl_lower_stat *")
        with self._running():
            lib.bl_lower_describe(self._index, out)
        return LowerStat.of(out)

    def attach_journal(self, room: int) -> None:
        """Keep the last changes of named blocks for :meth:`take_changes`. Call this before
        :meth:`start`.

        ``room`` is the largest number of changes that are kept.
        """
        if not 0 < room <= _COUNT_MAX:
            raise ValueError(f"room is {room}, but a journal keeps from 1 to {_COUNT_MAX} changes")
        with self._running():
            raise_for_status(lib.bl_journal_attach(self._index, room), "attaching a journal")

    def take_changes(self, count: int) -> tuple[NDArray[np.void], int]:
        """Take the oldest changes: an array of :data:`~beluga.index.CHANGE`, and how many changes
        were lost so far because the journal was full. Only one thread at a time may call this.
        """
        if len(self._changes) < count:
            self._changes = np.empty(count, CHANGE)
        lost = ffi.new("uint64_t *")
        out = ffi.from_buffer("bl_change[]", self._changes, require_writable=True)
        with self._running():
            taken = lib.bl_journal_take(self._index, out, count, lost)
        return self._changes[:taken].copy(), int(lost[0])

    def start(self) -> None:
        """Take the pool over and serve it on a new thread. A server can be started only once.

        Logs a warning if earlier servers had lower tiers that this one does not have. Raises
        :class:`~beluga.errors.GreenThreadsError` where threads are greenlets.
        """
        super().start()
        with suppress(RpcError):  # another thread has stopped it
            absent = self.lower_stat().tier_count - self._tier_count
            if absent > 0:
                _logger.warning(
                    "earlier servers of this pool had %d lower tiers that this one does not have: "
                    "their blocks are misses, and removals wait for them; give --disk and --remote "
                    "as before, or drop such a tier for good with --forget-tier",
                    absent,
                )

    def _take(self, server: core.bl_server) -> None:
        self._pool.raise_for_status(lib.bl_index_serve(self._index), "taking the pool over")

    def _destroy(self, server: core.bl_server) -> None:
        super()._destroy(server)
        index, self._index = self._index, ffi.NULL
        if index != ffi.NULL:  # creating the index failed
            lib.bl_index_destroy(index)

    def tenants(self) -> list[Tenant]:
        """Return the committed blocks by namespace and length, while the loop runs."""
        out = ffi.new("bl_tenant[]", lib.BL_TENANT_COUNT)
        with self._running():
            count = lib.bl_index_tenants(self._index, out, lib.BL_TENANT_COUNT)
        return [Tenant.of(out[row]) for row in range(count)]

    def shares(self) -> list[TenantShare]:
        """Return the tenants' shares; the first is the share of all other tenants."""
        with self._running():
            return read_shares(self._index, self._shares)

    def hints(self) -> HintStat:
        """Return the counters of hints."""
        out = ffi.new("bl_hint_stat *")
        with self._running():
            lib.bl_index_hints(self._index, out)
        return HintStat.of(out)

    def sessions(self) -> list[SessionView]:
        """Return the sessions, while the loop runs."""
        count = self._pool.geometry.lane_count
        out = ffi.new("bl_session_view[]", count)
        with self._running():
            taken = lib.bl_index_sessions(self._index, 0, out, count)
        return [SessionView.of(out[row], os.getpid()) for row in range(taken)]

    def space_map(self, cell_count: int) -> NDArray[np.void]:
        """Return a map of the pool's space, while the loop runs: an array of :data:`MAP_CELL`, with
        ``cell_count`` cells per device.
        """
        cells = np.zeros((self._pool.geometry.device_count, cell_count), MAP_CELL)
        out = ffi.from_buffer("bl_map_cell[]", cells, require_writable=True)
        with self._running():
            lib.bl_index_map(self._index, cell_count, out)
        return cells

    def refusals(self) -> dict[str, int]:
        """Return the number of refused grants, by reason (:data:`REFUSALS`)."""
        with self._running():
            return {
                reason: int(lib.bl_index_refused(self._index, error))
                for reason, error in REFUSALS.items()
            }

    def index_stat(self) -> IndexStat:
        """Return the index's counters, while the loop runs. They are not a consistent snapshot."""
        out = ffi.new("bl_index_stat *")
        with self._running():
            lib.bl_index_describe(self._index, out)
        return IndexStat.of(out)


def _tier_id(name: str, number: int = 0) -> int:
    """Return the id of a lower tier; never 0. Tiers of one name have equal upper halves."""
    unnumbered = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") | 1
    return unnumbered & ~_NUMBER | number & _NUMBER if number else unnumbered
