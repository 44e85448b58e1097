"""Answer a call by number in the poll loop."""

import numpy as np

from beluga import Client, Pool, Server
from beluga.rpc import METHOD_USER

with (
    Pool.create(["/dev/shm/methods"], device_size=64 << 20, force=True) as pool,
    Server(pool) as server,
    Client(pool, timeout_s=2.0) as client,
):
    server.handle(METHOD_USER, lambda request: request[::-1])  # in the poll loop: keep it short
    print(client.call(METHOD_USER, "abc").decode())  # cba
    print(client.call(METHOD_USER, np.arange(3, dtype=np.uint8))[0])  # 2
    print(client.stat().epoch)  # 1
Pool.destroy("/dev/shm/methods")
