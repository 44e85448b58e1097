"""Store and fetch blocks of numpy and torch."""

import numpy as np
import torch

from beluga import IndexServer, KVCache, Namespace, Pool
from beluga.kvcache import hash_keys

namespace = Namespace({"model": "my model", "dtype": "float32"})
with (
    Pool.create(["/dev/shm/cache"], device_size=64 << 20, force=True) as pool,
    IndexServer(pool),
    KVCache(pool, namespace=namespace) as cache,
):
    keys = hash_keys([b"first", b"second"])  # or an engine's digests: a list of bytes
    blocks = np.arange(2 * 1024, dtype=np.float32).reshape(2, 1024)
    stored = cache.put(keys, blocks)
    print(stored.stored, stored.present, stored.refused)  # 2 0 0
    targets = torch.empty(2, 1024)  # a block is a row, or an item of a list
    print(cache.get(keys, targets).hits)  # 2
    print(bool((targets == torch.from_numpy(blocks)).all()))  # True
    print(int(cache.lookup(keys)), cache.remove(keys))  # 2 2
Pool.destroy("/dev/shm/cache")
