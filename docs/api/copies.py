"""Store blocks of an engine's layout and fetch them into others."""

import numpy as np

from beluga import IndexServer, KVCache, Pool
from beluga.kvcache import Run
from beluga.transfer import CpuEngine, Slots, View, arrangements

layers = [np.zeros((2, 64, 16, 8, 128), np.float16) for _ in range(4)]  # K and V, blocks, tokens
layers[0][:, 3] = 1.0
layout = arrangements.vllm([View.of(layer) for layer in layers])
digests = [bytes([number]) * 16 for number in range(2)]
with (
    Pool.create(["/dev/shm/copies"], device_size=64 << 20, force=True) as pool,
    IndexServer(pool),
    KVCache(pool, namespace=layout.declared, engine=CpuEngine(pool, threads=2)) as cache,
):
    cache.put(
        digests, Run.of(layout, [3, 4])
    )  # blocks 3 and 4 of the engine, scattered over layers
    print(cache.get(digests, Run.of(layout, [40, 41])).hits)  # 2
    print(float(layers[0][0, 40].max()))  # 1.0
    tokens = [(0, 5), (1, 15)]  # token 5 of the first digest, token 15 of the second
    print(cache.get_tokens(digests, tokens, Slots(layout, [100, 101])).hits)  # 2
Pool.destroy("/dev/shm/copies")
