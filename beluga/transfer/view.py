# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Views describe an engine's memory for plans: an address for each index, within known bounds.

A view is made of a numpy array, of a torch or cupy array (by its pointer; neither is imported), or
of a bare pointer of any device with its owner. It is checked when it is made: each index within its
shape lies within its memory.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypedDict

import numpy as np

from beluga.errors import LayoutError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import TypeIs


DTYPE_SIZES = {"F32": 4, "F16": 2, "BF16": 2, "FP8": 1, "U8": 1}
"""Bytes of an element, by the engines' name of its type."""


class TensorDevice(Protocol):
    """The device of a tensor, as torch describes it."""

    @property
    def type(self) -> str:
        """``cpu``, ``cuda``, ..."""


class Tensor(Protocol):
    """The part of ``torch.Tensor`` that Beluga uses."""

    @property
    def device(self) -> TensorDevice:
        """Where its memory is."""

    @property
    def shape(self) -> Sequence[int]:
        """Its axes."""

    def stride(self) -> Sequence[int]:
        """Return the stride of each axis, in elements."""

    def data_ptr(self) -> int:
        """Return the address of the first element."""

    def numel(self) -> int:
        """Return the number of elements."""

    def element_size(self) -> int:
        """Return the size of an element in bytes."""

    def is_contiguous(self) -> bool:
        """Return whether the elements lie in order, without gaps."""


class CudaArrayInterface(TypedDict):
    """The part of CUDA's array interface that Beluga uses."""

    data: tuple[int, bool]  # the address, and whether it is read-only


class CudaArray(Protocol):
    """The part of ``cupy.ndarray``, or of another CUDA array, that Beluga uses."""

    @property
    def __cuda_array_interface__(self) -> CudaArrayInterface:
        """Where its memory is."""

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """The type of the elements."""

    @property
    def shape(self) -> Sequence[int]:
        """Its axes."""

    @property
    def strides(self) -> Sequence[int]:
        """The stride of each axis, in bytes."""


Array: TypeAlias = "NDArray[np.generic] | Tensor | CudaArray"
"""Memory of an engine that a :class:`View` can be made of."""


def is_tensor(array: object) -> TypeIs[Tensor]:
    """Return whether ``array`` is a torch tensor, without importing torch."""
    return hasattr(array, "data_ptr")


def tensor_start(tensor: Tensor) -> int:
    """Return the address of a tensor's first element; 0 if it has no elements. Only this function
    reads a tensor's pointer.

    Raises LayoutError for a tensor without memory of its own, as tracing, transforms and torch's
    meta device make them, for one whose bytes are not its values (a pending conjugation or
    negation), and for one that is larger than its storage.
    """
    name, lazy = type(tensor).__name__, False
    try:
        shape = tuple(getattr(tensor, "shape", ()))  # only torch's arrays have one
        if 0 in shape:
            return 0
        start = tensor.data_ptr()
        if start == 0:
            raise LayoutError(
                f"a {name} on {tensor.device} has no memory; give a tensor outside of tracing, and "
                "not of the meta device"
            )
        strides = tensor.stride() if shape else ()
        spans = [(size - 1) * step for size, step in zip(shape, strides, strict=True)]
        size = (1 + sum(spans)) * tensor.element_size()  # torch has no negative strides
        lazy = any(bool(getattr(tensor, check, bool)()) for check in ("is_conj", "is_neg"))
        storage: Any = getattr(tensor, "untyped_storage", lambda: None)()
        room = size  # for arrays of other libraries, without a storage that could be shorter
        if hasattr(storage, "nbytes"):
            room = storage.data_ptr() + storage.nbytes() - start
    except (RuntimeError, NotImplementedError, TypeError) as error:
        what = str(error).partition("\n")[0]
        raise LayoutError(
            f"a {name} has no memory that can be copied; torch reports: {what}"
        ) from None
    if lazy:
        raise LayoutError(f"a {name} has a pending operation; call resolve_conj().resolve_neg()")
    if size > room:
        raise LayoutError(
            f"a {name} needs {size} bytes, but its storage has {room}; it was resized"
        )
    return start


