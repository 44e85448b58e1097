# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A simulated memory tier (csrc/index/tier.h), which evicts with the pool's own code.

A request's blocks are given by a pointer to the first of its numbers and a count, so one call
handles all.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from beluga._ffi import core, ffi, lib
from beluga.errors import SimulateError

ORDERS = {
    "lru": lib.BL_TIER_LRU,
    "s3fifo": lib.BL_TIER_S3FIFO,
    "cost": lib.BL_TIER_COST,
    "fifo": lib.BL_TIER_FIFO,
}


class SimulatedTier:
    """Space for ``capacity`` blocks of a trace that has ``id_count`` different ones, of
    ``block_tokens`` tokens each. Raises SimulateError if there is not enough memory to track them.
    """

    __slots__ = ("_lead", "_owned", "_self", "capacity", "handle", "stat")

    def __init__(
        self, id_count: int, capacity: int, eviction: str = "lru", block_tokens: int = 16
    ) -> None:
        out = ffi.new("bl_tier **")
        if lib.bl_tier_create(out, id_count, capacity, ORDERS[eviction], block_tokens):
            raise SimulateError(f"not enough memory to track {id_count} blocks")
        self.handle = out[0]
        self._owned = ffi.gc(self.handle, lib.bl_tier_destroy)
        self.stat = lib.bl_tier_look(self.handle)
        self.capacity = capacity
        self._self = ffi.new("bl_tier *[]", [self.handle])
        self._lead = ffi.new("uint32_t *")

    def lead(self, ids: core.uint32_p, count: int) -> int:
        """Return how many of the first blocks are here."""
        lib.bl_tier_lead(self._self, 1, ids, count, self._lead)
        return int(self._lead[0])

    def touch(self, ids: core.uint32_p, count: int) -> None:
        """Count a hit of those blocks that are here."""
        lib.bl_tier_touch(self.handle, ids, count)

    def put(self, ids: core.uint32_p, count: int) -> int:
        """Add blocks. Returns how many are new."""
        return int(lib.bl_tier_put(self.handle, ids, count))

    def hint(self, ids: core.uint32_p, count: int, level: int, budget: int) -> NDArray[np.bool_]:
        """Give blocks that are here a hint (``bl_level``), of which ``budget`` blocks may be
        favored. Returns which got it.
        """
        given = np.zeros(count, np.bool_)
        out = ffi.from_buffer("uint8_t[]", given.view(np.uint8), require_writable=True)
        if lib.bl_tier_hint(self.handle, ids, count, level, budget, out) < 0:
            raise SimulateError(f"not enough memory for the hints of {count} blocks")
        return given

    def cool(self, ids: core.uint32_p, count: int) -> None:
        """End expired hints: their blocks are evicted next, the last one first."""
        lib.bl_tier_cool(self.handle, ids, count)

    def hold(self, ids: core.uint32_p, count: int) -> None:
        """Hold blocks: while they are in use they are not evicted."""
        lib.bl_tier_hold(self.handle, ids, count)

    def drop(self, ids: core.uint32_p, count: int) -> None:
        """End a hold."""
        lib.bl_tier_drop(self.handle, ids, count)

    def reserve(self, count: int) -> bool:
        """Reserve that many slots. Returns False if those in use leave too few."""
        return bool(lib.bl_tier_reserve(self.handle, count) == 0)

    def release(self, count: int) -> None:
        """Release reserved slots."""
        lib.bl_tier_release(self.handle, count)

    @property
    def used(self) -> int:
        """The slots that requests use: held blocks and reserved slots."""
        return int(self.stat.held + self.stat.reserved)


class Leads:
    """Looks up the leading blocks of a request in several tiers with one call."""

    def __init__(self, tiers: Sequence[SimulatedTier]) -> None:
        self._tiers = tuple(tiers)  # keeps the tiers alive
        self._handles = ffi.new("bl_tier *[]", [tier.handle for tier in tiers])
        self._leads = np.zeros(len(tiers), np.uint32)
        self._out = ffi.from_buffer("uint32_t[]", self._leads)

    def __call__(self, ids: core.uint32_p, count: int) -> NDArray[np.int64]:
        lib.bl_tier_lead(self._handles, len(self._tiers), ids, count, self._out)
        return self._leads.astype(np.int64)
