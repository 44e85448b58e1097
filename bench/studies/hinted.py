# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A pool whose blocks have hints, in the time of a trace. It evicts as the server's index does
(``csrc/index/hints.h``); a test compares the two.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from beluga._ffi import ffi, lib
from beluga.simulate.memory import SimulatedTier

_NEVER = np.inf
_FAVORED = (lib.BL_LEVEL_HIGH, lib.BL_LEVEL_PINNED)


class HintedPool:
    """A pool of ``capacity`` blocks, of which hints may favor ``budget``; else it evicts by LRU.
    Requests come one after another, with the time of each; ``ids`` are the numbers of the blocks of
    one request.
    """

    def __init__(self, id_count: int, capacity: int, budget: int) -> None:
        self._tier = SimulatedTier(id_count, capacity)
        self._budget = budget
        self._numbers = np.arange(id_count, dtype=np.uint32)
        self._each = ffi.from_buffer("uint32_t[]", self._numbers)  # a pointer to each number
        self._ttl = np.full(id_count, _NEVER)  # seconds; _NEVER for blocks without a time
        self._used = np.zeros(id_count)
        self.favored_max = 0  # blocks that hints have favored at a time
        self.refused = 0  # hints beyond the budget

    def look_up(self, now: float, ids: NDArray[np.uint32]) -> int:
        """Return how many leading blocks are present. They are used now."""
        self._expire(now)
        blocks = ffi.from_buffer("uint32_t[]", ids)
        hits = self._tier.lead(blocks, len(ids))
        self._tier.touch(blocks, hits)
        self._used[ids[:hits]] = now
        return hits

    def put(self, now: float, ids: NDArray[np.uint32]) -> None:
        """Store the missing blocks, the first ones first, as far as there is space."""
        self._expire(now)
        # A block that is being written is not evicted. A present block may be, before its turn.
        new = ids[[not self.has(block) and self._tier.reserve(1) for block in ids.tolist()]]
        self._ttl[new] = _NEVER  # a hint ends with the block that was evicted
        self._tier.release(len(new))
        self._tier.put(ffi.from_buffer("uint32_t[]", new), len(new))

    def has(self, block: int) -> bool:
        """Return whether a block is present."""
        return self._tier.lead(self._each + block, 1) == 1

    def hint(
        self, now: float, ids: NDArray[np.uint32], level: int, ttl_s: float | None = None
    ) -> int:
        """Give blocks a hint that holds for ``ttl_s`` after their last use. Returns how many got
        it.
        """
        self._expire(now)
        present = np.array([self.has(block) for block in ids.tolist()], np.bool_)
        given, favors = np.zeros(len(ids), np.bool_), level in _FAVORED
        starts = range(0, len(ids), lib.BL_CALL_KEYS_MAX)
        for start in starts if favors else reversed(starts):  # as bl_hint_blocks() does
            part = np.ascontiguousarray(ids[start : start + lib.BL_CALL_KEYS_MAX])
            blocks = ffi.from_buffer("uint32_t[]", part)
            given[start : start + len(part)] = self._tier.hint(
                blocks, len(part), level, self._budget
            )
        self._used[ids[given]] = now
        self._ttl[ids[given]] = _NEVER if ttl_s is None else ttl_s
        self.refused += int((present & ~given).sum())
        self.favored_max = max(self.favored_max, int(self._tier.stat.favored))
        return int(given.sum())

    def _expire(self, now: float) -> None:
        """End the hints whose time is over, in the order of their times."""
        due_s = self._used + self._ttl
        due = np.flatnonzero(due_s <= now).astype(np.uint32)
        if len(due):
            due = due[np.argsort(due_s[due], kind="stable")]
            self._ttl[due] = _NEVER
            self._tier.cool(ffi.from_buffer("uint32_t[]", due), len(due))


LEVELS = {
    "low": lib.BL_LEVEL_LOW,
    "normal": lib.BL_LEVEL_NORMAL,
    "high": lib.BL_LEVEL_HIGH,
    "pin": lib.BL_LEVEL_PINNED,
}
"""The levels of hints by name."""
