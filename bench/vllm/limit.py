# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""How long the machine's own copy loop takes for the bytes of a load: from shared memory, one core.

The source is not the pool but a file beside it, of the same kind and as long: what the loop has
just read would otherwise be in a cache for the engine. All is touched before anything is timed.
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

from ..drive import Driver, Load, bare
from ..region import touch

_LINE = 64
_COPIES = 3  # a new place for each: the one before is not in a cache any more


class LimitLoop:
    """Copies ``size`` bytes from the memory at ``base`` into private memory."""

    def __init__(self, base: int, size: int) -> None:
        places = np.arange(_COPIES, dtype=np.uint64) * np.uint64(size)
        touch(base, _COPIES * size)
        self._driver = Driver(Load(bare("load", base), places, size))

    def seconds(self) -> float:
        """The median of a few copies, each of all the bytes."""
        return median(map(float, self._driver.sample(_COPIES))) / 1e9


@contextmanager
def limit_loop(memory: Path, size: int) -> Iterator[LimitLoop]:
    """The loop for ``size`` bytes, from a file in the folder ``memory``."""
    size = -(-size // _LINE) * _LINE
    room = -(-_COPIES * size // (2 << 20)) * (2 << 20)  # touch() goes in steps of 2 MiB
    with tempfile.TemporaryFile(dir=memory) as file:
        file.truncate(room)
        mapped = mmap.mmap(file.fileno(), room)
        view = (ctypes.c_char * room).from_buffer(mapped)
        try:
            yield LimitLoop(ctypes.addressof(view), size)
        finally:
            del view
            mapped.close()
