# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Chooses the engines for the blocks of one cache: the available ones, and their break-even sizes.

A cache makes a :class:`Selection` when it is opened. ``auto`` is the CPU and each engine of the
registry that this process can open; a table of measured costs (:class:`Planner`) chooses among them
for each batch. A process without a stored calibration measures the table, and uses the engines'
default costs if it cannot. If another engine fails in any way, the CPU copies
(:class:`PlannedEngine`). If the CPU is chosen, C copies within the put or get.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from beluga._ffi import core, ffi
from beluga.errors import (
    ChecksumError,
    EngineUnavailableError,
    LayoutError,
    TransferCancelledError,
    TransferError,
    TransferTimeoutError,
    UnsettledError,
)
from beluga.transfer.calibrate.cost import Table
from beluga.transfer.calibrate.measure import calibrated, stored_table
from beluga.transfer.cpu import CpuEngine
from beluga.transfer.engine import Direction, settle
from beluga.transfer.io_handle import IoHandle, TransferStats
from beluga.transfer.link import Link, LinkSettings, TransferClass, host_link
from beluga.transfer.scheduled import ScheduledEngine
from beluga.transfer.select.registry import AUTO, CPU, ENGINES, EngineEntry, default_costs, entry_of

if TYPE_CHECKING:
    from beluga.pool import Pool
    from beluga.transfer.engine import CopyEngine, Transfer
    from beluga.transfer.plan import Plan

_logger = logging.getLogger(__name__)
_NOT_THE_ENGINE = (ChecksumError, TransferCancelledError, TransferTimeoutError, UnsettledError)
_NO_PLACE = nullcontext(ffi.NULL)


