"""Serve a function with types, and call it."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from beluga import Client, Handlers, Pool, Server

handlers = Handlers()


@dataclass
class Range:
    least: float
    most: float


@handlers.add
def span(values: NDArray[np.float64]) -> Range:
    """Find the least and the most."""
    return Range(float(values.min()), float(values.max()))


with (
    Pool.create(["/dev/shm/handlers"], device_size=64 << 20, force=True) as pool,
    Server(pool) as server,
    Client(pool) as client,
):
    server.register(handlers, threads=2)
    print(client.remote(span)(np.arange(5.0)).most)  # 4.0
    print(client.call("span", np.arange(1_000_000.0), returns=Range).most)  # 999999.0
    print(client.handlers()[0].help)  # Find the least and the most.
Pool.destroy("/dev/shm/handlers")
