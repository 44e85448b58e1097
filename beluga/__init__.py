# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Beluga: a shared KV-cache pool for LLM inference.

::

    from beluga import KVCache, MetaServer, Pool

    with Pool.create(["/dev/shm/a", "/dev/shm/b"], device_size=256 << 20) as pool:
        with MetaServer(pool), KVCache(pool, namespace="my model") as cache:
            cache.put(keys, blocks)
            cache.get(keys, targets).hits
"""

from beluga.errors import BelugaError
from beluga.kvcache import KVCache, Namespace
from beluga.meta import MetaServer
from beluga.pool import Pool
from beluga.rpc import Client, Server

__all__ = ["BelugaError", "Client", "KVCache", "MetaServer", "Namespace", "Pool", "Server"]
