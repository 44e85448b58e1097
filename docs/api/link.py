"""Limit the speed at which a cache uses the link."""

from beluga import IndexServer, KVCache, Pool
from beluga.transfer import LinkSettings, Speed, TransferClass

slow = LinkSettings(read=Speed(2_000_000_000), write=Speed(1_000_000_000))  # bytes per second
with (
    Pool.create(["/dev/shm/linked"], device_size=64 << 20, force=True) as pool,
    IndexServer(pool),
    KVCache(pool, namespace="x", link=slow, read_class=TransferClass.PREFETCH) as cache,
):
    cache.put([b"k" * 16], [bytes(1 << 20)])
    print(cache.transfer_stats()[TransferClass.OFFLOAD].bytes)  # 1048576
Pool.destroy("/dev/shm/linked")
