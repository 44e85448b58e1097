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
        own = self.held.get(worker)
        if own is None:
            return Overlap(shared=self.shared)
        beyond = own.shared or max(self.shared - own.held, 0)
        return Overlap(own.device, own.host, own.disk, beyond)


FindMatches: TypeAlias = Callable[[Query], Matches]
