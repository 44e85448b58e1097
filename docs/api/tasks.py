"""Call a handler from many tasks of asyncio."""

import asyncio

from beluga import AsyncClient, Handlers, Pool, Server


def square(number: int) -> int:
    return number * number


async def main(pool: Pool) -> None:
    async with AsyncClient(pool, sessions=4) as client:
        remote = client.remote(square)
        print(sum(await asyncio.gather(*(remote(number) for number in range(10)))))  # 285
        print(await client.call("square", 12, returns=int))  # 144


with (
    Pool.create(["/dev/shm/tasks"], device_size=64 << 20, force=True) as pool,
    Server(pool) as server,
):
    server.register(Handlers(square), threads=4)
    asyncio.run(main(pool))
Pool.destroy("/dev/shm/tasks")
