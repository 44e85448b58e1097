# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The loads of workers as the processes of one gateway count them together.

Each process writes what it counts into its own rows of a table in shared memory, and adds the rows
of the others to its own loads (csrc/routing/shared.c). The table has the present state, so no
update can get lost, and the rows of a process that has ended are zeroed. Blocks that requests of
two processes share count once for each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from beluga._ffi import core, ffi, lib
from beluga.router.candidates import Candidates
from beluga.router.worker import Load, Worker

if TYPE_CHECKING:
    import mmap

_ROW_SIZE = ffi.sizeof("bl_load_share")


class SharedLoads:
    """The table of ``processes``, in writable memory of :meth:`size` bytes, for the process with
    this number. Workers have slots, which the caller assigns before a tracker has the worker.
    """

    def __init__(
        self,
        memory: bytearray | memoryview | mmap.mmap,
        processes: int,
        slots: int,
        process: int,
        *,
        offset: int = 0,
    ) -> None:
        self._memory = ffi.from_buffer("char[]", memory, require_writable=True)
        self._table: core.bl_load_table = ffi.new("bl_load_table *")
        self._rows = ffi.cast("bl_load_share *", self._memory + offset)
        self._table.rows = self._rows
        self._table.process_count = processes
        self._table.slot_count = slots
        self._table.process = process
        self._slots: dict[Worker, int] = {}

    @staticmethod
    def size(processes: int, slots: int) -> int:
        """Return the bytes of a table."""
        return int(processes * slots * _ROW_SIZE)

    def assign(self, worker: Worker, slot: int) -> None:
        """Set the slot of a worker, which is the same in all processes."""
        self._slots[worker] = slot

    def row(self, worker: Worker) -> core.bl_load_share:
        """Return this process's row of a worker."""
        table = self._table
        return self._rows + (table.process * table.slot_count + self._slots[worker])

    def forget(self, worker: Worker) -> None:
        """Zero this process's row of a removed worker."""
        self.write(self.row(worker), _EMPTY.row, _NO_PREFILLS)
        del self._slots[worker]

    @staticmethod
    def write(row: core.bl_load_share, load: core.bl_load, prefills: core.bl_prefills) -> None:
        """Store what this process counts for a worker."""
        lib.bl_load_share_write(row, load, prefills)

    def slots(self, workers: Sequence[Worker]) -> core.uint32_p:
        """Return the slots of workers, for :meth:`add`."""
        return ffi.new("uint32_t[]", [self._slots[worker] for worker in workers])

    def add(self, candidates: Candidates, slots: core.uint32_p, now: float) -> None:
        """Add what the other processes count at time ``now``."""
        count = len(candidates.workers)
        lib.bl_load_shares_add(self._table, slots, count, now, candidates.rows)

    def total(self, worker: Worker, load: Load, now: float) -> Load:
        """Return a worker's load in all processes; ``load`` is this process's."""
        total = Load.of(load.row[0])
        lib.bl_load_share_add(self._table, self._slots[worker], now, total.row)
        return total

    def requests_elsewhere(self, worker: Worker) -> int:
        """Return how many requests the other processes have sent to a worker."""
        return self.total(worker, _EMPTY, 0.0).active_requests


_EMPTY = Load()
_NO_PREFILLS = ffi.new("bl_prefills *")
