# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Dicts and lists as the model of csrc/space/extent.h; each answer looks at all of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from errno import E2BIG, EAGAIN, EBUSY, EEXIST, EINVAL

from models.fit import STRIPE, STRIPES_MAX, blocks_in, cells, free_runs

CLASSES_MAX = 64


@dataclass
class Extent:
    block_size: int
    stripes: int
    generation: int
    blocks: list[str] = field(default_factory=list)  # "free", "used" or "held"


class Extents:
    def __init__(self, stripe_count: int, data_offset: int) -> None:
        self.stripe_count, self.data_offset = stripe_count, data_offset
        self.extents: dict[int, Extent] = {}

    def free(self) -> set[int]:
        taken = {s for f, e in self.extents.items() for s in range(f, f + e.stripes)}
        return set(range(self.stripe_count)) - taken

    def offset(self, first: int, block: int) -> int:
        return self.data_offset + first * STRIPE + block * self.extents[first].block_size

    def find(self, offset: int) -> tuple[Extent, int] | None:
        for first, extent in self.extents.items():
            for block in range(len(extent.blocks)):
                if self.offset(first, block) == offset:
                    return extent, block
        return None

    def open(self, block_size: int, any_fit: bool, generation: int) -> int:
        classes = {e.block_size for e in self.extents.values()}
        if block_size not in classes and len(classes) == CLASSES_MAX:
            return -E2BIG
        free = self.free()
        runs = [
            (first, stripes)
            for first, stripes in cells(block_size, self.stripe_count)
            if free.issuperset(range(first, first + stripes))
        ]
        if not runs and any_fit:
            runs = free_runs(block_size, free)
        if not runs:
            return -EAGAIN
        first, stripes = runs[0]
        filled = blocks_in(block_size, stripes) * block_size
        self.make(first, Extent(block_size, -(-filled // STRIPE), generation))
        return first

    def make(self, first: int, extent: Extent) -> None:
        extent.blocks = ["free"] * blocks_in(extent.block_size, extent.stripes)
        self.extents[first] = extent

    def adopt(self, first: int, extent: Extent) -> int:
        if not 1 <= extent.stripes <= STRIPES_MAX or first + extent.stripes > self.stripe_count:
            return -EINVAL
        if not blocks_in(extent.block_size, extent.stripes):
            return -EINVAL
        if not self.free().issuperset(range(first, first + extent.stripes)):
            return -EEXIST
        self.make(first, extent)
        return 0

    def take(self, block_size: int) -> int:
        for first, extent in sorted(self.extents.items()):
            if extent.block_size == block_size and "free" in extent.blocks:
                block = extent.blocks.index("free")
                extent.blocks[block] = "used"
                return self.offset(first, block)
        return -EAGAIN

    def turn(self, offset: int, old: str, new: str) -> int:
        found = self.find(offset)
        if not found or found[0].blocks[found[1]] != old:
            return -EINVAL
        found[0].blocks[found[1]] = new
        return 0

    def turn_all(self, old: str, new: str) -> None:
        for extent in self.extents.values():
            extent.blocks = [new if state == old else state for state in extent.blocks]

    def claim(self, offset: int, block_size: int) -> int:
        found = self.find(offset)
        if not found or found[0].block_size != block_size:
            return -EINVAL
        return 0 if self.turn(offset, "free", "used") == 0 else -EEXIST

    def close(self, first: int) -> int:
        if first not in self.extents:
            return -EINVAL
        if set(self.extents[first].blocks) != {"free"}:
            return -EBUSY
        del self.extents[first]
        return 0
