# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Blocks by number: short words for tests of the block index."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray
from support.emulation import PATIENCE

from beluga.index import Grant, IndexClient
from beluga.pool import Pool
from beluga.rpc import Client

MASK = (1 << 64) - 1
CHAIN = 8
BLOCK_WORDS = 24_000  # 192 kB: several checksums


def keys(numbers: Iterable[int]) -> NDArray[np.uint64]:
    """A key for each number, with well-mixed bits like those of digests."""
    pairs = [(n * 0x9E3779B97F4A7C15 & MASK, ~n * 0xD6E8FEB86659FD93 & MASK) for n in numbers]
    return np.array(pairs, dtype=np.uint64).reshape(-1, 2)


def content(number: int) -> NDArray[np.uint64]:
    """The bytes of a block: no word occurs twice, so that every mix-up is detected."""
    return np.arange(BLOCK_WORDS, dtype=np.uint64) * np.uint64(3) + np.uint64(number << 32)


def states(grants: Iterable[Grant]) -> list[str]:
    return [grant.state.name for grant in grants]


def put(
    index: IndexClient, numbers: Iterable[int], length: int = 1 << 20, chunk_size: int = 0
) -> list[Grant]:
    """Reserve and commit blocks, a few at a time. Returns the grants. Every number must be new, and
    there must be room.
    """
    left, done = list(numbers), []
    while left:
        part, left = left[:8], left[8:]
        grants = index.reserve(keys(part), length=length, chunk_size=chunk_size)
        assert states(grants) == ["GRANTED"] * len(part)
        assert index.commit(grants) == [0] * len(part)
        done += grants
    return done


def held(index: IndexClient, numbers: Iterable[int]) -> set[int]:
    """Return the committed numbers."""
    return {number for number in numbers if index.lookup(keys([number])).hits}


def eventually(condition: Callable[[], bool], timeout_s: float = 20.0) -> bool:
    end = time.monotonic() + timeout_s * PATIENCE
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


@contextmanager
def hasty_client(pool: Pool, timeout_s: float) -> Iterator[Client]:
    """Yield a client whose calls have a short time limit; its attachment has the usual one."""
    with Client(pool) as client:
        client.timeout_s = timeout_s
        yield client
