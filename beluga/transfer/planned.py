# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Several engines as one: each plan goes to the one that is cheapest for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from beluga.errors import LayoutError
from beluga.transfer.engine import Direction

if TYPE_CHECKING:
    from collections.abc import Mapping

    from beluga.transfer.engine import Engine, Transfer
    from beluga.transfer.plan import Plan
    from beluga.transfer.planner import EngineKind, Planner


class PlannedEngine:
    """``engines`` reach the same memory; ``planner`` says which of them copies.

    It costs a microsecond or two per plan. Raises LayoutError if the planner knows none of the
    engines.
    """

    name = "planned"

    def __init__(self, planner: Planner, engines: Mapping[EngineKind, Engine]) -> None:
        if any(planner.choose(direction, 1, 1, engines) is None for direction in Direction):
            raise LayoutError(f"the planner's table has none of {', '.join(engines) or 'nothing'}")
        self._planner, self._engines = planner, dict(engines)

    def gather_write(self, plan: Plan) -> Transfer:
        """Scattered memory to the pool. Raises what the chosen engine raises."""
        return self._chosen(Direction.WRITE, plan).gather_write(plan)

    def scatter_read(self, plan: Plan) -> Transfer:
        """The pool to scattered memory. Raises what the chosen engine raises."""
        return self._chosen(Direction.READ, plan).scatter_read(plan)

    def close(self) -> None:
        """Close them all."""
        for engine in self._engines.values():
            engine.close()

    def _chosen(self, direction: Direction, plan: Plan) -> Engine:
        kind = self._planner.choose(direction, plan.size, len(plan.pieces), self._engines)
        assert kind is not None  # noqa: S101  # looked at when this was made
        return self._engines[kind]
