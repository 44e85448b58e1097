# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Fixtures: a small pool of each kind of coherence, a server in this process, and a cache."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from beluga import IndexServer, KVCache, Pool
from beluga._ffi import ffi, lib
from beluga.index import IndexClient

DEVICE_SIZE = 48 << 20


@pytest.fixture(params=["hardware", "software", ["hardware", "software"]], ids=str)
def pool(request: pytest.FixtureRequest, paths: list[Path]) -> Iterator[Pool]:
    """Make a pool of two sparse devices in memory."""
    with Pool.create(paths, device_size=DEVICE_SIZE, coherence=request.param, sparse=True) as pool:
        yield pool


@pytest.fixture
def cache(pool: Pool, server: IndexServer) -> Iterator[KVCache]:
    with KVCache(pool, namespace="test") as cache:
        yield cache


def digests(count: int, *, start: int = 0) -> list[bytes]:
    """Return digests of numbered blocks."""
    return [hashlib.sha256(b"block %d" % i).digest() for i in range(start, start + count)]


def payload(count: int, length: int, *, seed: int = 0) -> NDArray[np.uint8]:
    """Return bytes that differ between blocks and between places."""
    return np.random.default_rng(seed).integers(0, 256, size=(count, length), dtype=np.uint8)


def place(cache: KVCache, digest: bytes) -> int:
    """Return the pool offset of a block."""
    return IndexClient(cache.client).lookup(cache.keys([digest])).hits[0].offset


def flip(pool: Pool, offset: int) -> None:
    """Damage one byte in the pool."""
    address = ffi.cast("uint8_t *", lib.bl_pool_address(pool.handle, offset))
    address[0] ^= 0x40
    lib.bl_drop(address, 1)
