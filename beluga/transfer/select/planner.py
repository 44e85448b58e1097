# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Choose the engine of a copy by direction, bytes and fragments, from measured costs.

The table has a cost for each engine and direction; the cheapest engine of those at hand is taken.
The code is pure: ``calibrate/measure.py`` measures, and the engines copy.
"""

from __future__ import annotations

from collections.abc import Collection

from beluga.transfer.calibrate.cost import Table
from beluga.transfer.engine import Direction

CPU = "cpu"
"""The engine that is always there, and stands in for every other one."""


class Planner:
    """Chooses among engines by their names. An engine that is not in the table is never chosen."""

    def __init__(self, table: Table) -> None:
        self._table = dict(table)

    def choose(
        self, direction: Direction, size: int, fragments: int, among: Collection[str]
    ) -> str | None:
        """Return the cheapest of ``among`` for ``size`` bytes in ``fragments`` pieces.

        Returns None if the table has none of them. Of equals, the first one in the table is taken.
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
