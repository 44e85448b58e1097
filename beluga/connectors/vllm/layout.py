# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The layout of a block: where its bytes are in the engine's tensors, and a name for that
arrangement.

An engine registers one tensor per layer. One of its axes counts blocks, or the smaller blocks of
its kernels; the rest, for one block, is a *page*, which is one contiguous run of bytes or a few
(separate K and V). A block in the pool is the concatenation of all layers' pages, in the engine's
order of layers. An ambiguous tensor is rejected when the engine starts, rather than guessed from
its shape.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from beluga.errors import ConnectorError, LayoutError
from beluga.kvcache import Run
from beluga.transfer import tensor_start

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

RUNS_PER_PAGE_MAX = 64  # more runs indicate a misinterpreted layout


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A run of bytes of every block: that of block b starts at ``address + b * stride``."""

    address: int
    stride: int
    size: int


class Pieces:
    """The location of blocks: the pieces of each block, in their order in the pool. ``owners``
    keeps the memory alive. Sizes are in bytes.
    """

    states = False  # whether a block is a state of recurrent layers

    def __init__(self, pieces: Sequence[Piece], *, block_count: int, owners: Sequence[Any]) -> None:
        self.pieces = list(pieces)
        self.block_count = block_count
        self.block_size = sum(piece.size for piece in self.pieces)
        self.tensors = tuple(owners)
        self._table = np.array(
            [dataclasses.astuple(piece) for piece in self.pieces], dtype=np.uint64
        )

    def run(self, block_ids: Sequence[int]) -> Run:
        """Return the bytes of these blocks, for the CPU engine."""
        return Run(
            len(block_ids),
            self.block_size,
            len(self.pieces),
            self.fragments(block_ids),
            list(self.tensors),
        )

    def fragments(self, block_ids: Sequence[int]) -> NDArray[np.uint64]:
        """Return address and size of each piece of each block, of shape (blocks * pieces, 2).

        Raises :class:`ConnectorError` for a block that the engine does not have.
        """
        ids = np.asarray(block_ids, dtype=np.int64)
        wrong = ids[(ids < 0) | (ids >= self.block_count)]
        if len(wrong):
            raise ConnectorError(
                f"block id {wrong[0]} is out of range: the engine has {self.block_count} blocks "
                f"(0-{self.block_count - 1})"
            )
        fragments = np.empty((len(ids), len(self.pieces), 2), dtype=np.uint64)
        fragments[:, :, 0] = self._table[:, 0] + ids.astype(np.uint64)[:, None] * self._table[:, 1]
        fragments[:, :, 1] = self._table[:, 2]
        return fragments.reshape(-1, 2)


class GroupLayout(Pieces):
    """The pieces of the blocks of one group of layers. ``distinct`` has its tensors without those
    that share another one's memory.
    """

    def __init__(
        self, tensors: Mapping[str, Any], *, block_count: int, page_sizes: Mapping[str, int]
    ) -> None:
        """``page_sizes`` has the bytes of a page of each layer, as the engine declares them.

        Raises :class:`~beluga.errors.ConnectorError` for tensors that are not understood.
        """
        if not tensors:
            raise ConnectorError(
                "the engine has registered no KV cache; give it at least one layer"
            )
        owned_pieces: list[tuple[Any, Piece]] = []
        declared: list[list[Any]] = []
        seen: set[int] = set()
        self.distinct: dict[str, Any] = {}
        for name, tensor in tensors.items():
            page = _Page(name, tensor, block_count, page_sizes.get(name))
            if page.start in seen:  # the layer shares another layer's tensor
                continue
            seen.add(page.start)
            self.distinct[name] = tensor
            owned_pieces += [(tensor, piece) for piece in page.pieces]
            declared.append([str(tensor.dtype), page.shape, page.order, len(page.pieces)])
        self.owned_pieces = tuple(owned_pieces)  # each piece with its tensor
        super().__init__(
            merged([piece for _, piece in owned_pieces]),
            block_count=block_count,
            owners=tuple(tensors.values()),
        )
        self.device: str = next(iter(tensors.values())).device.type
        self.declared = json.dumps(declared)


class _Page:
    """One layer's share of a block."""

    def __init__(self, name: str, tensor: Any, block_count: int, declared: int | None) -> None:
        try:
            self.start = tensor_start(tensor)
        except LayoutError as error:
            raise ConnectorError(f"{name}: {error}") from None
        item = tensor.element_size()
        shape, strides = list(tensor.shape), [stride * item for stride in tensor.stride()]
        ratio = _kernel_blocks(shape, block_count)
        if ratio > 1 and declared == item * math.prod(shape) // block_count:
            shape[:1], strides[:1] = [block_count, ratio], [strides[0] * ratio, strides[0]]
        axis = _block_axis(name, tuple(shape), block_count)
        page_axes = [
            (size, stride)
            for index, (size, stride) in enumerate(zip(shape, strides, strict=True))
            if index != axis
        ]
        self.shape = [size for size, _ in page_axes]
        # The page's axes from the slowest to the fastest in memory, which a shape does not show.
        self.order = sorted(range(len(page_axes)), key=lambda index: -page_axes[index][1])
        run, outer = item, list[tuple[int, int]]()
        for size, stride in sorted(page_axes, key=lambda axis: axis[1]):
            if size == 1:
                continue
            if stride == run and not outer:
                run *= size
            elif stride < run:
                raise ConnectorError(f"{name}: parts of a page overlap: strides {strides}")
            else:
                outer.append((size, stride))
        outer.reverse()
        offsets = [
            sum(steps)
            for steps in itertools.product(
                *(range(0, size * stride, stride) for size, stride in outer)
            )
        ]
        if len(offsets) > RUNS_PER_PAGE_MAX:
            raise ConnectorError(
                f"{name}: a page is in {len(offsets)} separate runs (shape {tuple(tensor.shape)}, "
                f"strides {tuple(tensor.stride())}); this layout is not supported"
            )
        self.pieces = [Piece(self.start + offset, strides[axis], run) for offset in offsets]
        self.size = run * len(offsets)
        if strides[axis] < run:
            raise ConnectorError(f"{name}: blocks overlap: strides {tuple(tensor.stride())}")
        if declared not in (None, self.size):
            raise ConnectorError(
                f"{name}: a block's page has {self.size} bytes, but the engine declares "
                f"{declared}; this layout is not supported"
            )


