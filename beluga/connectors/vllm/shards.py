# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Reads blocks that engines with another number of ranks have stored, cut to the heads of this
rank.

A part of a block in the pool has the heads of one rank of the engine that stored it. A rank of
another engine reads the parts that contain its heads. Bytes of other heads go to a scratch buffer,
because checksums cover whole chunks.

vLLM registers a layer as a tensor with the axes blocks, heads, tokens and content, and a name for
their order in memory. A layer whose memory contradicts that name is not cut.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from beluga.connectors.vllm.layout import RUNS_PER_PAGE_MAX, Piece, Pieces, merged
from beluga.connectors.vllm.parts import heads_name
from beluga.transfer import tensor_start

if TYPE_CHECKING:
    from collections.abc import Mapping

    from beluga.connectors.vllm.layout import GroupLayout
    from beluga.connectors.vllm.parts import BlockPart

_SHARDS_MAX = 16  # shards of a block; blocks of engines with more ranks are not searched
_AXES = "BHNC"  # of a tensor: blocks, heads, tokens, content


@dataclasses.dataclass(frozen=True, slots=True)
class Shard:
    """One part of another engine's block: the heads per part, its number and name there, and the
    targets of its bytes here.
    """

    split: int
    number: int
    name: str
    pieces: Pieces


@dataclasses.dataclass(frozen=True, slots=True)
class _Page:
    """One layer's share of a block. In its order in the pool, it has the ``outer`` axes (size and
    stride in bytes), the heads, and ``run`` bytes end to end.
    """

    start: int
    block_stride: int
    outer: tuple[tuple[int, int], ...]
    head_stride: int
    heads: int
    run: int
    declared: list[Any]

    def pieces(self, skipped: int, count: int, scratch: int) -> list[Piece]:
        """Return the pieces of ``count`` heads, the first of which is number ``skipped`` of this
        rank. Heads that it does not have go to ``scratch``.
        """
        pieces: list[Piece] = []
        for offsets in itertools.product(*(range(0, n * step, step) for n, step in self.outer)):
            heads = range(skipped, skipped + count)
            for mine, several in itertools.groupby(heads, lambda head: 0 <= head < self.heads):
                numbers = list(several)
                if not mine:
                    pieces.append(Piece(scratch, 0, len(numbers) * self.run))
                    continue
                for head in numbers:
                    address = self.start + sum(offsets) + head * self.head_stride
                    pieces.append(Piece(address, self.block_stride, self.run))
        return pieces


class HeadShards:
    """The shards that a rank's layout can read. ``declared`` names the layout without the number of
    its heads.
    """

    def __init__(self, layout: GroupLayout, part: BlockPart, pages: list[_Page]) -> None:
        self.declared = json.dumps([page.declared for page in pages])
        self._layout, self._part, self._pages = layout, part, pages
        longest = max(page.run for page in pages) * part.heads
        self._scratch, self._scratch_start = _buffer(layout, longest)

    def all(self) -> list[Shard]:
        """Return the shards of all supported splits, except this engine's own."""
        heads, own = self._part.heads, self._part.count
        supported = []
        for split in range(1, heads + 1):
            if heads % split or split == own or heads // split > _SHARDS_MAX:
                continue
            first, last = self._part.first, self._part.first + own
            numbers = range(first // split, (last - 1) // split + 1)
            shards = [self._shard(split, number) for number in numbers]
            if all(shard is not None for shard in shards):
                supported += [shard for shard in shards if shard is not None]
        return supported

    def _shard(self, split: int, number: int) -> Shard | None:
        first = number * split
        scratch = self._scratch_start
        pages = [
            merged(page.pieces(first - self._part.first, split, scratch)) for page in self._pages
        ]
        if any(len(pieces) > RUNS_PER_PAGE_MAX for pieces in pages):
            return None
        return Shard(
            split,
            number,
            heads_name(first, split, self._part.heads),
            Pieces(
                [piece for pieces in pages for piece in pieces],
                block_count=self._layout.block_count,
                owners=(*self._layout.tensors, self._scratch),
            ),
        )


def head_shards(
    layout: GroupLayout, part: BlockPart, order: str, page_sizes: Mapping[str, int]
) -> HeadShards | None:
    """Return the shards for a layout, or None if its memory contradicts ``order``, which is
    vLLM's name of it, such as LBHNC.
    """
    if part.heads == 0 or sorted(order) != sorted(f"L{_AXES}"):
        return None
    inner = [axis for axis in order if axis in "HNC"]
    pages = []
    for name, tensor in layout.distinct.items():
        page = _page(tensor, inner, part.count, layout.block_count)
        if page is None or page.run * page.heads * _sizes(page) != page_sizes.get(name):
            return None
        pages.append(page)
    own = merged([piece for page in pages for piece in page.pieces(0, part.count, 0)])
    return HeadShards(layout, part, pages) if own == layout.pieces else None


def _page(tensor: Any, inner: list[str], heads: int, block_count: int) -> _Page | None:
    item = tensor.element_size()
    sizes = dict(zip(_AXES, tensor.shape, strict=False))
    strides = dict(zip(_AXES, (stride * item for stride in tensor.stride()), strict=False))
    if len(tensor.shape) != len(_AXES) or sizes["H"] != heads or sizes["B"] % block_count:
        return None
    ratio = sizes["B"] // block_count  # kernel blocks per block
    after = inner[inner.index("H") + 1 :]
    run = item
    for axis in reversed(after):
        if sizes[axis] > 1 and strides[axis] != run:
            return None
        run *= sizes[axis]
    outer = [(ratio, strides["B"])] if ratio > 1 else []
    outer += [(sizes[axis], strides[axis]) for axis in inner[: inner.index("H")] if sizes[axis] > 1]
    return _Page(
        start=tensor_start(tensor),
        block_stride=ratio * strides["B"],
        outer=tuple(outer),
        head_stride=strides["H"],
        heads=heads,
        run=run,
        declared=[str(tensor.dtype), "".join(inner), ratio, [sizes[axis] for axis in "NC"]],
    )


def _sizes(page: _Page) -> int:
    return math.prod(size for size, _ in page.outer)


def _buffer(layout: GroupLayout, size: int) -> tuple[Any, int]:
    """Return memory on the device of the blocks, and its address."""
    if layout.device == "cpu":
        array = np.zeros(size, np.uint8)
        return array, int(array.ctypes.data)
    import torch

    tensor = torch.zeros(size, dtype=torch.uint8, device=layout.tensors[0].device)
    return tensor, tensor_start(tensor)
