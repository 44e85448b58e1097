# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Several engines as one: each plan goes to the one that is cheapest for it."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING

from beluga.errors import (
    ChecksumError,
    LayoutError,
    TransferCancelledError,
    TransferError,
    TransferTimeoutError,
    UnsettledError,
)
from beluga.transfer.engine import Direction, settle
from beluga.transfer.select.planner import CPU

if TYPE_CHECKING:
    from collections.abc import Mapping

    from beluga.transfer.engine import CopyEngine, Transfer
    from beluga.transfer.plan.plan import Plan
    from beluga.transfer.select.planner import Planner

_logger = logging.getLogger(__name__)
_NOT_THE_ENGINE = (ChecksumError, TransferCancelledError, TransferTimeoutError, UnsettledError)


@dataclasses.dataclass(slots=True)
class PlannedStat:
    """Counters of the plans so far."""

    plans: dict[str, int]  # given to each engine
    replayed: int = 0  # plans that an engine failed and the CPU then executed
    faults: dict[str, str] = dataclasses.field(default_factory=dict)
    """The reason why an engine is given no more plans."""


class PlannedEngine:
    """Several engines that reach the same memory; ``planner`` chooses which of them copies.

    It costs a microsecond or two per plan. If the CPU is among them, it executes the plans that
    another engine fails. That engine is given no more plans, which is counted, and warned of once.
    Raises LayoutError if the planner knows none of the engines.
    """

    name = "planned"

    def __init__(self, planner: Planner, engines: Mapping[str, CopyEngine]) -> None:
        if any(planner.choose(direction, 1, 1, engines) is None for direction in Direction):
            raise LayoutError(f"the planner's table has none of {', '.join(engines) or 'nothing'}")
        self._planner, self._engines = planner, dict(engines)
        self._sound = set(engines)
        self.stat = PlannedStat(dict.fromkeys(engines, 0))

    def choose(self, direction: Direction, size: int, fragments: int) -> str:
        """Return the name of the engine that would copy ``size`` bytes in ``fragments`` pieces."""
        kind = self._planner.choose(direction, size, fragments, self._sound)
        assert kind is not None  # noqa: S101  # looked at when this was made; the CPU stays sound
        return kind

    def gather_write(self, plan: Plan) -> Transfer:
        """Write scattered memory to the pool. Raises what the chosen engine raises."""
        return self._start(Direction.WRITE, plan)

    def scatter_read(self, plan: Plan) -> Transfer:
        """Read the pool to scattered memory. Raises what the chosen engine raises."""
        return self._start(Direction.READ, plan)

    def close(self) -> None:
        """Close all engines."""
        for engine in self._engines.values():
            engine.close()

    def leave_alone(self, kind: str, fault: str) -> None:
        """Give this engine no more plans."""
        if kind in self._sound:
            self._sound.discard(kind)
            self.stat.faults[kind] = fault
            _logger.warning("beluga: %s is left alone, the CPU copies: %s", kind, fault)

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
        return _Covered(self, kind, direction, plan, transfer)

    def replay(self, kind: str, direction: Direction, plan: Plan, error: TransferError) -> Transfer:
        """Let the CPU execute a plan that an engine failed; none of it is under way any more."""
        self.leave_alone(kind, str(error))
        self.stat.replayed += 1
        return _begin(self._engines[CPU], direction, plan)

    def judge(self, kind: str) -> None:
        """Return whether the engine has executed a plan alone."""
        if (fault := getattr(self._engines[kind], "fault", None)) is not None:
            self.leave_alone(kind, fault)


class _Covered:
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
                self._owner.judge(self._kind)


def _begin(engine: CopyEngine, direction: Direction, plan: Plan) -> Transfer:
    if direction is Direction.WRITE:
        return engine.gather_write(plan)
    return engine.scatter_read(plan)
