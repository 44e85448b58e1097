# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Background reads of a pool in use: a check reads while engines leave the link idle."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from beluga._ffi import core
from beluga.errors import PoolError, TransferError
from beluga.pool import Pool
from beluga.transfer import IoHandle, TransferClass, host_link


@contextmanager
def scrub_admission(pool: Pool) -> Iterator[tuple[core.bl_io_queue | core.Null, int] | None]:
    """Yield the lowest class of this host's link to the pool, or None if the link cannot be
    used.
    """
    try:
        link = host_link(pool)
    except (TransferError, PoolError, OSError):
        yield None
        return
    place = IoHandle(link)
    try:
        with place.using() as io_queue:
            yield io_queue, TransferClass.SCRUB
    finally:
        place.close()
        link.close()
