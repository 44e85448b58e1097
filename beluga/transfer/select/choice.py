# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Who copies what lies in host memory: what this machine has, and from which size on it pays.

``auto`` is the CPU, and beside it a DSA where there is a work queue that this process can use: then
a table says which of them copies. It is measured when a process finds nothing kept, at the paper's
values where it cannot be. Whatever is the matter with the DSA, the CPU copies alone. The software
queue is for tests and no faster than a thread: nobody has it who has not asked for it by name.
"""

from __future__ import annotations

import dataclasses
import logging
import typing
from typing import TYPE_CHECKING, Literal

from beluga.errors import EngineUnavailableError
from beluga.transfer.calibrate.measure import calibrated, kept_table
from beluga.transfer.calibrate.planner import DEFAULT, EngineKind, Planner
from beluga.transfer.engine import Direction
from beluga.transfer.engines.cpu.engine import CpuEngine
from beluga.transfer.engines.dsa.engine import DsaEngine
from beluga.transfer.engines.dsa.sysfs import nearest, why_none, work_queues

if TYPE_CHECKING:
    from beluga.pool import Pool
    from beluga.transfer.engine import Engine

_logger = logging.getLogger(__name__)

EngineChoice = Literal["auto", "cpu", "dsa"]
"""``auto``: the CPU, and a DSA for what it is faster at. ``dsa``: that alone."""

CHOICES: tuple[str, ...] = typing.get_args(EngineChoice)


@dataclasses.dataclass(frozen=True, slots=True)
class Crossovers:
    """What ``auto`` comes to for a pool: from how many bytes in one piece on the DSA copies (0:
    always, None: never), and whether that was measured. ``queue`` is its work queue; where there is
    none, ``why_none``."""

    queue: str | None
    why_none: str | None
    measured: bool = False
    written: int | None = None
    read: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Chosen:
    """Who copies beside the CPU, or (no ``planner``) instead of it; None: the CPU alone. ``made``:
    it is to be closed by who has chosen."""

    engine: Engine | None
    planner: Planner | None = None
    made: bool = False

    def close(self) -> None:
        """Close what was made."""
        if self.made and self.engine is not None:
            self.engine.close()


def choose(pool: Pool, engine: Engine | EngineChoice, threads: int) -> Chosen:
    """What a cache copies with whose gets have ``threads`` threads of the CPU.

    For ``auto`` it is measured from which size on a DSA copies, if nothing is kept: under two
    seconds, or a few more if the device does not answer. Raises
    :class:`~beluga.errors.EngineUnavailableError` where ``dsa`` is not to be had, and for other
    names.
    """
    if not isinstance(engine, str):
        return Chosen(engine)
    if engine == "auto":
        return _dsa_beside(pool, threads)
    if engine == "dsa":
        return Chosen(open_dsa(pool), made=True)
    if engine != "cpu":
        raise EngineUnavailableError(
            f"no engine is called {engine!r}; there are {', '.join(CHOICES)}"
        )
    return Chosen(None)


def open_dsa(pool: Pool) -> DsaEngine:
    """A device's queue, or :class:`~beluga.errors.EngineUnavailableError`."""
    return DsaEngine(pool, "device")


def why_no_dsa() -> str | None:
    """One line: why no work queue of this machine can be used, so far as can be seen unopened."""
    queues = work_queues()
    return None if nearest(queues, set()) else why_none(queues)


def _dsa_beside(pool: Pool, threads: int) -> Chosen:
    """Never raises; a work queue that is there and cannot be used is warned of."""
    if why_no_dsa() is not None:
        return Chosen(None)
    try:
        dsa = open_dsa(pool)
        setup = _setup(threads, dsa)
        table = kept_table(pool, setup)
        if not table:
            dsa.close()  # a dedicated queue is opened once at a time
            table = calibrated(pool, setup, lambda scratch: _measured(scratch, threads))
            dsa = open_dsa(pool)
    except Exception as error:  # whatever it is: the CPU copies as well
        _logger.warning("beluga: the CPU copies without the DSA: %s", error)
        return Chosen(None)
    return Chosen(dsa, Planner({**DEFAULT, **table}), made=True)


def crossovers(pool: Pool, threads: int) -> Crossovers:
    """What ``auto`` comes to, by what is kept: nothing is measured for it."""
    if (why := why_no_dsa()) is not None:
        return Crossovers(None, why)
    try:
        dsa = open_dsa(pool)
    except EngineUnavailableError as error:
        return Crossovers(None, str(error))
    table = kept_table(pool, _setup(threads, dsa))
    dsa.close()
    planner = Planner({**DEFAULT, **table})
    written, read = (
        planner.crossover(direction, EngineKind.CPU, EngineKind.DSA)
        for direction in (Direction.WRITE, Direction.READ)
    )
    return Crossovers(dsa.queue_text, None, bool(table), written, read)


def _setup(threads: int, dsa: DsaEngine) -> str:
    return f"{threads} threads; {dsa.queue_text}"


def _measured(scratch: Pool, threads: int) -> dict[tuple[EngineKind, Direction], Engine]:
    """What is measured: a put is one thread's, a get as many as the cache has."""
    dsa = open_dsa(scratch)
    return {
        (EngineKind.CPU, Direction.WRITE): CpuEngine(scratch, 1),
        (EngineKind.CPU, Direction.READ): CpuEngine(scratch, threads),
        (EngineKind.DSA, Direction.WRITE): dsa,
        (EngineKind.DSA, Direction.READ): dsa,
    }
