# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A dict as the model of csrc/index/hash.h."""

from __future__ import annotations

from errno import EEXIST, ENOENT, ENOSPC

Key = tuple[int, int]


class Index:
    def __init__(self, count_max: int) -> None:
        self.count_max = count_max
        self.block: dict[Key, int] = {}

    def find(self, key: Key) -> int:
        return self.block.get(key, -1)

    def add(self, key: Key, block: int) -> int:
        if key in self.block:
            return -EEXIST
        if len(self.block) == self.count_max:
            return -ENOSPC
        self.block[key] = block
        return 0

    def remove(self, key: Key) -> int:
        return 0 if self.block.pop(key, None) is not None else -ENOENT
