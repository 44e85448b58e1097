# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Tiers for tests of the block manager: owned ones in plain memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beluga.metrics import Registry
from beluga.tiers import (
    BlockPool,
    MutableBlock,
    OwnedTier,
    RegisteredBlock,
    Storage,
    TierBlocks,
)

SIZE, LENGTH = 4, 64  # tokens and bytes of a block


def key_of(number: int) -> tuple[int, int]:
    return (number, number * 3)


def content(number: int) -> NDArray[np.uint8]:
    return np.random.default_rng(number).integers(0, 256, LENGTH, np.uint8)


def owned(name: str, count: int, registry: Registry | None = None, **options: Any) -> OwnedTier:
    storage = Storage.allocate(count * LENGTH)
    pool = BlockPool(name, count, block_size=SIZE, registry=registry or Registry(), **options)
    return OwnedTier(pool, TierBlocks.of_storage(storage, LENGTH))


def bytes_of(tier: OwnedTier, index: int) -> NDArray[np.uint8]:
    assert tier.blocks.storage is not None
    return tier.blocks.storage.array().reshape(-1, LENGTH)[index]


def write(
    tier: OwnedTier,
    blocks: Sequence[MutableBlock],
    numbers: Sequence[int],
    *,
    parents: Sequence[int | None] | None = None,
    priority: int = 0,
) -> list[RegisteredBlock]:
    """Write the content of ``numbers`` to reserved blocks, and register them as one chain."""
    for place, (block, number) in enumerate(zip(blocks, numbers, strict=True)):
        parent = parents[place] if parents else (numbers[place - 1] if place else None)
        bytes_of(tier, block.index)[:] = content(number)
        block.fill(SIZE)
        above = None if parent is None else key_of(parent)
        block.commit(key_of(number), parent=above, priority=priority)
    return tier.pool.register(blocks)


def store(
    tier: OwnedTier, numbers: Sequence[int], request: str = "r", *, priority: int = 0
) -> list[RegisteredBlock]:
    return write(
        tier,
        tier.pool.reserve(request, len(numbers)).result(30),
        numbers,
        priority=priority,
    )
