# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The matches of one request: the index's result, from which a policy gets each worker's
overlap.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Protocol, TypeAlias

from beluga.router.candidates import Candidates
from beluga.router.policy import Query
from beluga.router.worker import Overlap, Worker


class Overlaps(Protocol):
    """The result of an index for a request."""

    def fill(self, candidates: Candidates) -> None:
        """Write the overlap of each candidate into its row."""
        ...


@dataclasses.dataclass(slots=True)
class Matches:
    """Leading blocks that workers hold, and those in the pool, which all workers can use. An index
    with the number of the pool's blocks that continue a worker's own ones stores it in ``held``.
    """

    held: Mapping[Worker, Overlap] = dataclasses.field(default_factory=dict)
    shared: int = 0  # leading blocks in the pool, counted from the first

    def of(self, worker: Worker) -> Overlap:
        """Return the overlap of one worker, including the pool's blocks after its own."""
        own, shared = self.held.get(worker), self.shared
        if own is None:
            return Overlap(0, 0, 0, shared)
        if not own.shared and shared:
            return Overlap(own.device, own.host, own.disk, max(shared - own.held, 0))
        return own

    def fill(self, candidates: Candidates) -> None:
        """Write the overlap of each candidate into its row."""
        if self.shared:
            candidates.table["shared"] = self.shared
        if not self.held:
            return
        for place, worker in enumerate(candidates.workers):
            if worker in self.held:
                row, own = candidates.rows[place], self.of(worker)
                row.device, row.host = own.device, own.host
                row.disk, row.shared = own.disk, own.shared


FindMatches: TypeAlias = Callable[[Query], Overlaps]
