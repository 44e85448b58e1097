# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Buffers of GPU and pinned memory are reused, because an allocation would stop the GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

from beluga.errors import TransferError
from beluga.transfer.engines.cuda.driver import Driver, Pinned

_SMALLEST = 64 << 10

_Kind = TypeVar("_Kind", int, Pinned)


class _Shelf(Generic[_Kind]):
    """Free buffers by size, a power of two."""

    def __init__(self) -> None:
        self.free: dict[int, list[_Kind]] = {}
        self.sizes: dict[int, int] = {}  # the sizes of buffers in use, by address


def _class_of(size: int) -> int:
    return max(_SMALLEST, 1 << (size - 1).bit_length())


class Buffers:
    """A pool of GPU memory and pinned memory, for use by one thread."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._device: _Shelf[int] = _Shelf()
        self._pinned: _Shelf[Pinned] = _Shelf()
        self._taken: list[int | Pinned] = []  # since begin()
        self._frozen = False
        self.closed = False

    @contextmanager
    def only_free(self) -> Iterator[None]:
        """Raise :class:`~beluga.errors.TransferError` in this context instead of allocating."""
        self._frozen = True
        try:
            yield
        finally:
            self._frozen = False

    def begin(self) -> None:
        """Record the buffers that are taken from now on, for :meth:`undo`."""
        self._taken = []

    def undo(self) -> None:
        """Release all buffers that were taken since :meth:`begin`; they are unused now."""
        for one in self._taken:
            if isinstance(one, Pinned):
                if one.address in self._pinned.sizes:
                    self.give_pinned(one)
            elif one in self._device.sizes:
                self.give(one)

    def take(self, size: int) -> int:
        """Take GPU memory of at least ``size`` bytes."""
        size = _class_of(size)
        free = self._device.free.get(size)
        self._refuse_frozen(free)
        address = free.pop() if free else self._driver.allocate(size)
        self._device.sizes[address] = size
        self._taken.append(address)
        return address

    def give(self, address: int) -> None:
        """Release unused memory of :meth:`take`."""
        self._device.free.setdefault(self._device.sizes.pop(address), []).append(address)

    def take_pinned(self, size: int) -> Pinned:
        """Take pinned memory of at least ``size`` bytes."""
        size = _class_of(size)
        free = self._pinned.free.get(size)
        self._refuse_frozen(free)
        pinned = free.pop() if free else self._driver.pin(size)
        self._pinned.sizes[pinned.address] = size
        self._taken.append(pinned)
        return pinned

    def give_pinned(self, pinned: Pinned) -> None:
        """Release unused memory of :meth:`take_pinned`."""
        self._pinned.free.setdefault(self._pinned.sizes.pop(pinned.address), []).append(pinned)

    def close(self) -> None:
        """Free all released memory."""
        for addresses in self._device.free.values():
            for address in addresses:
                self._driver.free(address)
        for buffers in self._pinned.free.values():
            for pinned in buffers:
                self._driver.unpin(pinned)
        self._device.free.clear()
        self._pinned.free.clear()
        self.closed = True

    def _refuse_frozen(self, free: Sequence[object] | None) -> None:
        if self._frozen and not free:
            raise TransferError("run the same copy once, to its end, before it is captured")
