# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A simulated tier of memory: csrc/index/tier.h, which evicts by the pool's own code.

Blocks of a request are a pointer to the first of its numbers and a count: one call has them all.
"""

from __future__ import annotations

from collections.abc import Sequence

from beluga._ffi import core, ffi, lib
from beluga.errors import SimulateError

ORDERS = {"lru": lib.BL_TIER_LRU, "fifo": lib.BL_TIER_FIFO}


class Tier:
    """Room for ``capacity`` blocks of a trace that has ``id_count`` of them. Raises SimulateError
    if there is no memory to keep account of them.
    """

    __slots__ = ("_lead", "_owned", "_self", "capacity", "handle", "stat")

    def __init__(self, id_count: int, capacity: int, eviction: str = "lru") -> None:
        out = ffi.new("bl_tier **")
        if lib.bl_tier_create(out, id_count, capacity, ORDERS[eviction]):
            raise SimulateError(f"no memory to keep account of {id_count} blocks")
        self.handle = out[0]
        self._owned = ffi.gc(self.handle, lib.bl_tier_destroy)
        self.stat = lib.bl_tier_look(self.handle)
        self.capacity = capacity
        self._self = ffi.new("bl_tier *[]", [self.handle])
        self._lead = ffi.new("uint32_t *")

    def lead(self, ids: core.uint32_p, count: int) -> int:
        """How many of the first blocks are here."""
        lib.bl_tier_lead(self._self, 1, ids, count, self._lead)
        return int(self._lead[0])

    def touch(self, ids: core.uint32_p, count: int) -> None:
        """A hit of those that are here."""
        lib.bl_tier_touch(self.handle, ids, count)

    def put(self, ids: core.uint32_p, count: int) -> int:
        """Have them here; how many are new."""
        return int(lib.bl_tier_put(self.handle, ids, count))

    def hold(self, ids: core.uint32_p, count: int) -> None:
        """They are used, and stay."""
        lib.bl_tier_hold(self.handle, ids, count)

    def drop(self, ids: core.uint32_p, count: int) -> None:
        """The end of a hold."""
        lib.bl_tier_drop(self.handle, ids, count)

    def reserve(self, count: int) -> bool:
        """Take so many slots, if those in use leave them."""
        return bool(lib.bl_tier_reserve(self.handle, count) == 0)

    def release(self, count: int) -> None:
        """Give slots back."""
        lib.bl_tier_release(self.handle, count)

    @property
    def used(self) -> int:
        """Slots that requests use: blocks held, and reserved ones."""
        return int(self.stat.held + self.stat.reserved)


class Leads:
    """The leading blocks of a request in several tiers, by one call."""

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self._tiers = tuple(tiers)  # kept alive
        self._handles = ffi.new("bl_tier *[]", [tier.handle for tier in tiers])
        self._leads = ffi.new("uint32_t[]", len(tiers))

    def __call__(self, ids: core.uint32_p, count: int) -> list[int]:
        lib.bl_tier_lead(self._handles, len(self._tiers), ids, count, self._leads)
        return list(self._leads)
