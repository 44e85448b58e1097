# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Page-aligned buffers for loaded blocks, recycled once nothing refers to them."""

from __future__ import annotations

import mmap
from collections import deque
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from beluga._ffi import ffi

_SIZE_MIN = 64 << 10
_HUGE = 2 << 20


class Arena:
    """Allocates buffers, and keeps up to ``keep`` bytes of freed ones for reuse. Thread-safe.

    A new mapping costs a page fault for each page; a recycled buffer costs none.
    """

    def __init__(self, keep: int = 256 << 20) -> None:
        self._keep = keep
        # Approximate: threads may update it at the same time, and nothing depends on it
        self._retained = 0
        self._free: dict[int, deque[mmap.mmap]] = {}

    def take(self, size: int) -> NDArray[np.uint8]:
        """Return an array of ``size`` bytes that starts at a page boundary.

        Its memory is recycled once the array and all views of it are freed.
        """
        rounded = _SIZE_MIN
        while rounded < size and rounded < _HUGE:
            rounded *= 2
        rounded = max(rounded, -(-size // _HUGE) * _HUGE if size > _HUGE else 0)
        try:
            memory = self._free[rounded].pop()
            self._retained -= rounded
        except (KeyError, IndexError):
            memory = mmap.mmap(-1, rounded, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if rounded >= _HUGE:
                with suppress(OSError):  # a kernel or a sandbox without transparent huge pages
                    memory.madvise(mmap.MADV_HUGEPAGE)
        return np.asarray(_Lease(self, memory, size))

    def give(self, memory: mmap.mmap) -> None:
        """Recycle a buffer. Called by the garbage collector, so it must not take a lock."""
        size = len(memory)
        if self._retained + size <= self._keep:
            self._retained += size
            self._free.setdefault(size, deque()).append(memory)


class _Lease:
    """Owns an array's memory: numpy refers to it as long as the array or a view of it exists."""

    def __init__(self, arena: Arena, memory: mmap.mmap, size: int) -> None:
        self._arena, self._memory = arena, memory
        self.__array_interface__ = {
            "data": (address_of(memory), False),
            "shape": (size,),
            "typestr": "|u1",
            "version": 3,
        }

    def __del__(self) -> None:
        self._arena.give(self._memory)


def address_of(memory: mmap.mmap) -> int:
    """Return the start address of a mapping."""
    return int(ffi.cast("uintptr_t", ffi.from_buffer("uint8_t[]", memory)))
