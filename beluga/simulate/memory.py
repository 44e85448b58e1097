# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Simulated memory: a tier (csrc/index/tier.h), which evicts with the pool's own code; and what is
behind a worker's HBM (the shared pool, or its own DRAM), with the links to it; and requests, which
use it.

A request's blocks are given by a pointer to the first of its numbers and a count, so one call
handles all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from beluga._ffi import core, ffi, lib
from beluga.errors import SimulateError
from beluga.router import costs
from beluga.simulate.links import Links
from beluga.simulate.options import Options

ORDERS = {
    "lru": lib.BL_TIER_LRU,
    "s3fifo": lib.BL_TIER_S3FIFO,
    "fifo": lib.BL_TIER_FIFO,
}


class SimulatedTier:
    """Space for ``capacity`` blocks of a trace that has ``id_count`` different ones.
    Raises SimulateError if there is not enough memory to track them.
    """

    __slots__ = ("_lead", "_owned", "_self", "capacity", "handle", "stat")

    def __init__(self, id_count: int, capacity: int, eviction: str = "lru") -> None:
        out = ffi.new("bl_tier **")
        if lib.bl_tier_create(out, id_count, capacity, ORDERS[eviction]):
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


class Request:
    """A request. Times are in seconds of the replay, and NaN for an event that has not happened.
    Blocks are the trace's.
    """

    __slots__ = (
        "arrival",
        "blocks",
        "device",
        "done",
        "far",
        "first_token",
        "ids",
        "index",
        "input",
        "kv",
        "left",
        "output",
        "reusable",
        "slots",
        "worker",
    )

    def __init__(
        self,
        index: int,
        arrival: float,
        tokens: tuple[int, int, int],
        ids: core.uint32_p,
        blocks: int,
    ) -> None:
        self.index = index
        self.arrival = arrival
        self.input, self.output, block_tokens = tokens
        self.ids = ids  # the numbers of its whole blocks, for Tier
        self.blocks = blocks  # the number of whole blocks
        # At least one token is always computed, so not all whole blocks may be reusable.
        self.reusable = min(blocks, (self.input - 1) // block_tokens)
        self.slots = -(-(self.input + self.output) // block_tokens)  # slots of HBM, in blocks
        self.worker = -1
        self.device = 0  # blocks found in HBM
        self.far = 0  # further blocks, found in the pool or the worker's DRAM
        self.first_token = math.nan
        self.done = math.nan

    def begin(self, block_tokens: int) -> None:
        """Compute what is left to prefill, once the found blocks are known."""
        self.kv = (self.device + self.far) * block_tokens  # tokens in HBM
        self.left = self.input - self.kv  # tokens to prefill


class Far:
    """A tier, and the links between it and one worker's GPU."""

    __slots__ = ("block_bytes", "paid", "read", "route_in", "route_out", "tier", "write")

    def __init__(
        self, tier: SimulatedTier, network: Network, routes: tuple[tuple[int, ...], tuple[int, ...]]
    ) -> None:
        self.tier = tier
        self.read, self.write = network.read, network.write
        self.route_in, self.route_out = routes
        self.block_bytes = network.block_bytes
        self.paid = network.options.offload

    def onboard(self, now: float, count: int, then: Callable[[float], None]) -> None:
        """Copy blocks into HBM, then call ``then(when)``."""
        self.read.start(now, count * self.block_bytes, self.route_in, then)

    def offload(self, now: float, request: Request) -> None:
        """Copy the prompt's missing blocks to the tier. They can be found after the copy."""
        missing = request.blocks - self.tier.lead(request.ids, request.blocks)
        if missing and self.paid:
            size = missing * self.block_bytes
            self.write.start(now, size, self.route_out, partial(self._written, request))
        else:
            self.tier.put(request.ids, request.blocks)

    def _written(self, request: Request, now: float) -> None:
        self.tier.put(request.ids, request.blocks)


class Network:
    """All links, by direction. To a pool these are each GPU's path, the adapters, to which workers
    are assigned in turn, and the memory devices, over which every copy is spread evenly. To DRAM
    each worker has one path.
    """

    def __init__(self, options: Options, memory: str, block_bytes: int) -> None:
        self.options = options
        self.block_bytes = block_bytes
        self.shared = memory == "pool"
        self.read, self.write = Links([]), Links([])
        if self.shared:
            devices = min(options.device_count * costs.DEVICE, costs.SWITCH)
            for links, speed in (
                (self.read, costs.ADAPTER_READ),
                (self.write, costs.ADAPTER_WRITE),
            ):
                links.add_link(devices)
                for _ in range(options.adapter_count):
                    links.add_link(speed)
        self.paths: list[int] = []

    def join(self, tier: SimulatedTier) -> Far:
        """Return the next worker's tier with its links."""
        options, number = self.options, len(self.paths)
        speed = options.path_speed if self.shared else options.local_bandwidth
        path = self.read.add_link(speed)
        self.write.add_link(speed)
        self.paths.append(path)
        shared = (0, 1 + number % options.adapter_count) if self.shared else ()
        return Far(tier, self, ((*shared, path), (*shared, path)))

    def utilisation(self, elapsed_s: float) -> tuple[float, float]:
        """Return the average share of time in which the GPUs' paths were read, and written."""
        if not elapsed_s:
            return 0.0, 0.0
        read, write = (
            sum(links.moved[path] / links.speeds[path] for path in self.paths)
            for links in (self.read, self.write)
        )
        whole = elapsed_s * len(self.paths)
        return read / whole, write / whole
