# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Buffers of pinned memory are reused, because an allocation would stop the GPU."""

from __future__ import annotations

from beluga.transfer.engines.cuda.driver import Driver, Pinned

_SMALLEST = 64 << 10


def _class_of(size: int) -> int:
    return max(_SMALLEST, 1 << (size - 1).bit_length())


class Buffers:
    """Pinned memory, for use by one thread. Sizes are powers of two."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._free: dict[int, list[Pinned]] = {}  # by size
        self.sizes: dict[int, int] = {}  # of buffers in use, by address
        self._taken: list[Pinned] = []  # since begin()
        self.closed = False

    def begin(self) -> None:
        """Record the buffers that are taken from now on, for :meth:`undo`."""
        self._taken = []

    def undo(self) -> None:
        """Release all buffers that were taken since :meth:`begin`; they are unused now."""
        for pinned in self._taken:
            if pinned.address in self.sizes:
                self.give(pinned)

    def take(self, size: int) -> Pinned:
        """Take a buffer of at least ``size`` bytes."""
        size = _class_of(size)
        free = self._free.get(size)
        pinned = free.pop() if free else self._driver.pin(size)
        self.sizes[pinned.address] = size
        self._taken.append(pinned)
        return pinned

    def give(self, pinned: Pinned) -> None:
        """Release an unused buffer."""
        self._free.setdefault(self.sizes.pop(pinned.address), []).append(pinned)

    def close(self) -> None:
        """Free all released buffers."""
        for buffers in self._free.values():
            for pinned in buffers:
                self._driver.unpin(pinned)
        self._free.clear()
        self.closed = True
