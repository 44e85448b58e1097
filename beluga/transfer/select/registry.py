# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The registry of copy engines, by name, for the rest of Beluga.

An engine is one folder under ``engines/`` and one entry in :data:`ENGINES`. The argument ``engine``
of ``KVCache``, the connectors' setting of that name, ``beluga pool info``, ``beluga bench copy``
and the errors take the names from here. ``docs/understand/copy-engines.md`` shows how to add one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal

from beluga.errors import EngineUnavailableError
from beluga.transfer.calibrate.cost import Cost, Table
from beluga.transfer.cpu import COSTS, CpuEngine
from beluga.transfer.cuda import CudaEngine, why_no_cupy
from beluga.transfer.dsa import COSTS as DSA_COSTS
from beluga.transfer.dsa import DsaEngine, queue_of, why_no_queue
from beluga.transfer.engine import CopyEngine, Direction

if TYPE_CHECKING:
    from beluga.pool import Pool

CPU = "cpu"
"""The engine that is always available, and that copies when another engine fails."""

AUTO = "auto"
"""The CPU, and every other engine that reaches host memory, where it is faster."""


def _always() -> None:
    return None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineEntry:
    """One engine.

    ``open`` makes the engine for a pool and for a cache whose gets have this many CPU threads. It
    raises :class:`~beluga.errors.EngineUnavailableError` if the engine cannot be used. ``why_none``
    returns in one line why this machine has no such engine, as far as known without opening one, or
    None. ``memory`` is where blocks have to lie for the engine to reach them: ``auto`` is for
    blocks in host memory.

    ``costs`` apply until the engine is measured; an engine without them takes part in ``auto``
    after a measurement. ``to_measure`` makes the engines whose copies are timed, by direction; None
    uses the engine of ``open``. ``device`` returns the device of an open engine; figures are stored
    for each device.
    """

    name: str
    open: Callable[[Pool, int], CopyEngine]
    why_none: Callable[[], str | None] = _always
    memory: Literal["host", "gpu"] = "host"
    costs: Mapping[Direction, Cost] = dataclasses.field(default_factory=dict)
    to_measure: Callable[[Pool, int], Mapping[Direction, CopyEngine]] | None = None
    device: Callable[[CopyEngine], str] = lambda engine: engine.name

    def measured(self, pool: Pool, threads: int) -> dict[tuple[str, Direction], CopyEngine]:
        """Return the engines to be timed, by direction, on a pool that they overwrite."""
        if self.to_measure is not None:
            made = self.to_measure(pool, threads)
        else:
            made = dict.fromkeys(Direction, self.open(pool, threads))
        return {(self.name, direction): engine for direction, engine in made.items()}


ENGINES: dict[str, EngineEntry] = {
    entry.name: entry
    for entry in (
        EngineEntry(
            name=CPU,
            open=CpuEngine,
            costs=COSTS,
            to_measure=lambda pool, threads: {  # a put uses one thread
                Direction.WRITE: CpuEngine(pool, 1),
                Direction.READ: CpuEngine(pool, threads),
            },
        ),
        EngineEntry(
            name="dsa",
            open=lambda pool, threads: DsaEngine(pool),
            why_none=why_no_queue,
            costs=DSA_COSTS,
            device=queue_of,
        ),
        EngineEntry(
            name="cuda",
            open=lambda pool, threads: CudaEngine(pool),
            why_none=why_no_cupy,
            memory="gpu",
        ),
    )
}
"""All engines by name; the CPU is first."""


def engine_names(memory: str | None = None) -> tuple[str, ...]:
    """Return the names for ``engine``: ``auto``, and engines that reach ``memory`` (None: any)."""
    return (AUTO, *(name for name, entry in ENGINES.items() if memory in (None, entry.memory)))


def entry_of(name: str) -> EngineEntry:
    """Return the entry of an engine. Raises :class:`~beluga.errors.EngineUnavailableError`."""
    if name not in ENGINES:
        names = ", ".join(engine_names())
        raise EngineUnavailableError(f"{name!r} is not an engine; use {names}")
    return ENGINES[name]


def default_costs() -> Table:
    """Return every engine's default costs."""
    return {
        (entry.name, direction): cost
        for entry in ENGINES.values()
        for direction, cost in entry.costs.items()
    }
