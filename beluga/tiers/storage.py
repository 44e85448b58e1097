# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The memory of a tier that this program owns or was brought: an address, a size and a type.

The memory lives as long as the storage is open or a view of it exists. Blocks that lie in a storage
are copied to those of another one by :func:`copy_blocks`::

    host = Storage.allocate(64 << 20)
    blocks = TierBlocks.of_storage(host, 1 << 20)        # 64 blocks of 1 MiB
    copy_blocks(device_blocks, [3, 5], blocks, [0, 1])
"""

from __future__ import annotations

import dataclasses
import enum
import math
import mmap
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from beluga._ffi import ffi, lib
from beluga.errors import EngineUnavailableError, LayoutError, TierError
from beluga.pool import STRIPE_SIZE
from beluga.transfer import CupyDriver, View, is_tensor

if TYPE_CHECKING:
    from beluga.pool import Pool
    from beluga.transfer import CudaDriver


class MemoryType(enum.Enum):
    """What kind of memory a storage has. A disk is no memory: it is a lower tier."""

    DEVICE = "device"
    """A GPU's memory, which the CPU cannot read."""
    PINNED = "pinned"
    """Memory of this host that is page-locked and mapped for a GPU."""
    SYSTEM = "system"
    """Other memory of this host."""


class _Memory:
    """Memory that is freed when nothing uses it any more."""

    __slots__ = ("__weakref__", "used")

    def __init__(self, used: object, free: Callable[[], object] | None = None) -> None:
        self.used = used
        if free is not None:
            weakref.finalize(self, free)


class Storage:
    """The memory of a tier. Make one with a class method; ``size`` is in bytes.

    ``is_owned`` says whether Beluga allocated it. ``driver`` copies to and from a GPU's memory.
    Raises TierError for a size of 0.
    """

    def __init__(  # noqa: PLR0913  all of them named
        self,
        *,
        address: int,
        size: int,
        memory_type: MemoryType,
        memory: object,
        is_owned: bool = False,
        read_only: bool = False,
        pool: Pool | None = None,
        driver: CudaDriver | None = None,
    ) -> None:
        _refuse_empty(size)
        self.size, self.type, self.is_owned, self.read_only = (
            size,
            memory_type,
            is_owned,
            read_only,
        )
        self.pool, self.driver = pool, driver
        self._address = address
        self._memory: object = memory

    @classmethod
    def allocate(cls, size: int) -> Storage:
        """Allocate zeroed memory of this host, in whole pages."""
        _refuse_empty(size)
        memory = np.frombuffer(mmap.mmap(-1, size), np.uint8)
        return cls(
            address=memory.ctypes.data,
            size=size,
            memory_type=MemoryType.SYSTEM,
            memory=memory,
            is_owned=True,
        )

    @classmethod
    def pinned(cls, size: int, driver: CudaDriver | None = None) -> Storage:
        """Allocate zeroed memory of this host that a GPU reaches, too.

        Raises TierError on a machine without a GPU or cupy.
        """
        _refuse_empty(size)
        driver = driver or _cupy("pinned memory")
        pinned = driver.pin(size)
        pinned.array[:] = 0
        return cls(
            address=pinned.array.ctypes.data,
            size=size,
            memory_type=MemoryType.PINNED,
            memory=_Memory(pinned, lambda: driver.unpin(pinned)),
            is_owned=True,
            driver=driver,
        )

    @classmethod
    def device(cls, size: int, driver: CudaDriver | None = None) -> Storage:
        """Allocate memory of a GPU, which is not zeroed. Raises TierError where there is none."""
        _refuse_empty(size)
        driver = driver or _cupy("GPU memory")
        address = driver.allocate(size)
        return cls(
            address=address,
            size=size,
            memory_type=MemoryType.DEVICE,
            memory=_Memory(address, lambda: driver.free(address)),
            is_owned=True,
            driver=driver,
        )

    @classmethod
    def of(cls, brought: object, driver: CudaDriver | None = None) -> Storage:
        """Use memory that somebody else owns: a torch tensor, anything with an array interface of
        numpy or CUDA, DLPack of this host's memory, or a buffer such as an mmap. It is contiguous.

        ``driver`` copies to and from a GPU's memory; without it, only a copy engine can.
        """
        view, type_ = _view_of(brought)
        dense = math.prod(view.shape) * view.item_size
        if dense != view.memory[1]:
            raise TierError(f"memory of shape {view.shape} has gaps; bring a contiguous array")
        return cls(
            address=view.memory[0],
            size=view.memory[1],
            memory_type=type_,
            memory=view.owner,
            read_only=view.read_only,
            driver=driver,
        )

    @classmethod
    def of_pool(cls, pool: Pool, offset: int, size: int) -> Storage:
        """Use ``size`` bytes from an offset of a pool's linear range, which nobody else uses.

        They need not be consecutive in memory, because stripes lie on several devices.
        """
        _refuse_empty(size)
        if offset < 0 or offset + size > pool.geometry.size:
            raise TierError(
                f"bytes {offset} to {offset + size} are not in a pool of {pool.geometry.size}"
            )
        storage = cls(
            address=offset, size=size, memory_type=MemoryType.SYSTEM, memory=pool, pool=pool
        )
        storage.address()  # raises if the pool is closed
        return storage

    @property
    def pool_offset(self) -> int:
        """Where it begins in the pool's linear range. Raises TierError if it is in no pool."""
        if self.pool is None:
            raise TierError("this storage is not in a pool")
        return self._address

    def address(self, offset: int = 0) -> int:
        """Return the address of a byte. Raises TierError beyond the end and after :meth:`close`."""
        if not 0 <= offset < self.size:
            raise TierError(f"byte {offset} is not in a storage of {self.size}")
        self._owner()
        if self.pool is None:
            return self._address + offset
        with self.pool.using() as pool:
            return int(ffi.cast("uintptr_t", lib.bl_pool_address(pool, self._address + offset)))

    def view(
        self,
        shape: Sequence[int],
        dtype: str,
        *,
        element_strides: Sequence[int] | None = None,
        offset: int = 0,
    ) -> View:
        """Return a view of elements of type F32, F16, BF16, FP8 or U8, ``offset`` bytes in.

        Raises LayoutError if an element lies outside of the storage, or of the pool's stripe.
        """
        start, size = self.address(), self.size
        if self.pool is not None:
            start = self.address(offset)
            size = min(size - offset, STRIPE_SIZE - (self._address + offset) % STRIPE_SIZE)
            offset = 0
        view = View.foreign(
            start,
            size,
            shape=tuple(shape),
            dtype=dtype,
            element_strides=element_strides,
            offset=offset,
            owner=self._owner(),
        )
        return dataclasses.replace(view, read_only=self.read_only)

    def array(self) -> NDArray[np.uint8]:
        """Return the bytes as an array that keeps the memory alive.

        Raises TierError for a GPU's memory and a pool's, which only copy engines touch.
        """
        if self.type is MemoryType.DEVICE or self.pool is not None:
            raise TierError(f"the CPU does not touch this {self.type.value} memory directly")
        return np.asarray(_Bytes(self.address(), self.size, self._owner(), self.read_only))

    def close(self) -> None:
        """Give up the memory, which is freed when its last view has gone. A second call does
        nothing.
        """
        self._memory = None

    def __repr__(self) -> str:
        state = "closed" if self._memory is None else "owned" if self.is_owned else "brought"
        return f"<Storage of {self.size} bytes, {self.type.value}, {state}>"

    def _owner(self) -> object:
        if self._memory is None:
            raise TierError("the storage is closed")
        return self._memory


