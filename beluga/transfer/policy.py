# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The policy table: the cache maintenance before and after each copy
(``csrc/transfer/cache_maintenance.c``).

A row has the steps before a read and after a write, by initiator, memory type and DDIO (whether the
writes of devices go into this host's cache). ``tests/sim/test_policy_rows.py`` compares every row
with the simulator's device agent: with fewer steps than the row has, a reader sees wrong bytes.

===  ==================================================================================
O1   CPU: streamed stores; invalidate, then load (the Beluga paper's names, its Table 4)
O2   DSA with its cache control off, so that its writes go to memory
O3   GPU: nothing on uncacheable memory with DDIO off; else flush after, invalidate before
===  ==================================================================================

An unprivileged process can determine neither the firmware's DDIO setting nor how a mapping is
cached. So the environment defines both (``BELUGA_DDIO``, ``BELUGA_MEMORY``), or the safe row is
used: write-back memory, DDIO unknown. On devices with hardware coherence no line is flushed, with
any row.
"""

from __future__ import annotations

import dataclasses
import enum
import os
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from beluga import config
from beluga._ffi import lib
from beluga.errors import EngineUnavailableError, raise_for_status

if TYPE_CHECKING:
    from beluga.pool import Pool
    from beluga.transfer.plan import Plan


CPUINFO = Path("/proc/cpuinfo")


class _Word(str, enum.Enum):
    """A word of the table, which prints as itself."""

    def __str__(self) -> str:
        return str(self.value)


class Initiator(_Word):
    """The CPU or device that issues the loads and stores."""

    CPU = "cpu"
    DSA = "dsa"
    GPU = "gpu"


class Memory(_Word):
    """The memory type of the CPU's mapping of the pool."""

    WRITE_BACK = "write-back"
    UNCACHEABLE = "uncacheable"


class Ddio(_Word):
    """Whether PCIe devices write into this host's cache."""

    ON = "on"
    OFF = "off"
    UNKNOWN = "unknown"


class Step(_Word):
    """A step that the CPU runs before or after a copy."""

    FENCE = "fence"  # only orders memory accesses
    INVALIDATE = "invalidate"
    FLUSH = "flush"


# A thread flushes 8 MiB in 0.4 to 0.6 ms, and starts a kernel in a twentieth of that.
_RANGE_SIZE = 8 << 20

MAINTENANCE = {
    Step.FENCE: lib.BL_MAINTENANCE_FENCE,
    Step.INVALIDATE: lib.BL_MAINTENANCE_INVALIDATE,
    Step.FLUSH: lib.BL_MAINTENANCE_FLUSH,
}


@dataclasses.dataclass(frozen=True, slots=True)
class PolicyRow:
    """The steps before a read (after the check of the entry) and after a complete write."""

    before_read: Step
    after_write: Step


_BARE = PolicyRow(Step.FENCE, Step.FENCE)
_DROP = PolicyRow(Step.INVALIDATE, Step.FENCE)
_SAFE = PolicyRow(Step.INVALIDATE, Step.FLUSH)

# The CPU streams its stores past its cache, so DDIO does not affect it. A device reads through its
# host's cache. DSA's cache control is only a hint, so Beluga relies on it only where the
# environment describes the machine.
_TABLE: dict[tuple[Initiator, Memory], dict[Ddio, PolicyRow]] = {
    (Initiator.CPU, Memory.WRITE_BACK): dict.fromkeys(Ddio, _DROP),
    (Initiator.CPU, Memory.UNCACHEABLE): dict.fromkeys(Ddio, _BARE),
    (Initiator.DSA, Memory.WRITE_BACK): {Ddio.ON: _DROP, Ddio.OFF: _DROP, Ddio.UNKNOWN: _SAFE},
    (Initiator.DSA, Memory.UNCACHEABLE): {Ddio.ON: _BARE, Ddio.OFF: _BARE, Ddio.UNKNOWN: _SAFE},
    (Initiator.GPU, Memory.WRITE_BACK): dict.fromkeys(Ddio, _SAFE),
    (Initiator.GPU, Memory.UNCACHEABLE): {Ddio.ON: _SAFE, Ddio.OFF: _BARE, Ddio.UNKNOWN: _SAFE},
}


def row(initiator: str, memory: str, ddio: str) -> PolicyRow:
    """Return a row of the table. Raises :class:`ValueError` for a word that is not in it."""
    return _TABLE[Initiator(initiator), Memory(memory)][Ddio(ddio)]


@dataclasses.dataclass(frozen=True, slots=True)
class CacheMaintenance:
    """Runs the steps of one initiator's row on one pool, on at most ``threads`` threads."""

    pool: Pool
    row: PolicyRow
    threads: int = 1

    def range_size(self, *, write: bool) -> int:
        """Return the bytes of a plan to copy at a time, so that the CPU maintains the lines of one
        range while the device copies another; more than any plan has where no line is maintained.
        """
        step = self.row.after_write if write else self.row.before_read
        kept = self.pool.data_devices[0].coherence != "hardware" and step is not Step.FENCE
        return _RANGE_SIZE if kept else 1 << 62

    def before_read(self, plan: Plan) -> None:
        """Drop this host's cached lines of the bytes that ``plan`` reads, if the row requires it.

        Raises :class:`~beluga.errors.DeviceFaultError`, or :class:`OSError` (EINVAL) for a plan
        that leaves the pool.
        """
        self._run(plan, self.row.before_read)

    def after_write(self, plan: Plan) -> None:
        """Flush the bytes that ``plan`` wrote to memory, before this thread's next streamed store.

        The copy has completed. Raises the errors of :meth:`before_read`.
        """
        self._run(plan, self.row.after_write)

    def _run(self, plan: Plan, step: Step) -> None:
        struct = plan.struct()
        with self.pool.using() as handle:
            code = lib.bl_plan_maintenance(handle, struct, MAINTENANCE[step], self.threads)
        if code < 0:
            raise_for_status(code, f"{step} for a device")


@dataclasses.dataclass(frozen=True, slots=True)
class PlatformPolicy:
    """The known properties of this machine, and the source of each."""

    memory: Memory
    ddio: Ddio
    memory_source: str
    ddio_source: str

    def row(self, initiator: str) -> PolicyRow:
        """Return the row of ``cpu``, ``dsa`` or ``gpu`` on this machine."""
        return row(initiator, self.memory, self.ddio)

    def maintenance(self, initiator: str, pool: Pool, threads: int = 1) -> CacheMaintenance:
        """Return the cache maintenance of ``cpu``, ``dsa`` or ``gpu`` for a pool."""
        return CacheMaintenance(pool, self.row(initiator), threads)


def flush_threads() -> int:
    """Return the number of threads that flush for a GPU: a quarter of the CPUs, at most four.

    One thread of two servers flushed 13 and 23 GB/s, and their GPUs' links move 50.
    """
    return min(max(len(os.sched_getaffinity(0)) // 4, 1), 4)


def probe(*, cpuinfo: Path = CPUINFO) -> PlatformPolicy:
    """Return the policy of the environment's settings, or the safe one with a hint for users.

    Raises :class:`~beluga.errors.EngineUnavailableError` for a setting that is not a word of the
    table.
    """
    memory, memory_source = _setting("BELUGA_MEMORY", config.memory_type(), Memory)
    ddio, ddio_source = _setting("BELUGA_DDIO", config.ddio(), Ddio)
    return PlatformPolicy(
        memory or Memory.WRITE_BACK,
        ddio or Ddio.UNKNOWN,
        memory_source or "mappings of files and devdax",
        ddio_source or _hint(cpuinfo),
    )


_WordT = TypeVar("_WordT", Memory, Ddio)


def _setting(variable: str, text: str | None, words: type[_WordT]) -> tuple[_WordT | None, str]:
    if text is None:
        return None, ""
    try:
        return words(text), variable
    except ValueError:
        choices = " or ".join(map(str, words))
        raise EngineUnavailableError(f"{variable}={text} is not {choices}") from None


def _hint(cpuinfo: Path) -> str:
    """Return why DDIO is unknown here."""
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    if "GenuineIntel" in text:
        return "Intel: on, unless the firmware has turned it off; set BELUGA_DDIO"
    return "not reported by this CPU; set BELUGA_DDIO"
