"""Make a pool of two devices, open it and destroy it."""

from beluga import Pool
from beluga.pool import DeviceSpec

first, second = DeviceSpec.parse("/dev/shm/a"), "/dev/shm/b"
with Pool.create([first, second], device_size=64 << 20, lane_count=16, force=True) as pool:
    print(len(pool.devices))  # 2
    print(pool.geometry.lane_count)  # 16
with Pool.open(["/dev/shm/b", "/dev/shm/a"]) as pool:  # in any order
    print(pool.geometry.device_count)  # 2
Pool.destroy(["/dev/shm/a", "/dev/shm/b"])
