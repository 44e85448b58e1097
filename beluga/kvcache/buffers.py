# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Converts an engine's memory (buffers, arrays, tensors) to (address, size) pairs."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from beluga._ffi import ffi, lib
from beluga.arguments import count_of
from beluga.errors import LayoutError
from beluga.transfer import is_tensor, tensor_start

if TYPE_CHECKING:
    from collections.abc import Sequence

    import typing_extensions
    from numpy.typing import ArrayLike

    from beluga.transfer import BlockLayout, Tensor

Buffer: TypeAlias = "typing_extensions.Buffer | NDArray[np.generic] | Tensor"
"""Contiguous memory: the buffer protocol, a numpy array, or a torch tensor in CPU memory."""

Fragments: TypeAlias = "Buffer | Sequence[Buffer]"
"""One block's bytes: a buffer, or a list or tuple of buffers that are stored back to back."""

Blocks: TypeAlias = "Sequence[Fragments] | NDArray[np.generic] | Tensor | Run"
"""A batch: a list of :data:`Fragments`, an array or tensor of blocks, or a :class:`Run`."""


BLOCK_SIZE_MAX: int = lib.BL_BLOCK_SIZE_MAX
_ADDRESS_MAX = 2**64 - 1
_OVERLAP = "the target blocks overlap; give targets in which each block has its own bytes"


@dataclasses.dataclass(slots=True)
class Run:
    """Blocks of equal length and equal fragment count, at known addresses of this process.

    ``fragments`` is a C-contiguous uint64 array of shape (count * fragment_count, 2): address,
    size. ``length`` is the size of one block in bytes. ``owners`` keeps the memory alive. ``start``
    is the index of the run's first block in the batch. ``read_only`` blocks cannot be targets.
    """

    count: int
    length: int
    fragment_count: int
    fragments: NDArray[np.uint64]
    owners: list[object] = dataclasses.field(default_factory=list)
    start: int = 0
    read_only: bool = False

    @classmethod
    def of(cls, layout: BlockLayout, block_ids: ArrayLike) -> Run:
        """Build a run of an engine's blocks, in the order of their layout. Raises LayoutError."""
        addresses = layout.addresses(block_ids)
        fragments = np.empty((*addresses.shape, 2), np.uint64)
        fragments[:, :, 0], fragments[:, :, 1] = addresses, layout.sizes
        count, per_block = addresses.shape
        owners, rows = list(layout.owners), fragments.reshape(-1, 2)
        return cls(count, layout.length, per_block, rows, owners, read_only=layout.read_only)

    def rest(self, first: int) -> Run:
        """Return the run without its first ``first`` blocks."""
        if first == 0:
            return self
        return dataclasses.replace(
            self,
            count=self.count - first,
            fragments=self.fragments[first * self.fragment_count :],
            start=self.start + first,
        )

    def __len__(self) -> int:
        return self.count

    def refuse_wrong(self) -> None:
        """Raise LayoutError if the fields contradict each other, because C does not check them, or
        if this run is part of another batch.
        """
        rows, shape = self.fragments, (self.count * self.fragment_count, 2)
        if self.start != 0:
            raise LayoutError(
                f"run.start is {self.start}, so the run is part of another batch; give a run with "
                "start 0"
            )
        if min(self.count, self.fragment_count, self.length) < 1:
            raise LayoutError("a run needs at least one block, one fragment and one byte")
        if (
            not isinstance(rows, np.ndarray)
            or rows.dtype != np.uint64
            or rows.shape != shape
            or not rows.flags.c_contiguous
        ):
            raise LayoutError(f"run.fragments must be a C-contiguous uint64 array of shape {shape}")
        sizes = rows[:, 1].reshape(self.count, self.fragment_count)
        longest = int(sizes.max())
        if longest > self.length or (sizes.sum(axis=1) != self.length).any():
            raise LayoutError(
                f"run.length is {self.length}, but the fragments of a block have another size in "
                "total"
            )
        first, last = int(rows[:, 0].min()), int(rows[:, 0].max())
        over = last + longest > _ADDRESS_MAX and (rows[:, 0] + rows[:, 1] < rows[:, 0]).any()
        if first == 0 or over:
            raise LayoutError("a fragment starts at address 0, or ends after the last address")


def _locate(buffer: Buffer, *, writable: bool) -> tuple[int, int, object]:
    """Return the address, the size in bytes, and the object to keep alive."""
    if is_tensor(buffer):
        start = tensor_start(buffer)
        if buffer.device.type != "cpu" or not buffer.is_contiguous():
            raise LayoutError("a tensor must be contiguous and in CPU memory for the CPU engine")
        return start, buffer.numel() * buffer.element_size(), buffer
    if _has_objects(buffer):
        raise LayoutError(
            f"a {type(buffer).__name__} of Python objects cannot be copied; give an array of "
            "numbers"
        )
    try:
        pointer = ffi.from_buffer("uint8_t[]", buffer, require_writable=writable)
    except (TypeError, BufferError, ValueError) as error:
        need = "writable, contiguous" if writable else "contiguous"
        raise LayoutError(
            f"need a {need} buffer, but got {type(buffer).__name__}: {error}"
        ) from None
    return int(ffi.cast("uintptr_t", pointer)), len(pointer), pointer


