# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""What the engine asks of CUDA: a dozen calls, so that all above them runs without a GPU.

``device.py`` has them for a GPU, ``host.py`` for the kernels compiled for this CPU. Addresses and
handles are plain integers.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from beluga.errors import TransferError


class DriverError(TransferError):
    """CUDA refused or failed a call; nothing of it sticks to later calls."""


@dataclasses.dataclass(frozen=True, slots=True)
class Grid:
    """Blocks of threads of a launch."""

    blocks: int
    threads: int


@dataclasses.dataclass(frozen=True, slots=True)
class Pinned:
    """Memory of this process that the GPU reaches at ``address``."""

    array: NDArray[np.uint8]
    address: int


class Driver(Protocol):
    """All calls but :meth:`wait` return at once; failed ones raise :class:`DriverError`."""

    @property
    def name(self) -> str:
        """``cuda``, or with what stands in for a GPU after a hyphen."""
        ...

    @property
    def identity(self) -> str:
        """Of the device: measurements are kept under it."""
        ...

    def use(self) -> None:
        """Make the calling thread one that may use the device."""
        ...

    def allocate(self, size: int) -> int:
        """GPU memory."""
        ...

    def free(self, address: int) -> None: ...

    def pin(self, size: int) -> Pinned: ...

    def unpin(self, pinned: Pinned) -> None: ...

    def register(self, address: int, size: int) -> int:
        """Map memory of this process, page-locked, for the GPU: its address there, for every driver
        of that GPU. It stays when this one is closed."""
        ...

    def unregister(self, address: int) -> None:
        """No more. This too can be called on a driver that is closed."""
        ...

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        """By a copy engine, in stream order."""
        ...

    def launch(self, kernel: str, grid: Grid, job: NDArray[np.void], stream: int) -> None:
        """One launch of a kernel of ``csrc/cuda/kv_copy.cu``; ``job`` is of type JOB."""
        ...

    def make_stream(self, *, urgent: bool) -> int:
        """A stream that waits for no other; ``urgent`` ones are served first."""
        ...

    def end_stream(self, stream: int) -> None: ...

    def capturing(self, stream: int) -> bool:
        """Is the stream being captured into a graph?"""
        ...

    def make_event(self) -> int: ...

    def free_event(self, event: int) -> None: ...

    def record(self, event: int, stream: int) -> None: ...

    def follow(self, stream: int, event: int) -> None:
        """What is put on ``stream`` from now on waits for the event as it was recorded last, which
        may be freed or recorded anew meanwhile."""
        ...

    def ended(self, event: int) -> bool:
        """Has all before it ended? Raises :class:`DriverError` if any of it failed."""
        ...

    def wait(self, event: int) -> None:
        """Block until :meth:`ended`."""
        ...

    def elapsed_s(self, first: int, second: int) -> float:
        """Between two events that have ended."""
        ...

    def close(self) -> None: ...
