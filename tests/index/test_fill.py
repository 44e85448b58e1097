# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""How much of a pool's devices blocks of real models fill: payload relative to all used space."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import pytest
from support.blocks import held, keys, put

from beluga.index import IndexClient, IndexServer
from beluga.pool import Pool
from beluga.rpc import Client

MIB = 1 << 20
SIZES = {"1.1 MiB": 11 * MIB // 10, "2.5 MiB": 5 * MIB // 2, "3 MiB": 3 * MIB}
CHUNK_SIZE = 16384  # the checksums take another page
FILL_MIN = 0.95

each_size = pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
each_pool = pytest.mark.parametrize(
    ("device_count", "pool_size"), [(1, 512 * MIB), (2, 1024 * MIB)], ids=["512 MiB", "1 GiB"]
)


def fill(index: IndexClient, size: int, pool_size: int, first: int = 0) -> range:
    """Put a third more blocks than fit."""
    numbers = range(first, first + pool_size * 4 // (3 * size))
    put(index, numbers, length=size, chunk_size=CHUNK_SIZE)
    return numbers


def shuffled(numbers: Iterable[int]) -> list[int]:
    order = list(numbers)
    random.Random(7).shuffle(order)
    return order


@pytest.mark.long
@each_pool
@pytest.mark.parametrize("order", ["as written", "at random"])
@pytest.mark.parametrize("second", SIZES.values(), ids=SIZES)
@each_size
def test_blocks_of_one_size_and_then_of_another_fill_the_pool(
    shm: Path, *, device_count: int, pool_size: int, size: int, second: int, order: str
) -> None:
    paths = [shm / str(index) for index in range(device_count)]
    device_size = pool_size // device_count
    with (
        Pool.create(paths, device_size=device_size, sparse=True) as pool,
        IndexServer(pool),
        Client(pool) as client,
    ):
        index = IndexClient(client)
        numbers = fill(index, size, pool_size)
        assert len(held(index, numbers)) * size >= FILL_MIN * pool_size
        if order == "at random":
            for number in shuffled(numbers):
                index.lookup(keys([number]))
        others = fill(index, second, pool_size, first=1 << 20)
        assert len(held(index, others)) * second >= FILL_MIN * pool_size


@each_size
def test_a_pool_is_filled_before_anything_is_evicted(shm: Path, size: int) -> None:
    pool_size = 512 * MIB
    with (
        Pool.create([shm / "a"], device_size=pool_size, sparse=True) as pool,
        IndexServer(pool),
        Client(pool) as client,
    ):
        index = IndexClient(client)
        put(index, range(int(FILL_MIN * pool_size / size) + 1), length=size, chunk_size=CHUNK_SIZE)
        stat = index.stat()
        assert stat.evict_count == 0
        assert stat.block_bytes >= FILL_MIN * pool_size


def test_a_change_of_models_keeps_the_pool_in_use(shm: Path) -> None:
    """While blocks of one size replace those of another, no more old bytes are evicted than new
    ones are put.
    """
    pool_size = 1024 * MIB
    old, new = SIZES["2.5 MiB"], SIZES["3 MiB"]
    with (
        Pool.create([shm / "a"], device_size=pool_size, sparse=True) as pool,
        IndexServer(pool),
        Client(pool) as client,
    ):
        index = IndexClient(client)
        for number in shuffled(fill(index, old, pool_size)):
            index.lookup(keys([number]))
        used = []
        for number in range(1 << 20, (1 << 20) + 320):
            put(index, [number], length=new, chunk_size=CHUNK_SIZE)
            used.append(index.stat().block_bytes / pool_size)
        assert min(used) > 0.7