def _has_objects(buffer: typing_extensions.Buffer | NDArray[np.generic]) -> bool:
    """Whether the buffer holds Python references, which must not be overwritten."""
    if isinstance(buffer, np.ndarray):
        return bool(buffer.dtype.hasobject)
    try:
        kind = memoryview(buffer).format
    except (TypeError, ValueError, BufferError):  # a dtype without a buffer format, or not a buffer
        return False
    return "O" in re.sub(":[^:]*:", "", kind)  # without field names


def runs(blocks: Blocks, count: int, *, writable: bool) -> list[Run]:
    """Split a batch of ``count`` blocks, one for each key, into runs of equal shape.

    A numpy array is a batch of blocks along its first axis. Each block must be contiguous; no
    Python loop visits them. A Run is returned unchanged. Raises :class:`~beluga.errors.LayoutError`
    for unusable memory.
    """
    block_count = count_of("a batch of blocks", blocks)
    if count != block_count:
        raise LayoutError(f"{count} keys but {block_count} blocks; give one key per block")
    if count == 0:
        return []
    if isinstance(blocks, np.ndarray):
        return [_matrix_run(blocks, count, writable=writable)]
    if isinstance(blocks, Run):
        if writable and blocks.read_only:
            raise LayoutError("the target blocks' memory is read-only")
        blocks.refuse_wrong()
        if writable and count > 1:
            # A layout's blocks overlap only as a whole. All may share scratch memory, so the check
            # needs a fragment whose address depends on the block.
            starts = blocks.fragments[:, 0].reshape(count, -1)
            column = int(np.argmax(starts[0] != starts[1]))
            if len(np.unique(starts[:, column])) < count:
                raise LayoutError(_OVERLAP)
        batch = [blocks]
    else:
        batch = _list_runs(blocks, writable=writable)
        if writable:
            _refuse_overlap(np.concatenate([run.fragments for run in batch]))
    for run in batch:
        refuse_long(run.length)
    return batch


def _refuse_overlap(fragments: NDArray[np.uint64]) -> None:
    """Raise LayoutError if two targets share bytes, because the second would overwrite a hit."""
    fragments = fragments[fragments[:, 1] > 0]
    fragments = fragments[np.argsort(fragments[:, 0])]
    if (fragments[:-1].sum(axis=1) > fragments[1:, 0]).any():
        raise LayoutError(_OVERLAP)


def refuse_long(length: int) -> None:
    """Raise LayoutError for blocks of more bytes than the pool takes."""
    if length > BLOCK_SIZE_MAX:
        raise LayoutError(f"a block has {length} bytes, but the pool takes up to {BLOCK_SIZE_MAX}")


def _list_runs(blocks: Sequence[Fragments] | Tensor, *, writable: bool) -> list[Run]:
    if is_tensor(blocks):  # a list of rows, because torch may be unable to convert it
        tensor_start(blocks)
    batch: list[Run] = []
    shape: tuple[int, int] | None = None
    start, rows, owners = 0, list[tuple[int, int]](), list[object]()
    index = 0
    for index, block in enumerate(blocks):  # type: ignore[arg-type]  # a tensor has rows, too
        fragments = block if isinstance(block, (list, tuple)) else (block,)
        located = [_locate(fragment, writable=writable) for fragment in fragments]
        this = (sum(size for _, size, _ in located), len(located))
        if this[0] == 0:
            raise LayoutError(f"block {index} is empty; give blocks of at least one byte")
        if shape is not None and this != shape:
            batch.append(_list_run(start, index, shape, rows, owners))
            start, rows, owners = index, [], []
        shape = this
        rows.extend((address, size) for address, size, _ in located)
        owners.extend(owner for _, _, owner in located)
    assert shape is not None  # noqa: S101  # there was at least one block
    batch.append(_list_run(start, index + 1, shape, rows, owners))
    return batch


def _list_run(
    start: int, end: int, shape: tuple[int, int], rows: list[tuple[int, int]], owners: list[object]
) -> Run:
    fragments = np.array(rows, dtype=np.uint64)
    return Run(end - start, shape[0], shape[1], fragments, owners, start)


def _matrix_run(blocks: NDArray[np.generic], count: int, *, writable: bool) -> Run:
    if blocks.ndim < 2 or not (first := blocks[0]).flags.c_contiguous:
        raise LayoutError("an array of blocks needs two axes, and each block must be contiguous")
    if blocks.dtype.hasobject:
        raise LayoutError("an array of Python objects cannot be stored; give an array of numbers")
    if writable and not blocks.flags.writeable:
        raise LayoutError("the target array is read-only")
    length, stride = first.nbytes, blocks.strides[0]
    if not 0 < length <= BLOCK_SIZE_MAX:
        if length == 0:
            raise LayoutError(
                "the blocks of this array are empty; give blocks of at least one byte"
            )
        refuse_long(length)
    if writable and count > 1 and abs(stride) < length:
        raise LayoutError(_OVERLAP)
    fragments = np.empty((count, 2), np.uint64)
    start: int = first.__array_interface__["data"][0]
    fragments[0, 0] = start
    fragments[:, 1] = length
    if count > 1:
        fragments[1:, 0] = start + np.arange(1, count, dtype=np.int64) * stride
    return Run(count, length, 1, fragments, [blocks])
