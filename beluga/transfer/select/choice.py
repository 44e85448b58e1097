# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Choose the engine for blocks in host memory: what this machine has, and from which size on it
pays.

``auto`` is the CPU, and beside it each engine of the registry that this process can open; a table
then says which of them copies. A process that finds no kept calibration measures the table, and
uses the engines' default costs if it cannot. If another engine fails in any way, the CPU copies.
DSA's software queue is for tests and no faster than a thread, so ``auto`` never uses it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from beluga.errors import EngineUnavailableError
from beluga.transfer.calibrate.cost import Table
from beluga.transfer.calibrate.measure import calibrated, kept_table
from beluga.transfer.engine import Direction
from beluga.transfer.select.planner import CPU, Planner
from beluga.transfer.select.registry import AUTO, ENGINES, EngineEntry, default_costs, entry_of

if TYPE_CHECKING:
    from beluga.pool import Pool
    from beluga.transfer.engine import CopyEngine

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Crossovers:
    """The result of the comparison of an engine with the CPU for a pool.

    The engine copies from so many bytes in one piece on (0: always, None: never), measured or not.
    ``device`` is what it copies with; ``why_none`` says why there is none. An engine that reaches
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

    ``engine`` copies instead of the CPU, or the engines ``beside`` it copy, by name, where
    ``planner`` says so. Without either, the CPU alone copies. The caller closes the ``made`` ones.
    """

    engine: CopyEngine | None = None
    beside: Mapping[str, CopyEngine] = dataclasses.field(default_factory=dict)
    planner: Planner | None = None
    made: bool = False

    def close(self) -> None:
        """Close the engines that were made."""
        if not self.made:
            return
        with contextlib.ExitStack() as each:  # all of them, whatever one raises
            for engine in (self.engine, *self.beside.values()):
                if engine is not None:
                    each.callback(engine.close)


def choose(pool: Pool, engine: CopyEngine | str, threads: int) -> Chosen:
    """Choose the engines of a cache whose gets have ``threads`` threads of the CPU.

    ``engine`` is an engine, the name of one, or ``auto``. For ``auto``, the size from which on an
    engine copies is measured if it is not kept: this takes under two seconds for each engine, or a
    few more if a device does not answer. Raises :class:`~beluga.errors.EngineUnavailableError` if
    an engine is unavailable, and for other names.
    """
    if not isinstance(engine, str):
        return Chosen(engine)
    if engine == AUTO:
        return _beside_the_cpu(pool, threads)
    entry = entry_of(engine)
    return Chosen() if engine == CPU else Chosen(entry.open(pool, threads), made=True)


def crossovers(pool: Pool, threads: int) -> dict[str, Crossovers]:
    """Return what ``auto`` chooses for each engine but the CPU, from kept figures. Nothing is
    measured.
    """
    return {name: _crossovers(ENGINES[name], pool, threads) for name in ENGINES if name != CPU}


def _crossovers(entry: EngineEntry, pool: Pool, threads: int) -> Crossovers:
    if (why := entry.why_none()) is not None or entry.memory != "host":
        return Crossovers(entry.memory, None, why)
    try:
        engine = entry.open(pool, threads)
    except EngineUnavailableError as error:
        return Crossovers(entry.memory, None, str(error))
    device, table = entry.device(engine), _kept(entry, engine, pool, threads)
    engine.close()
    known = {**default_costs(), **table}
    written, read = (
        Planner(known).crossover(direction, CPU, entry.name)
        if (entry.name, direction) in known
        else None
        for direction in (Direction.WRITE, Direction.READ)
    )
    return Crossovers(entry.memory, device, None, bool(table), written, read)


def _beside_the_cpu(pool: Pool, threads: int) -> Chosen:
    """Open the engine of this name, or return None and warn if it cannot be used. Never raises."""
    beside: dict[str, CopyEngine] = {}
    table = dict(default_costs())
    for entry in ENGINES.values():
        if entry.name == CPU or entry.memory != "host" or entry.why_none() is not None:
            continue
        try:
            engine, costs = _calibrated(entry, pool, threads)
        except Exception as error:  # whatever it is: the CPU copies as well
            _logger.warning("beluga: the CPU copies without %s: %s", entry.name, error)
            continue
        table |= costs
        beside[entry.name] = engine
    return Chosen(beside=beside, planner=Planner(table), made=True) if beside else Chosen()


def _calibrated(entry: EngineEntry, pool: Pool, threads: int) -> tuple[CopyEngine, Table]:
    """Return the open engine, and what was measured of it and the CPU beside it."""
    engine = entry.open(pool, threads)
    table = _kept(entry, engine, pool, threads)
    if not table:
        setup = _setup(entry, engine, threads)
        engine.close()  # a dedicated queue, for example, is opened once at a time
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


def _kept(entry: EngineEntry, engine: CopyEngine, pool: Pool, threads: int) -> Table:
    return kept_table(pool, _setup(entry, engine, threads))


def _setup(entry: EngineEntry, engine: CopyEngine, threads: int) -> str:
    return f"{threads} threads; {entry.name} {entry.device(engine)}"
