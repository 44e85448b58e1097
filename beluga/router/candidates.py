# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The candidates of a request as a table with one row per worker (csrc/api/routing.h), so that
policies compute all costs at once, in C or by column.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from beluga._ffi import core, ffi
from beluga.router.policy import Candidate
from beluga.router.worker import FIGURES, Load, Overlap, Worker

_OF_ROW = ("device", "host", "disk", "shared", "new_blocks", "held_alone", "taint_weight")
_FLOATS = frozenset(
    ("gpu_cache_usage_perc", "gpu_prefix_cache_hit_rate", "prefill_s", "held_alone", "taint_weight")
)
_ROW = np.dtype([(name, "f8" if name in _FLOATS else "i8") for name in (*FIGURES, *_OF_ROW)])


class Candidates(Sequence[Candidate]):
    """Workers that may take a request, in their current state: a row for each.

    An element is a copy of a row, made on access.
    """

    __slots__ = ("_table", "rows", "workers")

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.workers = workers
        self.rows: core.bl_candidate = ffi.new("bl_candidate[]", len(workers))
        self._table: NDArray[np.void] | None = None

    @property
    def table(self) -> NDArray[np.void]:
        """The memory of ``rows``, whose load figures and other fields are its columns."""
        if self._table is None:  # few requests need it, and numpy takes longer than C's work
            memory: Any = ffi.buffer(self.rows)
            self._table = np.frombuffer(memory, _ROW, len(self.workers))
        return self._table

    @classmethod
    def of(cls, candidates: Sequence[Candidate]) -> Candidates:
        """Convert candidates to a table."""
        if isinstance(candidates, Candidates):
            return candidates
        made = cls([candidate.worker for candidate in candidates])
        for place, candidate in enumerate(candidates):
            row, overlap = made.rows[place], candidate.overlap
            row.load = candidate.load.row[0]
            row.device, row.host = overlap.device, overlap.host
            row.disk, row.shared = overlap.disk, overlap.shared
            row.new_blocks = candidate.new_blocks
            row.held_alone = candidate.held_alone
            row.taint_weight = candidate.taint_weight
        return made

    def __len__(self) -> int:
        return len(self.workers)

    @overload
    def __getitem__(self, place: int) -> Candidate: ...

    @overload
    def __getitem__(self, place: slice) -> list[Candidate]: ...

    def __getitem__(self, place: int | slice) -> Candidate | list[Candidate]:
        if isinstance(place, slice):
            return [self[at] for at in range(*place.indices(len(self)))]
        worker, row = self.workers[place], self.rows[range(len(self))[place]]
        return Candidate(
            worker,
            Load.of(row.load),
            Overlap(row.device, row.host, row.disk, row.shared),
            row.new_blocks,
            row.taint_weight,
            row.held_alone,
        )

    def counts(self, name: str) -> list[int]:
        """Return a column of whole numbers: a load counter, or another field of the rows."""
        column: list[int] = self.table[name].tolist()
        return column

    def amounts(self, name: str) -> list[float]:
        """Return a column of floating-point numbers."""
        column: list[float] = self.table[name].tolist()
        return column

    def held(self) -> list[int]:
        """Return the number of leading blocks that each worker itself holds."""
        table = self.table
        held: list[int] = (table["device"] + table["host"] + table["disk"]).tolist()
        return held

    def hits(self) -> list[int]:
        """Return the number of leading blocks that each worker need not compute."""
        table = self.table
        found: list[int] = (
            table["device"] + table["host"] + table["disk"] + table["shared"]
        ).tolist()
        return found
