# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Lines that change while they are read: this process stores them in pieces."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from support.forge import LINE

from beluga._ffi import ffi, lib
from beluga.pool import Pool


def scribble(pool: Pool, offset: int, data: bytes, piece: int) -> None:
    """Store ``data`` (within one stripe) ``piece`` bytes at a time, last piece first."""
    target = ffi.cast("uint8_t *", lib.bl_pool_address(pool.handle, offset))
    assert target != ffi.NULL
    for at in reversed(range(0, len(data), piece)):
        part = data[at : at + piece]
        ffi.memmove(target + at, part, len(part))


@contextmanager
def restless(pool: Pool, offset: int, values: Sequence[bytes], piece: int) -> Iterator[None]:
    """Store the values into the line in a loop, and the first value at the end."""
    over = threading.Event()

    def run() -> None:
        while not over.is_set():
            for value in values:
                scribble(pool, offset, value, piece)

    assert all(len(value) == LINE for value in values)
    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        scribble(pool, offset, values[0], LINE)