@dataclasses.dataclass(frozen=True, slots=True)
class View:
    """An array in an engine's memory: elements of ``item_size`` bytes from address ``start`` on.

    ``shape`` and ``strides`` (in bytes) have an entry for each axis. ``memory`` is the address and
    the size in bytes of the memory that may be used, and ``owner`` keeps it alive. Plans cannot
    read into ``read_only`` memory. Raises :class:`~beluga.errors.LayoutError` if an element lies
    outside of the memory.
    """

    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_size: int
    memory: tuple[int, int]
    owner: object = None
    read_only: bool = False

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.strides) or any(size < 1 for size in self.shape):
            raise LayoutError(f"shape {self.shape} with strides {self.strides} is not a valid view")
        spans = [(size - 1) * step for size, step in zip(self.shape, self.strides, strict=True)]
        low = self.start + sum(span for span in spans if span < 0)
        high = self.start + sum(span for span in spans if span > 0) + self.item_size
        begin, room = self.memory
        if low < begin or high > begin + room:
            raise LayoutError(
                f"shape {self.shape} needs bytes {low - begin} to {high - begin}, "
                f"but the memory has {room}"
            )

    @classmethod
    def of(cls, array: Array) -> View:
        """Return a view of a whole numpy array, or of a torch or cupy array on any device.

        Raises LayoutError for other objects.
        """
        if is_tensor(array):
            start, item = tensor_start(array), array.element_size()
            shape, strides = tuple(array.shape), tuple(step * item for step in array.stride())
            return cls._of(start, shape, strides, item, array)
        if isinstance(array, np.ndarray) and not array.dtype.hasobject:
            start, read_only = array.ctypes.data, not array.flags.writeable
            item = array.itemsize
            return cls._of(start, array.shape, array.strides, item, array, read_only=read_only)
        if hasattr(array, "__cuda_array_interface__"):
            start, read_only = array.__cuda_array_interface__["data"]
            item = array.dtype.itemsize
            return cls._of(start, array.shape, array.strides, item, array, read_only=read_only)
        raise LayoutError(
            f"a {type(array).__name__} is not an array with memory that Beluga can access"
        )

    @classmethod
    def _of(  # noqa: PLR0913  an array's parts
        cls,
        start: int,
        shape: Sequence[int],
        strides: Sequence[int],
        item: int,
        owner: object,
        *,
        read_only: bool = False,
    ) -> View:
        """An array's memory is the span of its elements. If elements share bytes, as in a broadcast
        array, nothing can be read into it.
        """
        if start == 0:
            raise LayoutError(f"a {type(owner).__name__} of shape {tuple(shape)} has no memory")
        spans = [(size - 1) * step for size, step in zip(shape, strides, strict=True)]
        read_only |= any(size > 1 and step == 0 for size, step in zip(shape, strides, strict=True))
        low = sum(span for span in spans if span < 0)
        room = sum(map(abs, spans)) + item
        memory = start + low, room
        return cls(start, tuple(shape), tuple(strides), item, memory, owner, read_only)

    @classmethod
    def foreign(  # noqa: PLR0913  all but the first two named
        cls,
        address: int,
        size: int,
        *,
        shape: Sequence[int],
        dtype: str,
        element_strides: Sequence[int] | None = None,
        offset: int = 0,
        owner: object = None,
    ) -> View:
        """``shape`` elements of a :data:`DTYPE_SIZES` type, ``offset`` bytes into ``size`` bytes at
        ``address`` of any device. Without ``element_strides`` they are C-contiguous."""
        if dtype not in DTYPE_SIZES:
            raise LayoutError(
                f"element type {dtype} is not supported; use {', '.join(DTYPE_SIZES)}"
            )
        item = DTYPE_SIZES[dtype]
        steps = (
            [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
            if element_strides is None
            else element_strides
        )
        strides = tuple(step * item for step in steps)
        return cls(address + offset, tuple(shape), strides, item, (address, size), owner)

    def address(self, *index: int) -> int:
        """Return the address of an element; the axes without an index are at 0."""
        if len(index) > len(self.shape) or not all(
            0 <= at < size for at, size in zip(index, self.shape, strict=False)
        ):
            raise LayoutError(f"index {index} is outside of shape {self.shape}")
        return self.start + sum(at * step for at, step in zip(index, self.strides, strict=False))

    def slice(self, axis: int, start: int, stop: int) -> View:
        """Return a view of the elements [start, stop) of one axis. Raises LayoutError."""
        if not (0 <= axis < len(self.shape) and 0 <= start < stop <= self.shape[axis]):
            raise LayoutError(
                f"slice {start}:{stop} of axis {axis} is outside of shape {self.shape}"
            )
        shape = (*self.shape[:axis], stop - start, *self.shape[axis + 1 :])
        return dataclasses.replace(self, start=self.start + start * self.strides[axis], shape=shape)

    def split(self, axis: int, size: int) -> View:
        """Return a view with one axis split in two: runs of ``size``, and the elements of a run."""
        runs, rest = divmod(self.shape[axis], size) if size > 0 else (0, 1)
        if rest or not runs:
            raise LayoutError(f"axis {axis} of shape {self.shape} needs runs of {size}")
        step = self.strides[axis]
        return dataclasses.replace(
            self,
            shape=(*self.shape[:axis], runs, size, *self.shape[axis + 1 :]),
            strides=(*self.strides[:axis], step * size, step, *self.strides[axis + 1 :]),
        )
