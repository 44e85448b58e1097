# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The engine's side of a copy: buffers, arrays and tensors as (address, size) pairs."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from beluga._ffi import ffi
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
"""One block's bytes: a buffer, or a list or tuple of them that stand end to end in the pool."""

Blocks: TypeAlias = "Sequence[Fragments] | NDArray[np.generic] | Tensor | Run"
"""A batch: a list of :data:`Fragments`, an array or tensor of blocks, or a :class:`Run`."""


_ADDRESS_MAX = 2**64 - 1


@dataclasses.dataclass(slots=True)
class Run:
    """Blocks of one length and one number of fragments, at known addresses of this process.

    ``fragments`` is a C-contiguous uint64 array of shape (count * fragment_count, 2): address,
    size. ``length`` is the size of one block, in bytes. ``owners`` keeps the memory alive.
    ``start`` is the index of the first block in the batch that the run was cut from. ``read_only``
    blocks cannot be targets.
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
        """Blocks of an engine, in the pool's order of its layout. Raises LayoutError."""
        addresses = layout.addresses(block_ids)
        fragments = np.empty((*addresses.shape, 2), np.uint64)
        fragments[:, :, 0], fragments[:, :, 1] = addresses, layout.sizes
        count, per_block = addresses.shape
        owners, rows = list(layout.owners), fragments.reshape(-1, 2)
        return cls(count, layout.length, per_block, rows, owners, read_only=layout.read_only)

    def rest(self, first: int) -> Run:
        """Return the blocks from ``first`` on."""
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
        """Raise LayoutError if the numbers contradict each other, because C believes them, or if
        this run is a part of another batch."""
        rows, shape = self.fragments, (self.count * self.fragment_count, 2)
        if self.start != 0:
            raise LayoutError(f"a run that starts at {self.start} is a part of a batch; give 0")
        if min(self.count, self.fragment_count, self.length) < 1:
            raise LayoutError("a run has blocks, fragments and bytes: give numbers from 1 on")
        if (
            not isinstance(rows, np.ndarray)
            or rows.dtype != np.uint64
            or rows.shape != shape
            or not rows.flags.c_contiguous
        ):
            raise LayoutError(f"a run's fragments are a C-contiguous uint64 array of shape {shape}")
        sizes = rows[:, 1].reshape(self.count, self.fragment_count)
        longest = int(sizes.max())
        if longest > self.length or (sizes.sum(axis=1) != self.length).any():
            raise LayoutError(f"a block's fragments have {self.length} bytes together, no others")
        first, last = int(rows[:, 0].min()), int(rows[:, 0].max())
        over = last + longest > _ADDRESS_MAX and (rows[:, 0] + rows[:, 1] < rows[:, 0]).any()
        if first == 0 or over:
            raise LayoutError("a fragment lies at address 0, or beyond the last one")


def _place(buffer: Buffer, *, writable: bool) -> tuple[int, int, object]:
    """Return the address, the size in bytes, and the object that must stay alive."""
    if is_tensor(buffer):
        start = tensor_start(buffer)
        if buffer.device.type != "cpu" or not buffer.is_contiguous():
            raise LayoutError("a tensor must be contiguous and in CPU memory for the CPU engine")
        return start, buffer.numel() * buffer.element_size(), buffer
    if _has_objects(buffer):
        raise LayoutError(f"a {type(buffer).__name__} of Python's objects has no bytes to copy")
    try:
        pointer = ffi.from_buffer("uint8_t[]", buffer, require_writable=writable)
    except (TypeError, BufferError, ValueError) as error:
        need = "writable, contiguous" if writable else "contiguous"
        raise LayoutError(f"need a {need} buffer, have {type(buffer).__name__}: {error}") from None
    return int(ffi.cast("uintptr_t", pointer)), len(pointer), pointer


def _has_objects(buffer: typing_extensions.Buffer | NDArray[np.generic]) -> bool:
    """Does the buffer hold Python references? To overwrite those would crash the interpreter."""
    if isinstance(buffer, np.ndarray):
        return bool(buffer.dtype.hasobject)
    try:
        kind = memoryview(buffer).format
    except (TypeError, ValueError, BufferError):  # a type without a name there, or no buffer
        return False
    return "O" in re.sub(":[^:]*:", "", kind)  # without the names of fields


def runs(blocks: Blocks, *, writable: bool) -> list[Run]:
    """Cut a batch into runs of equal shape.

    A numpy array is a batch of blocks along its first axis. Each block must be contiguous; no
    Python loop runs over them. A Run stays as it is.
    Raises :class:`~beluga.errors.LayoutError` for memory that cannot be used.
    """
    if count_of("a batch of blocks", blocks) == 0:
        return []
    if isinstance(blocks, Run):
        if writable and blocks.read_only:
            raise LayoutError("the target blocks' memory is read-only")
        blocks.refuse_wrong()
        return [blocks]
    if isinstance(blocks, np.ndarray):
        return [_matrix_run(blocks, writable=writable)]
    if is_tensor(blocks):  # a batch of its rows, which torch may be unable to make
        tensor_start(blocks)
    items = cast("Sequence[Fragments]", blocks)
    found: list[Run] = []
    shape: tuple[int, int] | None = None
    start, rows, owners = 0, list[tuple[int, int]](), list[object]()
    for index, block in enumerate(items):
        parts = block if isinstance(block, (list, tuple)) else (block,)
        places = [_place(part, writable=writable) for part in parts]
        this = (sum(size for _, size, _ in places), len(places))
        if this[0] == 0:
            raise LayoutError(f"block {index} has no bytes")
        if shape is not None and this != shape:
            found.append(_list_run(start, index, shape, rows, owners))
            start, rows, owners = index, [], []
        shape = this
        rows.extend((address, size) for address, size, _ in places)
        owners.extend(owner for _, _, owner in places)
    assert shape is not None  # noqa: S101  # there was at least one block
    found.append(_list_run(start, len(items), shape, rows, owners))
    return found


def _list_run(
    start: int, end: int, shape: tuple[int, int], rows: list[tuple[int, int]], owners: list[object]
) -> Run:
    fragments = np.array(rows, dtype=np.uint64)
    return Run(end - start, shape[0], shape[1], fragments, owners, start)


def _matrix_run(blocks: NDArray[np.generic], *, writable: bool) -> Run:
    if blocks.ndim < 2 or not (first := blocks[0]).flags.c_contiguous:
        raise LayoutError("an array of blocks needs two axes, and each block must be contiguous")
    if blocks.dtype.hasobject:
        raise LayoutError("an array of Python's objects has no bytes to be stored")
    if writable and not blocks.flags.writeable:
        raise LayoutError("the target array is read-only")
    count, length, stride = len(blocks), first.nbytes, blocks.strides[0]
    if length == 0:
        raise LayoutError("the blocks of this array have no bytes")
    if writable and count > 1 and abs(stride) < length:
        raise LayoutError("the target blocks share bytes; give an array in which each has its own")
    fragments = np.empty((count, 2), np.uint64)
    fragments[0, 0] = start = _start(first)
    fragments[0, 1] = length
    if count > 1:
        fragments[1:, 0] = start + np.arange(1, count, dtype=np.int64) * stride
        fragments[1:, 1] = length
    return Run(count, length, 1, fragments, [blocks])


def _start(block: NDArray[np.generic]) -> int:
    try:
        return int(ffi.cast("uintptr_t", ffi.from_buffer(block)))
    except (TypeError, ValueError, BufferError):  # the buffer protocol lacks the type
        return block.ctypes.data
