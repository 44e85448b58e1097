# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A device in plain memory, and a shared tier that fails where a test sets it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beluga.index import BlockState
from beluga.kvbm import BlockPool, Key, MutableBlock, RegisteredBlock
from beluga.metrics import Registry

SIZE, LENGTH = 4, 64  # tokens and bytes of a block


def content(number: int) -> NDArray[np.uint8]:
    return np.random.default_rng(number).integers(0, 256, LENGTH, np.uint8)


class Device:
    """Blocks of an engine, whose keys are numbers that determine their bytes."""

    def __init__(self, count: int, registry: Registry | None = None, **options: Any) -> None:
        self.pool = BlockPool(
            "device", count, block_size=SIZE, registry=registry or Registry(), **options
        )
        self.memory = np.zeros((count, LENGTH), np.uint8)

    def write(
        self, blocks: Sequence[MutableBlock], numbers: Sequence[int]
    ) -> list[RegisteredBlock]:
        """Write the content of ``numbers`` to reserved blocks, and register them as one chain."""
        for place, (block, number) in enumerate(zip(blocks, numbers, strict=True)):
            self.memory[block.index] = content(number)
            block.fill(SIZE)
            block.commit(number, parent=numbers[place - 1] if place else None)
        return self.pool.register(blocks)

    def store(self, numbers: Sequence[int], request: str = "r") -> list[RegisteredBlock]:
        return self.write(self.pool.reserve(request, len(numbers)).result(30), numbers)


class SharedMemory:
    """A shared tier of one device. ``before`` is called with "save" or "load" before a copy."""

    name = "memory"

    def __init__(self, device: Device) -> None:
        self.device = device
        self.blocks: dict[Key, bytes] = {}
        self.is_full = False
        self.copies: list[tuple[str, list[Key]]] = []
        self.before: Callable[[str], None] = lambda what: None

    def save(self, keys: Sequence[Key], blocks: Sequence[int]) -> list[int]:
        self.copies.append(("save", list(keys)))
        self.before("save")
        states: list[int] = []
        for key, block in zip(keys, blocks, strict=True):
            if key in self.blocks:
                states.append(BlockState.HIT)
            elif self.is_full:
                states.append(BlockState.REFUSED)
            else:
                self.blocks[key] = self.device.memory[block].tobytes()
                states.append(BlockState.GRANTED)
        return states

    def load(self, keys: Sequence[Key], blocks: Sequence[int]) -> int:
        self.copies.append(("load", list(keys)))
        self.before("load")
        for place, (key, block) in enumerate(zip(keys, blocks, strict=True)):
            if key not in self.blocks:
                return place
            self.device.memory[block] = np.frombuffer(self.blocks[key], np.uint8)
        return len(keys)
