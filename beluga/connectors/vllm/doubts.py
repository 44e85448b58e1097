# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Tracks the engine's blocks that may hold wrong KV: blocks based on a failed load, or computed
before a reset.

vLLM leaves such blocks in its own prefix cache while the request that loads them computes them
again. Another request that finds them meanwhile, or after the first one was aborted, computes on
wrong KV. None of that may be saved. A block leaves this set when a request has computed it from
valid ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence


class Doubts:
    """A set of block ids below ``block_count``."""

    def __init__(self, block_count: int) -> None:
        self._doubted = np.zeros(block_count, dtype=bool)
        self._any = False

    def __bool__(self) -> bool:
        return self._any

    def mark(self, block_ids: Sequence[int]) -> None:
        """Add blocks."""
        if block_ids:
            self._doubted[block_ids] = self._any = True

    def mark_all(self) -> None:
        """Add every block."""
        self._doubted[:] = self._any = True

    def clear(self, block_ids: Sequence[int]) -> None:
        """Remove blocks that hold valid KV."""
        if self._any and block_ids:
            self._doubted[block_ids] = False
            self._any = bool(self._doubted.any())

    def first(self, block_ids: Sequence[int]) -> int | None:
        """Return the position of the first of these blocks in the set."""
        if not self._any or not block_ids:
            return None
        places = np.flatnonzero(self._doubted[block_ids])
        return int(places[0]) if len(places) else None
