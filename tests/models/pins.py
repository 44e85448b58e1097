# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A dict as the model of csrc/index/pins.h."""

from __future__ import annotations

from errno import ENOENT, ENOSPC


class Pins:
    def __init__(self, block_count_max: int) -> None:
        self.block_count_max = block_count_max
        self.pins: dict[int, int] = {}

    def add(self, block: int) -> int:
        if block not in self.pins and len(self.pins) == self.block_count_max:
            return -ENOSPC
        self.pins[block] = self.pins.get(block, 0) + 1
        return self.pins[block]

    def remove(self, block: int) -> int:
        if block not in self.pins:
            return -ENOENT
        self.pins[block] -= 1
        return self.pins[block] or self.pins.pop(block)  # popping a zero returns it
