# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""What lies behind a worker's HBM: the shared pool, or DRAM of its own, and the way there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from beluga.router import costs
from beluga.simulate.links import Links
from beluga.simulate.options import Options
from beluga.simulate.request import Request
from beluga.simulate.tier import Tier


class Far:
    """A tier, and the links between it and one worker's GPU."""

    __slots__ = ("block_bytes", "paid", "read", "route_in", "route_out", "tier", "write")

    def __init__(
        self, tier: Tier, network: Network, routes: tuple[tuple[int, ...], tuple[int, ...]]
    ) -> None:
        self.tier = tier
        self.read, self.write = network.read, network.write
        self.route_in, self.route_out = routes
        self.block_bytes = network.block_bytes
        self.paid = network.options.offload

    def onboard(self, now: float, count: int, then: Callable[[float], None]) -> None:
        """Copy blocks into HBM; ``then(when)``."""
        self.read.start(now, count * self.block_bytes, self.route_in, then)

    def offload(self, now: float, request: Request) -> None:
        """Copy what of a prompt is not there yet; it can be found when it is whole."""
        missing = request.blocks - self.tier.lead(request.ids, request.blocks)
        if missing and self.paid:
            size = missing * self.block_bytes
            self.write.start(now, size, self.route_out, partial(self._written, request))
        else:
            self.tier.put(request.ids, request.blocks)

    def _written(self, request: Request, now: float) -> None:
        self.tier.put(request.ids, request.blocks)


class Network:
    """All links, by direction. To a pool: each GPU's path, the adapters, which workers share in
    turn, and the memory devices, over which every copy is spread evenly. To DRAM: one path each.
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

    def join(self, tier: Tier) -> Far:
        """The next worker's way to the tier."""
        options, number = self.options, len(self.paths)
        speed = options.path_speed if self.shared else options.local_bandwidth
        path = self.read.add_link(speed)
        self.write.add_link(speed)
        self.paths.append(path)
        shared = (0, 1 + number % options.adapter_count) if self.shared else ()
        return Far(tier, self, ((*shared, path), (*shared, path)))

    def utilisation(self, elapsed_s: float) -> tuple[float, float]:
        """The share of time that the GPUs' paths were read, and written, on average."""
        if not elapsed_s:
            return 0.0, 0.0
        read, write = (
            sum(links.moved[path] / links.speeds[path] for path in self.paths)
            for links in (self.read, self.write)
        )
        whole = elapsed_s * len(self.paths)
        return read / whole, write / whole