class _Bytes:
    """An owner's memory, for ``np.asarray``."""

    def __init__(self, address: int, size: int, owner: object, read_only: bool) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "version": 3,
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, read_only),
        }


def _refuse_empty(size: int) -> None:
    if size <= 0:
        raise TierError(f"a storage of {size} bytes; it needs at least one")


def _cupy(what: str) -> CudaDriver:
    try:
        return CupyDriver()
    except EngineUnavailableError as error:
        raise TierError(f"{what} needs a GPU: {error}") from error


def _view_of(brought: object) -> tuple[View, MemoryType]:
    """Return a view of the whole memory, and its type."""
    try:
        if is_tensor(brought):
            if brought.device.type == "cuda":
                return View.of(brought), MemoryType.DEVICE
            is_pinned = getattr(brought, "is_pinned", None)
            pinned = is_pinned is not None and bool(is_pinned())
            return View.of(brought), MemoryType.PINNED if pinned else MemoryType.SYSTEM
        if hasattr(brought, "__cuda_array_interface__"):
            return _cuda_view(brought, brought.__cuda_array_interface__), MemoryType.DEVICE
        if hasattr(brought, "__array_interface__"):
            return View.of(np.asarray(brought)), MemoryType.SYSTEM
        if hasattr(brought, "__dlpack__"):
            return View.of(np.from_dlpack(brought)), MemoryType.SYSTEM
        memory = np.frombuffer(brought, np.uint8)  # type: ignore[call-overload]
        return View.of(memory), MemoryType.SYSTEM
    except (LayoutError, TypeError, ValueError, KeyError, BufferError, RuntimeError) as error:
        raise TierError(f"beluga finds no memory in a {type(brought).__name__}: {error}") from None


def _cuda_view(owner: object, interface: dict[str, Any]) -> View:
    shape, item = tuple(interface["shape"]), int(interface["typestr"][2:])
    dense = tuple(math.prod(shape[axis + 1 :]) * item for axis in range(len(shape)))
    start, read_only = interface["data"]
    if start == 0:
        raise LayoutError(f"a {type(owner).__name__} of shape {shape} has no memory")
    memory = start, math.prod(shape) * item
    strides = interface.get("strides") or dense
    return View(start, shape, tuple(strides), item, memory, owner, bool(read_only))