class Planner:
    """Chooses among engines by their names. An engine that is not in the table is never chosen."""

    def __init__(self, table: Table) -> None:
        self._table = dict(table)

    def choose(
        self, direction: Direction, size: int, fragments: int, among: Collection[str]
    ) -> str | None:
        """Return the cheapest of ``among`` for ``size`` bytes in ``fragments`` pieces.

        Returns None if the table has none of them. Of equals, the first one in the table is chosen.
        """
        costs = {
            name: cost.of(size, fragments)
            for (name, its), cost in self._table.items()
            if its is direction and name in among
        }
        return min(costs, key=costs.__getitem__) if costs else None

    def crossover(
        self, direction: Direction, before: str, after: str, fragments: int = 1
    ) -> int | None:
        """Return the bytes from which on ``after`` is cheaper: 0 always, None never."""
        first, second = self._table[before, direction], self._table[after, direction]
        ahead = second.of(0, fragments) - first.of(0, fragments)
        gain = first.byte_ns - second.byte_ns
        if ahead <= 0:
            return 0 if gain >= 0 else None
        return int(-(-ahead // gain)) if gain > 0 else None


@dataclasses.dataclass(frozen=True, slots=True)
class Crossovers:
    """The result of the comparison of an engine with the CPU for a pool.

    The engine copies from this size in one piece on (0: always, None: never), measured or by
    default. ``device`` is its device; ``why_none`` is why there is none. An engine that reaches
    other ``memory`` than the host's is not compared with the CPU.
    """

    memory: str
    device: str | None
    why_none: str | None
    measured: bool = False
    written: int | None = None
    read: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Chosen:
    """The chosen engines.

    ``engine`` copies instead of the CPU, or the ``planner`` chooses among the CPU and the engines
    ``beside`` it, by name. Without either, the CPU alone copies. The caller closes the ``made``
    ones.
    """

    engine: CopyEngine | None = None
    beside: Mapping[str, CopyEngine] = dataclasses.field(default_factory=dict)
    planner: Planner | None = None
    made: bool = False

    def close(self) -> None:
        """Close the engines that this object owns."""
        if not self.made:
            return
        with contextlib.ExitStack() as each:  # all of them, even if one raises
            for engine in (self.engine, *self.beside.values()):
                if engine is not None:
                    each.callback(engine.close)


def choose(pool: Pool, engine: CopyEngine | str, threads: int) -> Chosen:
    """Choose the engines of a cache whose gets have ``threads`` threads of the CPU.

    ``engine`` is an engine, the name of one, or ``auto``. For ``auto``, the break-even size of an
    engine is measured if none is stored: this takes under two seconds for each engine, or a few
    more if a device does not respond. Raises :class:`~beluga.errors.EngineUnavailableError` if an
    engine is unavailable, and for other names.
    """
    if not isinstance(engine, str):
        return Chosen(engine)
    if engine == AUTO:
        return _choose_auto(pool, threads)
    entry = entry_of(engine)
    return Chosen() if engine == CPU else Chosen(entry.open(pool, threads), made=True)


def crossovers(pool: Pool, threads: int) -> dict[str, Crossovers]:
    """Return the crossovers of ``auto`` for each engine except the CPU, from stored figures.
    Nothing is measured.
    """
    return {name: _crossovers(ENGINES[name], pool, threads) for name in ENGINES if name != CPU}


def _crossovers(entry: EngineEntry, pool: Pool, threads: int) -> Crossovers:
    if (why := entry.why_none()) is not None or entry.memory != "host":
        return Crossovers(entry.memory, None, why)
    try:
        engine = entry.open(pool, threads)
    except EngineUnavailableError as error:
        return Crossovers(entry.memory, None, str(error))
    device, table = entry.device(engine), _stored(entry, engine, pool, threads)
    engine.close()
    known = {**default_costs(), **table}
    written, read = (
        Planner(known).crossover(direction, CPU, entry.name)
        if (entry.name, direction) in known
        else None
        for direction in (Direction.WRITE, Direction.READ)
    )
    return Crossovers(entry.memory, device, None, bool(table), written, read)


def _choose_auto(pool: Pool, threads: int) -> Chosen:
    """Open every engine of ``auto``. Warn about those that cannot be used. Never raises."""
    beside: dict[str, CopyEngine] = {}
    table = dict(default_costs())
    for entry in ENGINES.values():
        if entry.name == CPU or entry.memory != "host" or entry.why_none() is not None:
            continue
        try:
            engine, costs = _calibrated(entry, pool, threads)
        except Exception as error:  # after any failure the CPU copies
            _logger.warning("beluga: the CPU copies without %s: %s", entry.name, error)
            continue
        table |= costs
        beside[entry.name] = engine
    return Chosen(beside=beside, planner=Planner(table), made=True) if beside else Chosen()


def _calibrated(entry: EngineEntry, pool: Pool, threads: int) -> tuple[CopyEngine, Table]:
    """Return the open engine, and the measured costs of it and of the CPU."""
    engine = entry.open(pool, threads)
    table = _stored(entry, engine, pool, threads)
    if not table:
        setup = _setup(entry, engine, threads)
        engine.close()  # a dedicated queue, for example, can be open only once
        both = (ENGINES[CPU], entry)
        table = calibrated(
            pool,
            setup,
            lambda scratch: {
                key: made for one in both for key, made in one.measured(scratch, threads).items()
            },
        )
        engine = entry.open(pool, threads)
    return engine, table


def _stored(entry: EngineEntry, engine: CopyEngine, pool: Pool, threads: int) -> Table:
    return stored_table(pool, _setup(entry, engine, threads))


def _setup(entry: EngineEntry, engine: CopyEngine, threads: int) -> str:
    return f"{threads} threads; {entry.name} {entry.device(engine)}"


@dataclasses.dataclass(slots=True)
class PlannedStat:
    """Counters of the plans so far."""

    plans: dict[str, int]  # by engine
    replayed: int = 0  # plans that the CPU executed after another engine failed
    faults: dict[str, str] = dataclasses.field(default_factory=dict)
    """The reason why an engine gets no more plans."""


class PlannedEngine:
    """Several engines that reach the same memory; ``planner`` chooses which of them copies.

    It costs a microsecond or two per plan. If the CPU is among them, it executes the plans on which
    another engine fails. That engine gets no more plans, which is counted and logged once. Raises
    LayoutError if the planner has none of the engines.
    """

    name = "planned"

    def __init__(self, planner: Planner, engines: Mapping[str, CopyEngine]) -> None:
        if any(planner.choose(direction, 1, 1, engines) is None for direction in Direction):
            raise LayoutError(
                f"the planner's table has no costs of {', '.join(engines) or 'any engine'}"
            )
        self._planner, self._engines = planner, dict(engines)
        self._healthy = set(engines)
        self.stat = PlannedStat(dict.fromkeys(engines, 0))

    def choose(self, direction: Direction, size: int, fragments: int) -> str:
        """Return the name of the engine that would copy ``size`` bytes in ``fragments`` pieces."""
        kind = self._planner.choose(direction, size, fragments, self._healthy)
        assert kind is not None  # noqa: S101  # checked in __init__; the CPU is never disabled
        return kind

    def gather_write(self, plan: Plan) -> Transfer:
        """Write scattered memory to the pool. Raises the chosen engine's errors."""
        return self._start(Direction.WRITE, plan)

    def scatter_read(self, plan: Plan) -> Transfer:
        """Read the pool to scattered memory. Raises the chosen engine's errors."""
        return self._start(Direction.READ, plan)

    def close(self) -> None:
        """Close all engines."""
        for engine in self._engines.values():
            engine.close()

    def disable(self, kind: str, fault: str) -> None:
        """Start no more plans on this engine."""
        if kind in self._healthy:
            self._healthy.discard(kind)
            self.stat.faults[kind] = fault
            _logger.warning("beluga: %s is disabled, the CPU copies: %s", kind, fault)

    def _start(self, direction: Direction, plan: Plan) -> Transfer:
        kind = self.choose(direction, plan.size, len(plan.pieces))
        self.stat.plans[kind] += 1
        engine = self._engines[kind]
        if kind == CPU or CPU not in self._engines:
            return _begin(engine, direction, plan)
        try:
            transfer = _begin(engine, direction, plan)
        except UnsettledError:
            raise
        except TransferError as error:
            return self.replay(kind, direction, plan, error)
        return _FallbackTransfer(self, kind, direction, plan, transfer)

    def replay(self, kind: str, direction: Direction, plan: Plan, error: TransferError) -> Transfer:
        """Execute a plan on the CPU after an engine failed on it and has stopped."""
        self.disable(kind, str(error))
        self.stat.replayed += 1
        return _begin(self._engines[CPU], direction, plan)

    def check_fault(self, kind: str) -> None:
        """Disable the engine if it reports a fault."""
        if (fault := getattr(self._engines[kind], "fault", None)) is not None:
            self.disable(kind, fault)


class _FallbackTransfer:
    """An engine's transfer; if the engine fails, the CPU executes the plan."""

    def __init__(
        self,
        owner: PlannedEngine,
        kind: str,
        direction: Direction,
        plan: Plan,
        transfer: Transfer,
    ) -> None:
        self._owner, self._kind = owner, kind
        self._direction, self._plan = direction, plan
        self._transfer = transfer

    def done(self) -> bool:
        return self._transfer.done()

    def wait(self, timeout_s: float | None = None) -> None:
        try:
            self._transfer.wait(timeout_s)
        except _NOT_THE_ENGINE:
            raise
        except TransferError as error:
            if self._kind == CPU:
                raise
            settle([self._transfer])
            kind, self._kind = self._kind, CPU
            self._transfer = self._owner.replay(kind, self._direction, self._plan, error)
            self._transfer.wait(timeout_s)
        else:
            if self._kind != CPU:
                self._owner.check_fault(self._kind)


def _begin(engine: CopyEngine, direction: Direction, plan: Plan) -> Transfer:
    if direction is Direction.WRITE:
        return engine.gather_write(plan)
    return engine.scatter_read(plan)


class Selection:
    """The engines of one cache.

    ``link`` is a link, an I/O handle that several caches share, or the settings of this host's link
    to the pool; with None, copies need no admission. ``chosen`` has the engines. ``engine`` and
    ``token_engine`` (for rows of tokens, by ``threads`` if it is the CPU) replace the chosen ones.
    If ``engine`` is None, C copies in the put or get.
    """

    def __init__(  # noqa: PLR0913  all but the first five named
        self,
        pool: Pool,
        link: Link | LinkSettings | IoHandle | None,
        chosen: Chosen,
        read: TransferClass,
        write: TransferClass,
        *,
        threads: int,
    ) -> None:
        self._own_link = host_link(pool, link) if isinstance(link, LinkSettings) else None
        found = self._own_link if isinstance(link, LinkSettings) else link
        self._own_handle = IoHandle(found) if isinstance(found, Link) else None
        self._handle = found if isinstance(found, IoHandle) else self._own_handle
        engine, beside = chosen.engine, dict(chosen.beside)
        if self._handle is not None:
            if engine is not None:
                engine = ScheduledEngine(engine, self._handle, read=read, write=write)
            for name, other in beside.items():
                beside[name] = ScheduledEngine(other, self._handle, read=read, write=write)
        cpu = CpuEngine(pool, threads, handle=self._handle, read=read, write=write)
        self._planned: PlannedEngine | None = None
        if chosen.planner is not None:
            self._planned = PlannedEngine(chosen.planner, {CPU: cpu, **beside})
        self.engine = self._planned or engine
        self.token_engine = cpu if engine is None else engine

    def engine_for(self, direction: Direction, size: int, fragments: int) -> CopyEngine | None:
        """Return the engine that copies ``size`` bytes or less in ``fragments`` pieces; None means
        C.
        """
        planned = self._planned
        if planned and planned.choose(direction, size, fragments) == CPU:
            return None
        return self.engine

    def using(self) -> AbstractContextManager[core.bl_io_queue | core.Null]:
        """Return the I/O queue in which C acquires tokens; NULL if the cache has no link."""
        return _NO_PLACE if self._handle is None else self._handle.using()

    def watch(self) -> None:
        """Warn about copies that took too long."""
        if self._handle is not None:
            self._handle.watch()

    def transfer_stats(self, *, own: bool = False) -> dict[TransferClass, TransferStats]:
        """Return the statistics of the link's admissions so far, by class.

        With ``own``, a handle that the caller passed to the cache is excluded.
        """
        handle = self._own_handle if own else self._handle
        return {
            kind: TransferStats() if handle is None else handle.transfer_stats(kind)
            for kind in TransferClass
        }

    def close(self) -> None:
        """Close the objects that this has made. No copy is in progress, and the engine stays
        open."""
        if self._own_handle is not None:
            self._own_handle.close()
        if self._own_link is not None:
            self._own_link.close()
