# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Which engine copies: chosen by direction, bytes and fragments, from what was measured.

A cost is a line: so long to start, so long for each fragment, so long for each byte. The table has
one for each kind of engine and direction; the cheapest one of those at hand is taken. Pure: who
measures is ``calibration.py``, who copies are the engines.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection, Mapping

from beluga.transfer.engine import Direction


class EngineKind(str, enum.Enum):
    """An engine, and how it goes about it."""

    __str__ = str.__str__

    CPU = "cpu"
    DSA = "dsa"
    CUDA_DIRECT = "cuda-direct"
    CUDA_STAGED = "cuda-staged"


@dataclasses.dataclass(frozen=True, slots=True)
class Cost:
    """Nanoseconds to start, for each fragment, and for each byte."""

    start_ns: float
    fragment_ns: float
    byte_ns: float

    def of(self, size: int, fragments: int) -> float:
        """Nanoseconds for ``size`` bytes in ``fragments`` pieces."""
        return self.start_ns + self.fragment_ns * fragments + self.byte_ns * size


Table = Mapping[tuple[EngineKind, Direction], Cost]

# The Beluga paper's words before anything was measured: the CPU below 4 KiB, DSA ahead from 16 KiB
# (Exp 1, 2: 16 KiB written in 2.41 us, flushed and read in 5.98 us), a kernel of one's own up to
# 24 KB, a copy engine's 10.55 us for 16 KB of which 2.68 us are data.
_KIB = 1024
DEFAULT: Table = {
    (EngineKind.CPU, Direction.WRITE): Cost(200, 20, 2200 / (16 * _KIB)),
    (EngineKind.CPU, Direction.READ): Cost(500, 20, 5400 / (16 * _KIB)),
    (EngineKind.DSA, Direction.WRITE): Cost(1550, 60, 1 / 30),
    (EngineKind.DSA, Direction.READ): Cost(2000, 60, 1 / 30),
    (EngineKind.CUDA_DIRECT, Direction.WRITE): Cost(5000, 5, 1 / 23),
    (EngineKind.CUDA_DIRECT, Direction.READ): Cost(5000, 5, 1 / 23),
    (EngineKind.CUDA_STAGED, Direction.WRITE): Cost(5120, 5, 1 / 26),
    (EngineKind.CUDA_STAGED, Direction.READ): Cost(5120, 5, 1 / 26),
}


class Planner:
    """Chooses among kinds of engines. One that the table does not have is never chosen."""

    def __init__(self, table: Table = DEFAULT) -> None:
        self._table = dict(table)

    def choose(
        self, direction: Direction, size: int, fragments: int, among: Collection[EngineKind]
    ) -> EngineKind | None:
        """The cheapest of ``among`` for ``size`` bytes in ``fragments`` pieces; None if the table
        has none of them. Of equals the one that :class:`EngineKind` names first."""
        costs = {
            kind: self._table[kind, direction].of(size, fragments)
            for kind in EngineKind
            if kind in among and (kind, direction) in self._table
        }
        return min(costs, key=costs.__getitem__) if costs else None

    def crossover(
        self, direction: Direction, before: EngineKind, after: EngineKind, fragments: int = 1
    ) -> int | None:
        """From how many bytes on ``after`` is the cheaper: 0 always, None never."""
        first, second = self._table[before, direction], self._table[after, direction]
        ahead = second.of(0, fragments) - first.of(0, fragments)
        gain = first.byte_ns - second.byte_ns
        if ahead <= 0:
            return 0 if gain >= 0 else None
        return int(-(-ahead // gain)) if gain > 0 else None
