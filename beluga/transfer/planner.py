# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Which engine copies: chosen by direction, bytes and fragments, from what was measured.

A cost is a line: so long to start, so long for each fragment, so long for each byte. The table has
one for each way of copying and direction; the cheapest one of those at hand is taken. Pure: who
measures is ``calibration.py``, who copies are the engines.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection, Mapping


class Way(str, enum.Enum):
    """An engine, and how it goes about it."""

    __str__ = str.__str__

    CPU = "cpu"
    DSA = "dsa"
    CUDA_DIRECT = "cuda-direct"
    CUDA_STAGED = "cuda-staged"


class Course(str, enum.Enum):
    """The two directions, as an engine's methods are called."""

    __str__ = str.__str__

    GATHER_WRITE = "gather_write"
    SCATTER_READ = "scatter_read"


@dataclasses.dataclass(frozen=True, slots=True)
class Cost:
    """Nanoseconds to start, for each fragment, and for each byte."""

    start_ns: float
    fragment_ns: float
    byte_ns: float

    def of(self, size: int, fragments: int) -> float:
        """Nanoseconds for ``size`` bytes in ``fragments`` pieces."""
        return self.start_ns + self.fragment_ns * fragments + self.byte_ns * size


Table = Mapping[tuple[Way, Course], Cost]

# The Beluga paper's words before anything was measured: the CPU below 4 KiB, DSA ahead from 16 KiB
# (Exp 1, 2: 16 KiB written in 2.41 us, flushed and read in 5.98 us), a kernel of one's own up to
# 24 KB, a copy engine's 10.55 us for 16 KB of which 2.68 us are data.
_KIB = 1024
DEFAULT: Table = {
    (Way.CPU, Course.GATHER_WRITE): Cost(200, 20, 2200 / (16 * _KIB)),
    (Way.CPU, Course.SCATTER_READ): Cost(500, 20, 5400 / (16 * _KIB)),
    (Way.DSA, Course.GATHER_WRITE): Cost(1550, 60, 1 / 30),
    (Way.DSA, Course.SCATTER_READ): Cost(2000, 60, 1 / 30),
    (Way.CUDA_DIRECT, Course.GATHER_WRITE): Cost(5000, 5, 1 / 23),
    (Way.CUDA_DIRECT, Course.SCATTER_READ): Cost(5000, 5, 1 / 23),
    (Way.CUDA_STAGED, Course.GATHER_WRITE): Cost(5120, 5, 1 / 26),
    (Way.CUDA_STAGED, Course.SCATTER_READ): Cost(5120, 5, 1 / 26),
}


class Planner:
    """Chooses among ways of copying. A way that the table does not have is never chosen."""

    def __init__(self, table: Table = DEFAULT) -> None:
        self._table = dict(table)

    def choose(
        self, course: Course, size: int, fragments: int, among: Collection[Way]
    ) -> Way | None:
        """The cheapest of ``among`` for ``size`` bytes in ``fragments`` pieces; None if the table
        has none of them. Of equals the one that :class:`Way` names first."""
        costs = {
            way: self._table[way, course].of(size, fragments)
            for way in Way
            if way in among and (way, course) in self._table
        }
        return min(costs, key=costs.__getitem__) if costs else None

    def crossover(self, course: Course, before: Way, after: Way, fragments: int = 1) -> int | None:
        """From how many bytes on ``after`` is the cheaper: 0 always, None never."""
        first, second = self._table[before, course], self._table[after, course]
        ahead = second.of(0, fragments) - first.of(0, fragments)
        gain = first.byte_ns - second.byte_ns
        if ahead <= 0:
            return 0 if gain >= 0 else None
        return int(-(-ahead // gain)) if gain > 0 else None