def _kernel_blocks(shape: list[int], block_count: int) -> int:
    """Return how many kernel blocks are a block, if the first axis counts those; else 1."""
    if len(shape) < 2 or shape[0] % block_count or block_count in shape[1:2]:
        return 1
    return shape[0] // block_count


def _block_axis(name: str, shape: tuple[int, ...], block_count: int) -> int:
    """Return the axis that counts blocks: the first, or the second after K and V."""
    if len(shape) >= 2 and shape[0] == block_count and not shape[1] == block_count == 2:
        return 0
    if len(shape) >= 3 and shape[0] == 2 and shape[1] == block_count != 2:
        return 1
    raise ConnectorError(
        f"{name}: a KV cache of shape {shape} for {block_count} blocks is not supported (the first "
        "axis must count blocks, or the second after K and V)"
    )


def merged(pieces: list[Piece]) -> list[Piece]:
    """Merge pieces that are adjacent in every block, such as layers packed within a block."""
    merged_pieces: list[Piece] = []
    for piece in pieces:
        last = merged_pieces[-1] if merged_pieces else None
        if last and last.stride == piece.stride and last.address + last.size == piece.address:
            merged_pieces[-1] = dataclasses.replace(last, size=last.size + piece.size)
        else:
            merged_pieces.append(piece)
    return merged_pieces
