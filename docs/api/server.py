"""Serve a pool and limit its sessions."""

from beluga import Client, IndexServer, Pool
from beluga.rpc import Quota

with (
    Pool.create(["/dev/shm/served"], device_size=64 << 20, force=True) as pool,
    IndexServer(pool, quota=Quota(bytes=16 << 20, calls_per_s=100_000)) as server,
    Client(pool) as client,
):
    client.ping()
    print(server.stat().live_count)  # 1: sessions
    print(server.calls()["ping"].calls)  # 1
    server.limit(Quota())  # from now on there is no limit
Pool.destroy("/dev/shm/served")
