# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The memory behind a worker's HBM (the shared pool, or its own DRAM) and the links to it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from beluga.router import costs
from beluga.simulate.links import Links
from beluga.simulate.options import Options
from beluga.simulate.request import Request
from beluga.simulate.tier import SimulatedTier


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
