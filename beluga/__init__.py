# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Beluga: a shared KV-cache pool for LLM inference.

::

    from beluga import KVCache, IndexServer, Pool

    with Pool.create(["/dev/shm/a", "/dev/shm/b"], device_size=256 << 20) as pool:
        with IndexServer(pool), KVCache(pool, namespace="my model") as cache:
            cache.put(keys, blocks)
            cache.get(keys, targets).hits

The names here are imported on access. Loading the C core checks the environment, and a command must
be able to report a problem that this check finds.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from beluga import _checkout

if TYPE_CHECKING:
    from beluga.errors import BelugaError
    from beluga.index import IndexServer
    from beluga.kvcache import KVCache, Namespace
    from beluga.pool import Pool
    from beluga.rpc import Client, Handlers, Server

__version__ = "0.1.0"  # the only place; pyproject.toml reads it

__all__ = [
    "BelugaError",
    "Client",
    "Handlers",
    "IndexServer",
    "KVCache",
    "Namespace",
    "Pool",
    "Server",
]

_HOMES = {
    "BelugaError": "beluga.errors",
    "Client": "beluga.rpc",
    "Handlers": "beluga.rpc",
    "KVCache": "beluga.kvcache",
    "IndexServer": "beluga.index",
    "Namespace": "beluga.kvcache",
    "Pool": "beluga.pool",
    "Server": "beluga.rpc",
}


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


_checkout.give_way()

if not TYPE_CHECKING:  # otherwise a type checker would accept every name

    def __getattr__(name):
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_HOMES[name]), name)
        return value
