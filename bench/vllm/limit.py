# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The limit of a load: how long the machine's copy loop takes for its bytes, from shared memory on
one core.

The source is not the pool but a file of the same kind and length next to it, because the engine
would otherwise find in a cache what the loop has just read. All memory is touched before any
measurement.
"""

from __future__ import annotations

import ctypes
import mmap
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import numpy as np

from ..harness.drive import Driver, Load, bare
from ..harness.region import touch

_LINE = 64
_COPIES = 3  # each copy has a new source, because the previous one may be in a cache


class LimitLoop:
    """Copies ``size`` bytes from the memory at ``base`` into private memory."""

    def __init__(self, base: int, size: int) -> None:
        offsets = np.arange(_COPIES, dtype=np.uint64) * np.uint64(size)
        touch(base, _COPIES * size)
        self._driver = Driver(Load(bare("load", base), offsets, size))

    def seconds(self) -> float:
        """Return the median of a few copies of all the bytes, in seconds."""
        return median(map(float, self._driver.sample(_COPIES))) / 1e9


@contextmanager
def limit_loop(memory: Path, size: int) -> Iterator[LimitLoop]:
    """Yield the loop for ``size`` bytes, from a file in the folder ``memory``."""
    size = -(-size // _LINE) * _LINE
    room = -(-_COPIES * size // (2 << 20)) * (2 << 20)  # touch() works in steps of 2 MiB
    with tempfile.TemporaryFile(dir=memory) as file:
        file.truncate(room)
        mapped = mmap.mmap(file.fileno(), room)
        view = (ctypes.c_char * room).from_buffer(mapped)
        try:
            yield LimitLoop(ctypes.addressof(view), size)
        finally:
            del view
            mapped.close()
