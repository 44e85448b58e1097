# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The interface to CUDA: a dozen calls, so that the code above it also runs without a GPU.

``device.py`` implements it for a GPU, ``host.py`` for kernels that are compiled for this CPU.
Addresses and handles are plain integers.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from beluga.errors import TransferError


class DriverError(TransferError):
    """A CUDA call failed; the error does not affect later calls."""


@dataclasses.dataclass(frozen=True, slots=True)
class Grid:
    """The number and size of a launch's thread blocks."""

    blocks: int
    threads: int


@dataclasses.dataclass(frozen=True, slots=True)
class Pinned:
    """Memory of this process that the GPU reaches at ``address``."""

    array: NDArray[np.uint8]
    address: int


class Driver(Protocol):
    """All calls except :meth:`wait` return at once; failed ones raise :class:`DriverError`."""

    @property
    def name(self) -> str:
        """The name ``cuda``, with the stand-in for a GPU after a hyphen if there is one."""
        ...

    @property
    def identity(self) -> str:
        """The identity of the device, under which measurements are kept."""
        ...

    def use(self) -> None:
        """Make the device current for the calling thread."""
        ...

    def allocate(self, size: int) -> int:
        """Allocate ``size`` bytes of GPU memory and return the address."""
        ...

    def free(self, address: int) -> None: ...

    def pin(self, size: int) -> Pinned: ...

    def unpin(self, pinned: Pinned) -> None: ...

    def register(self, address: int, size: int) -> int:
        """Map memory of this process, page-locked, for the GPU and return its address there.

        The address is valid for every driver of that GPU, and stays valid when this one closes.
        """
        ...

    def unregister(self, address: int) -> None:
        """End a registration. This works on a driver that is closed, too."""
        ...

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        """Copy ``size`` bytes by a copy engine of the GPU, in stream order."""
        ...

    def launch(self, kernel: str, grid: Grid, job: NDArray[np.void], stream: int) -> None:
        """Launch a kernel of ``csrc/cuda/kv_copy.cu``; ``job`` is of type JOB."""
        ...

    def make_stream(self, *, urgent: bool) -> int:
        """Make a stream that waits for no other; ``urgent`` streams have priority."""
        ...

    def end_stream(self, stream: int) -> None: ...

    def capturing(self, stream: int) -> bool:
        """Return whether the stream is being captured into a graph."""
        ...

    def make_event(self) -> int: ...

    def free_event(self, event: int) -> None: ...

    def record(self, event: int, stream: int) -> None: ...

    def follow(self, stream: int, event: int) -> None:
        """Make later work on ``stream`` wait for the event's last recording.

        The event may be freed or recorded again meanwhile.
        """
        ...

    def ended(self, event: int) -> bool:
        """Return whether all work before the event has ended. Raises :class:`DriverError` if any
        failed."""
        ...

    def wait(self, event: int) -> None:
        """Block until :meth:`ended` is true."""
        ...

    def elapsed_s(self, first: int, second: int) -> float:
        """Return the seconds between two events that have ended."""
        ...

    def close(self) -> None: ...
