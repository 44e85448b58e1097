# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The hits of a request on all workers of a simulated cluster, by one call."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from beluga.router import Candidates


@dataclasses.dataclass(slots=True)
class Caches:
    """The leading blocks in each worker's HBM, and those in each worker's DRAM, or only in the
    pool, which is ``shared``.
    """

    device: NDArray[np.int64]
    far: NDArray[np.int64]
    shared: bool

    def fill(self, candidates: Candidates) -> None:
        """Write the overlaps of the candidates: the first workers of the cluster, in order."""
        count = len(candidates)
        device = candidates.table["device"] = self.device[:count]
        far = self.far[0] if self.shared else self.far[:count]
        column = "shared" if self.shared else "host"
        candidates.table[column] = np.maximum(far - device, 0)
