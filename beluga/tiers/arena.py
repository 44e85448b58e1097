# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Aligned buffers for blocks that are loaded, used again when nothing refers to them any more."""

from __future__ import annotations

import mmap
from collections import deque
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from beluga._ffi import ffi

_LEAST = 64 << 10
_HUGE = 2 << 20


class Arena:
    """Hands out buffers, and keeps up to ``keep`` bytes of those that came back. Any thread may
    call it.

    A fresh mapping costs a page fault for each page; a buffer that is used again costs nothing.
    """

    def __init__(self, keep: int = 256 << 20) -> None:
        self._keep = keep
        self._kept = 0  # about: threads may count at the same time, and nothing depends on it
        self._free: dict[int, deque[mmap.mmap]] = {}

    def take(self, size: int) -> NDArray[np.uint8]:
        """Return an array of ``size`` bytes, whose first one is at the start of a page.

        Its memory comes back when the array and all views of it are gone.
        """
        whole = _LEAST
        while whole < size and whole < _HUGE:
            whole *= 2
        whole = max(whole, -(-size // _HUGE) * _HUGE if size > _HUGE else 0)
        try:
            memory = self._free[whole].pop()
            self._kept -= whole
        except (KeyError, IndexError):
            memory = mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if whole >= _HUGE:
                with suppress(OSError):  # a kernel or a sandbox without transparent huge pages
                    memory.madvise(mmap.MADV_HUGEPAGE)
        return np.asarray(_Lease(self, memory, size))

    def give(self, memory: mmap.mmap) -> None:
        """Take a buffer back. This runs where a lease is collected, so it takes no lock."""
        size = len(memory)
        if self._kept + size <= self._keep:
            self._kept += size
            self._free.setdefault(size, deque()).append(memory)


class _Lease:
    """The owner of an array's memory: numpy keeps it as long as the array or a view of it lives."""

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
    """Return the address of a mapping's first byte."""
    return int(ffi.cast("uintptr_t", ffi.from_buffer("uint8_t[]", memory)))
