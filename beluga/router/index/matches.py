# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""What an index says of one request, before a policy sees it worker by worker."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TypeAlias

from beluga.router.policy import Query
from beluga.router.worker import Overlap, Worker


@dataclasses.dataclass(slots=True)
class Matches:
    """Leading blocks that workers hold, and that the pool holds for all of them. An index that
    knows how far the pool goes on behind a worker's own blocks says so in ``held``.
    """

    held: Mapping[Worker, Overlap] = dataclasses.field(default_factory=dict)
    shared: int = 0  # leading blocks in the pool, counted from the first block

    def of(self, worker: Worker) -> Overlap:
        """The overlap of one worker, the pool's blocks beyond its own included."""
        own, shared = self.held.get(worker), self.shared
        if own is None:
            return Overlap(0, 0, 0, shared)
        if not own.shared and shared:
            return Overlap(own.device, own.host, own.disk, max(shared - own.held, 0))
        return own


FindMatches: TypeAlias = Callable[[Query], Matches]
