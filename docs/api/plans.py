"""Copy two blocks by a plan, without a server."""

import numpy as np

from beluga import Pool
from beluga.transfer import CpuEngine, View, arrangements

layers = [np.full((2, 8, 16, 2, 64), layer, np.float16) for layer in range(2)]
layout = arrangements.vllm([View.of(layer) for layer in layers])
with Pool.create(["/dev/shm/plans"], device_size=64 << 20, force=True) as pool:
    engine = CpuEngine(pool)
    start = pool.geometry.data_offset  # of a pool without a server: all its space is yours
    plan = layout.plan([1, 2], [start, start + layout.length])
    engine.gather_write(plan).wait()
    layers[1][:] = 0
    engine.scatter_read(plan).wait(timeout_s=10.0)
    print(float(layers[1][0, 2].max()), float(layers[1][0, 3].max()))  # 1.0 0.0
    print(plan.size == 2 * layout.length)  # True
    engine.close()
Pool.destroy("/dev/shm/plans")
