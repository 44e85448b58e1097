"""Pool, server, cache, calls, copies and router."""

import numpy as np
import torch
from numpy.typing import NDArray

from beluga import Client, Handlers, IndexServer, KVCache, Pool
from beluga.kvcache import Run
from beluga.router import BlockHasher, Router, Worker, make_policy
from beluga.transfer import View, arrangements

handlers = Handlers()


@handlers.add
def mean(values: NDArray[np.float32]) -> float:
    return float(values.mean())


with (
    Pool.create(["/dev/shm/whole"], device_size=128 << 20, force=True) as pool,
    IndexServer(pool) as server,
    Client(pool) as client,
    KVCache(client, namespace="my model") as cache,
):
    server.register(handlers, threads=2)
    keys = [bytes([number]) * 16 for number in range(4)]
    cache.put(keys[:2], np.ones((2, 4096), np.float32))
    targets = torch.zeros(2, 4096)
    print(cache.get(keys[:2], targets).hits, float(targets.sum()))  # 2 8192.0
    print(client.remote(mean)(np.arange(5, dtype=np.float32)))  # 2.0

    layers = [torch.rand(2, 32, 16, 2, 64) for _ in range(2)]  # K and V, blocks, tokens, heads, dim
    layout = arrangements.vllm([View.of(layer) for layer in layers])
    cache.put(keys[2:], Run.of(layout, [5, 6]))
    print(cache.get(keys[2:], Run.of(layout, [20, 21])).hits)  # 2
    print(all(torch.equal(layer[:, 5], layer[:, 20]) for layer in layers))  # True

router, hasher = Router(make_policy("least-cost")), BlockHasher(block_size=16)
for number in range(2):
    router.add_worker(Worker(number))
print(router.route("request", hasher.query(range(1000))).worker.worker_id in (0, 1))  # True
Pool.destroy(["/dev/shm/whole"])
